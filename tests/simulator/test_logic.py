"""Logic and shifts (PTX ISA 9.7.8)."""

from __future__ import annotations

import numpy as np
import pytest
from form_support import Form, assemble_forms, bind, check, dtype_of, wrapped
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_support import run_elementwise

from pallasite_simulator.errors import PtxError

BITS = ("b16", "b32", "b64")
AMOUNTS = (0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 1 << 16, 1 << 31, (1 << 32) - 1)


def funnel(low, high, amount, direction, mode):
    amount = amount % 32 if mode == "wrap" else min(amount, 32)
    both = high << 32 | low
    return both << amount >> 32 if direction == "l" else both >> amount


def forms():
    for kind in ("pred", *BITS):
        yield Form(f"and.{kind}", (kind,) * 2, kind, lambda a, b: a & b)
        yield Form(f"or.{kind}", (kind,) * 2, kind, lambda a, b: a | b)
        yield Form(f"xor.{kind}", (kind,) * 2, kind, lambda a, b: a ^ b)
    yield Form("not.pred", ("pred",), "pred", lambda a: not a)
    for kind in BITS:
        yield Form(f"not.{kind}", (kind,), kind, lambda a: ~a)
        yield Form(f"cnot.{kind}", (kind,), kind, lambda a: a == 0)
        yield Form(f"shl.{kind}", (kind, "u32"), kind, lambda a, n: a << min(n, 64), {1: AMOUNTS})
        for sign in "bus":
            full = sign + kind[1:]
            shifted = Form(f"shr.{full}", (full, "u32"), full, lambda a, n: a >> n, {1: AMOUNTS})
            yield shifted
    for direction in "lr":
        for mode in ("clamp", "wrap"):
            yield Form(
                f"shf.{direction}.{mode}.b32",
                ("b32", "b32", "u32"),
                "b32",
                lambda a, b, n, d=direction, m=mode: funnel(a, b, n, d, m),
                {2: AMOUNTS},
            )


FORMS = list(forms())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_instruction(form):
    check(form)


def test_ptxas_knows_all_forms(tmp_path):
    tables = [Form("lop3.b32", ("b32",) * 3, "b32", int, extra=f", {table}") for table in (0, 255)]
    assemble_forms([*FORMS, *tables], tmp_path)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_constant_operands(form):
    if form.operands[0] == "pred":
        values = [1, 0][: len(form.operands)]
    else:
        values = [13, 7, 3][: len(form.operands)]
    first = np.array([values[0]], dtype_of(form.operands[0]))
    constants = "".join(f", {one}" for one in values[1:])
    expected = wrapped(form.reference(*values), form.result)
    for operand in ("{a}", values[0]):
        code = f"{form.name} {{d}}, {operand}{constants};"
        assert run_elementwise(code, [first], dtype_of(form.result))[0] == expected


def test_predicates_can_be_negated():
    a, b = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    assert run_elementwise("and.pred {d}, {a}, !{b};", [a, b], bool).tolist() == [0, 0, 1, 0]
    assert run_elementwise("or.pred {d}, !{a}, {b};", [a, b], bool).tolist() == [1, 1, 0, 1]


# lop3 ---------------------------------------------------------------------------------------------


def by_table(table, a, b, c):
    """Bit n of the result is bit (a, b, c)[n] of the table."""
    return sum(
        (table >> ((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1) & 1) << n for n in range(32)
    )


WORDS = st.integers(0, 2**32 - 1)


def test_every_truth_table():
    a, b, c = (np.array([one], np.uint32) for one in (0xF0F1_2345, 0xCCDE_ADBE, 0xAA98_76EF))
    lines = [".reg .b32 %one; mov.b32 {d}, 0;"]
    expected = 0
    for table in range(256):
        lines.append(
            f"lop3.b32 %one, {{a}}, {{b}}, {{c}}, {table}; mad.lo.u32 {{d}}, {{d}}, 31, %one;"
        )
        expected = (expected * 31 + by_table(table, int(a[0]), int(b[0]), int(c[0]))) % 2**32
    assert run_elementwise("\n".join(lines), [a, b, c], np.uint32)[0] == expected


@given(st.integers(-128, 1000), WORDS, WORDS, WORDS, st.sampled_from(["", "a", "b", "c", "all"]))
@settings(max_examples=40, deadline=None)
def test_lop3(table, a, b, c, constant):
    operands = {
        letter: str(value) if constant in (letter, "all") else f"{{{letter}}}"
        for letter, value in zip("abc", (a, b, c), strict=True)
    }
    code = f"lop3.b32 {{d}}, {operands['a']}, {operands['b']}, {operands['c']}, {table};"
    arrays = [np.array([one], np.uint32) for one in (a, b, c)]
    assert run_elementwise(code, arrays, np.uint32)[0] == by_table(table & 0xFF, a, b, c)


@pytest.mark.parametrize("table", [0xF0, 0xCC, 0xAA, 0x00, 0xFF])
def test_lop3_copies_what_it_takes_over(table):
    """A result that is an operand or a constant is a register of its own."""
    code = f"""
        .reg .b32 %copy; .reg .pred %p;
        lop3.b32 %copy, {{a}}, {{b}}, {{c}}, {table};
        setp.eq.u32 %p, {{a}}, 0;
        @%p add.u32 %copy, %copy, 1;
        add.u32 {{d}}, {{a}}, {{b}};
        add.u32 {{d}}, {{d}}, {{c}};
    """
    a, b, c = (np.arange(128, dtype=np.uint32) * factor for factor in (1, 100, 10000))
    np.testing.assert_array_equal(run_elementwise(code, [a, b, c], np.uint32), a + b + c)


@pytest.mark.parametrize("combine", ["or", "and"])
@pytest.mark.parametrize("negated", ["", "!"])
@pytest.mark.parametrize("target", ["{d}|%p", "_|%p"])
def test_lop3_with_a_predicate(combine, negated, target):
    a = np.array([0, 0, 6, 6], np.uint32)
    b = np.array([5, 5, 5, 5], np.uint32)
    q = np.array([0, 1, 0, 1], bool)
    code = f"""
        .reg .pred %p;
        mov.b32 {{d}}, 9;
        lop3.{combine}.b32 {target}, {{a}}, {{b}}, {{b}}, 0x80, {negated}{{c}};
        @%p add.u32 {{d}}, {{d}}, 100;
    """
    found = run_elementwise(code, [a, b, q], np.uint32)
    truth = (a & b) != 0
    other = ~q if negated else q
    predicate = truth | other if combine == "or" else truth & other
    bits = a & b if target[0] == "{" else 9
    np.testing.assert_array_equal(found, bits + 100 * predicate)


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, message",
    [
        ("and.u32 %r0, %r1, %r2;", "no type .u32"),
        ("and.b8 %b0, %b1, %b2;", "no type .b8"),
        ("xor.b32 %r0, %r1;", "wrong number of operands"),
        ("or.b64 %x0, %x1, %r1;", "cannot be read as .b64"),
        ("not.b32 %p0, %r1;", "cannot hold a .b32"),
        ("cnot.pred %p0, %p1;", "no type .pred"),
        ("lop3.b64 %x0, %x1, %x2, %x3, 1;", "no type .b64"),
        ("lop3.b32 %r0, %r1, %r2, %r3, %r4;", "must be a constant"),
        ("lop3.b32 %r0, %r1, %r2, %r3;", "wrong number of operands"),
        ("lop3.xor.b32 %r0|%p0, %r1, %r2, %r3, 1, %p1;", "unknown modifier .xor"),
        ("lop3.or.b32 %r0, %r1, %r2, %r3, 1, %p1;", "predicate for the result is missing"),
        ("shf.l.b32 %r0, %r1, %r2, %r3;", "one of .clamp, .wrap"),
        ("shf.wrap.b32 %r0, %r1, %r2, %r3;", "one of .l, .r"),
        ("shf.l.wrap.b64 %x0, %x1, %x2, %r3;", "no type .b64"),
        ("shl.u32 %r0, %r1, %r2;", "no type .u32"),
        ("shl.b32 %r0, %r1, %h2;", "cannot be read as .u32"),
        ("shr.s8 %b0, %b1, %r2;", "no type .s8"),
    ],
)
def test_errors(line, message):
    with pytest.raises(PtxError, match=message) as caught:
        bind(line)
    assert line[:-1] in str(caught.value)
