"""Integer instructions of single threads (PTX ISA 9.7.1 and 9.7.2)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from form_support import Form, assemble_forms, bind, check, dtype_of, edges, wrapped
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_support import run_body, run_elementwise

from pallasite_simulator.engine.observer import Observer
from pallasite_simulator.errors import PtxError

ALL = ("u16", "u32", "u64", "s16", "s32", "s64")
SIGNED = ("s16", "s32", "s64")
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


def limited(value, bits=32):
    return max(-(1 << bits - 1), min((1 << bits - 1) - 1, value))


def divided(a, b):
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def left_over(a, b):
    return -1 if b == 0 else a - divided(a, b) * b


def by_halves(function, sign):
    """A reference for two 16-bit numbers in each 32-bit one."""

    def apply(*words):
        halves = [
            [wrapped(word >> 16 * place, f"{sign}16") for word in words] for place in range(2)
        ]
        low, high = (function(*half) & 0xFFFF for half in halves)
        return low | high << 16

    return apply


def cut_24(value, kind):
    value &= 0xFFFFFF
    return value - (1 << 24) if kind == "s32" and value >> 23 else value


def product_24(mode, kind):
    shift = 16 if mode == "hi" else 0
    return lambda a, b: wrapped(cut_24(a, kind) * cut_24(b, kind) >> shift, kind)


def arithmetic():
    for kind in ALL:
        two, three, bits = (kind,) * 2, (kind,) * 3, int(kind[1:])
        yield Form(f"add.{kind}", two, kind, lambda a, b: a + b)
        yield Form(f"sub.{kind}", two, kind, lambda a, b: a - b)
        yield Form(f"mul.lo.{kind}", two, kind, lambda a, b: a * b)
        yield Form(f"mul.hi.{kind}", two, kind, lambda a, b, n=bits: a * b >> n)
        yield Form(f"mad.lo.{kind}", three, kind, lambda a, b, c: a * b + c)
        yield Form(f"mad.hi.{kind}", three, kind, lambda a, b, c, n=bits: (a * b >> n) + c)
        yield Form(f"sad.{kind}", three, kind, lambda a, b, c: abs(a - b) + c)
        yield Form(f"div.{kind}", two, kind, divided)
        yield Form(f"rem.{kind}", two, kind, left_over)
        yield Form(f"min.{kind}", two, kind, min)
        yield Form(f"max.{kind}", two, kind, max)
    for kind, wide in WIDE.items():
        yield Form(f"mul.wide.{kind}", (kind, kind), wide, lambda a, b: a * b)
        yield Form(f"mad.wide.{kind}", (kind, kind, wide), wide, lambda a, b, c: a * b + c)
    for kind in SIGNED:
        yield Form(f"abs.{kind}", (kind,), kind, abs)
        yield Form(f"neg.{kind}", (kind,), kind, lambda a: -a)
    two, three = ("s32",) * 2, ("s32",) * 3
    yield Form("add.sat.s32", two, "s32", lambda a, b: limited(a + b))
    yield Form("sub.sat.s32", two, "s32", lambda a, b: limited(a - b))
    yield Form("mad.hi.sat.s32", three, "s32", lambda a, b, c: limited((a * b >> 32) + c))
    yield Form("min.relu.s32", two, "s32", lambda a, b: max(min(a, b), 0))
    yield Form("max.relu.s32", two, "s32", lambda a, b: max(a, b, 0))
    for kind, mode in itertools.product(("u32", "s32"), ("lo", "hi")):
        multiply = product_24(mode, kind)
        yield Form(f"mul24.{mode}.{kind}", (kind,) * 2, kind, multiply)
        yield Form(
            f"mad24.{mode}.{kind}", (kind,) * 3, kind, lambda a, b, c, m=multiply: m(a, b) + c
        )
    high = product_24("hi", "s32")
    yield Form("mad24.hi.sat.s32", three, "s32", lambda a, b, c: limited(high(a, b) + c))


def packed():
    words = ("b32", "b32")
    for sign in "us":
        for name, function in (("add", lambda a, b: a + b), ("min", min), ("max", max)):
            yield Form(f"{name}.{sign}16x2", words, "b32", by_halves(function, sign))
    yield Form("min.relu.s16x2", words, "b32", by_halves(lambda a, b: max(min(a, b), 0), "s"))
    yield Form("max.relu.s16x2", words, "b32", by_halves(lambda a, b: max(a, b, 0), "s"))


def field(word, place, bits, sign):
    return wrapped(word >> place * bits, f"{sign}{bits}")


def dot_products():
    for left, right in itertools.product("us", repeat=2):
        result = "u32" if (left, right) == ("u", "u") else "s32"
        kinds = (f"{left}32", f"{right}32", result)

        def dp4a(a, b, c, left=left, right=right):
            return c + sum(field(a, n, 8, left) * field(b, n, 8, right) for n in range(4))

        yield Form(f"dp4a.{left}32.{right}32", kinds, result, dp4a)
        for mode, start in (("lo", 0), ("hi", 2)):

            def dp2a(a, b, c, left=left, right=right, start=start):
                pairs = [(field(a, n, 16, left), field(b, start + n, 8, right)) for n in range(2)]
                return c + sum(x * y for x, y in pairs)

            yield Form(f"dp2a.{mode}.{left}32.{right}32", kinds, result, dp2a)


def highest(value):
    """The place of the highest bit that differs from the sign, or -1."""
    return (value if value >= 0 else ~value).bit_length() - 1


def shift_to_top(value, bits):
    return -1 if highest(value) < 0 else bits - 1 - highest(value)


def reversed_bits(value, bits):
    return int(f"{value:0{bits}b}"[::-1], 2)


def extracted(value, place, length, kind):
    """Bit by bit, as the PTX ISA says."""
    bits = int(kind[1:])
    word = value & (1 << bits) - 1
    sign = 0
    if kind[0] == "s" and length:
        sign = word >> min(place + length - 1, bits - 1) & 1
    found = 0
    for n in range(bits):
        inside = n < length and place + n < bits
        found |= (word >> place + n & 1 if inside else sign) << n
    return found


def inserted(a, b, place, length, bits):
    found = b
    for n in range(length):
        if place + n < bits:
            found = found & ~(1 << place + n) | (a >> n & 1) << place + n
    return found


def extended(value, count, mode, sign):
    count = min(count, 32) if mode == "clamp" else count % 32
    return wrapped(value, f"{sign}{count}") if count else 0


def masked(place, length, mode):
    if mode == "wrap":
        place, length = place % 32, length % 32
    return sum(1 << n for n in range(place, min(place + length, 32)))


def nth_set(mask, base, offset):
    """Bit by bit, as the PTX ISA says."""
    if offset == 0:
        return base if mask >> base & 1 else -1
    count, place = abs(offset), base
    while 0 <= place < 32:
        count -= mask >> place & 1
        if count == 0:
            return place
        place += 1 if offset > 0 else -1
    return -1


AMOUNTS = (0, 1, 2, 7, 15, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 200, 255)
HUGE_AMOUNTS = (*AMOUNTS, 256, 257, 288, 1 << 16, 1 << 31, (1 << 32) - 1)


def bit_fields():
    for bits in (32, 64):
        kind = f"b{bits}"
        yield Form(f"popc.{kind}", (kind,), "u32", int.bit_count)
        yield Form(f"clz.{kind}", (kind,), "u32", lambda a, n=bits: n - a.bit_length())
        yield Form(f"brev.{kind}", (kind,), kind, lambda a, n=bits: reversed_bits(a, n))
        yield Form(
            f"bfi.{kind}",
            (kind, kind, "u32", "u32"),
            kind,
            lambda a, b, c, d, n=bits: inserted(a, b, c, d, n),
            {2: AMOUNTS, 3: AMOUNTS},
        )
    for kind in ("u32", "s32", "u64", "s64"):
        bits = int(kind[1:])
        yield Form(f"bfind.{kind}", (kind,), "u32", highest)
        yield Form(f"bfind.shiftamt.{kind}", (kind,), "u32", lambda a, n=bits: shift_to_top(a, n))
        yield Form(
            f"bfe.{kind}",
            (kind, "u32", "u32"),
            kind,
            lambda a, b, c, kind=kind: extracted(a, b, c, kind),
            {1: AMOUNTS, 2: AMOUNTS},
        )
    for mode in ("clamp", "wrap"):
        for sign in "us":
            yield Form(
                f"szext.{mode}.{sign}32",
                (f"{sign}32", "u32"),
                f"{sign}32",
                lambda a, b, mode=mode, sign=sign: extended(a, b, mode, sign),
                {1: HUGE_AMOUNTS},
            )
        yield Form(
            f"bmsk.{mode}.b32",
            ("u32", "u32"),
            "b32",
            lambda a, b, mode=mode: masked(a, b, mode),
            {0: HUGE_AMOUNTS, 1: HUGE_AMOUNTS},
        )
    yield Form("fns.b32", ("b32", "u32", "s32"), "b32", nth_set, {1: range(32), 2: range(-10, 11)})


FORMS = [*arithmetic(), *packed(), *dot_products(), *bit_fields()]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_instruction(form):
    check(form)


def test_ptxas_knows_all_forms(tmp_path):
    assemble_forms(FORMS, tmp_path)


# What PTX leaves open -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("name", ["div", "rem"])
def test_division_by_zero_gives_all_ones_as_on_an_h200(name, kind):
    values = np.array(edges(kind), dtype_of(kind))
    found = run_elementwise(
        f"{name}.{kind} {{d}}, {{a}}, {{b}};", [values, values * 0], values.dtype
    )
    assert (found == np.array(wrapped(-1, kind), values.dtype)).all()
    constant = run_elementwise(f"{name}.{kind} {{d}}, {{a}}, 0;", [values], values.dtype)
    np.testing.assert_array_equal(constant, found)


def test_amounts_above_255_are_as_on_an_h200():
    values = np.array([0x9D3B6A5C], np.uint32)
    run = run_elementwise
    assert run("bfe.u32 {d}, {a}, 260, 8;", [values], np.uint32)[0] == 0xA5
    assert run("bfe.u64 {d}, {a}, 260, 8;", [values.astype(np.uint64)], np.uint64)[0] == 0
    assert run("bfi.b32 {d}, {a}, 0, 260, 8;", [values], np.uint32)[0] == 0x5C0
    assert run("bfi.b64 {d}, {a}, 0, 260, 8;", [values.astype(np.uint64)], np.uint64)[0] == 0


# Operands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [one for one in FORMS if len(one.operands) > 1], ids=str)
def test_constants_are_operands_like_registers(form):
    values = [3, 5, 7, 11][: len(form.operands)]
    first = np.array([values[0]], dtype_of(form.operands[0]))
    constants = ", ".join(map(str, values[1:]))
    found = run_elementwise(
        f"{form.name} {{d}}, {{a}}, {constants};", [first], dtype_of(form.result)
    )
    assert int(found[0]) == wrapped(form.reference(*values), form.result)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_all_operands_can_be_constants(form):
    values = [3, 5, 7, 11][: len(form.operands)]
    constants = ", ".join(map(str, values))
    dummy = np.zeros(1, np.uint32)
    found = run_elementwise(f"{form.name} {{d}}, {constants};", [dummy], dtype_of(form.result))
    assert int(found[0]) == wrapped(form.reference(*values), form.result)


def test_a_part_of_the_lanes_keeps_its_registers():
    values = np.arange(256, dtype=np.uint32)
    code = """
        .reg .pred %odd; .reg .b32 %bit;
        mov.b32 {d}, 1000;
        and.b32 %bit, {a}, 1;
        setp.eq.u32 %odd, %bit, 1;
        @%odd mad.lo.u32 {d}, {a}, 2, 5;
        @!%odd popc.b32 {d}, {a};
    """
    found = run_elementwise(code, [values], np.uint32)
    expected = [2 * v + 5 if v & 1 else v.bit_count() for v in range(256)]
    assert found.tolist() == expected


# Carries ------------------------------------------------------------------------------------------


@given(
    st.sampled_from([32, 64]),
    st.sampled_from("us"),
    st.sampled_from(["add", "sub"]),
    st.lists(st.tuples(st.integers(0, 2**256 - 1), st.integers(0, 2**256 - 1)), min_size=1),
)
@settings(max_examples=25, deadline=None)
def test_long_sums(bits, sign, name, pairs):
    count = 256 // bits
    kind = f"{sign}{bits}"
    lines = [f".reg .b{bits} %l<{count}>, %m<{count}>, %n<{count}>; .reg .b64 %at;"]
    for letter, array in (("l", 0), ("m", 1)):
        lines.append(f"mul.wide.u32 %at, %thread, 32; add.s64 %at, %at, %array{array};")
        lines += [f"ld.global.b{bits} %{letter}{n}, [%at+{n * bits // 8}];" for n in range(count)]
    for n in range(count):
        full = f"{name}.cc" if n == 0 else f"{name}c.cc" if n < count - 1 else f"{name}c"
        lines.append(f"{full}.{kind} %n{n}, %l{n}, %m{n};")
    lines.append("mul.wide.u32 %at, %thread, 32; add.s64 %at, %at, %array2;")
    lines += [f"st.global.b{bits} [%at+{n * bits // 8}], %n{n};" for n in range(count)]
    # Limbs that are alike are where a carry can go through all of them.
    pairs = [*pairs, (0, 1), (2**256 - 1, 1), (2**128, 2**128 - 1), (5, 5)]
    arrays = [as_bytes([pair[side] for pair in pairs]) for side in range(2)]
    result = np.zeros_like(arrays[0])
    run_body("\n".join(lines), *arrays, result, block=len(pairs))
    step = 1 if name == "add" else -1
    expected = [(a + step * b) % 2**256 for a, b in pairs]
    assert [int.from_bytes(row.tobytes(), "little") for row in result] == expected


def as_bytes(numbers):
    rows = [np.frombuffer(one.to_bytes(32, "little"), np.uint8) for one in numbers]
    return np.array(rows)


@given(
    st.sampled_from([32, 64]),
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**128 - 1)),
        min_size=1,
    ),
)
@settings(max_examples=25, deadline=None)
def test_long_products(bits, rows):
    top = 2**bits
    rows = [(a % top, b % top, c % top**2) for a, b, c in rows] + [(top - 1, top - 1, top**2 - 1)]
    code = f"""
        .reg .b{bits} %a, %b, %low, %high, %c, %d; .reg .b64 %at;
        mul.wide.u32 %at, %thread, 16; add.s64 %at, %at, %array0;
        ld.global.b{bits} %a, [%at]; ld.global.b{bits} %b, [%at+8];
        mul.wide.u32 %at, %thread, 16; add.s64 %at, %at, %array1;
        ld.global.b{bits} %low, [%at]; ld.global.b{bits} %high, [%at+8];
        mad.lo.cc.u{bits} %low, %a, %b, %low;
        madc.hi.cc.u{bits} %high, %a, %b, %high;
        addc.u{bits} %c, 0, 0;
        madc.lo.u{bits} %d, %a, 0, 1;
        mul.wide.u32 %at, %thread, 32; add.s64 %at, %at, %array2;
        st.global.b{bits} [%at], %low; st.global.b{bits} [%at+8], %high;
        st.global.b{bits} [%at+16], %c; st.global.b{bits} [%at+24], %d;
    """
    factors = np.array([row[:2] for row in rows], np.uint64)
    addends = np.array([(c % top, c // top) for *_, c in rows], np.uint64)
    result = np.zeros((len(rows), 4), np.uint64)
    run_body(code, factors, addends, result, block=len(rows))
    for (a, b, c), found in zip(rows, result.tolist(), strict=True):
        total = a * b + c
        low, high, carry, last = found
        assert low + high * top + carry * top**2 == total
        # The flag stays as it was when nothing sets it.
        assert last == 1 + carry


def test_subtraction_and_addition_share_a_flag_as_on_an_h200():
    # A subtraction without a borrow sets the flag, and one with it clears it.
    a, b = np.array([5, 3], np.uint32), np.array([3, 5], np.uint32)
    code = ".reg .b32 %t; sub.cc.u32 %t, {a}, {b}; addc.u32 {d}, 100, 0;"
    assert run_elementwise(code, [a, b], np.uint32).tolist() == [101, 100]
    code = ".reg .b32 %t; add.cc.u32 %t, {a}, {b}; subc.u32 {d}, 100, 0;"
    top = np.array([2**32 - 5, 2**32 - 5], np.uint32)
    assert run_elementwise(code, [top, b], np.uint32).tolist() == [99, 100]


def test_lanes_have_their_own_flag():
    code = """
        .reg .pred %p; .reg .b32 %t;
        mov.b32 {d}, 0;
        add.cc.u32 %t, {a}, -1;
        setp.lt.u32 %p, {a}, 3;
        @%p sub.cc.u32 %t, 0, 1;
        addc.u32 {d}, 0, 0;
    """
    values = np.arange(6, dtype=np.uint32)
    assert run_elementwise(code, [values], np.uint32).tolist() == [0, 0, 0, 1, 1, 1]


def test_a_flag_that_nothing_set_is_told_of():
    seen = []

    class Listener(Observer):
        def undefined_register(self, lanes, name, instruction):
            seen.append((lanes.tolist(), name, instruction.opcode))

    code = """
        .reg .pred %p; .reg .b32 %t;
        setp.lt.u32 %p, {a}, 3;
        @%p add.cc.u32 %t, 0, 1;
        addc.u32 {d}, 0, 0;
    """
    values = np.arange(128, dtype=np.uint32)
    run_elementwise(code, [values], np.uint32, make_observer=Listener)
    assert seen == [(list(range(3, 128)), "CC.CF", "addc")]


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, message",
    [
        ("add %r0, %r1, %r2;", "has no type"),
        ("add.b32 %r0, %r1, %r2;", "no type .b32"),
        ("add.sat.u32 %r0, %r1, %r2;", ".u32 has no .sat"),
        ("add.sat.s64 %x0, %x1, %x2;", ".s64 has no .sat"),
        ("add.sat.s16x2 %r0, %r1, %r2;", ".s16x2 has no .sat"),
        ("sub.u16x2 %r0, %r1, %r2;", "no type .u16x2"),
        ("add.rn.s32 %r0, %r1, %r2;", "unknown modifier .rn"),
        ("add.s32 %r0, %r1;", "wrong number of operands"),
        ("add.s64 %x0, %x1, %r2;", "cannot be read as .s64"),
        ("add.s64 %r0, %x1, %x2;", "cannot hold a .s64"),
        ("mul.s32 %r0, %r1, %r2;", "one of .lo, .hi, .wide"),
        ("mul.lo.hi.s32 %r0, %r1, %r2;", "exclude each other"),
        ("mul.wide.u64 %x0, %x1, %x2;", ".u64 has no .wide"),
        ("mad.lo.sat.s32 %r0, %r1, %r2, %r3;", ".sat is only for"),
        ("mad.hi.sat.u32 %r0, %r1, %r2, %r3;", ".sat is only for"),
        ("mad24.lo.sat.s32 %r0, %r1, %r2, %r3;", ".sat is only for"),
        ("mul24.lo.u64 %x0, %x1, %x2;", "no type .u64"),
        ("mul24.u32 %r0, %r1, %r2;", "a modifier is missing"),
        ("abs.u32 %r0, %r1;", "no type .u32"),
        ("neg.b32 %r0, %r1;", "no type .b32"),
        ("min.relu.u32 %r0, %r1, %r2;", ".u32 has no .relu"),
        ("max.relu.s64 %x0, %x1, %x2;", ".s64 has no .relu"),
        ("min.relu.u16x2 %r0, %r1, %r2;", ".u16x2 has no .relu"),
        ("rem.f32 %f0, %f1, %f2;", "rem has no type .f32"),
        ("fma.rn.s32 %r0, %r1, %r2, %r3;", "fma has no type .s32"),
        ("add.cc.u16 %h0, %h1, %h2;", "no type .u16"),
        ("addc.b32 %r0, %r1, %r2;", "no type .b32"),
        ("mad.lo.cc.u16 %h0, %h1, %h2, %h3;", "no type .u16"),
        ("madc.u32 %r0, %r1, %r2, %r3;", "one of .lo, .hi"),
        ("mad.wide.cc.u32 %x0, %r1, %r2, %x3;", "unknown modifier .cc"),
        ("popc.u32 %r0, %r1;", "no type .u32"),
        ("clz.b16 %r0, %h1;", "no type .b16"),
        ("bfind.b32 %r0, %r1;", "no type .b32"),
        ("brev.u32 %r0, %r1;", "no type .u32"),
        ("bfe.b32 %r0, %r1, %r2, %r3;", "no type .b32"),
        ("bfi.u32 %r0, %r1, %r2, %r3, %r4;", "no type .u32"),
        ("fns.u32 %r0, %r1, %r2, %r3;", "no type .u32"),
        ("szext.s32 %r0, %r1, %r2;", "one of .clamp, .wrap"),
        ("bmsk.clamp.u32 %r0, %r1, %r2;", "no type .u32"),
        ("dp4a.u32 %r0, %r1, %r2, %r3;", "wrong types"),
        ("dp4a.u32.b32 %r0, %r1, %r2, %r3;", "wrong types"),
        ("dp2a.u32.u32 %r0, %r1, %r2, %r3;", "one of .lo, .hi"),
        ("vadd.s32.u32 %r0, %r1, %r2;", "3 types are missing"),
        ("vadd.s32.u32.s32 %r0.b0, %r1, %r2;", "wrong number of operands"),
        ("vadd.s32.u32.s32 %r0, %r1.b21, %r2;", "there is no part .b21"),
        ("vadd.s32.u32.s32 %r0, %r1.h2, %r2;", "there is no part .h2"),
        ("vadd.s32.u32.s32.add %r0.b0, %r1, %r2, %r3;", "exclude each other"),
        ("vshl.s32.u32.s32.clamp %r0, %r1, %r2;", "the amount of a shift"),
        ("vshl.s32.u32.u32 %r0, %r1, %r2;", "one of .clamp, .wrap"),
        ("vmad.s32.s32.s32.po %r0, -%r1, %r2, %r3;", "exclude each other"),
        ("vadd2.s32.s32.s32 %r0.h01, %r1, %r2, %r3;", "the highest first"),
        ("vadd2.s32.s32.s32 %r0, %r1.b10, %r2, %r3;", "no selection .b10 of 2 parts"),
        ("vadd4.s32.s32.s32 %r0, %r1.b10, %r2, %r3;", "4 parts are to be selected"),
        ("vadd4.s32.s32.s32.sat.add %r0, %r1, %r2, %r3;", "exclude each other"),
        ("vset.s32.s32.lo %r0, %r1, %r2;", "unknown modifier .lo"),
    ],
)
def test_errors(line, message):
    with pytest.raises(PtxError, match=message) as caught:
        bind(line)
    assert line[:-1] in str(caught.value)
    assert caught.value.position.line > 1
