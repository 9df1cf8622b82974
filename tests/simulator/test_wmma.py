"""``wmma`` against double precision and integers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from mma_programs import DTYPES, extents, random_values
from simulator_support import body_ptx, module, run_ptx
from wmma_programs import FORMS, product_ptx, stored

from pallasite_simulator.errors import PtxError, SimulationError
from pallasite_simulator.programs import load

WARPS = 4  # two blocks of two
TOLERANCE = {"f16": 2e-3, "f32": 1e-6, "f64": 1e-15}
PADDING = 32


def multiply(shape, kinds, layouts=("row", "col", "row"), name="", held=None):
    """Random matrices, and D as the simulator computes it, of shape (warps, m, n)."""
    d, a_kind, c_kind = kinds
    m, n, k = extents(shape)
    random = np.random.default_rng(1)
    a = random_values(random, a_kind, (WARPS, m, k))
    b = random_values(random, a_kind, (WARPS, k, n))
    c = random_values(random, c_kind, (WARPS, m, n)) if held is None else held
    lengths = ((m, k), (k, n), (m, n))
    strides = tuple(
        (one[1] if layout == "row" else one[0]) + PADDING
        for one, layout in zip(lengths, layouts, strict=True)
    )
    images = [
        stored(matrix, kind, layout, stride)
        for matrix, kind, layout, stride in zip(
            (a, b, c), (a_kind, a_kind, c_kind), layouts, strides, strict=True
        )
    ]
    lines = m if layouts[2] == "row" else n
    result = np.zeros((WARPS, lines, strides[2]), DTYPES[d])
    arrays = [*images, result]
    sizes = tuple(one.nbytes // WARPS for one in arrays)
    ptx = product_ptx(shape, kinds, layouts, strides, sizes, name)
    execution = run_ptx(ptx, *arrays, grid=WARPS // 2, block=64)
    assert execution.counters["tensor operations"] == 2 * m * n * k * WARPS
    got = result[..., : n if layouts[2] == "row" else m]
    assert not result[..., got.shape[-1] :].any()
    return a, b, c, got if layouts[2] == "row" else got.swapaxes(1, 2)


def check(got, reference, kind):
    if kind == "s32":
        wrapped = (reference.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
        np.testing.assert_array_equal(got, wrapped)
        return
    error = np.abs(got.astype(np.float64) - reference).max()
    assert error <= TOLERANCE[kind] * np.abs(reference).max()


@pytest.mark.parametrize(("shape", "d", "a", "c"), [f for f in FORMS if f[2] != "b1"])
def test_products(shape, d, a, c):
    left, right, held, got = multiply(shape, (d, a, c))
    check(got, left @ right + held, d)


@pytest.mark.parametrize("layouts", [(a, b, c) for a in "rc" for b in "rc" for c in "rc"])
@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        ("m32n8k16", ("f32", "f16", "f16")),
        ("m8n32k16", ("s32", "s8", "s32")),
        ("m16n16k8", ("f32", "tf32", "f32")),
        ("m8n8k4", ("f64", "f64", "f64")),
    ],
)
def test_layouts(shape, kinds, layouts):
    names = tuple({"r": "row", "c": "col"}[one] for one in layouts)
    left, right, held, got = multiply(shape, kinds, names)
    check(got, left @ right + held, kinds[0])


BITS = [
    "wmma.mma.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32.{}.popc",
    "wmma.mma.{}.popc.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32",
]


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("operation", ["xor", "and"])
def test_bits(name, operation):
    left, right, held, got = multiply("m8n8k128", ("s32", "b1", "s32"), name=name.format(operation))
    pairs = left[..., :, :, None] != right[..., None, :, :]
    if operation == "and":
        pairs = (left[..., :, :, None] * right[..., None, :, :]) != 0
    check(got, pairs.sum(axis=-2) + held, "s32")


@pytest.mark.parametrize("saturate", [False, True])
def test_saturation(saturate):
    held = np.full((WARPS, 16, 16), 2.0**31 - 100)
    held[:, ::2] = -(2.0**31) + 100
    name = "wmma.mma.sync.aligned.row.col.m16n16k16.s32.s8.s8.s32" + ".satfinite" * saturate
    left, right, _, got = multiply("m16n16k16", ("s32", "s8", "s32"), name=name, held=held)
    exact = left @ right + held
    assert (exact > 2**31 - 1).any() and (exact < -(2**31)).any()
    check(got, exact.clip(-(2**31), 2**31 - 1) if saturate else exact, "s32")


def test_rounding():
    kinds = ("f64", "f64", "f64")
    results = {}
    for mode in ("rm", "rn", "rp"):
        name = f"wmma.mma.sync.aligned.row.col.m8n8k4.{mode}.f64.f64.f64.f64"
        left, right, held, results[mode] = multiply("m8n8k4", kinds, name=name)
    exact = [
        Fraction(held[0, i, j])
        + sum(Fraction(left[0, i, k]) * Fraction(right[0, k, j]) for k in range(4))
        for i in range(8)
        for j in range(8)
    ]
    below, above = (results[mode][0].reshape(-1) for mode in ("rm", "rp"))
    assert all(Fraction(x) <= y for x, y in zip(below, exact, strict=True))
    assert all(Fraction(x) >= y for x, y in zip(above, exact, strict=True))
    assert (results["rm"] <= results["rn"]).all() and (results["rn"] <= results["rp"]).all()
    assert (below < above).any()


def test_special_values():
    held = np.zeros((WARPS, 16, 16))
    held[0, 0, :3] = [np.inf, np.nan, -np.inf]
    left, right, _, got = multiply("m16n16k16", ("f32", "f16", "f32"), held=held)
    row = got.view(np.uint32)[0, 0]
    assert list(row[:3]) == [0x7F800000, 0x7FFFFFFF, 0xFF800000]
    assert np.isfinite(got[1:]).all()


@pytest.mark.parametrize("space", ["shared", "shared::cta", ""])
def test_matrices_in_shared_memory(space):
    """Without a stride, the lines of a matrix follow each other."""
    values = np.random.default_rng(2).standard_normal((16, 16)).astype(np.float16)
    output = np.zeros_like(values)
    named = f".{space}" if space else ""
    body = f"""
        .reg .b32 %base, %v<4>, %place; .reg .b64 %at, %from; .reg .b32 %c<4>; .reg .b32 %size;
        mov.u32 %base, dynamic; shl.b32 %size, %thread, 4;
        cvt.u64.u32 %at, %size; add.s64 %at, %at, %array0; add.u32 %place, %base, %size;
        ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%at];
        st.shared.v4.b32 [%place], {{%v0, %v1, %v2, %v3}};
        bar.sync 0;
        cvt.u64.u32 %from, %base;
        {"" if space else "cvta.shared.u64 %from, %from;"}
        wmma.load.c.sync.aligned.row.m16n16k16{named}.f16 {{%c0, %c1, %c2, %c3}}, [%from];
        wmma.store.d.sync.aligned.col.m16n16k16.global.f16 [%array1], {{%c0, %c1, %c2, %c3}};
    """
    run_ptx(body_ptx(body, 2, shared=512), values, output, block=32, shared=512)
    np.testing.assert_array_equal(output, values.T)


def test_accesses_out_of_bounds():
    values = np.zeros(255, np.float32)
    body = """
        .reg .f32 %c<8>;
        wmma.load.c.sync.aligned.row.m16n16k16.global.f32
            {%c0, %c1, %c2, %c3, %c4, %c5, %c6, %c7}, [%array0], 16;
    """
    with pytest.raises(SimulationError, match="thread 31 .* out of bounds"):
        run_ptx(body_ptx(body, 1), values, block=32)


EIGHT = "{%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}"
WORDS = "{%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}"
WRONG = [
    (f"wmma.load.sync.aligned.row.m16n16k16.f16 {WORDS}, [%x];", "not named"),
    (f"wmma.load.d.sync.aligned.row.m16n16k16.f16 {WORDS}, [%x];", "not named"),
    (f"wmma.load.a.aligned.row.m16n16k16.f16 {WORDS}, [%x];", "one sync"),
    (f"wmma.load.a.sync.aligned.m16n16k16.f16 {WORDS}, [%x];", "one layout"),
    (f"wmma.load.a.sync.aligned.row.f16 {WORDS}, [%x];", "one shape"),
    (f"wmma.load.a.sync.aligned.row.m16n16k16.f32 {EIGHT}, [%x];", "no such matrices"),
    (f"wmma.load.c.sync.aligned.row.m16n16k8.f16 {WORDS}, [%x];", "no such matrices"),
    (f"wmma.load.a.sync.aligned.row.m16n16k16.local.f16 {WORDS}, [%x];", "unknown modifier"),
    ("wmma.load.a.sync.aligned.col.m8n8k32.s4 {%r0}, [%x];", "no such matrices in .col"),
    ("wmma.load.a.sync.aligned.row.m16n16k16.f16 {%r0, %r1}, [%x];", "number of registers"),
    ("wmma.store.d.sync.aligned.row.m16n16k16.f16 [%x], {%r0, %r1};", "number of registers"),
    (f"wmma.mma.sync.aligned.row.col.m16n16k16.f32.f16.f16.f32 {EIGHT}, {WORDS}, {WORDS}, {EIGHT};",
     "not named"),
    (f"wmma.mma.sync.aligned.row.col.m16n16k16.f32.bf16.f32 {EIGHT}, {WORDS}, {WORDS}, {EIGHT};",
     "other parts"),
    (f"wmma.mma.sync.aligned.row.col.m16n16k16.s32.s8.u8.s32 {EIGHT}, {WORDS}, {WORDS}, {EIGHT};",
     "no such combination"),
    (f"wmma.mma.sync.aligned.row.col.m16n16k8.f32.f32 {EIGHT}, {WORDS}, {WORDS}, {EIGHT};",
     "no such combination"),
    (f"wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32.satfinite {EIGHT}, {WORDS}, {WORDS},"
     f" {EIGHT};", "satfinite"),
    (f"wmma.mma.sync.aligned.row.col.m16n16k16.rz.f32.f32 {EIGHT}, {WORDS}, {WORDS}, {EIGHT};",
     "rz"),
    ("wmma.mma.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32 {%r0, %r1}, {%r2}, {%r3}, {%r4, %r5};",
     "popc"),
    ("wmma.mma.sync.aligned.col.col.m8n8k32.s32.s4.s4.s32 {%r0, %r1}, {%r2}, {%r3}, {%r4, %r5};",
     "row layout"),
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "message"), WRONG)
def test_wrong_instructions(instruction, message):
    with pytest.raises(PtxError, match=message):
        load(module(".reg .b32 %r<8>; .reg .f32 %f<8>; .reg .b64 %x;\n" + instruction))
