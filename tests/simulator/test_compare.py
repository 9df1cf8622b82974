"""setp and set, run as PTX and held against comparisons of exact values."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from exact_floats import INFINITY, KINDS, NAN, flushed, patterns
from simulator_support import run_body, run_elementwise

from pallasite_simulator.errors import PtxError

COUNT = 512
ORDERS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
FLOATS = (*ORDERS, *(f"{one}u" for one in ORDERS), "num", "nan")


def integers(kind, seed):
    """Pairs of integers among which many are equal or next to one another."""
    bits = int(kind[1:])
    random = np.random.default_rng(seed)
    values = random.integers(0, 2**bits - 1, COUNT, np.uint64, endpoint=True)
    others = np.where(random.random(COUNT) < 0.5, values, values[::-1])
    others = others + random.integers(0, 2, COUNT, np.uint64)
    edges = np.array([0, 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 2**bits - 1], np.uint64)
    values[:25], others[:25] = np.repeat(edges, 5), np.tile(edges, 5)
    return values.astype(f"u{bits // 8}"), others.astype(f"u{bits // 8}")


def float_pairs(kind):
    a, b = patterns(kind, COUNT, 1), patterns(kind, COUNT, 2)
    b[::4] = a[::4]
    b[1::8] = a[1::8] ^ kind.dtype.type(1 << (kind.bits - 1))
    return a, b


def holds(name, kind, a, b, ftz=False):
    """Whether a comparison of bits of floats is true."""
    if ftz:
        a, b = flushed(kind, a), flushed(kind, b)

    def number(bits):
        value = kind.value(bits)
        if value == INFINITY:
            return float("-inf") if kind.negative(bits) else float("inf")
        return value

    x, y = number(a), number(b)
    unordered = NAN in (x, y)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if unordered:
        return name.endswith("u")
    return ORDERS[name[:2]](x, y)


@pytest.mark.parametrize("kind", [f"{letter}{bits}" for letter in "bus" for bits in (16, 32, 64)])
def test_integers(kind):
    a, b = integers(kind, 3)
    names = ("eq", "ne") if kind[0] == "b" else (*ORDERS, *(UNSIGNED if kind[0] == "u" else ()))
    dtype = a.dtype if kind[0] != "s" else np.dtype(f"i{a.itemsize}")
    for name in names:
        ours = run_elementwise(f"setp.{name}.{kind} {{d}}, {{a}}, {{b}};", [a, b], bool)
        compare = ORDERS[UNSIGNED.get(name, name)]
        np.testing.assert_array_equal(ours, compare(a.view(dtype), b.view(dtype)))


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("ftz", [False, True])
def test_floats(kind, ftz):
    if ftz and kind in ("bf16", "f64"):
        return
    form, middle = KINDS[kind], ".ftz" if ftz else ""
    a, b = float_pairs(form)
    for name in FLOATS:
        code = f"setp.{name}{middle}.{kind} {{d}}, {{a}}, {{b}};"
        ours = run_elementwise(code, [a, b], bool)
        wanted = [holds(name, form, x, y, ftz) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        assert ours.tolist() == wanted, name


TWO = """
    .reg .pred %p, %q;
    setp.{code};
    selp.b32 {{d}}, 1, 0, %p;
    @%q add.u32 {{d}}, {{d}}, 2;
"""


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["lt", "geu", "ne", "nan"])
def test_packed_types_set_two_predicates(kind, name):
    form = KINDS[kind]
    a, b = float_pairs(form)
    code = TWO.format(code=f"{name}.{kind}x2 %p|%q, {{a}}, {{b}}")
    ours = run_elementwise(code, [a.view(np.uint32), b.view(np.uint32)], np.uint32)
    each = [holds(name, form, x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert ours.tolist() == [
        low + 2 * high for low, high in zip(each[::2], each[1::2], strict=True)
    ]


def test_packed_types_flush():
    form = KINDS["f16"]
    a, b = float_pairs(form)
    code = TWO.format(code="eq.ftz.f16x2 %p|%q, {a}, {b}")
    ours = run_elementwise(code, [a.view(np.uint32), b.view(np.uint32)], np.uint32)
    each = [holds("eq", form, x, y, True) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert ours.tolist() == [
        low + 2 * high for low, high in zip(each[::2], each[1::2], strict=True)
    ]


COMBINATIONS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("negation", ["", "!"])
def test_combinations_with_a_third_predicate(combination, negation):
    a, b = integers("s32", 8)
    third = np.random.default_rng(9).random(COUNT) < 0.5
    code = TWO.format(code=f"lt.{combination}.s32 %p|%q, {{a}}, {{b}}, {negation}{{c}}")
    ours = run_elementwise(code, [a, b, third], np.uint32)
    less, other = a.view(np.int32) < b.view(np.int32), third ^ bool(negation)
    combine = COMBINATIONS[combination]
    np.testing.assert_array_equal(ours, combine(less, other) + 2 * combine(~less, other))


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_combinations_of_packed_comparisons(combination):
    form = KINDS["bf16"]
    a, b = float_pairs(form)
    third = np.random.default_rng(9).random(COUNT // 2) < 0.5
    code = TWO.format(code=f"le.{combination}.bf16x2 %p|%q, {{a}}, {{b}}, {{c}}")
    ours = run_elementwise(code, [a.view(np.uint32), b.view(np.uint32), third], np.uint32)
    each = [holds("le", form, x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    low, high = np.array(each[::2]), np.array(each[1::2])
    combine = COMBINATIONS[combination]
    np.testing.assert_array_equal(ours, combine(low, third) + 2 * combine(high, third))


def test_the_third_predicate_may_be_a_destination():
    a, b = integers("u32", 4)
    code = """
        .reg .pred %p, %q;
        setp.ne.u32 %p, {a}, {b};
        setp.lt.and.u32 %p|%q, {a}, {b}, %p;
        selp.b32 {d}, 1, 0, %p;
        @%q add.u32 {d}, {d}, 2;
    """
    ours = run_elementwise(code, [a, b], np.uint32)
    np.testing.assert_array_equal(ours, (a < b) + 2 * (a > b))


def test_pairs_with_one_result_thrown_away():
    a, b = integers("u32", 4)
    code = """
        .reg .pred %p, %q;
        setp.lt.u32 _|%q, {a}, {b};
        setp.eq.u32 %p|_, {a}, {b};
        selp.b32 {d}, 1, 0, %p;
        @%q add.u32 {d}, {d}, 2;
    """
    ours = run_elementwise(code, [a, b], np.uint32)
    np.testing.assert_array_equal(ours, (a == b) + 2 * (a >= b))


def test_scalars():
    """Operands that are the same for all lanes."""
    out = np.zeros(128, np.uint32)
    body = """
        .reg .pred %p, %q; .reg .b32 %r<3>; .reg .b64 %at;
        mov.u32 %r0, %ctaid.x;
        setp.lt.u32 %p|%q, %r0, 1;
        selp.b32 %r1, 1, 0, %p;
        @%q add.u32 %r1, %r1, 2;
        setp.eq.and.u32 %p, 3, 3, %p;
        @%p add.u32 %r1, %r1, 4;
        mov.b32 %r2, 0x3c003c00;
        setp.eq.f16x2 %p|%q, %r2, %r2;
        @%q add.u32 %r1, %r1, 8;
        add.s64 %at, %array0, %offset4;
        st.global.b32 [%at], %r1;
    """
    run_body(body, out)
    assert (out == 13).all()


def test_special_registers_and_immediates():
    out = np.zeros(128, np.uint32)
    body = """
        .reg .pred %p<2>; .reg .b32 %r; .reg .b64 %at;
        setp.ge.s32 %p0, %tid.x, 100;
        setp.gt.and.f32 %p1, 0f40000000, 1.5, %p0;
        selp.b32 %r, 7, 5, %p1;
        add.s64 %at, %array0, %offset4;
        st.global.b32 [%at], %r;
    """
    run_body(body, out)
    np.testing.assert_array_equal(out, np.where(np.arange(128) >= 100, 7, 5))


# set ----------------------------------------------------------------------------------------------

TRUE = {
    "u32": 0xFFFFFFFF,
    "s32": 0xFFFFFFFF,
    "f32": 0x3F800000,
    "f16": 0x3C00,
    "bf16": 0x3F80,
    "u16": 0xFFFF,
    "s16": 0xFFFF,
}


@pytest.mark.parametrize(
    "result,kind",
    [
        ("u32", "f32"),
        ("s32", "f16"),
        ("f32", "f32"),
        ("f32", "f64"),
        ("f16", "f16"),
        ("bf16", "bf16"),
        ("u16", "f16"),
        ("s16", "bf16"),
        ("bf16", "f32"),
    ],
)
def test_set_of_floats(result, kind):
    form = KINDS[kind]
    a, b = float_pairs(form)
    dtype = np.uint16 if result.endswith("16") else np.uint32
    for name in ("lt", "neu"):
        ours = run_elementwise(f"set.{name}.{result}.{kind} {{d}}, {{a}}, {{b}};", [a, b], dtype)
        wanted = [holds(name, form, x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        assert ours.tolist() == [TRUE[result] * one for one in wanted]


def test_set_of_integers():
    a, b = integers("s64", 6)
    for result in ("u32", "f32"):
        ours = run_elementwise(f"set.ge.{result}.s64 {{d}}, {{a}}, {{b}};", [a, b], np.uint32)
        np.testing.assert_array_equal(ours, (a.view(np.int64) >= b.view(np.int64)) * TRUE[result])


def test_set_with_a_third_predicate():
    a, b = integers("u32", 6)
    third = np.random.default_rng(1).random(COUNT) < 0.5
    ours = run_elementwise("set.lt.or.u32.u32 {d}, {a}, {b}, !{c};", [a, b, third], np.uint32)
    np.testing.assert_array_equal(ours, ((a < b) | ~third) * 0xFFFFFFFF)


@pytest.mark.parametrize(
    "name,true", [("f16x2.f16x2", 0x3C00), ("bf16x2.bf16x2", 0x3F80), ("u32.f16x2", 0xFFFF)]
)
def test_set_of_packed_types(name, true):
    form = KINDS[name.split(".")[1].removesuffix("x2")]
    a, b = float_pairs(form)
    third = np.random.default_rng(1).random(COUNT // 2) < 0.5
    for combination in ("", "and"):
        code = f"set.gt.{combination}.{name} {{d}}, {{a}}, {{b}}, {{c}};".replace("..", ".")
        code = code if combination else code.replace(", {c}", "")
        inputs = [a.view(np.uint32), b.view(np.uint32), third]
        ours = run_elementwise(code, inputs, np.uint32).view(np.uint16)
        wanted = np.array(
            [holds("gt", form, x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        )
        if combination:
            wanted &= np.repeat(third, 2)
        np.testing.assert_array_equal(ours, wanted * true)


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code,message",
    [
        ("setp.u32 %p, {a}, {a};", "a modifier is missing"),
        ("setp.lt.b32 %p, {a}, {a};", "no comparison .lt of .b32"),
        ("setp.lo.s32 %p, {a}, {a};", "no comparison .lo of .s32"),
        ("setp.ltu.u32 %p, {a}, {a};", "no comparison .ltu of .u32"),
        ("setp.hi.f32 %p, {a}, {a};", "no comparison .hi of .f32"),
        ("setp.lt.ge.f32 %p, {a}, {a};", "exclude each other"),
        ("setp.lt.ftz.u32 %p, {a}, {a};", ".ftz does not fit"),
        ("setp.lt.ftz.bf16x2 %p, {a}, {a};", ".ftz does not fit"),
        ("setp.lt.nand.u32 %p, {a}, {a}, %p;", "modifier .nand does not fit"),
        ("setp.lt.and.or.u32 %p, {a}, {a}, %p;", "more than one Boolean"),
        ("setp.lt.and.u32 %p, {a}, {a};", "wrong number of operands"),
        ("setp.lt.u32 %p, {a}, {a}, %p;", "wrong number of operands"),
        ("setp.lt.f16 %p|%p, %h, %h;", "one predicate"),
        ("setp.lt.e4m3x2 %p, {a}, {a};", "wrong type"),
        ("setp.lt.u8 %p, {a}, {a};", "wrong type"),
        ("setp.lt.u32 {d}, {a}, {a};", "cannot hold"),
        ("setp.lt.u64 %p, {a}, {a};", "cannot be read"),
        ("set.lt.u32 {d}, {a}, {a};", "needs a type"),
        ("set.lt.f64.f32 {d}, {a}, {a};", "cannot give .f64 from .f32"),
        ("set.lt.u16.f32 {d}, {a}, {a};", "cannot give .u16 from .f32"),
        ("set.lt.f32.f16 {d}, %h, %h;", "cannot give .f32 from .f16"),
    ],
)
def test_errors(code, message):
    registers = ".reg .pred %p; .reg .b16 %h;"
    with pytest.raises(PtxError, match=message):
        run_elementwise(code, [np.zeros(1, np.uint32)], np.uint32, registers=registers)
