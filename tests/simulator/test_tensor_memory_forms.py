"""All forms of the instructions on tensor memory: what ptxas accepts runs here, or is refused by an
error that says why; nothing else is accepted."""

from __future__ import annotations

import itertools

import pytest
from ptxas_forms import refusals, rejected

DECLARATIONS = """
.reg .b32 r<300>; .reg .b64 d<8>; .reg .pred p<4>; .reg .b128 h; .reg .b16 s<4>;
.shared .align 16 .b8 m[64];
"""

TARGETS = ("sm_100a", "sm_103a", "sm_110a", "sm_100f", "sm_120a", "sm_90a")

GROUPS = ("cta_group::1", "cta_group::2")


def registers(count, first=100):
    return "{" + ", ".join(f"r{first + number}" for number in range(count)) + "}"


def moves():
    """Loads and stores of every shape, some numbers, and what there is to add."""
    shapes = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
    for (shape, each), count in itertools.product(shapes.items(), (1, 2, 32, 64, 128)):
        given = registers(min(each * count, 128))
        split = ", 16" if shape == "16x32bx2" else ""
        for pack in ("", ".pack::16b"):
            yield f"tcgen05.ld.sync.aligned.{shape}.x{count}{pack}.b32 {given}, [r0]{split};"
        for pack in ("", ".unpack::16b"):
            yield f"tcgen05.st.sync.aligned.{shape}.x{count}{pack}.b32 [r0]{split}, {given};"
    yield "tcgen05.ld.sync.aligned.32x32b.x4.b32 {r1, r2}, [r0];"
    yield "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {r1}, [r0];"
    yield "tcgen05.ld.sync.aligned.32x32b.x3.b32 {r1, r2, r3}, [r0];"
    yield "tcgen05.ld.sync.aligned.32x32b.b32 {r1}, [r0];"
    kinds = [
        f"{operation}{more}.{kind}"
        for operation, kind in itertools.product(("min", "max"), ("f32", "u32", "s32"))
        for more in ("", ".abs", ".NaN", ".abs.NaN")
    ]
    for kind in kinds:
        yield f"tcgen05.ld.red.sync.aligned.32x32b.x4.{kind} {registers(4)}, r5, [r0];"
    for shape, count in (("32x32b", 1), ("32x32b", 128), ("16x64b", 4), ("16x256b", 2)):
        given = registers(count * shapes[shape])
        yield f"tcgen05.ld.red.sync.aligned.{shape}.x{count}.min.f32 {given}, r5, [r0];"
    yield f"tcgen05.ld.red.sync.aligned.16x32bx2.x4.min.f32 {registers(4)}, r5, [r0], 4;"
    yield f"tcgen05.ld.red.sync.aligned.32x32b.x4.min {registers(4)}, r5, [r0];"
    for kind in ("ld", "st"):
        yield f"tcgen05.wait::{kind}.sync.aligned;"


def others():
    """Copies, allocation, and what orders."""
    shapes = (
        "128x256b", "128x128b", "4x256b", "32x128b.warpx4", "64x128b.warpx2::02_13",
        "64x128b.warpx2::01_23", "32x128b", "64x128b", "128x128b.warpx4",
    )  # fmt: skip
    formats = ("", ".b8x16.b6x16_p32", ".b8x16.b4x16_p64", ".b8x16")
    for group, shape, kind in itertools.product(GROUPS, shapes, formats):
        yield f"tcgen05.cp.{group}.{shape}{kind} [r0], d1;"
    for group in GROUPS:
        yield f"tcgen05.shift.{group}.down [r0];"
        yield f"tcgen05.shift.{group} [r0];"
        for space, count in itertools.product((".shared::cta", ""), ("64", "r2")):
            place = "[m]" if space else "[d1]"
            yield f"tcgen05.alloc.{group}.sync.aligned{space}.b32 {place}, {count};"
        yield f"tcgen05.dealloc.{group}.sync.aligned.b32 r0, 64;"
        yield f"tcgen05.dealloc.{group}.sync.aligned.b32 r0, r2;"
        yield f"tcgen05.relinquish_alloc_permit.{group}.sync.aligned;"
        commit = f"tcgen05.commit.{group}.mbarrier::arrive::one"
        for space, place in ((".shared::cluster", "[r0]"), ("", "[d1]")):
            yield f"{commit}{space}.b64 {place};"
            yield f"{commit}{space}.multicast::cluster.b64 {place}, s0;"
        yield f"tcgen05.commit.{group}.b64 [d1];"
    for moment in ("before_thread_sync", "after_thread_sync"):
        yield f"tcgen05.fence::{moment};"
    yield "tcgen05.alloc.sync.aligned.shared::cta.b32 [m], 64;"
    cancel = "clusterlaunchcontrol.try_cancel.async"
    for word in ("", ".multicast::cluster::all"):
        yield f"{cancel}.shared::cta.mbarrier::complete_tx::bytes{word}.b128 [m], [m+16];"
        yield f"{cancel}.mbarrier::complete_tx::bytes{word}.b128 [d1], [d2];"
    query = "clusterlaunchcontrol.query_cancel"
    yield f"{query}.is_canceled.pred.b128 p1, h;"
    yield f"{query}.get_first_ctaid.v4.b32.b128 {{r1, r2, r3, _}}, h;"
    for axis in "xyz":
        yield f"{query}.get_first_ctaid::{axis}.b32.b128 r1, h;"


def products():
    """Products without scale factors."""
    kinds = ("f16", "tf32", "f8f6f4", "i8")
    for group, kind, sparse in itertools.product(GROUPS, kinds, ("", ".sp")):
        name, meta = f"tcgen05.mma{sparse}.{group}.kind::{kind}", "[r7], " * bool(sparse)
        lanes = f"{registers(4 * int(group[-1]))}, "
        for a in ("d1", "[r1]"):
            for off, scale in itertools.product(("", lanes), ("", ", 3", ", 16")):
                yield f"{name} [r0], {a}, d2, {meta}r2, {off}p1{scale};"
            for use in ("fill", "use", "lastuse", "discard", "b0::fill"):
                yield f"{name}.collector::a::{use} [r0], {a}, d2, {meta}r2, p1;"
            yield f"{name}.ashift [r0], {a}, d2, {meta}r2, p1;"
            yield f"{name}.ashift.collector::a::lastuse [r0], {a}, d2, {meta}r2, p1;"
            stationary = f"tcgen05.mma.ws{sparse}.{group}.kind::{kind}"
            for mask in ("", ", d3"):
                yield f"{stationary} [r0], {a}, d2, {meta}r2, p1{mask};"
            for buffer, use in itertools.product(("b0", "b3", "b4", "a"), ("fill", "discard")):
                yield f"{stationary}.collector::{buffer}::{use} [r0], {a}, d2, {meta}r2, p1;"
        yield f"{name} [r0], d1, d2, {meta}r2, {registers(3)}, p1;"
    yield "tcgen05.mma.kind::f16 [r0], d1, d2, r2, p1;"
    yield "tcgen05.mma.cta_group::1.kind::f64 [r0], d1, d2, r2, p1;"


def scaled_products():
    """Products with scale factors."""
    kinds = ("mxf8f6f4", "mxf4", "mxf4nvf4", "f16")
    sizes = (
        "", ".scale_vec::1X", ".scale_vec::2X", ".scale_vec::4X", ".block16", ".block32",
    )  # fmt: skip
    for group, kind, size, sparse, a in itertools.product(
        GROUPS, kinds, sizes, ("", ".sp"), ("d1", "[r1]")
    ):
        meta = "[r7], " * bool(sparse)
        name = f"tcgen05.mma{sparse}.{group}.kind::{kind}.block_scale{size}"
        yield f"{name} [r0], {a}, d2, {meta}r2, [r3], [r4], p1;"
    for kind in kinds:
        name = f"tcgen05.mma.cta_group::1.kind::{kind}"
        yield f"{name}.block_scale.collector::a::fill [r0], d1, d2, r2, [r3], [r4], p1;"
        yield f"{name} [r0], d1, d2, r2, [r3], [r4], p1;"
        yield f"{name}.block_scale [r0], d1, d2, r2, p1;"
        yield f"{name}.block_scale [r0], d1, d2, r2, [r3], [r4], {registers(4)}, p1;"
        yield f"{name}.block_scale [r0], d1, d2, r2, [r3], [r4], p1, 3;"
        stationary = f"tcgen05.mma.ws.cta_group::1.kind::{kind}.block_scale"
        yield f"{stationary} [r0], d1, d2, r2, [r3], [r4], p1;"


REFUSED = ("a scale of D is for products of the kinds f16 and tf32",)
"""Errors about what ptxas accepts, and the simulator does not: PTX does not say what it means."""


@pytest.mark.parametrize(
    ("forms", "target"),
    [
        *itertools.product((moves, others, scaled_products), TARGETS),
        *itertools.product((products,), TARGETS[:4]),
    ],
)
def test_forms(forms, target):
    lines = list(forms())
    wrong = rejected(lines, DECLARATIONS, target)
    refused = refusals(lines, DECLARATIONS, target)
    known = set()
    for number in refused.keys() - wrong:
        if refused[number].partition(", in: ")[0].endswith(REFUSED):
            known.add(number)
            assert lines[number].split()[0] in refused[number]
    different = [
        (lines[number], refused.get(number, "accepted"))
        for number in sorted(refused.keys() ^ wrong ^ known)
    ]
    assert different == []
