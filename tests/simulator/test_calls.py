"""Calls: of functions with a body, of printf and assert."""

from __future__ import annotations

import ctypes
import json
import math
import pathlib
import random

import numpy as np
import pytest
from corpus_prints import FORMATS, prints_ptx
from cuda_programs import COMPILER, SOURCES, compiled
from simulator_support import module, run_body, run_ptx

from pallasite_simulator.engine.inline import inline_calls
from pallasite_simulator.errors import PtxError, SimulationError
from pallasite_simulator.instructions.print_format import convert, parse_format
from pallasite_simulator.ptx.parser import parse

THREADS = 64
REGISTERS = """
.reg .b16 %h<10>; .reg .b32 %r<10>; .reg .b64 %rd<12>; .reg .f32 %f<10>; .reg .pred %p<4>;
"""
STORE = "add.s64 %rd11, %array0, %offset4; st.global.b32 [%rd11], {};"


def results(functions, code, register="%r1", dtype=np.uint32, **options):
    """What each thread has in a register at the end."""
    output = np.full(THREADS, 0xCDCDCDCD, np.uint32).view(dtype)
    run_body(
        REGISTERS + code + STORE.format(register),
        output,
        block=THREADS,
        variables=functions,
        **options,
    )
    return output


def error_of(functions, code):
    with pytest.raises((PtxError, SimulationError)) as error:
        results(functions, code)
    return str(error.value)


NUMBERS = np.arange(THREADS)

# A function whose end is reached in several ways, one of them with a predicate.
CLAMP = """
.func (.param .b32 result) clamp(.param .b32 value, .param .b32 limit)
{
    .reg .b32 %r<4>; .reg .pred %p<3>;
    ld.param.b32 %r1, [value];
    ld.param.b32 %r2, [limit];
    st.param.b32 [result], %r1;
    setp.lt.u32 %p1, %r1, %r2;
    @%p1 ret;
    st.param.b32 [result], %r2;
    setp.eq.u32 %p2, %r1, 60;
    @!%p2 bra END;
    st.param.b32 [result], 1000;
    ret.uni;
END:
    ret;
}
"""

CALL_CLAMP = """
    {{
    .param .b32 a; .param .b32 b; .param .b32 c;
    st.param.b32 [a], %thread;
    st.param.b32 [b], {limit};
    call.uni (c), clamp, (a, b);
    ld.param.b32 {register}, [c];
    }}
"""


def clamped(limit):
    return np.where(limit > NUMBERS, NUMBERS, np.where(NUMBERS == 60, 1000, limit))


def test_returns_in_several_places():
    code = CALL_CLAMP.format(limit=40, register="%r1")
    np.testing.assert_array_equal(results(CLAMP, code), clamped(40))


def test_calls_of_one_function_have_registers_and_labels_of_their_own():
    code = "".join(
        CALL_CLAMP.format(limit=limit, register=f"%r{number}")
        for number, limit in ((1, 10), (2, 20), (3, 61))
    )
    code += "mad.lo.u32 %r1, %r1, 10000, %r2; add.u32 %r1, %r1, %r3;"
    expected = clamped(10) * 10000 + clamped(20) + clamped(61)
    np.testing.assert_array_equal(results(CLAMP, code), expected)


def test_calls_with_a_predicate():
    """Where it is false, the result's register keeps its value."""
    functions = (
        CLAMP
        + """
    .func (.reg .b32 %out) twice(.reg .b32 %in) { add.u32 %out, %in, %in; ret; }
    """
    )
    code = """
        mov.u32 %r1, 7;
        setp.lt.u32 %p1, %thread, 9;
        @%p1 call (%r1), twice, (%thread);
        mov.u32 %r2, 100;
        @!%p1 call (%r2), twice, (%r1);
        add.u32 %r1, %r1, %r2;
    """
    first = np.where(NUMBERS < 9, 2 * NUMBERS, 7)
    np.testing.assert_array_equal(
        results(functions, code), first + np.where(NUMBERS < 9, 100, 2 * first)
    )


NESTED = (
    CLAMP
    + """
.func (.param .b32 result) total(.param .b32 count)
{
    .reg .b32 %r<8>; .reg .pred %p<3>;
    .local .align 4 .b8 sums[8];
    ld.param.b32 %r1, [count];
    mov.u32 %r2, 0;
    st.local.b32 [sums+4], 0;
LOOP:
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 bra DONE;
    {
    .param .b32 a; .param .b32 b; .param .b32 c;
    st.param.b32 [a], %r2;
    st.param.b32 [b], 5;
    call (c), clamp, (a, b);
    ld.param.b32 %r3, [c];
    }
    ld.local.b32 %r4, [sums+4];
    add.u32 %r4, %r4, %r3;
    st.local.b32 [sums+4], %r4;
    setp.gt.u32 %p2, %r4, 100;
    @%p2 ret;
    st.param.b32 [result], %r4;
    add.u32 %r2, %r2, 1;
    bra LOOP;
DONE:
    setp.eq.u32 %p2, %r1, 0;
    @!%p2 ret;
    st.param.b32 [result], 77;
}
"""
)


def test_nested_calls_in_loops():
    code = """
        { .param .b32 a; .param .b32 b;
        st.param.b32 [a], %thread;
        call (b), total, (a);
        ld.param.b32 %r1, [b]; }
        { .param .b32 a; .param .b32 b;
        sub.u32 %r2, 63, %thread;
        st.param.b32 [a], %r2;
        call (b), total, (a);
        ld.param.b32 %r2, [b]; }
        mad.lo.u32 %r1, %r1, 1000, %r2;
    """
    expected = []
    for count in range(THREADS):
        sums = np.cumsum(np.minimum(np.arange(count), 5))
        small = sums[sums <= 100]
        expected.append(int(small[-1]) if count else 77)
    totals = np.array(expected)
    np.testing.assert_array_equal(results(NESTED, code), totals * 1000 + totals[::-1])


def test_arguments_in_registers_constants_and_variables():
    functions = """
    .func (.param .b32 result) f(.param .b32 a, .reg .b32 %b, .param .b64 c, .reg .b16 %d)
    {
        .reg .b32 %r<5>; .reg .b64 %w;
        ld.param.b32 %r1, [a];
        ld.param.b64 %w, [c];
        cvt.u32.u64 %r2, %w;
        cvt.u32.u16 %r3, %d;
        mad.lo.u32 %r1, %r1, 100, %b;
        mad.lo.u32 %r1, %r1, 100, %r2;
        mad.lo.u32 %r1, %r1, 100, %r3;
        add.u32 %b, %b, 50;
        st.param.b32 [result], %r1;
        ret;
    }
    """
    code = """
        .param .b32 variable; .param .b32 other; .param .b64 wide;
        st.param.b32 [variable], %thread;
        st.param.b64 [wide], 7;
        mov.u64 %rd1, 9;
        cvt.u16.u32 %h1, %thread;
        mov.u32 %r2, 5;
        call (%r1), f, (%r2, variable, %rd1, 3);
        call (other), f, (variable, %r2, wide, %h1);
        ld.param.b32 %r3, [other];
        call (_), f, (1, 2, 3, 4);
        xor.b32 %r1, %r1, %r3;
        mad.lo.u32 %r1, %r2, 1, %r1;
    """
    first = ((5 * 100 + NUMBERS) * 100 + 9) * 100 + 3
    second = ((NUMBERS * 100 + 5) * 100 + 7) * 100 + NUMBERS
    np.testing.assert_array_equal(results(functions, code), (first ^ second) + 5)


def test_structures_and_addresses_of_parameters():
    """In a function, an address of a parameter that is in a register is one of local memory."""
    functions = """
    .func (.param .align 8 .b8 result[16]) f(.param .align 8 .b8 given[16], .param .b32 which)
    {
        .reg .b32 %r<5>; .reg .b64 %w, %at;
        ld.param.b32 %r1, [which];
        and.b32 %r1, %r1, 3;
        mul.wide.u32 %w, %r1, 4;
        mov.b64 %at, given;
        add.u64 %at, %at, %w;
        ld.param.b32 %r2, [%at];
        st.param.v2.b32 [result], {%r2, %r1};
        st.param.b64 [result+8], %w;
        ret;
    }
    """
    code = """
        .param .align 8 .b8 structure[16]; .param .align 8 .b8 back[16]; .param .b32 which;
        mul.lo.u32 %r1, %thread, 10;
        st.param.v2.b32 [structure], {%r1, 21};
        st.param.v2.b32 [structure+8], {22, %thread};
        st.param.b32 [which], %thread;
        call (back), f, (structure, which);
        ld.param.v2.b32 {%r1, %r2}, [back];
        ld.param.b32 %r3, [back+8];
        mad.lo.u32 %r1, %r1, 100, %r2;
        mad.lo.u32 %r1, %r1, 100, %r3;
    """
    part = NUMBERS % 4
    entry = np.choose(part, [NUMBERS * 10, 21 + 0 * NUMBERS, 22 + 0 * NUMBERS, NUMBERS])
    np.testing.assert_array_equal(results(functions, code), (entry * 100 + part) * 100 + part * 4)


def test_shared_variables_of_functions_exist_once():
    functions = """
    .func (.reg .b32 %out) count()
    {
        .shared .b32 counter;
        red.shared.add.u32 [counter], 1;
        mov.b32 %out, counter;
        ret;
    }
    .func (.reg .b32 %out) counted()
    {
        call (%out), count;
        bar.sync 0;
        call (%out), count;
        bar.sync 0;
        ret;
    }
    """
    code = """
        .shared .b32 other;
        st.shared.b32 [other], 3;
        call (%r1), counted;
        call (%r2), count;
        bar.sync 0;
        ld.shared.b32 %r1, [%r2];
    """
    assert (results(functions, code) == 0x7B7B7B7B + 3 * THREADS).all()


def test_indexed_branches_in_functions():
    functions = """
    .func (.reg .b32 %out) choose(.reg .b32 %in)
    {
        .reg .b32 %t;
        and.b32 %t, %in, 3;
        TABLE: .branchtargets A, B, C, A;
        brx.idx %t, TABLE;
    A:  mov.u32 %out, 10; ret;
    B:  mov.u32 %out, 20; bra C;
    C:  mov.u32 %out, %in;
    }
    """
    code = """
        call (%r1), choose, (%thread);
        add.u32 %r2, %thread, 1;
        call (%r2), choose, (%r2);
        mad.lo.u32 %r1, %r1, 100, %r2;
    """

    def chosen(values):
        return np.where(np.isin(values % 4, (0, 3)), 10, values)

    np.testing.assert_array_equal(
        results(functions, code), chosen(NUMBERS) * 100 + chosen(NUMBERS + 1)
    )


def test_threads_may_end_in_a_function():
    functions = ".func stop(.reg .b32 %in) { .reg .pred %p; setp.gt.u32 %p, %in, 9; @%p exit; }"
    found = results(functions, "mov.u32 %r1, 5; call stop, (%thread);")
    np.testing.assert_array_equal(found, np.where(NUMBERS > 9, 0xCDCDCDCD, 5))


def test_functions_without_calls_stay_as_they_are():
    tree = parse(module("ret;", variables=CLAMP))
    (kernel,) = [one for one in tree.functions if one.entry]
    assert inline_calls(tree, kernel) is kernel


def test_names_of_what_is_put_in():
    tree = parse(
        module(
            REGISTERS + "call (%r1), f, (5);",
            variables="""
        .func (.reg .b32 %out) f(.reg .b32 %in) { mov.u32 %out, %in; }""",
        )
    )
    (kernel,) = [one for one in tree.functions if one.entry]
    inlined = inline_calls(tree, kernel)
    names = {one.name for one in inlined.registers} - {one.name for one in kernel.registers}
    assert names == {"%out@f.1", "%in@f.1"}
    assert inlined.body is not None
    texts = [getattr(one, "name", "") for one in inlined.body]
    assert texts == ["mov.b32", "mov.u32", "return@f.1", "mov.b32", "ret"]


@pytest.mark.parametrize(
    ("functions", "code", "message"),
    [
        (
            ".func f();\n.func f() { call f; }",
            "call f;",
            "thread 0 of block (0, 0, 0) has no stack left for a call of 'f'",
        ),
        (
            ".func g();\n.func f() { call g; }\n.func g() { call f; }",
            "call f;",
            "got: 1000 calls inside one another, 0 bytes of local memory",
        ),
        (
            ".func g();\n.func f() { .local .b32 x[99]; call g; }\n.func g() { call f; }",
            "call f;",
            "got: 20 calls inside one another, 4000 bytes of local memory",
        ),
        (CLAMP, "call (%r1), clamp, (%r1);", "got: 1 arguments and 1 results"),
        (CLAMP, "call clamp, (%r1, %r1);", "got: 2 arguments and 0 results"),
        (CLAMP, "call (%r1), clamp, (%rd1, %r1);", "does not fit 'value' of function 'clamp'"),
        (CLAMP, "call (%rd1), clamp, (%r1, %r1);", "does not fit 'result' of function 'clamp'"),
        (CLAMP, "call (5), clamp, (%r1, %r1);", "does not fit 'result'"),
        (CLAMP, ".param .b16 v; call (%r1), clamp, (v, %r1);", "does not fit 'value'"),
        (CLAMP, ".param .b8 v[4]; call (%r1), clamp, (v, %r1);", "does not fit 'value'"),
        (CLAMP, ".shared .b32 v; call (%r1), clamp, (v, %r1);", "does not fit 'value'"),
        (".extern .func f(.param .b32 a);", "call f, (%r1);", "function 'f' has no body"),
        (
            CLAMP,
            "mov.u64 %rd1, clamp; add.u64 %rd1, %rd1, 64;"
            " P: .callprototype (.param .b32 _) _ (.param .b32 _, .param .b32 _);"
            " call (%r1), %rd1, (%r1, %r1), P;",
            "calls an address where there is no function with such parameters and results",
        ),
        (
            CLAMP,
            "mov.u64 %rd1, clamp; P: .callprototype (.param .b32 _) _ (.param .b64 _);"
            " call (%r1), %rd1, (%rd1), P;",
            "calls an address where there is no function with such parameters and results",
        ),
    ],
)
def test_calls_that_cannot_be(functions, code, message):
    text = error_of(functions, code)
    assert text.startswith(("PTX line ", "thread 0 of block (0, 0, 0) "))
    assert message in text


# Functions that are called by address, some of which call one another, to different depths, with
# parameters in registers and in memory, and calls of only some lanes.
STANDING = """
.func (.reg .b32 %out) gcd(.reg .b32 %a, .param .b32 b);
.func (.reg .b32 %out) lcm(.reg .b32 %a, .param .b32 b)
{
    .reg .b32 %r<6>;
    ld.param.b32 %r1, [b];
    call (%r2), gcd, (%a, %r1);
    mul.lo.u32 %r3, %a, %r1;
    div.u32 %out, %r3, %r2;
}
.func (.reg .b32 %out) gcd(.reg .b32 %a, .param .b32 b)
{
    .reg .b32 %r<6>; .reg .pred %p;
    .param .b32 rest;
    ld.param.b32 %r1, [b];
    setp.ne.u32 %p, %r1, 0;
    mov.u32 %out, %a;
    mov.u32 %r2, 1;
    @%p rem.u32 %r2, %a, %r1;
    st.param.b32 [rest], %r2;
    @%p call (%out), gcd, (%r1, rest);
    // What it holds is its own again.
    ld.param.b32 %r3, [b];
    setp.ne.u32 %p, %r1, %r3;
    @%p mov.u32 %out, 0;
}
.global .u64 functions[2] = {gcd, lcm};
"""


def test_calls_by_address_of_functions_that_call_themselves():
    code = """
    .reg .b32 %s<4>; .reg .pred %all;
    P: .callprototype (.reg .b32 _) _ (.reg .b32 _, .param .b32 _);
    mov.u32 %r1, 7;
    mul.lo.u32 %s1, %prologue0, 6;
    add.u32 %s1, %s1, 12;
    and.b32 %s2, %prologue0, 1;
    mul.wide.u32 %rd2, %s2, 8;
    mov.u64 %rd1, functions;
    add.u64 %rd1, %rd1, %rd2;
    ld.global.u64 %rd1, [%rd1];
    setp.ne.u32 %all, %prologue0, 5;
    add.u32 %s3, %prologue0, 3;
    @%all call (%r1), %rd1, (%s1, %s3), P;
    """
    a, b = 6 * NUMBERS + 12, NUMBERS + 3
    expected = np.where(NUMBERS % 2, np.lcm(a, b), np.gcd(a, b))
    expected[5] = 7
    np.testing.assert_array_equal(results(STANDING, code.replace("%prologue0", "%tid.x")), expected)


# printf -------------------------------------------------------------------------------------------

VPRINTF = ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);\n"
ASSERTFAIL = (
    ".extern .func __assertfail(.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n,"
    " .param .b64 s);\n"
)


def text_variable(name, text):
    data = text.encode() + b"\0"
    listed = ", ".join(str(byte) for byte in data)
    return f".global .align 1 .b8 {name}[{len(data)}] = {{{listed}}};\n"


def print_code(stores, *, text="text", buffer=32, register="%r1"):
    """Stores arguments in the buffer ``frame`` and prints."""
    return f"""
        .local .align 8 .b8 frame[{buffer}];
        mov.u64 %rd1, frame;
        cvta.local.u64 %rd2, %rd1;
        {stores}
        mov.u64 %rd3, {text};
        cvta.global.u64 %rd3, %rd3;
        {{
        .param .b64 format; .param .b64 arguments; .param .b32 back;
        st.param.b64 [format], %rd3;
        st.param.b64 [arguments], %rd2;
        call.uni (back), vprintf, (format, arguments);
        ld.param.b32 {register}, [back];
        }}
    """


def printed(text, stores, *, block=2, grid=1, variables="", **options):
    result = np.zeros(block * grid, np.uint32)
    execution = run_body(
        REGISTERS + print_code(stores, **options) + STORE.format("%r1"),
        result,
        block=block,
        grid=grid,
        variables=VPRINTF + text_variable("text", text) + variables,
    )
    return execution.output, result.tolist()


def test_printed_lines_come_in_the_order_of_lanes():
    output, counts = printed("thread %d\n", "st.local.b32 [frame], %thread;", block=40, grid=2)
    assert output == [f"thread {number}\n" for number in range(80)]
    assert counts == [1] * 80


def test_arguments_are_aligned_to_their_size():
    output, counts = printed(
        "%d %lld %c|%f %u",
        """
        st.local.b32 [frame], -3;
        st.local.b64 [frame+8], -5000000000;
        add.u32 %r2, %thread, 65;
        st.local.b32 [frame+16], %r2;
        st.local.f64 [frame+24], 2.5;
        st.local.b32 [frame+32], -1;
        """,
        buffer=40,
    )
    assert output == [f"-3 -5000000000 {letter}|2.500000 4294967295" for letter in "AB"]
    assert counts == [5, 5]


def test_strings():
    output, counts = printed(
        "<%s> <%6.2s> <%s>",
        """
        mov.u64 %rd4, word;
        cvta.global.u64 %rd4, %rd4;
        st.local.b64 [frame], %rd4;
        st.local.b32 [frame+24], 0x00737965;
        add.u64 %rd5, %rd2, 24;
        st.local.b64 [frame+8], %rd5;
        st.local.b64 [frame+16], 0;
        """,
        variables=text_variable("word", "größer"),
        buffer=32,
    )
    assert output == ["<größer> <    ey> <(null)>"] * 2
    assert counts == [3, 3]


def test_texts_without_arguments():
    assert printed("100%%\n", "mov.u64 %rd2, 0;") == (["100%\n"] * 2, [0, 0])


def test_formats_may_differ_from_lane_to_lane():
    code = print_code("st.local.b32 [frame], %thread;").replace(
        "cvta.global.u64 %rd3, %rd3;",
        """
        mov.u64 %rd4, other;
        and.b32 %r2, %thread, 1;
        setp.eq.u32 %p1, %r2, 1;
        selp.b64 %rd3, %rd4, %rd3, %p1;
        setp.eq.u32 %p1, %thread, 4;
        selp.b64 %rd3, 0, %rd3, %p1;
        """,
    )
    output, counts = [], np.zeros(6, np.uint32)
    variables = VPRINTF + text_variable("text", "a%d ") + text_variable("other", "bb ")
    execution = run_body(
        REGISTERS + code + STORE.format("%r1"), counts, block=6, variables=variables
    )
    output = execution.output
    assert output == ["a0 ", "bb ", "a2 ", "bb ", "bb "]
    assert counts.tolist() == [1, 0, 1, 0, 0xFFFFFFFF, 0]


def test_only_lanes_whose_predicate_is_true_print():
    code = print_code("st.local.b32 [frame], %thread; setp.gt.u32 %p1, %thread, 4;")
    code = code.replace("call.uni", "@%p1 call.uni")
    execution = run_body(
        REGISTERS + code, block=7, variables=VPRINTF + text_variable("text", "%x,")
    )
    assert execution.output == ["5,", "6,"]


def test_wrong_formats():
    with pytest.raises(SimulationError) as error:
        printed("%d and %n", "")
    assert "printf has an unknown format" in str(error.value)
    assert "got: '%n' in '%d and %n'" in str(error.value)
    with pytest.raises(SimulationError, match=r"out of bounds(.|\n)*8 bytes at local address"):
        printed("%f" * 20, "", buffer=8)
    with pytest.raises(SimulationError, match=r"string without an end(.|\n)*byte 0 of endless"):
        printed(
            "%s",
            "mov.u64 %rd4, endless; st.local.b64 [frame], %rd4;",
            variables=".global .b8 endless[3] = {65, 66, 67};",
        )
    with pytest.raises(SimulationError, match="out of bounds"):
        printed("%s", "st.local.b64 [frame], 12345;")


def c_text(form, *arguments):
    """What the C library prints."""
    library = ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(2000)
    library.snprintf(buffer, len(buffer), form, *arguments)
    return buffer.value


def test_formats_are_those_of_c():
    choose = random.Random(0)
    for _ in range(4000):
        kind = choose.choice("diouxXeEfFgGaAsc")
        flags = "".join(choose.sample("-+ #0", choose.randrange(4)))
        width = choose.choice(["", "", "5", "12", "*"])
        precision = choose.choice(["", "", ".", ".0", ".3", ".13", ".16"]) * (kind != "c")
        size = choose.choice(["", "h", "l", "ll"]) if kind in "diouxX" else ""
        form = f"a%{flags}{width}{precision}{size}{kind}b%%".encode()
        extra = []
        if width == "*":
            # Some C libraries fill with zeros on the right for flag 0 and a negative width, which
            # the standard says is flag -.
            extra.append(choose.randrange(0 if "0" in flags else -10, 15))
        if kind in "eEfFgGaA":
            edges = [0.0, -0.0, 1.5, 1e300, 5e-324, 1e-310, math.inf, -math.inf, math.nan]
            value = choose.choice([*edges, choose.uniform(-1e6, 1e6), choose.gauss(0, 1) * 1e-20])
            given = ctypes.c_double(value)
        elif kind == "s":
            value = choose.choice([b"some words", b"", b"a"])
            given = ctypes.c_char_p(value)
        elif kind == "c":
            value = choose.randrange(1, 128)
            given = ctypes.c_int(value)
        else:
            value = choose.choice([0, 1, choose.getrandbits(64), choose.getrandbits(8), 2**63])
            given = ctypes.c_uint64(value)
            value %= 2**64 if size in ("l", "ll") else 2**32
        parsed = parse_format(form)
        (conversion,) = parsed.conversions
        ours = parsed.literals[0] + convert(conversion, value, *extra) + parsed.literals[1]
        assert ours == c_text(form, *map(ctypes.c_int, extra), given), (form, extra, value)
        assert parsed.arguments == 1 + len(extra)


REFUSED = [number for number, (form, *_) in enumerate(FORMATS) if "hh" in form]


def test_formats_print_what_an_h200_prints():
    with open(pathlib.Path(__file__).parent / "recorded" / "prints.json") as file:
        recorded = json.load(file)
    numbers = [number for number in range(len(FORMATS)) if number not in REFUSED]
    counts = np.zeros(len(FORMATS), np.int32)
    execution = run_ptx(prints_ptx(numbers), counts, block=1)
    assert execution.output == [f"{number}: {recorded[number]['text']}\n" for number in numbers]
    assert counts[numbers].tolist() == [recorded[number]["count"] for number in numbers]


@pytest.mark.parametrize("number", REFUSED)
def test_formats_that_print_nonsense_on_hardware(number):
    with pytest.raises(SimulationError, match="printf has an unknown format"):
        run_ptx(prints_ptx([number]), np.zeros(len(FORMATS), np.int32), block=1)


def test_pointers():
    (conversion,) = parse_format(b"%20p").conversions
    assert convert(conversion, 0x7F00DEADBEEF) == b"      0x7f00deadbeef"
    assert convert(conversion, 0) == b"(nil)".rjust(20)


# assert and breakpoints ---------------------------------------------------------------------------


def test_assertions():
    variables = (
        ASSERTFAIL
        + text_variable("message", "x > 0")
        + text_variable("file", "kernel.cu")
        + text_variable("function", "void kernel(int)")
    )
    code = (
        REGISTERS
        + """
        setp.lt.u32 %p1, %thread, 70;
        @%p1 bra FINE;
        mov.u64 %rd1, message;
        mov.u64 %rd2, file;
        mov.u64 %rd3, function;
        call __assertfail, (%rd1, %rd2, 42, %rd3, 1);
        FINE:
    """
    )
    with pytest.raises(SimulationError) as error:
        run_body(code, block=64, grid=2, variables=variables)
    assert str(error.value) == (
        "assertion failed: x > 0, in void kernel(int) at kernel.cu:42\n"
        "  got: thread 6 of block (1, 0, 0) (58 lanes)"
    )
    run_body(code, block=64, grid=1, variables=variables)


def test_breakpoints_end_the_kernel():
    with pytest.raises(SimulationError, match=r"^thread 3 of block \(0, 0, 0\) executes a break"):
        run_body(REGISTERS + "setp.ge.u32 %p1, %thread, 3; @%p1 brkpt;", block=32)
    run_body(REGISTERS + "setp.ge.u32 %p1, %thread, 33; @%p1 brkpt;", block=32)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("call (%r1), vprintf, (%rd1);", "vprintf is called with the wrong number of arguments"),
        ("call (%r1, %r2), vprintf, (%rd1, %rd2);", "the function has one result"),
        ("call (%rd1), vprintf, (%rd1, %r2);", "cannot be read as .u64"),
        (".shared .b64 x; call (%r1), vprintf, (x, %rd2);", "variables of .param space"),
        ("call.frob (%r1), vprintf, (%rd1, %rd2);", "unknown modifier"),
        ("call (%r1), __assertfail, (%rd1, %rd1, %r1, %rd1, %rd1);", "has no result"),
        ("brkpt 5;", "wrong number of operands"),
    ],
)
def test_wrong_calls_of_external_functions(code, message):
    text = error_of(VPRINTF + ASSERTFAIL, code)
    assert text.startswith("PTX line ")
    assert message in text


# What compilers make ------------------------------------------------------------------------------


@pytest.mark.skipif(COMPILER is None, reason="there is no nvcc here")
@pytest.mark.parametrize("options", [(), ("-G",)])
class TestCompiled:
    def ptx(self, options):
        return compiled(SOURCES / "functions.cu", *options)

    def test_functions(self, options):
        count = 96
        out, seen = np.zeros(count, np.float32), np.zeros((count, 6), np.int32)
        entries = np.array([3, -1, 4, 1, -5, 9], np.int32)
        table = entries.tobytes() + np.float32(0.5).tobytes()
        run_ptx(self.ptx(options), out, seen, table, grid=3, block=32, name="functions")
        expected_out, expected_seen = expected_functions(count, entries)
        np.testing.assert_array_equal(out, expected_out)
        np.testing.assert_array_equal(seen, expected_seen)

    def test_printf_and_assert(self, options):
        x = np.array([0.5, 1.25, -2, 1e6], np.float32)
        ptx = self.ptx(options)
        execution = run_ptx(ptx, x, np.int32(4), block=4, name="print")
        odd = [
            f"{n}: {x[n]:8.3f} {word:6}|{x[n] * 1e10:.1e}|{-(1 << 40) - n} {chr(97 + n)} 0xff%\n"
            for n, word in ((1, "one"), (3, "many"))
        ]
        assert sorted(execution.output) == sorted(["nothing to say\n"] * 2 + odd)
        with pytest.raises(SimulationError, match=r"assertion failed: thread < bound, in .*print"):
            run_ptx(ptx, x, np.int32(2), block=4, name="print")


def collatz(x, limit):
    steps = 0
    while x != 1:
        steps += 1
        if steps == limit:
            return -1
        x = 3 * x + 1 if x % 2 else x // 2
    return steps


def expected_functions(count, entries):
    """The kernel ``functions`` in Python."""
    out, seen = np.zeros(count, np.float32), np.zeros((count, 6), np.int32)

    def weighted(values, scale, x, row):
        total = np.float32(0)
        for number in range(6):
            steps = collatz(x + number, 50)
            if steps < 0:
                return -total
            row[number] = steps
            total += np.float32(scale) * np.float32(values[steps % 6])
        return total

    for thread in range(count):
        total = weighted(entries, 0.5, thread + 1, seen[thread])
        if thread % 3 == 0:
            rotated = np.roll(entries, -thread) - 2
            total += weighted(rotated, 1.0, thread + 2, seen[thread])
        out[thread] = total
    return out, seen
