"""``mma`` against double precision and integers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from mma_programs import (
    BITS,
    DTYPES,
    FLOATS,
    INTEGERS,
    extents,
    packed,
    places,
    product_ptx,
    quarter_places,
    random_values,
    register_kind,
)
from simulator_support import body_ptx, module, run_ptx

from pallasite_simulator.errors import PtxError, SimulationError
from pallasite_simulator.programs import load

TOLERANCE = {"f16": 2e-3, "f32": 1e-6, "f64": 1e-15}

WARPS = 6  # three blocks of two


def run_mma(name, words, results, kinds, setup=""):
    """Executes an instruction in all warps: see :func:`product_ptx`."""
    size = 8 if kinds[0] == "f64" else 4
    output = np.full((*words[0].shape[:2], results), 0xCD, f"u{size}")
    arrays = [np.ascontiguousarray(one) for one in words]
    warps = len(words[0])
    block = 64 if warps % 2 == 0 else 32
    ptx = product_ptx(name, arrays, results, kinds, setup)
    execution = run_ptx(ptx, *arrays, output, grid=32 * warps // block, block=block)
    return output, execution


def multiply(shape, kinds, suffix="", extra="", held=None):
    """Random matrices, and D as the simulator computes it, of shape (warps, m, n)."""
    d, a_kind, b_kind, c_kind = kinds
    m, n, k = extents(shape)
    random = np.random.default_rng(len(shape) + 7 * BITS[a_kind])
    a = random_values(random, a_kind, (WARPS, m, k))
    b = random_values(random, b_kind, (WARPS, k, n))
    c = random_values(random, c_kind, (WARPS, m, n)) if held is None else held
    in_a, in_b, in_c = places(shape, BITS[a_kind])
    words = [
        packed(a[:, in_a[..., 0], in_a[..., 1]], a_kind),
        packed(b[:, in_b[..., 0], in_b[..., 1]], b_kind),
        packed(c[:, in_c[..., 0], in_c[..., 1]], c_kind),
    ]
    name = f"mma.sync.aligned.{shape}.row.col{extra}.{'.'.join(kinds)}{suffix}"
    results, execution = run_mma(
        name, words, words[2].shape[-1], (register_kind(d), register_kind(c_kind))
    )
    got = np.zeros((WARPS, m, n), DTYPES[d])
    got[:, in_c[..., 0], in_c[..., 1]] = results.view(DTYPES[d])
    assert execution.counters["tensor operations"] == 2 * m * n * k * WARPS
    return a, b, c, got


def check(got, reference, kind):
    if kind == "s32":
        wrapped = (reference.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        np.testing.assert_array_equal(got, wrapped)
        return
    error = np.abs(got.astype(np.float64) - reference).max()
    assert error <= TOLERANCE[kind] * np.abs(reference).max()


@pytest.mark.parametrize(("shape", "d", "a", "b"), FLOATS)
def test_floats(shape, d, a, b):
    left, right, held, got = multiply(shape, (d, a, b, d))
    check(got, left @ right + held, d)


@pytest.mark.parametrize(("shape", "a", "b"), INTEGERS)
def test_integers(shape, a, b):
    left, right, held, got = multiply(shape, ("s32", a, b, "s32"))
    check(got, left @ right + held, "s32")


@pytest.mark.parametrize("operation", ["xor", "and"])
@pytest.mark.parametrize("shape", ["m8n8k128", "m16n8k128", "m16n8k256"])
def test_bits(shape, operation):
    left, right, held, got = multiply(shape, ("s32", "b1", "b1", "s32"), f".{operation}.popc")
    pairs = left[..., :, :, None] != right[..., None, :, :]
    if operation == "and":
        pairs = (left[..., :, :, None] * right[..., None, :, :]) != 0
    check(got, pairs.sum(axis=-2) + held, "s32")


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("shape", ["m8n8k16", "m16n8k32"])
def test_saturation(shape, place):
    m, n, _ = extents(shape)
    held = np.full((WARPS, m, n), 2.0**31 - 1000)
    held[:, ::2] = -(2.0**31) + 1000
    satfinite = {"extra" if place == "before" else "suffix": ".satfinite"}
    left, right, _, got = multiply(shape, ("s32", "s8", "u8", "s32"), held=held, **satfinite)
    exact = left @ right + held
    assert (exact > 2**31 - 1).any() and (exact < -(2**31)).any()
    np.testing.assert_array_equal(got, exact.clip(-(2**31), 2**31 - 1))
    left, right, _, got = multiply(shape, ("s32", "s8", "u8", "s32"), held=held)
    check(got, left @ right + held, "s32")


# Rounding of f64 ----------------------------------------------------------------------------------


def rounded(value: Fraction, mode: str) -> float:
    nearest = float(value)
    difference = Fraction(nearest) - value
    away = {"rn": False, "rz": difference * value > 0, "rm": difference > 0, "rp": difference < 0}
    if not away[mode]:
        return nearest
    return math.nextafter(nearest, -math.inf if difference > 0 else math.inf)


@pytest.mark.parametrize("mode", ["", "rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("shape", ["m8n8k4", "m16n8k8"])
def test_rounding_of_f64(shape, mode):
    suffix = f".{mode}" if mode else ""
    left, right, held, got = multiply(shape, ("f64",) * 4, suffix)
    m, n, k = extents(shape)
    for row in range(m):
        for column in range(n):
            total = Fraction(held[0, row, column])
            for step in range(k):
                total += Fraction(left[0, row, step]) * Fraction(right[0, step, column])
                total = Fraction(rounded(total, mode or "rn"))
            assert got[0, row, column] == float(total)


# Four products of quarters of a warp --------------------------------------------------------------


@pytest.mark.parametrize("types", [("f16", "f16"), ("f32", "f32"), ("f32", "f16")], ids=".".join)
@pytest.mark.parametrize("layouts", [(a, b) for a in ("row", "col") for b in ("row", "col")])
def test_quarters(layouts, types):
    d, c_kind = types
    random = np.random.default_rng(3)
    a, b = (random_values(random, "f16", (WARPS, 4, *s)) for s in ((8, 4), (4, 8)))
    c = random_values(random, c_kind, (WARPS, 4, 8, 8))
    quarter = np.arange(32) % 16 // 4
    in_a, in_b, in_c = quarter_places(layouts, c_kind)
    _, _, in_d = quarter_places(layouts, d)
    words = [
        packed(matrix[:, quarter[:, None], place[..., 0], place[..., 1]], kind)
        for matrix, place, kind in ((a, in_a, "f16"), (b, in_b, "f16"), (c, in_c, c_kind))
    ]
    name = f"mma.sync.aligned.m8n8k4.{'.'.join(layouts)}.{d}.f16.f16.{c_kind}"
    count = 4 if d == "f16" else 8
    results, execution = run_mma(name, words, count, (register_kind(d), register_kind(c_kind)))
    got = np.zeros((WARPS, 4, 8, 8), DTYPES[d])
    got[:, quarter[:, None], in_d[..., 0], in_d[..., 1]] = results.view(DTYPES[d])
    check(got, a @ b + c, d)
    assert execution.counters["tensor operations"] == WARPS * 4 * 2 * 8 * 8 * 4


# Special values and operands ----------------------------------------------------------------------


def special(a, b, c):
    """One element of D of m16n8k16 from the first elements of the rows of A and the columns of B,
    and of C."""
    words = [np.zeros((1, 32, 4), np.uint32), np.zeros((1, 32, 2), np.uint32)]
    held = np.full((1, 32, 4), c, np.float32)
    words[0][0, :, 0] = np.float16(a).view(np.uint16)
    words[1][0, :, 0] = np.float16(b).view(np.uint16)
    name = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    results, _ = run_mma(name, [*words, held.view(np.uint32)], 4, ("f32", "f32"))
    return results[0, 0, 0]


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        (np.inf, 1, 0, 0x7F800000),
        (np.inf, -1, 0, 0xFF800000),
        (np.inf, 0, 0, 0x7FFFFFFF),
        (np.inf, 1, -np.inf, 0x7FFFFFFF),
        (np.nan, 1, 0, 0x7FFFFFFF),
        (1, 1, np.nan, 0x7FFFFFFF),
        (0, 0, np.inf, 0x7F800000),
        (6e-8, 6e-8, 0, np.float32(4 * 2.0**-48).view(np.uint32)),
    ],
)
def test_special_values(a, b, c, expected):
    assert special(a, b, c) == expected


def test_constants_and_sinks():
    body = """
        .reg .b32 %a<4>, %b<2>; .reg .f32 %d<4>; .reg .b64 %at;
        mov.b32 %a0, 0x3c003c00; mov.b32 %a1, 0x3c003c00;
        mov.b32 %a2, 0x3c003c00; mov.b32 %a3, 0x3c003c00;
        mov.b32 %b0, 0x3c003c00; mov.b32 %b1, 0x40004000;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {_, %d1, %d2, %d3},
            {%a0, %a1, %a2, %a3}, {%b0, %b1}, {0f3F800000, 0f40000000, 0f40400000, 0f40800000};
        mul.wide.u32 %at, %thread, 16; add.s64 %at, %at, %array0;
        st.global.f32 [%at+4], %d1; st.global.f32 [%at+8], %d2; st.global.f32 [%at+12], %d3;
    """
    output = np.zeros((64, 4), np.float32)
    run_ptx(body_ptx(body, 1), output, block=64)
    np.testing.assert_array_equal(output, np.tile(np.float32([0, 26, 27, 28]), (64, 1)))


def test_lanes_that_come_later():
    """The lanes of a warp take two ways, and meet at the instruction."""
    words = [
        packed(random_values(np.random.default_rng(4), kind, (WARPS, 32, count)), kind)
        for kind, count in (("f16", 8), ("f16", 4), ("f32", 4))
    ]
    name = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    setup = """
        .reg .pred %p, %q; .reg .b32 %x, %y; mov.u32 %x, %laneid; and.b32 %y, %x, 5;
        setp.eq.u32 %p, %y, 1; @%p bra $other; bra.uni $same; $other: mov.u32 %x, 7;
        $more: sub.u32 %x, %x, 1; setp.ne.u32 %q, %x, 0; @%q bra $more; $same:
    """
    together, _ = run_mma(name, words, 4, ("f32", "f32"))
    apart, _ = run_mma(name, words, 4, ("f32", "f32"), setup)
    np.testing.assert_array_equal(apart, together)


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["m16n8k16", "m8n8k4"])
def test_a_warp_that_is_not_whole(shape):
    body = {
        "m16n8k16": """
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3},
                {%r0, %r0, %r0, %r0}, {%r0, %r0}, {%f0, %f1, %f2, %f3};
        """,
        "m8n8k4": """
            mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%g0, %g1}, {%g0}, {%g0}, {%g0, %g1};
        """,
    }[shape]
    setup = """
        .reg .f32 %f<4>; .reg .b32 %r<4>; .reg .f64 %g<2>;
        mov.b32 %r0, 0; mov.f64 %g0, 0d0000000000000000; mov.f64 %g1, %g0;
        mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
    """
    with pytest.raises(SimulationError, match="all 32 threads of a warp") as caught:
        run_ptx(module(setup + body), block=80)
    assert "16 threads of the warp of thread 64" in str(caught.value)


WRONG = [
    ("mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1},"
     " {%r2, %r3}, {%f0, %f1, %f2, %f3}, %r4, 0;", "sparse"),
    ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32 {%f0, %f1, %f2, %f3},"
     " {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%f0, %f1, %f2, %f3};", "kind"),
    ("mma.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1}, {%r2},"
     " {%f0, %f1, %f2, %f3};", "sync"),
    ("mma.sync.aligned.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1}, {%r2},"
     " {%f0, %f1, %f2, %f3};", "one shape"),
    ("mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1}, {%r2},"
     " {%f0, %f1, %f2, %f3};", "shape and types"),
    ("mma.sync.aligned.m16n8k8.col.row.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1}, {%r2},"
     " {%f0, %f1, %f2, %f3};", "layout"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f16 {%f0, %f1, %f2, %f3}, {%r0, %r1}, {%r2},"
     " {%r0, %r1};", "accumulators"),
    ("mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f32 {%r0, %r1, %r2, %r3}, {%r0, %r1},"
     " {%r2, %r3}, {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7};", "accumulators"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.bf16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1}, {%r2},"
     " {%f0, %f1, %f2, %f3};", "shape and types"),
    ("mma.sync.aligned.m16n8k64.row.col.s32.u8.s4.s32 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3},"
     " {%r2, %r3}, {%f0, %f1, %f2, %f3};", "shape and types"),
    ("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32 {%f0, %f1, %f2, %f3}, {%r0, %r1}, {%r2},"
     " {%f0, %f1, %f2, %f3};", "popc"),
    ("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.xor {%f0, %f1, %f2, %f3}, {%r0, %r1},"
     " {%r2}, {%f0, %f1, %f2, %f3};", "popc"),
    ("mma.sync.aligned.m16n8k8.row.col.satfinite.f32.f16.f16.f32 {%f0, %f1, %f2, %f3},"
     " {%r0, %r1}, {%r2}, {%f0, %f1, %f2, %f3};", "satfinite"),
    ("mma.sync.aligned.m16n8k8.row.col.rz.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1},"
     " {%r2}, {%f0, %f1, %f2, %f3};", "rz"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32.x {%f0, %f1, %f2, %f3}, {%r0, %r1},"
     " {%r2}, {%f0, %f1, %f2, %f3};", "other parts"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0}, {%r2},"
     " {%f0, %f1, %f2, %f3};", "operand 1"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1}, {%r2},"
     " {%f0, %f1};", "operand 3"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1}, {%r2};",
     "operands"),
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "message"), WRONG)
def test_wrong_instructions(instruction, message):
    body = ".reg .f32 %f<8>; .reg .b32 %r<8>;\n" + instruction
    with pytest.raises(PtxError, match=message) as caught:
        load(module(body))
    assert caught.value.position.line > 1
