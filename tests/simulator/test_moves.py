"""Moves, selections, permutations, and addresses of state spaces (PTX ISA 9.7.6 and 9.7.9)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cubin import assemble
from form_support import Form, assemble_forms, bind, check, ptx_of, values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_support import run_body, run_elementwise

from pallasite_simulator.engine.memory import RANK_SHIFT, SHARED_BASE, WINDOWS
from pallasite_simulator.errors import PtxError

NUMBERS = ("u16", "u32", "u64", "s16", "s32", "s64")
BITS = ("b16", "b32", "b64")


def permuted(a, b, selector):
    sources = [(b << 32 | a) >> 8 * n & 0xFF for n in range(8)]
    result = 0
    for place in range(4):
        choice = selector >> 4 * place & 0xF
        byte = sources[choice & 7]
        if choice & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << 8 * place
    return result


# The bytes that each mode picks for 0 to 3, as the table of the PTX ISA lists them, highest first.
MODES = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


def forms():
    for kind in (*BITS, *NUMBERS):
        yield Form(f"mov.{kind}", (kind,), kind, lambda a: a)
        yield Form(f"selp.{kind}", (kind, kind, "pred"), kind, lambda a, b, p: a if p else b)
        yield Form(
            f"slct.{kind}.s32", (kind, kind, "s32"), kind, lambda a, b, c: a if c >= 0 else b
        )
    yield Form("mov.pred", ("pred",), "pred", lambda a: a)
    yield Form("prmt.b32", ("b32",) * 3, "b32", permuted)
    for mode, table in MODES.items():
        yield Form(
            f"prmt.b32.{mode}",
            ("b32",) * 3,
            "b32",
            lambda a, b, c, table=table: permuted(a, b, int(table[c & 3], 16)),
        )


FORMS = list(forms())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_instruction(form):
    check(form)


def test_ptxas_knows_all_forms(tmp_path):
    assemble_forms(FORMS, tmp_path)


# mov ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, bits", [("f32", 32), ("f64", 64)])
def test_floats_move_bit_by_bit(kind, bits):
    values = np.array(values_of(f"u{bits}", 300, 1), f"u{bits // 8}")
    nan = np.array([0x7F800001 if bits == 32 else 0x7FF0000000000001], values.dtype)
    values = np.concatenate([values, nan])
    code = f".reg .{kind} %t; mov.{kind} %t, {{a}}; mov.b{bits} {{d}}, %t;"
    np.testing.assert_array_equal(run_elementwise(code, [values], values.dtype), values)


def test_a_copy_is_a_register_of_its_own():
    code = """
        .reg .pred %p;
        mov.b32 {d}, {a};
        setp.lt.u32 %p, {a}, 10;
        @%p mov.b32 {d}, 77;
        add.u32 {d}, {d}, {a};
    """
    values = np.arange(128, dtype=np.uint32)
    expected = np.where(values < 10, 77, values) + values
    np.testing.assert_array_equal(run_elementwise(code, [values], np.uint32), expected)


@pytest.mark.parametrize(
    "special, expected",
    [
        ("%laneid", lambda n: n % 32),
        ("%tid.x", lambda n: n % 64),
        ("%ctaid.x", lambda n: n // 64),
        ("%ntid.x", lambda n: 64),
        ("%tid.w", None),
    ],
)
def test_special_registers_stay_as_they_are(special, expected):
    code = f"""
        .reg .b32 %d; .reg .b64 %at; .reg .pred %p;
        mov.u32 %d, {special};
        setp.lt.u32 %p, %thread, 5;
        @%p add.u32 %d, %d, 1000;
        @!%p mov.u32 %d, {special};
        add.s64 %at, %array0, %offset4;
        st.global.b32 [%at], %d;
    """
    result = np.zeros(256, np.uint32)
    if expected is None:
        with pytest.raises(PtxError, match="does not know %tid.w"):
            run_body(code, result, grid=4, block=64)
        return
    run_body(code, result, grid=4, block=64)
    assert result.tolist() == [expected(n) + 1000 * (n < 5) for n in range(256)]


def test_addresses_of_variables():
    code = """
        .reg .b64 %from, %at; .reg .b32 %d;
        mov.u64 %from, table+4;
        ld.global.b32 %d, [%from+4];
        add.s64 %at, %array0, %offset4;
        st.global.b32 [%at], %d;
    """
    result = np.zeros(32, np.uint32)
    table = ".global .align 4 .u32 table[4] = {11, 22, 33, 44};"
    run_body(code, result, block=32, variables=table)
    assert (result == 33).all()


PACKS = [
    ("b16", 2, "b8"),
    ("b32", 2, "b16"),
    ("b32", 4, "b8"),
    ("b64", 2, "b32"),
    ("b64", 4, "b16"),
    ("b128", 2, "b64"),
    ("b128", 4, "b32"),
]


@pytest.mark.parametrize("kind, count, part", PACKS)
@given(order=st.permutations(range(4)), seed=st.integers(0, 1000))
@settings(max_examples=8, deadline=None)
def test_pack_and_unpack(kind, count, part, order, seed):
    """Elements are unpacked, and packed again in another order."""
    order = [one for one in order if one < count]
    size, width = int(part[1:]) // 8, int(kind[1:]) // 8
    values = np.random.default_rng(seed).integers(0, 256, (128, width), np.uint8)
    names = [f"%e{n}" for n in range(count)]
    load = {16: "ld.global.b128", 8: "ld.global.b64", 4: "ld.global.b32", 2: "ld.global.b16"}[width]
    code = f"""
        .reg .{part} %e<{count}>; .reg .{kind} %whole; .reg .b64 %at, %offset;
        mul.wide.u32 %offset, %thread, {width};
        add.s64 %at, %array0, %offset;
        {load} %whole, [%at];
        mov.{kind} {{{", ".join(names)}}}, %whole;
        mov.{kind} %whole, {{{", ".join(names[n] for n in order)}}};
        add.s64 %at, %array1, %offset;
        {load.replace("ld", "st")} [%at], %whole;
    """
    result = np.zeros_like(values)
    run_body(code, values, result)
    expected = values.reshape(128, count, size)[:, order].reshape(128, width)
    np.testing.assert_array_equal(result, expected)


def test_parts_can_be_left_out():
    value = np.array([0x1234_5678], np.uint32)
    code = ".reg .b16 %h; mov.b32 {{_, %h}}, {a}; mov.b32 {d}, {{%h, %h}};"
    assert run_elementwise(code, [value], np.uint32)[0] == 0x1234_1234
    # On an H200 a part that is not given is zero.
    code = ".reg .b16 %h; mov.b32 {{%h, _}}, {a}; mov.b32 {d}, {{_, %h}};"
    assert run_elementwise(code, [value], np.uint32)[0] == 0x5678_0000


def test_constants_and_special_registers_are_parts():
    value = np.arange(64, dtype=np.uint32)
    code = "mov.b64 {d}, {{%tid.x, 7}};"
    np.testing.assert_array_equal(
        run_elementwise(code, [value], np.uint64), value.astype(np.uint64) | np.uint64(7 << 32)
    )
    assert run_elementwise("mov.b32 {d}, {{-1, 2}};", [value], np.uint32)[0] == 0x2_FFFF
    code = ".reg .b16 %l, %h; mov.b32 {{%l, %h}}, 0x30004; mov.b32 {d}, {{%h, %l}};"
    assert (run_elementwise(code, [value], np.uint32) == 0x40003).all()


def test_floats_are_parts():
    value = np.array([0x3F80_0000_4000_0000], np.uint64)
    code = ".reg .f32 %l, %h; mov.b64 {{%l, %h}}, {a}; mov.b64 {d}, {{%h, %l}};"
    assert run_elementwise(code, [value], np.uint64)[0] == 0x4000_0000_3F80_0000
    code = (
        ".reg .f64 %t; .reg .b32 %l, %h; mov.b64 %t, {a}; mov.b64 {{%l, %h}}, %t; mov.b32 {d}, %h;"
    )
    assert run_elementwise(code, [value], np.uint32)[0] == 0x3F80_0000


def test_vectors_are_read_before_they_are_written():
    value = np.arange(128, dtype=np.uint32)
    code = """
        .reg .b32 %x, %y;
        mov.b32 %x, {a}; add.u32 %y, {a}, 1000;
        mov.v2.b32 {{%x, %y}}, {{%y, %x}};
        mad.lo.u32 {d}, %x, 3, %y;
    """
    np.testing.assert_array_equal(
        run_elementwise(code, [value], np.uint32), 3 * (value + 1000) + value
    )


def test_wide_registers():
    code = """
        .reg .b128 %q, %s; .reg .b64 %l, %h, %at; .reg .pred %p;
        cvt.u64.u32 %l, %thread;
        mov.b128 %q, {%l, %offset8};
        mov.b128 %s, 5;
        setp.lt.u32 %p, %thread, 40;
        @%p mov.b128 %s, %q;
        mov.b128 %q, %s;
        mov.b128 {%l, %h}, %q;
        mad.lo.u64 %l, %h, 1000, %l;
        add.s64 %at, %array0, %offset8;
        st.global.b64 [%at], %l;
    """
    result = np.zeros(64, np.uint64)
    run_body(code, result, block=64)
    assert result.tolist() == [n + 8000 * n if n < 40 else 5 for n in range(64)]


# slct and prmt ------------------------------------------------------------------------------------


def test_slct_by_a_float():
    bits = [0, 1 << 31, 1, 0x80000001, 0x807FFFFF, 0x80800000, 0x7FC00000, 0xFFC00000, 0x7F800000]
    bits += [0xFF800000, 0x3F800000, 0xBF800000]
    selector = np.array(bits, np.uint32)
    # As on an H200.
    plain = [1, 1, 1, 2, 2, 2, 2, 2, 1, 2, 1, 2]
    flushed = [1, 1, 1, 1, 1, 2, 2, 2, 1, 2, 1, 2]
    for ftz, expected in (("", plain), (".ftz", flushed)):
        found = run_elementwise(f"slct{ftz}.u32.f32 {{d}}, 1, 2, {{a}};", [selector], np.uint32)
        assert found.tolist() == expected


@given(st.integers(0, 2**17), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_prmt_with_a_constant_selector(selector, a, b):
    arrays = [np.array([a], np.uint32), np.array([b], np.uint32)]
    found = run_elementwise(f"prmt.b32 {{d}}, {{a}}, {{b}}, {selector};", arrays, np.uint32)
    assert found[0] == permuted(a, b, selector)


def test_prmt_of_constants():
    dummy = np.zeros(1, np.uint32)
    code = "prmt.b32 {d}, 0x33221180, 0x77665544, 0x86f1;"
    found = run_elementwise(code, [dummy], np.uint32)
    assert found[0] == permuted(0x33221180, 0x77665544, 0x86F1)
    found = run_elementwise("prmt.b32.f4e {d}, 0x33221100, 0x77665544, 1;", [dummy], np.uint32)
    assert found[0] == 0x44332211


# State spaces -------------------------------------------------------------------------------------

SPACES = ("global", "const", "shared", "shared::cta", "shared::cluster", "local", "param")

ADDRESSES = """
    .local .align 4 .b32 mine[4]; .reg .b64 %g<9>; .reg .b32 %t, %from; .reg .pred %p;
    cvta.global.u64 %g0, everywhere+4;
    cvta.const.u64 %g1, fixed;
    cvta.shared.u64 %g2, ours+8;
    mov.u64 %g3, mine; cvta.local.u64 %g3, %g3;
    cvta.param.u64 %g4, p0;
    mov.u64 %g5, 0;
    mov.u64 %g6, %array0;
"""
VARIABLES = """
    .global .align 4 .b32 everywhere[4]; .const .align 4 .b32 fixed[4] = {5, 6, 7, 8};
    .shared .align 4 .b32 ours[4];
"""


def test_isspacep():
    lines = [ADDRESSES]
    for number, (address, space) in enumerate(itertools.product(range(7), SPACES)):
        lines.append(f"isspacep.{space} %p, %g{address}; selp.b32 %t, 1, 0, %p;")
        lines.append(f"st.global.b32 [%array0+{4 * number}], %t;")
    result = np.zeros(7 * len(SPACES), np.uint32)
    run_body("\n".join(lines), result, block=1, variables=VARIABLES)
    # As on an H200.
    assert result.reshape(7, -1).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 0, 1],
        [1, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize(
    "number, space", [(0, "global"), (1, "const"), (2, "shared"), (3, "local")]
)
def test_cvta_there_and_back(number, space):
    """A generic address means the same as the one in the space that it came from."""
    # Local and shared memory begin with rubbish.
    changed = {"local": "add.u32 %t, %thread, 100;", "shared": "mov.u32 %t, 1;"}
    code = (
        ADDRESSES
        + f"""
        .reg .b64 %s, %at;
        cvta.to.{space}.u64 %s, %g{number};
        ld.{space}.b32 %t, [%s];
        {changed.get(space, "add.u32 %t, %t, 1;")}
        {f"st.{space}.b32 [%s], %t;" if space != "const" else ""}
        ld.b32 %from, [%g{number}];
        cvta.{space}.u64 %s, %s;
        sub.s64 %s, %s, %g{number};
        cvt.u32.u64 %t, %s;
        add.u32 %from, %from, %t;
        add.s64 %at, %array0, %offset4;
        st.global.b32 [%at], %from;
    """
    )
    result = np.zeros(32, np.uint32)
    run_body(code, result, block=32, variables=VARIABLES)
    expected = {"const": [5] * 32, "local": list(range(100, 132))}.get(space, [1] * 32)
    assert result.tolist() == expected


def test_cvta_cuts_addresses_that_are_too_large():
    code = """
        .reg .b64 %s, %t;
        mov.u64 %s, 0x100000400;
        cvta.shared.u64 %t, %s; st.global.b64 [%array0], %t;
        cvta.to.shared.u64 %t, %t; st.global.b64 [%array0+8], %t;
        cvta.to.local.u64 %t, 0; st.global.b64 [%array0+16], %t;
    """
    result = np.zeros(3, np.uint64)
    run_body(code, result, block=1)
    assert result.tolist() == [WINDOWS["shared"] + 0x400, 0x400, 0]


@pytest.mark.parametrize("generic", [False, True])
def test_shared_memory_of_the_other_blocks(generic):
    """Every block reads what each block of its cluster has written into its shared memory."""
    if generic:
        map_code = """
            cvta.shared.u64 %wide, ours+4;
            mapa.u64 %wide, %wide, %rank;
            ld.b32 %value, [%wide];
            getctarank.u64 %other, %wide;
        """
    else:
        map_code = """
            mapa.shared::cluster.u32 %remote, ours+4, %rank;
            ld.shared::cluster.b32 %value, [%remote];
            getctarank.shared::cluster.u32 %other, %remote;
            mov.u64 %wide, ours;
            mapa.shared::cluster.u64 %wide, %wide, %rank;
        """
    code = f"""
        .reg .b32 %own, %rank, %remote, %value, %other, %base; .reg .b64 %wide, %at;
        .reg .pred %p, %q;
        mov.u32 %base, ours;
        mov.u32 %own, %ctaid.x;
        add.u32 %own, %own, 50;
        st.shared.b32 [%base+4], %own;
        barrier.cluster.arrive; barrier.cluster.wait;
        mov.u32 %rank, %tid.x;
        {map_code}
        mad.lo.u32 %value, %value, 1000, %other;
        mad.lo.u32 %value, %rank, 1000000, %value;
        {"" if generic else "cvta.shared::cluster.u64 %wide, %wide;"}
        isspacep.shared::cta %p, %wide;
        isspacep.shared::cluster %q, %wide;
        @%p add.u32 %value, %value, 100;
        @%q add.u32 %value, %value, 200;
        add.s64 %at, %array0, %offset4;
        st.global.b32 [%at], %value;
        barrier.cluster.arrive; barrier.cluster.wait;
    """
    result = np.zeros(32, np.uint32)
    variables = ".shared .align 4 .b32 ours[2];"
    run_body(code, result, grid=8, block=4, cluster=4, variables=variables)
    expected = []
    for block, rank in itertools.product(range(8), range(4)):
        held = 50 + block // 4 * 4 + rank
        expected.append(rank * 1000000 + held * 1000 + rank + 200 + 100 * (block % 4 == rank))
    assert result.tolist() == expected


def test_generic_addresses_of_shared_memory_keep_the_rank():
    code = """
        .reg .b64 %wide, %at;
        cvta.shared.u64 %wide, ours;
        add.s64 %at, %array0, %offset8;
        st.global.b64 [%at], %wide;
        mov.u64 %wide, ours;
        st.global.b64 [%at+8], %wide;
    """
    result = np.zeros(4, np.uint64)
    code = code.replace("%offset8", "%offset16")
    code = ".reg .b64 %offset16; mul.wide.u32 %offset16, %thread, 16;" + code
    run_body(code, result, grid=2, block=1, cluster=2, variables=".shared .align 4 .b32 ours[2];")
    start = WINDOWS["shared"] + SHARED_BASE
    assert result.tolist() == [
        start,
        SHARED_BASE,
        start + (1 << RANK_SHIFT),
        SHARED_BASE + (1 << RANK_SHIFT),
    ]


# Instructions without effect ----------------------------------------------------------------------


def test_instructions_that_change_nothing():
    code = """
        nanosleep.u32 100;
        nanosleep.u32 {a};
        pmevent 3;
        pmevent.mask 0xff;
        griddepcontrol.wait;
        griddepcontrol.launch_dependents;
        add.u32 {d}, {a}, 1;
    """
    value = np.arange(64, dtype=np.uint32)
    np.testing.assert_array_equal(run_elementwise(code, [value], np.uint32), value + 1)


def test_clocks_advance_within_a_basic_block():
    out = np.zeros(32, np.uint32)
    body = """
    .reg .b32 %r<3>; .reg .b64 %at;
    mov.u32 %r0, %clock;
    add.u32 %r1, %thread, 1;
    add.u32 %r1, %r1, 1;
    mov.u32 %r2, %clock;
    sub.u32 %r2, %r2, %r0;
    add.u64 %at, %array0, %offset4;
    st.global.b32 [%at], %r2;
    """
    run_body(body, out, block=32)
    np.testing.assert_array_equal(out, 3)


# Errors -------------------------------------------------------------------------------------------

ACCEPTED = (
    "mov.b16 %h0, {%b0, %b1};",
    "mov.b16 {%b0, %b1}, %h0;",
    "mov.b32 %r0, {%b0, %b1, %b2, %b3};",
    "mov.b32 {%h0, _}, %r0;",
    "mov.b32 %r0, {%h0, 0};",
    "mov.b32 %r0, {%h0, _};",
    "mov.b64 %x0, {%h0, %h1, %h2, %h3};",
    "mov.b64 %x0, {%f0, %r1};",
    "mov.b64 {%r0, %r1}, 7;",
    "mov.b64 {%r0, %r1}, everywhere;",
    "mov.b64 {%r0, %r1}, %clock64;",
    "mov.b128 %q0, {%r0, %r1, %r2, %r3};",
    "mov.b128 {%x0, _}, %q0;",
    "mov.b128 %q0, %q1;",
    "mov.b128 %q0, 0;",
    "mov.v2.b32 {%r0, %r1}, {%r2, %r3};",
    "mov.pred %p0, 1;",
    "mov.pred %p0, !%p1;",
    "mov.pred %p0, %is_explicit_cluster;",
    "mov.f32 %f0, 0f3F800000;",
    "mov.f64 %g0, 1.5;",
    "mov.b64 %x0, 1.5;",
    "mov.u64 %x0, everywhere+4;",
    "mov.u64 %x0, kernel;",
    "selp.f32 %f0, %f1, 1.0, !%p0;",
    "slct.ftz.f32.f32 %f0, %f1, %f2, %f3;",
    "prmt.f4e.b32 %r0, %r1, %r2, %r3;",
    "cvta.shared.u64 %x0, ours+4;",
    "cvta.shared::cluster.u64 %x0, %x1;",
    "cvta.to.shared::cta.u64 %x0, %x1;",
    "cvta.param::entry.u64 %x0, p0;",
    "cvta.const.u64 %x0, fixed;",
    "isspacep.param::entry %p0, %x0;",
    "isspacep.shared %p0, %r0;",
    "mapa.shared::cluster.u32 %r0, ours+4, 1;",
    "mapa.shared::cluster.u64 %x0, %x1, %r2;",
    "mapa.u64 %x0, %x1, %r2;",
    "getctarank.shared::cluster.u32 %r0, ours;",
    "getctarank.shared::cluster.u64 %r0, %x1;",
    "getctarank.u64 %r0, %x1;",
    "pmevent.mask 3;",
    "griddepcontrol.wait;",
)


def test_these_are_accepted_as_by_ptxas(tmp_path):
    bind(*ACCEPTED)
    assemble(ptx_of(*ACCEPTED), tmp_path)


@pytest.mark.parametrize(
    "line, message",
    [
        ("mov.b8 %b0, %b1;", "no type .b8"),
        ("mov.f16 %h0, %h1;", "no type .f16"),
        ("mov.u32 %r0, {%h0, %h1};", "cannot be packed"),
        ("mov.b64 %x0, {%r0, %h1};", "wrong size"),
        ("mov.b64 %x0, {%r0, %r1, %r2};", "no 3 elements"),
        ("mov.b32 {_, _}, %r0;", "all elements are left out"),
        ("mov.b64 {%r0, %r1}, {%r2, %r3};", "only one operand can be a vector"),
        ("mov.v2.b32 {%r0, %r1}, %x0;", "wrong number of vector elements"),
        ("mov.b32 %r0, {%r0, %r1};", "wrong size"),
        ("mov.b64 %x0, %r0;", "wrong size"),
        ("mov.b16 %h0, %r0;", "wrong size"),
        ("mov.b32 _, %r0;", "must be a register"),
        ("mov.f32 %f0, 1;", "an integer is no .f32"),
        ("selp.f64 %g0, %g1, 0, %p0;", "an integer is no .f64"),
        ("mov.f32 %f0, ours;", "an address is no .f32"),
        ("mov.u16 %h0, ours;", "does not fit a .u16"),
        ("mov.b32 %r0, %r1, %r2;", "wrong number of operands"),
        ("mov.sat.b32 %r0, %r1;", "unknown modifier .sat"),
        ("selp.pred %p0, %p1, %p2, %p3;", "no type .pred"),
        ("selp.b32 %r0, %r1, %r2, %r3;", "cannot be read as .pred"),
        ("slct.u32.u32 %r0, %r1, %r2, %r3;", "wrong types"),
        ("slct.ftz.u32.s32 %r0, %r1, %r2, %r3;", "only for .f32"),
        ("slct.u32 %r0, %r1, %r2, %r3;", "unknown modifiers"),
        ("slct.ftz.ftz.u32.f32 %r0, %r1, %r2, %f3;", "unknown modifiers"),
        ("prmt.b64 %x0, %x1, %x2, %r3;", "no type .b64"),
        ("prmt.b32.all %r0, %r1, %r2, %r3;", "unknown modifier .all"),
        ("prmt.b32 %r0, %r1, %r2;", "wrong number of operands"),
        ("cvta.u64 %x0, %x1;", "a modifier is missing"),
        ("cvta.shared.u32 %r0, %r1;", "no type .u32"),
        ("cvta.shared.u64 %x0, %r1;", "cannot be read as .u64"),
        ("cvta.global.u64 %x0, ours;", "another state space"),
        ("cvta.to.global.u64 %x0, everywhere;", "expected: a register"),
        ("cvta.param::func.u64 %x0, %x1;", "unknown modifier .param::func"),
        ("isspacep.param::func %p0, %x0;", "unknown modifier .param::func"),
        ("isspacep.shared.u64 %p0, %x0;", "unknown modifier .u64"),
        ("isspacep.global %p0, everywhere;", "an address in a register"),
        ("isspacep.global %r0, %x0;", "cannot hold a .pred"),
        ("mapa.shared.u32 %r0, %r1, %r2;", "unknown modifier .shared"),
        ("mapa.u32 %r0, %r1, %r2;", "generic addresses have 64 bits"),
        ("mapa.u64 %x0, ours, 1;", "no generic address"),
        ("mapa.shared::cluster.u32 %r0, everywhere, 1;", "another state space"),
        ("getctarank.shared::cluster.u64 %r0, %r1;", "cannot be read as .u64"),
        ("nanosleep.b32 %r0;", "no type .b32"),
        ("nanosleep %r0;", "a modifier is missing"),
        ("pmevent %r0;", "must be a constant"),
        ("pmevent 16;", "must be a constant"),
        ("griddepcontrol;", "a modifier is missing"),
    ],
)
def test_errors(line, message):
    with pytest.raises(PtxError, match=message) as caught:
        bind(line)
    assert line[:-1] in str(caught.value)
