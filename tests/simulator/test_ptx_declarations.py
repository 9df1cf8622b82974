"""Variables, functions and directives of a module become the right records."""

from __future__ import annotations

import itertools
import math
import random
import struct
from pathlib import Path

import pytest
from cubin import assemble
from ptx_texts import HEADER

from pallasite_simulator.errors import PtxError
from pallasite_simulator.ptx.parser import parse
from pallasite_simulator.ptx.syntax import Function, Module, Position, Register, Symbol, Variable


def module(text: str) -> Module:
    return parse(HEADER + text)


def variables(text: str) -> tuple[Variable, ...]:
    return module(text).variables


def function(text: str) -> Function:
    return module(text).functions[-1]


# The module ---------------------------------------------------------------------------------------


def test_header():
    text = "// comment\n.version 9.0 .target sm_100a, debug, texmode_independent .address_size 64"
    assert parse(text) == Module((9, 0), "sm_100a", 64, (), (), {})


def test_default_address_size():
    assert parse(".version 8.0\n.target sm_90").address_size == 32


def test_pragmas_sections_and_files_are_skipped():
    parsed = module(
        '.pragma "one", "two";\n.file 1 "a.py"\n.section .debug_abbrev {\n.b8 1,2\n$L: .b64 $L+4\n}'
    )
    assert (parsed.variables, parsed.functions, parsed.files) == ((), (), {1: "a.py"})


# Variables ----------------------------------------------------------------------------------------


SHAPES = {
    ".global .u32 x;": ("global", "u32", 4, 4),
    ".visible .global .align 16 .b8 x[5];": ("global", "b8", 5, 16),
    ".const .f64 x;": ("const", "f64", 8, 8),
    ".shared .align 128 .b8 x[1024];": ("shared", "b8", 1024, 128),
    ".weak .global .f16x2 x;": ("global", "f16x2", 4, 4),
    ".common .global .b128 x;": ("global", "b128", 16, 16),
    ".global .v4 .f32 x;": ("global", "f32", 16, 16),
    ".global .v2 .u16 x[3];": ("global", "u16", 12, 4),
    ".global .u32 x[2][3];": ("global", "u32", 24, 4),
    ".global .u32 x[] = {1, 2, 3};": ("global", "u32", 12, 4),
    ".global .u32 x[][2] = {{1, 2}, {3}};": ("global", "u32", 16, 4),
    ".global .attribute(.managed) .u32 x;": ("global", "u32", 4, 4),
    ".global .align 64 .attribute(.managed) .u32 x;": ("global", "u32", 4, 64),
    ".global .attribute(.managed, .managed) .u32 x;": ("global", "u32", 4, 4),
    ".attribute(.managed) .global .u32 x;": ("global", "u32", 4, 4),
    ".extern .shared .align 1024 .b8 x[];": ("shared", "b8", 0, 1024),
    ".extern .global .u64 x;": ("global", "u64", 8, 8),
}


@pytest.mark.parametrize("text", SHAPES)
def test_shapes_of_variables(text: str):
    (variable,) = variables(text)
    found = (variable.space, variable.type, variable.bytes, variable.alignment)
    assert (variable.name, *found) == ("x", *SHAPES[text])
    assert variable.external == text.startswith(".extern")


def test_ptxas_accepts_the_variables(tmp_path: Path):
    texts = [text.replace(" x", f" x{number}") for number, text in enumerate(SHAPES)]
    assemble(HEADER + "\n".join(texts), tmp_path, "sm_90a", "-c")


def test_several_variables_in_one_declaration():
    first, second = variables(".global .align 8 .u32 a = 5, b[2];")
    assert first == Variable("a", "global", "u32", 4, 8, Position(4, 23), b"\5\0\0\0")
    assert second == Variable("b", "global", "u32", 8, 8, Position(4, 30))


def test_external_variables_may_be_declared_again():
    declared = ".extern .global .u32 x; .extern .global .u32 x;"
    assert [one.external for one in variables(declared)] == [True]
    defined = ".extern .global .u32 x; .visible .global .u32 x = 3; .extern .global .u32 x;"
    assert [(one.external, one.initial) for one in variables(defined)] == [(False, b"\3\0\0\0")]


def test_variables_inside_functions():
    parsed = function(
        """
    .entry k() {
      .shared .align 16 .f32 tile[32][33];
      .local .align 8 .b8 depot[16];
      .global .u32 counter = 7;
      .const .u64 where = counter+8;
      .param .b32 result;
      .extern_is_no_directive
    }
    """.replace(".extern_is_no_directive", "")
    )
    assert [(v.name, v.space, v.bytes, v.alignment, v.initial) for v in parsed.variables] == [
        ("tile", "shared", 4224, 16, None),
        ("depot", "local", 16, 8, None),
        ("counter", "global", 4, 4, b"\7\0\0\0"),
        ("where", "const", 8, 8, bytes(8)),
        ("result", "param", 4, 4, None),
    ]
    assert parsed.variables[3].addresses == ((0, Symbol("counter", 8)),)


# Initial values -----------------------------------------------------------------------------------

# Declarations of "x" whose contents ptxas writes into the cubin.
INITIAL = {
    ".global .u32 x = 5;": struct.pack("<I", 5),
    ".global .s32 x = -5;": struct.pack("<i", -5),
    ".global .u64 x = 0xffffffffffffffff;": b"\xff" * 8,
    ".global .s8 x[4] = {-128, 127, 0, 255};": b"\x80\x7f\x00\xff",
    ".global .b8 x[6] = {104, 105, 10};": b"hi\n",
    ".const .u16 x[3] = {1, 0xffff, -1};": b"\1\0\xff\xff\xff\xff",
    ".global .f32 x = 1.1;": struct.pack("<f", 1.1),
    ".global .f32 x[3] = {0f3F800000, -2.5, 0d4000000000000000};": struct.pack("<3f", 1, -2.5, 2),
    ".global .f64 x[2] = {1.1, -2.0};": struct.pack("<2d", 1.1, -2),
    ".global .f32 x[4] = {1e300, -1e300, 1e-300, -0.0};": struct.pack(
        "<4f", math.inf, -math.inf, 0, -0.0
    ),
    ".global .f64 x = -0d3FF0000000000000;": struct.pack("<d", -1),
    ".global .b32 x = 0f3F800000;": struct.pack("<f", 1),
    ".global .v4 .f32 x = {1.0, 2.0, 3.0, 4.0};": struct.pack("<4f", 1, 2, 3, 4),
    ".global .v2 .f32 x[2] = {{1.0, 2.0}, {3.0, 4.0}};": struct.pack("<4f", 1, 2, 3, 4),
    ".global .u32 x[2][2] = {{1, 2}, {3}};": struct.pack("<3I", 1, 2, 3),
    ".global .u8 x[2][2][2] = {{{1, 2}, {3, 4}}, {{5}}};": bytes([1, 2, 3, 4, 5]),
    ".global .u8 x[2][2][2] = {{{1, 2}, {3, 4}}, {}};": bytes([1, 2, 3, 4]),
    ".global .u32 x[] = {1, 2, 3};": struct.pack("<3I", 1, 2, 3),
    ".global .b8 x[4] = {};": b"",
    ".global .u8 x = ~1;": b"\xfe",
    ".global .u32 x = WARP_SZ * 2;": struct.pack("<I", 64),
    ".global .u32 x = (5 > 3 ? 2 : 1);": struct.pack("<I", 2),
}


def contents(variable: Variable) -> bytes:
    assert variable.initial is not None
    return variable.initial + bytes(variable.bytes - len(variable.initial))


@pytest.mark.parametrize("text", INITIAL)
def test_initial_values(text: str):
    (variable,) = variables(text)
    assert variable.initial == INITIAL[text]
    assert variable.addresses == ()


def test_initial_values_are_those_of_ptxas(tmp_path: Path):
    texts = [text.replace(" x", f" x{number}", 1) for number, text in enumerate(INITIAL)]
    text = HEADER + "\n".join(".visible " + one for one in texts)
    cubin = assemble(text, tmp_path, "sm_90a", "-c")
    for variable in parse(text).variables:
        assert cubin.contents(variable.name) == contents(variable), variable.name


def _expression(random_: random.Random, depth: int) -> str:
    if depth == 0 or random_.random() < 0.15:
        number = random_.choice(
            [0, 1, 2, 3, 7, 63, 255, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
        )
        return random_.choice([f"{number}", f"{number}U", f"{number:#x}", "WARP_SZ"])
    kind = random_.randrange(8)
    operands = [_expression(random_, depth - 1) for _ in range(3)]
    if kind == 0:
        return f"({operands[0]} ? {operands[1]} : {operands[2]})"
    if kind == 1:
        return random_.choice("-~!+") + f"({operands[0]})"
    if kind == 2:
        return f"({random_.choice(['.s64', '.u64'])})({operands[0]})"
    if kind == 3:
        return f"(({operands[0]}) {random_.choice(['<<', '>>'])} {random_.randrange(64)})"
    operators = [
        "+",
        "-",
        "*",
        "/",
        "%",
        "&",
        "|",
        "^",
        "==",
        "!=",
        "<",
        ">",
        "<=",
        ">=",
        "&&",
        "||",
    ]
    # Without parentheses, so that the strength of operators counts.
    first, second = random_.choice(operators), random_.choice(operators)
    return f"({operands[0]} {first} {operands[1]} {second} {operands[2]})"


def test_values_of_expressions_are_those_of_ptxas(tmp_path: Path):
    random_ = random.Random(5)
    accepted: list[str] = []
    while len(accepted) < 400:
        text = f".visible .global .u64 x{len(accepted)} = {_expression(random_, 3)};"
        try:
            parse(HEADER + text)
        except PtxError as error:
            assert "division by zero" in str(error)
        else:
            accepted.append(text)
    text = HEADER + "\n".join(accepted)
    cubin = assemble(text, tmp_path, "sm_90a", "-c")
    for variable, line in zip(parse(text).variables, accepted, strict=True):
        assert variable.initial == cubin.contents(variable.name), line


POINTED = ".global .u32 target[4]; .func callee() { ret; }\n"
ADDRESSES = {
    ".global .u64 x = target;": ((0, Symbol("target")),),
    ".global .u64 x = target+8;": ((0, Symbol("target", 8)),),
    ".global .u64 x = generic(target);": ((0, Symbol("target", 0, generic=True)),),
    ".global .u64 x = generic(target)+4;": ((0, Symbol("target", 4, generic=True)),),
    ".const .u64 x = callee;": ((0, Symbol("callee")),),
    ".global .u64 x[4] = {1, target, 0, generic(target)};": (
        (8, Symbol("target")),
        (24, Symbol("target", 0, generic=True)),
    ),
    ".global .u8 x[10] = {1, 2, "
    + ", ".join(f"{0xFF << 8 * n:#x}(generic(target)+4)" for n in range(8))
    + "};": ((2, Symbol("target", 4, generic=True)),),
}


@pytest.mark.parametrize("text", ADDRESSES)
def test_addresses_as_initial_values(text: str):
    variable = variables(POINTED + text)[-1]
    assert variable.addresses == ADDRESSES[text]
    assert variable.initial is not None
    for offset, _ in variable.addresses:
        assert variable.initial[offset : offset + 8] == bytes(8)


def test_ptxas_accepts_the_addresses(tmp_path: Path):
    texts = [text.replace(" x", f" x{number}", 1) for number, text in enumerate(ADDRESSES)]
    assemble(HEADER + POINTED + "\n".join(texts), tmp_path, "sm_90a", "-c")


# Functions ----------------------------------------------------------------------------------------


def test_parameters_of_kernels():
    parsed = function("""
    .visible .entry k(
      .param .u64 .ptr .global .align 256 a,
      .param .align 64 .b8 b[128],
      .param .u64 .ptr c, .param .u64 .ptr .shared d, .param .u64 .ptr .align 4 e,
      .param .f16 f, .param .b32 g[4], .param .align 16 .b8 h
    ) { ret; }
    """)
    assert parsed.entry and parsed.results == ()
    found = [(v.name, v.space, v.type, v.bytes, v.alignment) for v in parsed.parameters]
    assert found == [
        ("a", "param", "u64", 8, 8),
        ("b", "param", "b8", 128, 64),
        ("c", "param", "u64", 8, 8),
        ("d", "param", "u64", 8, 8),
        ("e", "param", "u64", 8, 8),
        ("f", "param", "f16", 2, 2),
        ("g", "param", "b32", 16, 4),
        ("h", "param", "b8", 1, 16),
    ]
    assert parsed.position == Position(5, 14)
    assert parsed.parameters[0].position == Position(6, 7)


def test_parameters_of_functions():
    parsed = function(
        ".func (.reg .b32 sum) f(.reg .b32 x, .reg .pred p, .param .b64 y, .param .b8 z[])"
        "{ mov.b32 sum, x; ret; }"
    )
    x, p, total = Register("x", "b32"), Register("p", "pred"), Register("sum", "b32")
    assert not parsed.entry
    assert parsed.results == (total,)
    assert parsed.parameters[:2] == (x, p)
    assert [(v.name, v.bytes, v.alignment) for v in parsed.parameters[2:]] == [
        ("y", 8, 8),
        ("z", 0, 1),
    ]
    assert parsed.registers == (x, p, total)


def test_performance_directives():
    parsed = function("""
    .entry k() .maxntid 256 .reqntid 8, 4,2 .minnctapersm 2 .maxnreg 64 .pragma "x";
    .explicitcluster .reqnctapercluster 2,1 .maxclusterrank 8 { ret; }
    """)
    assert parsed.directives == {
        "maxntid": (256, 1, 1),
        "reqntid": (8, 4, 2),
        "minnctapersm": (2,),
        "maxnreg": (64,),
        "explicitcluster": (),
        "reqnctapercluster": (2, 1, 1),
        "maxclusterrank": (8,),
    }
    assert function(".entry k .blocksareclusters { ret; }").directives == {"blocksareclusters": ()}
    assert function(
        ".func f() .noreturn .abi_preserve 4 .abi_preserve_control 2 {}"
    ).directives == {
        "noreturn": (),
        "abi_preserve": (4,),
        "abi_preserve_control": (2,),
    }


def test_declarations_of_functions():
    parsed = module("""
    .extern .func (.param .b32 result) vprintf
    ( .param .b64 a, .param .b64 b )
    ;
    .extern .func without_semicolon(.param .b64 a)
    .func later(.param .b32 _);
    .func later(.param .b32 x) { ret; }
    .extern .func never .noreturn;
    """).functions
    assert [(one.name, one.body is None) for one in parsed] == [
        ("vprintf", True),
        ("without_semicolon", True),
        ("later", False),
        ("never", True),
    ]
    assert [one.name for one in parsed[0].results] == ["result"]
    assert parsed[3].directives == {"noreturn": ()}


def test_aliases():
    first, second = module("""
    .visible .func other(.param .b32 y);
    .visible .func f(.param .b32 x) { .reg .b32 a; ld.param.b32 a, [x]; ret; }
    .alias other, f;
    """).functions
    assert (first.name, second.name) == ("other", "f")
    assert first.body == second.body and first.parameters == second.parameters


def test_unified_functions():
    assert function(".func .attribute(.unified(1, 2)) f() { ret; }").name == "f"


def test_many_names_are_fast():
    # Each of these would take minutes if names were searched for in a list.
    scopes = "\n".join("{ .reg .pred p; L: @p bra L; }" for _ in range(3000))
    parsed = function(f".entry k() {{ .reg .b32 %r<20000>;\n{scopes}\nret; }}")
    assert len(parsed.registers) == 23000
    assert len(set(parsed.registers)) == 23000
    labels = [one.name for one in itertools.islice(parsed.body or (), 0, None, 2)]  # type: ignore[union-attr]
    assert labels[1] == "L#1"
