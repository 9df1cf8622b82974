"""Text that is no PTX, or that cannot be represented, raises PtxError at the right place.

In each text ``§`` stands before the word that the error must point to.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cubin import ptxas
from ptx_texts import HEADER, kernel_text

from pallasite.errors import SourceLocation
from pallasite_simulator.errors import PtxError
from pallasite_simulator.ptx.parser import parse
from pallasite_simulator.ptx.syntax import Position


def refused(marked: str) -> PtxError:
    """The error of a text, which must be where the mark stands."""
    before, after = marked.split("§")
    line = before.count("\n") + 1
    column = len(before) - before.rfind("\n")
    with pytest.raises(PtxError) as raised:
        parse(before + after)
    assert raised.value.position == Position(line, column)
    assert str(raised.value).splitlines()[0].count(f"PTX line {line}, column {column}: ") == 1
    return raised.value


# Statements of a kernel that ptxas refuses too, with part of the message.
STATEMENTS = {
    "add.u32 %r1, §%r2.b0, %r3;": "only video instructions take parts of registers",
    "vadd.u32.u32.u32 %r1, §%r2.b9, %r3;": "no part of registers such as '%r2.b9'",
    # Words.
    "mov.u32 %r1, §`;": "unexpected character '`'",
    "mov.u32 %r1, §'a';": "unexpected character",
    "§/* no end": "comment without end",
    '.pragma §"no end': "string without end",
    "mov.u32 %r1, §0x;": "malformed number '0x'",
    "mov.u32 %r1, §08;": "malformed number '08'",
    "mov.u32 %r1, §5u;": "malformed number '5u'",
    "mov.f32 %f1, §0f3F8;": "malformed number '0f3F8'",
    "mov.f32 %f1, §1e999;": "malformed number '1e999'",
    "mov.u64 %rd1, §3000000000000000000000;": "malformed number",
    # Semicolons and separators.
    "mov.u32 %r1, 5\n§mov.u32 %r2, 6;": "expected ',' or ';' after '5', found 'mov.u32'",
    "mov.u32 %r1, %r2\n§ret;": "expected ',' or ';' after '%r2', found 'ret'",
    "ret\n§add.u32 %r1, %r1, 1;": "expected an operand, found 'add.u32'",
    "mov.u32 %r1, %r2 §%r3;": "expected ',' or ';' after '%r2', found '%r3'",
    "mov.u32 %r1,§, 5;": "expected an operand, found ','",
    "mov.u32 %r1, 5,§;": "expected an operand, found ';'",
    "mov.u32 %r1, 5;§;": "expected an instruction, found ';'",
    "{ mov.u32 %r1, 5; }§;": "expected an instruction, found ';'",
    "@%p1 §{ ret; }": "expected an instruction, found '{'",
    "@%p1 §@%p2 ret;": "expected an instruction, found '@'",
    # Undeclared names.
    "mov.u32 %r1, §%r77;": "undeclared register '%r77'",
    "mov.u32 %r1, §%nosuch;": "undeclared register '%nosuch'",
    "mov.u32 %r1, §%envreg32;": "undeclared register '%envreg32'",
    "mov.u32 %r1, §%tid;": "%tid is a vector",
    "mov.u32 %r1, §%laneid.x;": "expected an operand, found '%laneid.x'",
    "mov.u64 %rd1, §nosuch;": "undeclared name 'nosuch'",
    "ld.global.u32 %r1, [§nosuch+4];": "undeclared name 'nosuch'",
    "ld.global.u32 %r1, [§%rd77];": "undeclared register '%rd77'",
    "mov.u32 §late, 5; .reg .b32 late;": "undeclared name 'late'",
    "{ .reg .b32 inner; } mov.u32 §inner, 5;": "undeclared name 'inner'",
    "@§%q bra L; L:": "undeclared predicate '%q'",
    "@§%r1 ret;": "expected a predicate after '@', found '%r1'",
    "bra §L;": "undeclared label 'L'",
    "bra §%r1;": "expected the name of a label, found '%r1'",
    "bra §bytes;": "expected the name of a label, found 'bytes'",
    "bra L§+4; L:": "expected ',' or ';' after 'L', found '+'",
    "§bra; L:": "bra without operands",
    "{ L: ret; } bra §L;": "undeclared label 'L'",
    "bra §L; { L: ret; }": "undeclared label 'L'",
    "L: ret; mov.u64 %rd1, §L;": "the label 'L' cannot be an operand of mov",
    "L: ld.global.u32 %r1, [§L];": "'L' is no address",
    "brx.idx %r1, §L; L:": "expected the name of a .branchtargets, found 'L'",
    "t: .branchtargets §L;": "undeclared label 'L'",
    "t: .branchtargets L; L: bra §t;": "expected the name of a label, found 't'",
    "call §nosuch;": "undeclared function 'nosuch'",
    "call §kernel;": "'kernel' is not a function that can be called",
    "call §bytes;": "'bytes' is not a function that can be called",
    "call (%r1), %rd1, (%r2)§;": "expected ',', found ';'",
    "L: call (%r1), %rd1, (%r2), §L;": "expected a prototype or call targets",
    "call (%r1), %rd1, (%r2), §5;": "expected a prototype or call targets, found '5'",
    "t: .calltargets §nosuch;": "undeclared function 'nosuch'",
    # Names that are declared twice.
    ".reg .b32 §%r3;": "'%r3' is declared twice",
    ".reg .b32 a; .reg .pred §a;": "'a' is declared twice",
    ".reg .b32 §pointer;": "'pointer' is declared twice",
    "L: §L: ret;": "'L' is declared twice",
    "L: .reg .b32 §L;": "'L' is declared twice",
    ".shared .b32 a; .local .b32 §a;": "'a' is declared twice",
    # Operands.
    "ld.global.u32 %r1, [%rd1§-4];": "offsets are added in PTX",
    "mov.u64 %rd1, bytes§-4;": "offsets are added in PTX",
    "ld.global.u32 %r1, [%rd1+§%rd2];": "expected a constant offset, found '%rd2'",
    "ld.global.u32 %r1, [4+§%rd1];": "expected a constant, found '%rd1'",
    "ld.global.u32 %r1, [%rd1§;": "expected ']' after an address, found ';'",
    "ld.global.u32 %r1, [§];": "expected an address, found ']'",
    "ld.shared.u32 %r1, [§%tid.x];": "the special register %tid.x cannot be an address",
    "ld.global.u32 %r1, [%rd1, §%r1];": "expected coordinates in braces, found '%r1'",
    "mov.b64 {%r1§;": "';' inside braces that are not closed",
    "mov.b64 {%r1 §%r2}, %rd1;": "expected ',' or '}' in a vector, found '%r2'",
    "mov.b64 {§}, %rd1;": "expected an operand, found '}'",
    "mov.b64 {%r1, §{%r2}}, %rd1;": "'{' inside a vector",
    "mov.u64 %rd1, (§bytes+4);": "expected a constant, found 'bytes'",
    "setp.eq.u32 %p1|§5, %r1, %r2;": "expected a register after '|', found '5'",
    "call (%r1§;": "expected ',' or ')' in arguments, found ';'",
    "setp.eq.u32 %p1|§%p77, %r1, %r2;": "undeclared register '%p77'",
    "tex.1d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f1}, §[%r1]];": "'[' inside an address",
    "tex.1d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f1}§;": "expected ']' after coordinates",
    # Constants.
    "mov.u32 %r1, 5§/0;": "division by zero",
    "mov.u32 %r1, 5 § % 0;".replace("§ ", "§"): "division by zero",
    "mov.f32 %f1, §-0f3F800000;": "'-' cannot be applied",
    "mov.f32 %f1, 1§+1.5;": "'+' cannot be applied",
    "ld.global.u32 %r1, [%rd1+§1.5];": "expected a constant offset, found the float '1.5'",
    "mov.u32 %r1, 1 §? 2 : 1.5;": "'?:' cannot be applied",
    "mov.u32 %r1, (§.u64)1.5;": "'.u64' cannot be applied",
    "mov.f32 %f1, 1.5§/0.0;": "division by zero",
    "mov.u32 %r1, (5§;": "expected ')', found ';'",
    "mov.u32 %r1, (1 ? 2§);": "expected ':', found ')'",
    # Declarations.
    ".reg §x;": "expected a type such as .b32, found 'x'",
    ".reg §.e4m3 x;": "expected a type such as .b32, found '.e4m3'",
    ".reg .v4 §.f64 x;": "vectors of 4 elements of type .f64",
    ".reg .v2 §.pred x;": "vectors of 2 elements of type .pred",
    ".reg .b32 x<§-1>;": "expected how many registers, found '-'",
    ".reg .b32 x<4§;": "expected '>', found ';'",
    ".reg .b32 x §y;": "expected ',' or ';' after 'x', found 'y'",
    ".reg .b32 §WARP_SZ;": "'WARP_SZ' is a constant",
    ".shared §x;": "expected a type such as .b32, found 'x'",
    ".shared .b32 §1x;": "expected the name of a variable, found '1x'",
    ".shared .b32 §x[];": "the array 'x' has no length",
    ".shared §.pred x;": "predicates can only be registers",
    ".shared .align §3 .b32 x;": "alignment 3 is not a power of two",
    ".shared .b32 §x = 5;": "variables in .shared cannot have initial values",
    ".local .b32 §x = 5;": "variables in .local cannot have initial values",
    # Directives.
    "§.nosuch 5;": "unknown directive '.nosuch' in a function",
    "§.minnctapersm 1;": "unknown directive '.minnctapersm'",
    '§.file 1 "x"': "unknown directive '.file'",
    "§.extern .shared .b32 x[];": ".extern inside a function",
    ".loc 1 1 1, function_name L, §nosuch 1 1 1\nL:": "expected 'inlined_at', found 'nosuch'",
    "§.branchtargets L; L:": ".branchtargets without a label",
    ".pragma §nounroll;": "expected a string, found 'nounroll'",
    ".loc 1 1§;": "expected a column, found ';'",
    ".loc 1 1 1 §1;": "expected an instruction, found '1'",
    ".loc 1 1 1, §inlined_at 1 1 1": "expected 'function_name', found 'inlined_at'",
    "§}": "'}' without '{'",
    "§{": "block without end",
}


def with_mark(statements: str) -> str:
    text = kernel_text(statements)
    if statements == "§}":
        # The brace closes the kernel, so that the kernel's own is too many.
        return text.replace("§", "")[:-2] + "§}\n"
    if statements == "§{":
        return text.replace("§", "").replace("\n{\n", "\n§{\n", 1)
    return text


@pytest.mark.parametrize("statements", STATEMENTS)
def test_refused_statements(statements: str, tmp_path: Path):
    text = with_mark(statements)
    assert STATEMENTS[statements] in str(refused(text))
    assert ptxas(text.replace("§", ""), tmp_path, "sm_90a", "-c").returncode != 0


# Modules that ptxas refuses too.
MODULES = {
    "§": "expected '.version', found the end of the text",
    "§.target sm_90": "expected '.version', found '.target'",
    ".version §8\n.target sm_90": "expected a version such as 8.6, found '8'",
    ".version 8.0\n§.address_size 64": "expected '.target', found '.address_size'",
    ".version 8.0\n.target §bogus": "expected a target such as sm_90a, found 'bogus'",
    ".version 8.0\n.target sm_90, §bogus": "unknown option 'bogus' of a target",
    ".version 8.0\n.target sm_90\n.address_size §48": "address size 48",
    HEADER + "§.version 8.0": ".version a second time or in the wrong place",
    HEADER + "§.nosuch 5;": "unknown directive '.nosuch'",
    HEADER + "§nosuch;": "expected a directive, found 'nosuch'",
    HEADER + "§;": "expected a directive, found ';'",
    HEADER + "§@@DWARF .x": "expected a directive, found '@'",
    HEADER + ".visible §.visible .entry k() { ret; }": "expected a function or a variable",
    HEADER + "§.tex .u32 t;": "textures and the like (.tex) are not supported",
    HEADER + ".section .debug_x §;": "expected '{', found ';'",
    HEADER + ".section §x {}": "expected the name of a section, found 'x'",
    HEADER + '.file 1 "a"\n§.file 1 "b"\n.entry k() { ret; }': "file 1 is declared twice",
    HEADER + '.file 1 "a" , §;': "expected a time stamp, found ';'",
    # Variables.
    HEADER + ".global .u32 §x[];": "the array 'x' has no length",
    HEADER + ".global .u32 §x[0];": "the array 'x' has no length",
    HEADER + ".global .u32 x[2][§];": "expected the length of an array, found ']'",
    HEADER + ".global .u32 x[§-1];": "expected the length of an array, found '-'",
    HEADER + ".global .u32 x[2§;": "expected ']', found ';'",
    HEADER + ".global .u32 x §y;": "expected ',' or ';' after 'x', found 'y'",
    HEADER + ".global .v4 §.f64 x;": "a vector of 32 bytes",
    HEADER + ".global .attribute(§.bogus) .u32 x;": "unknown attribute '.bogus'",
    HEADER + "§.local .u32 x;": "a variable in .local outside of a function",
    HEADER + ".const§[1] .u32 x;": "expected a type such as .b32, found '['",
    HEADER + ".global .u32 x; .global .u32 §x;": "'x' is declared twice",
    HEADER + ".global .u32 x; §.entry x() { ret; }": "'x' is declared twice",
    HEADER + ".func f() { ret; } .global .u32 §f;": "'f' is declared twice",
    HEADER + ".extern .global .u32 §x = 5;": "an initial value for the .extern variable 'x'",
    HEADER + ".shared .u32 §x = 5;": "variables in .shared cannot have initial values",
    # Initial values.
    HEADER + ".global .u32 x = §{5};": "expected a constant, found '{'",
    HEADER + ".global .u32 x[2] = §5;": "expected '{', found '5'",
    HEADER + ".global .u32 x[2] = {1, 2, §3};": "more than 2 initial values",
    HEADER + ".global .u32 x[2] = {1, §};": "expected a constant, found '}'",
    HEADER + ".global .u32 x[2] = {1 §2};": "expected ',', found '2'",
    HEADER + ".global .u32 x[2][2] = {§1, 2, 3, 4};": "expected '{', found '1'",
    HEADER + ".global .u32 x = §1.5;": "a float for the type .u32",
    HEADER + ".global .f32 x = §1;": "an integer for the type .f32",
    HEADER + ".global .f16 x = §5;": "an integer for the type .f16",
    HEADER + ".global .f16 x = §1.5;": "a float for the type .f16",
    HEADER + ".global .u64 x = §y; .global .u32 y;": "expected a constant, found 'y'",
    HEADER + ".global .u32 y; .global .u64 x = y§-4;": "expected ',' or ';' after 'x'",
    HEADER + ".global .u64 x = generic(§y);": "'y' is not the name of a variable or function",
    # Functions.
    HEADER + ".func f() { ret; } §.func f() { ret; }": "'f' is declared twice",
    HEADER
    + ".func f(.param .b32 a); §.func f(.param .b64 a) { ret; }": "declared with other parameters",
    HEADER + ".extern .func f() §{ ret; }": "a body of the .extern function 'f'",
    HEADER + ".entry k(§.reg .b32 a) { ret; }": "parameters of kernels are in .param",
    HEADER + ".entry k(.param .b8 §x[]) { ret; }": "the array 'x' has no length",
    HEADER + ".entry k(.param §.pred a) { ret; }": "predicates can only be registers",
    HEADER + ".entry k(.param .u64 a,§) { ret; }": "expected '.param', found ')'",
    HEADER + ".entry k(.param .u64 a §b) { ret; }": "expected ',' or ')' after a parameter",
    HEADER + ".entry k(.param .u64 a, .param .u32 §a) { ret; }": "'a' is declared twice",
    HEADER + ".entry k(.param .v4 §.f32 a) { ret; }": "parameters that are vectors",
    HEADER + ".func f(.param .b32 §_) { ret; }": "a parameter without a name",
    HEADER + ".entry k() .reqntid §x { ret; }": "expected a number, found 'x'",
    HEADER + ".entry k() §.reqntid 1, 2, 3, 4 { ret; }": "at most 3 numbers",
    HEADER + ".entry k() §.nosuch { ret; }": "expected the body of 'k' or ';', found '.nosuch'",
    HEADER + ".entry §.visible k() { ret; }": "expected the name of a function",
    HEADER + ".visible .func g(); .alias g, §f;": "'f' is not a function with a body",
    HEADER
    + ".visible .func g() { ret; } .visible .func f(.param .b32 x); §.alias f, g;": "different",
    HEADER + ".func f() { ret; } .alias §g, f;": "'g' is not declared as a function",
}


@pytest.mark.parametrize("text", MODULES)
def test_refused_modules(text: str, tmp_path: Path):
    assert MODULES[text] in str(refused(text))
    assert ptxas(text.replace("§", ""), tmp_path, "sm_90a", "-c").returncode != 0


# What ptxas accepts, but what has no place in the syntax tree or would be guessed at.
UNSUPPORTED = {
    HEADER + ".global §.texref t;": "textures and surfaces (.texref) are not supported",
    HEADER + ".global §.surfref t;": "textures and surfaces (.surfref) are not supported",
    HEADER + ".func f(.reg §.v2 .b32 a) { ret; }": "parameters that are vectors",
    HEADER + ".global .u8 x = §300;": "300 does not fit the type .u8",
    HEADER + ".global .s8 x = §-129;": "-129 does not fit the type .s8",
    HEADER + ".global .u32 x[2][2] = {{1}, {§3, 4}};": "a row of an array with too few values",
    HEADER + ".global .u32 y; .global .u32 x = §y;": "an address of 8 bytes in an element of type",
    HEADER + ".global .u32 y; .global .u8 x[2] = {0xff(y), 0xff00(y)}§;": "is given in part",
    HEADER + ".global .u32 y, z; .global .u8 x[8] = {0xff(y), §0xff00(z)};": "is given in part",
    HEADER + ".global .u32 y; .global .u8 x[8] = {§0xff00(y)};": "only whole addresses",
    HEADER + ".global .u32 y; .global .u8 x[8] = {0xff(y), §1};": "is given in part",
    HEADER + ".global .f64 x = §0f3F800000;": "a constant of type .f32 for the type .f64",
    kernel_text(".shared .b32 a[4]; ld.shared.b32 %r1, a§[1];"): "indices of arrays such as a[1]",
    kernel_text("add.u32 %r1, %r2§+1, 5;"): "expected ',' or ';' after '%r2', found '+'",
    kernel_text("mov.v4.u32 {%r1, %r2, %r3, %r4}, §%tid;"): "%tid is a vector",
    kernel_text("mov.u32 %r1, 1§<<64;"): "shift by 64",
    HEADER + ".entry k() .maxnreg 5 §.maxnreg 6 { ret; }": ".maxnreg is given twice",
    kernel_text("mov.u64 %rd1, §18446744073709551616;"): "malformed number",
}


@pytest.mark.parametrize("text", UNSUPPORTED)
def test_unsupported(text: str, tmp_path: Path):
    assert UNSUPPORTED[text] in str(refused(text))
    assert ptxas(text.replace("§", ""), tmp_path, "sm_90a", "-c").returncode == 0


# What is too large or too deep to be meant.
NONSENSE = {
    kernel_text(".reg .b32 §x<99999999>;"): "99999999 registers",
    kernel_text(f"mov.u32 %r1, {'(' * 100}§1{')' * 100};"): "nested too deeply",
    kernel_text(f"mov.u32 %r1, §1{'0' * 5000};"): "malformed number",
    HEADER + f".global .u32 x{'[1]' * 33}§;": "more than 32 dimensions",
    HEADER + ".global .u64 §x[4294967296][4294967296];": "a variable of",
    HEADER + ".global .u8 x[2][1073741824] = {{}, {§1}};": "too few values",
}


@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense(text: str):
    assert NONSENSE[text] in str(refused(text))


def test_messages_show_the_statement():
    error = refused(kernel_text("mov.u32 %r1, 5; add.s32  %r1,\n  /* x */ §%q, 2; mov.u32 %r1, 6;"))
    assert error.instruction == "add.s32 %r1, %q, 2"
    error = refused(kernel_text("add.s32 %r1, %r2\n§mov.u32 %r1, 5;"))
    assert error.instruction == "add.s32 %r1, %r2 mov.u32 %r1, 5"
    error = refused(HEADER + ".global   .u32 x[2] =\t§5;")
    assert error.instruction == ".global .u32 x[2] = 5;"


def test_messages_show_the_source_line():
    error = refused(
        kernel_text(".loc 1 12 3\nret;\n.loc 1 0 0\nmov.u32 %r1, §%q;") + '.file 1 "kernel.py"'
    )
    assert error.location == SourceLocation("kernel.py", 12, 3)
    assert str(error).startswith("kernel.py:12: PTX line ")
    assert str(error).endswith("undeclared register '%q', in: mov.u32 %r1, %q")


def test_hints():
    error = refused(kernel_text("ld.global.u32 %r1, [%rd1§-4];"))
    assert error.hint == "write +-8 for -8"
