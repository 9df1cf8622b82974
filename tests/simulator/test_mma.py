"""``mma`` against double precision and integers; fragments are put together lane by lane."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from simulator_support import body_ptx, module, run_ptx

from pallasite_simulator.errors import PtxError, SimulationError
from pallasite_simulator.programs import load

DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "f64": np.float64,
    "f32": np.float32,
    "s32": np.int32,
}
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "f32": 32, "s32": 32}
BITS |= {"e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}
TOLERANCE = {"f16": 2e-3, "f32": 1e-6, "f64": 1e-15}

WARPS = 6  # three blocks of two


# The layouts, from the figures and formulas of PTX ISA 9.7.14.5 -----------------------------------


def up_to(limits, values):
    """The value that belongs to the first limit above an index."""

    def find(i):
        for limit, value in zip(limits, values, strict=True):
            if i < limit:
                return value
        raise AssertionError(i)

    return find


def alternating(width):
    """Row offset of elements of A: 0 and 8 in turn, every ``width`` elements."""
    return up_to((width, 2 * width, 3 * width, 4 * width), (0, 8, 0, 8))


# For A: row offset and column of element i in lane 4g + t; for B: row (along K). By shape and bits.
A = {
    ("m16n8k8", 16): (alternating(2), lambda t, i: 2 * t + (i & 1)),
    ("m16n8k16", 16): (alternating(2), lambda t, i: 2 * t + (i & 1) + (8 if i >= 4 else 0)),
    ("m16n8k4", 32): (alternating(1), lambda t, i: t),
    ("m16n8k8", 32): (alternating(1), lambda t, i: t + (4 if i >= 2 else 0)),
    ("m8n8k16", 8): (lambda i: 0, lambda t, i: 4 * t + i),
    ("m16n8k16", 8): (alternating(4), lambda t, i: 4 * t + (i & 3)),
    ("m16n8k32", 8): (alternating(4), lambda t, i: 4 * t + (i & 3) + (16 if i >= 8 else 0)),
    ("m8n8k32", 4): (lambda i: 0, lambda t, i: 8 * t + i),
    ("m16n8k32", 4): (alternating(8), lambda t, i: 8 * t + (i & 7)),
    ("m16n8k64", 4): (alternating(8), lambda t, i: 8 * t + (i & 7) + (32 if i >= 16 else 0)),
    ("m8n8k128", 1): (lambda i: 0, lambda t, i: 32 * t + i),
    ("m16n8k128", 1): (alternating(32), lambda t, i: 32 * t + (i & 31)),
    ("m16n8k256", 1): (alternating(32), lambda t, i: 32 * t + (i & 31) + (128 if i >= 64 else 0)),
    ("m8n8k4", 64): (lambda i: 0, lambda t, i: t),
    ("m16n8k4", 64): (alternating(1), lambda t, i: t),
    ("m16n8k8", 64): (alternating(1), lambda t, i: t + (4 if i >= 2 else 0)),
    ("m16n8k16", 64): (
        lambda i: 8 if i % 2 else 0,
        lambda t, i: (2 * i if i % 2 == 0 else 2 * i - 2) + t,
    ),
}
B = {
    ("m16n8k8", 16): lambda t, i: 2 * t + i,
    ("m16n8k16", 16): lambda t, i: 2 * t + (i & 1) + (8 if i >= 2 else 0),
    ("m16n8k4", 32): lambda t, i: t,
    ("m16n8k8", 32): lambda t, i: t + (4 if i == 1 else 0),
    ("m8n8k16", 8): lambda t, i: 4 * t + i,
    ("m16n8k16", 8): lambda t, i: 4 * t + i,
    ("m16n8k32", 8): lambda t, i: 4 * t + (i & 3) + (16 if i >= 4 else 0),
    ("m8n8k32", 4): lambda t, i: 8 * t + i,
    ("m16n8k32", 4): lambda t, i: 8 * t + i,
    ("m16n8k64", 4): lambda t, i: 8 * t + (i & 7) + (32 if i >= 8 else 0),
    ("m8n8k128", 1): lambda t, i: 32 * t + i,
    ("m16n8k128", 1): lambda t, i: 32 * t + i,
    ("m16n8k256", 1): lambda t, i: 32 * t + (i & 31) + (128 if i >= 32 else 0),
    ("m8n8k4", 64): lambda t, i: t,
    ("m16n8k4", 64): lambda t, i: t,
    ("m16n8k8", 64): lambda t, i: t + 4 * i,
    ("m16n8k16", 64): lambda t, i: t + 4 * i,
}


def extents(shape):
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


def places(shape, bits):
    """For A, B and C: rows and columns, by lane and element."""
    m, n, k = extents(shape)
    offset, column = A[shape, bits]
    row_b = B[shape, bits]

    def listed(count, place):
        return np.array(
            [[place(lane // 4, lane % 4, i) for i in range(count)] for lane in range(32)]
        )

    return (
        listed(m * k // 32, lambda g, t, i: (g + offset(i), column(t, i))),
        listed(n * k // 32, lambda g, t, i: (row_b(t, i), g)),
        listed(m * n // 32, lambda g, t, i: (g + (8 if i >= 2 else 0), 2 * t + (i & 1))),
    )


def packed(values, kind):
    """Registers of 32 (or 64) bits from elements, the last dimension of which a lane holds."""
    bits = BITS[kind]
    if bits >= 8:
        dtype = DTYPES.get(kind, np.uint8)
        held = np.ascontiguousarray(values.astype(dtype))
        return held.view(np.uint64 if bits == 64 else np.uint32)
    parts = (values.astype(np.int64) & ((1 << bits) - 1)).astype(np.uint64)
    parts = parts.reshape(*parts.shape[:-1], -1, 32 // bits)
    shifts = np.arange(32 // bits, dtype=np.uint64) * np.uint64(bits)
    return (parts << shifts).sum(axis=-1).astype(np.uint32)


def random_values(random, kind, shape):
    """Elements that the type holds, in double precision."""
    if kind in ("s32", "s8", "u8", "s4", "u4", "b1"):
        bits = BITS[kind]
        low = -(1 << (bits - 1)) if kind[0] == "s" else 0
        return random.integers(low, low + (1 << bits), shape).astype(np.float64)
    values = random.standard_normal(shape)
    if kind == "tf32":
        values = (values.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)
    return values.astype(DTYPES[kind]).astype(np.float64)


# Programs -----------------------------------------------------------------------------------------


def listed(prefix, count):
    return "{" + ", ".join(f"%{prefix}{number}" for number in range(count)) + "}"


def run_mma(name, words, results, kinds, setup=""):
    """Executes an instruction in all warps.

    Args:
      name: of the instruction.
      words: registers of A, B and C: arrays of shape (warps, 32, registers).
      results: how many registers D has.
      kinds: register types of D and C.
    """
    width = words[0].itemsize
    body = [".reg .b64 %at;", setup]
    for number, (letter, array) in enumerate(zip("abc", words, strict=True)):
        count, size = array.shape[-1], array.itemsize
        register = kinds[1] if letter == "c" else f"b{8 * width}"
        body += [
            f".reg .{register} %{letter}<{count}>;",
            f"mul.wide.u32 %at, %thread, {count * size}; add.s64 %at, %at, %array{number};",
            *[f"ld.global.b{8 * size} %{letter}{i}, [%at+{size * i}];" for i in range(count)],
        ]
    size = 8 if kinds[0] == "f64" else 4
    body += [
        f".reg .{kinds[0]} %d<{results}>;",
        f"{name} {listed('d', results)}, {listed('a', words[0].shape[-1])},"
        f" {listed('b', words[1].shape[-1])}, {listed('c', words[2].shape[-1])};",
        f"mul.wide.u32 %at, %thread, {results * size}; add.s64 %at, %at, %array3;",
        *[f"st.global.b{8 * size} [%at+{size * i}], %d{i};" for i in range(results)],
    ]
    output = np.full((*words[0].shape[:2], results), 0xCD, f"u{size}")
    arrays = [np.ascontiguousarray(one) for one in words]
    warps = len(words[0])
    block = 64 if warps % 2 == 0 else 32
    execution = run_ptx(
        body_ptx("\n".join(body), 4), *arrays, output, grid=32 * warps // block, block=block
    )
    return output, execution


def register_kind(kind):
    return {"f16": "b32", "f32": "f32", "s32": "s32", "f64": "f64"}[kind]


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


FLOATS = [
    *[(f"m16n8k{k}", d, "f16", "f16") for k in (8, 16) for d in ("f16", "f32")],
    *[(f"m16n8k{k}", "f32", "bf16", "bf16") for k in (8, 16)],
    *[(f"m16n8k{k}", "f32", "tf32", "tf32") for k in (4, 8)],
    *[
        (f"m16n8k{k}", d, a, b)
        for k in (16, 32)
        for d in ("f16", "f32")
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
    ],
    *[(shape, "f64", "f64", "f64") for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")],
]
INTEGERS = [
    *[
        (shape, a, b)
        for shape in ("m8n8k16", "m16n8k16", "m16n8k32")
        for a in ("s8", "u8")
        for b in ("s8", "u8")
    ],
    *[
        (shape, a, b)
        for shape in ("m8n8k32", "m16n8k32", "m16n8k64")
        for a in ("s4", "u4")
        for b in ("s4", "u4")
    ],
]


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


def quarter_places(layouts, kind):
    """For A, B and C of ``m8n8k4``: rows and columns, by lane and element."""

    def of_a(lane, i):
        high = 4 if lane >= 16 else 0
        return (lane % 4 + high, i) if layouts[0] == "row" else (i % 4 + high, lane % 4)

    def of_b(lane, i):
        high = 4 if lane >= 16 else 0
        return (lane % 4, i + high) if layouts[1] == "row" else (i, lane % 4 + high)

    def of_c(lane, i):
        high = 4 if lane >= 16 else 0
        if kind == "f16":
            return lane % 4 + high, i
        row = (lane & 0b1) + (i & 0b10) + high
        return row, (i & 0b100) + (lane & 0b10) + (i & 0b1)

    return [
        np.array([[of(lane, i) for i in range(count)] for lane in range(32)])
        for of, count in ((of_a, 4), (of_b, 4), (of_c, 8))
    ]


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
