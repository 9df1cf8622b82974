"""The parser on whole modules: of Pallasite, nvcc and Triton, made at random, and broken."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import pytest
import triton_kernels
from cubin import Cubin, assemble
from cuda_programs import COMPILER, SOURCES, compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_printer import print_module, print_statement
from ptx_texts import HEADER, kernel_text
from test_ptx_declarations import ADDRESSES, INITIAL, POINTED, SHAPES
from test_ptx_parser import CALL_DECLARATIONS, CALLS, OPERANDS, instruction

import pallasite
from examples import catalog
from pallasite_simulator.errors import PtxError
from pallasite_simulator.ptx import syntax
from pallasite_simulator.ptx.parser import parse

_NOWHERE = syntax.Position(0, 0)


def reparsed_is_the_same(module: syntax.Module) -> None:
    """Printing a module and reading it again gives the same statements."""
    again = parse(print_module(module))
    for one, other in zip(_defined(module), _defined(again), strict=True):
        assert one.name == other.name
        assert list(map(print_statement, one.body or ())) == list(
            map(print_statement, other.body or ())
        )


def _defined(module: syntax.Module) -> list[syntax.Function]:
    found = [function for function in module.functions if function.body is not None]
    return sorted(found, key=lambda function: function.name)


def same_machine_code(ptx: str, folder: pathlib.Path) -> None:
    """ptxas makes the same of a module and of what the parser understood of it."""
    module = parse(ptx)
    linking = {
        match[2]: f".{match[1]}"
        for match in re.finditer(
            r"^\.(visible|weak)\s+(?:\.(?:global|const)[^;\[=]*|\.entry|\.func\s*(?:\([^)]*\))?)\s+"
            r"([\w$%]+)\s*[;(\[=]",
            ptx,
            re.MULTILINE,
        )
    }
    options = ("-c", "-w") if re.search(r"\.extern\s+\.func", ptx) else ("-w",)
    # Trees have neither pragmas nor debug information.
    plain = re.sub(r", debug$|\.pragma[^;]*;", "", ptx, flags=re.MULTILINE)
    original = assemble(plain, folder, module.target, *options)
    printed = assemble(print_module(module, linking), folder, module.target, *options)
    assert original.code() == printed.code()
    assert _variables(original) == _variables(printed)


def _variables(cubin: Cubin) -> dict[str, bytes]:
    return {
        name: data
        for name, data in cubin.sections.items()
        if re.match(r"\.nv\.(global|shared|constant[34])", name)
    }


# Compilers ----------------------------------------------------------------------------------------

EXAMPLES = [one for one in catalog.all_examples() if not one.needs]


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("example", EXAMPLES[:: max(1, len(EXAMPLES) // 8)], ids=lambda e: e.name)
def test_examples(example: catalog.Example, target: str, tmp_path: pathlib.Path):
    inputs = jax.eval_shape(example.make_inputs, jax.random.key(0))
    ptx = pallasite.compile(example.function, *inputs, target=target, assemble=False).ptx
    module = parse(ptx)
    assert module.target == target
    assert any(one.location for one in module.functions[-1].body or () if hasattr(one, "location"))
    reparsed_is_the_same(module)
    same_machine_code(ptx, tmp_path)


@pytest.mark.parametrize("options", [(), ("-G",), ("-lineinfo", "-rdc=true")])
@pytest.mark.parametrize("source", sorted(SOURCES.glob("*.cu")), ids=lambda path: path.stem)
def test_nvcc(source: pathlib.Path, options: tuple[str, ...], tmp_path: pathlib.Path):
    if COMPILER is None:
        pytest.skip("there is no nvcc here")
    ptx = compiled(source, *options)
    reparsed_is_the_same(parse(ptx))
    same_machine_code(ptx, tmp_path)


def test_names_of_inlined_cuda_functions(tmp_path: pathlib.Path):
    if COMPILER is None:
        pytest.skip("there is no nvcc here")
    source = tmp_path / "inlined.cu"
    source.write_text(
        "__device__ __forceinline__ int twice(int x) {\n  return x * __ldg(&((int*)0)[x]); }\n"
        'extern "C" __global__ void k(int* p) {\n  p[0] = twice(p[1]); }\n'
    )
    (function,) = parse(compiled(source, "-lineinfo")).functions
    locations = {
        (one.location.line, one.location.function)
        for one in function.body or ()
        if isinstance(one, syntax.Instruction) and one.location is not None
    }
    assert (2, "_Z5twicei") in locations
    assert (4, "") in locations


@pytest.mark.parametrize(
    "kernel, signature, constants",
    [
        (triton_kernels.gelu, "*fp32 *fp32 i32", {"BLOCK": 512}),
        (triton_kernels.layer_norm, "*fp16 *fp16 *fp16 *fp16 i32 fp32", {"BLOCK": 1024}),
        (triton_kernels.histogram, "*i32 *i32 *i32 i32", {"BLOCK": 512}),
    ],
    ids=["gelu", "layer_norm", "histogram"],
)
def test_triton(kernel: object, signature: str, constants: dict[str, int], tmp_path: pathlib.Path):
    ptx = triton_kernels.compiled(kernel, signature, **constants).ptx
    reparsed_is_the_same(parse(ptx))
    # Triton may have a newer ptxas of its own; these kernels need nothing of it.
    same_machine_code(re.sub(r"\.version \d+\.\d+", ".version 8.7", ptx), tmp_path)


# Random instructions ------------------------------------------------------------------------------

registers = st.sampled_from(
    [syntax.Register(f"%r{number}", "b32") for number in range(40)]
    + [syntax.Register(f"%rd{number}", "b64") for number in range(9)]
)
predicates = st.sampled_from([syntax.Register(f"%p{number}", "pred") for number in range(9)])
immediates = st.one_of(
    st.builds(syntax.Immediate, st.integers(1 - 2**63, 2**64 - 1)),
    st.builds(syntax.Immediate, st.integers(0, 2**32 - 1), st.just("f32")),
    st.builds(syntax.Immediate, st.integers(0, 2**64 - 1), st.just("f64")),
)
sinks = st.just(syntax.Sink())
offsets = st.integers(-(2**31), 2**31)
symbols = st.builds(syntax.Symbol, st.sampled_from(["counter", "bytes", "map", "pointer"]), offsets)
specials = st.sampled_from(
    [syntax.Special("%tid", "x"), syntax.Special("%laneid"), syntax.Special("%ctaid", "z")]
)
coordinates = st.lists(st.one_of(registers, immediates), min_size=1, max_size=5).map(tuple)
bases = st.one_of(registers, symbols.map(lambda symbol: dataclasses.replace(symbol, offset=0)))
addresses = st.one_of(
    st.builds(syntax.Address, bases, offsets, st.one_of(st.none(), coordinates)),
    st.builds(syntax.Address, st.none(), offsets),
    st.builds(syntax.Address, bases, offsets, coordinates, coordinates),
)
vectors = st.lists(st.one_of(registers, immediates, sinks), min_size=1, max_size=8).map(
    lambda elements: syntax.Vector(tuple(elements))
)
operands = st.one_of(
    registers,
    immediates,
    symbols,
    specials,
    addresses,
    vectors,
    sinks,
    st.builds(syntax.Negated, predicates),
    st.builds(syntax.Negated, registers),
    st.builds(syntax.Pair, st.one_of(registers, sinks), st.one_of(predicates, sinks)),
)
modifiers = st.lists(
    st.sampled_from(["global", "v4", "b32", "shared::cta", "L2::cache_hint", "16x64b", "NaN"]),
    max_size=5,
).map(tuple)
instructions = st.builds(
    syntax.Instruction,
    opcode=st.sampled_from(["ld", "mov", "cp", "tcgen05", "wgmma"]),
    modifiers=modifiers,
    operands=st.lists(operands, max_size=5).map(tuple),
    position=st.just(_NOWHERE),
    text=st.just(""),
    predicate=st.one_of(st.none(), predicates),
)


@settings(max_examples=400, deadline=None)
@given(instructions, st.booleans())
def test_printed_instructions_are_read_again(made: syntax.Instruction, negated: bool):
    made = dataclasses.replace(made, predicate_negated=negated and made.predicate is not None)
    text = print_statement(made)
    parsed = instruction(text)
    assert dataclasses.replace(parsed, position=_NOWHERE, text="") == made
    assert text.endswith(parsed.text + ";") or not made.operands


# Broken text --------------------------------------------------------------------------------------

EVERYTHING = (
    kernel_text(
        "\n".join(f"{text};" for text in OPERANDS)
        + CALL_DECLARATIONS
        + "\n".join(f"{text};" for text in CALLS)
        + """
        { .reg .pred q; .reg .v2 .b32 v; W: @!q bra W; } // implicit-def: %r1
        table: .branchtargets A, B; brx.idx %r1, table; A: B:
        .loc 1 2 3
        .loc 1 2 3, function_name $x, inlined_at 1 2 3
        """
    )
    + POINTED
    + "\n".join(
        text.replace(" x", f" x{number}", 1)
        for number, text in enumerate([*SHAPES, *INITIAL, *ADDRESSES])
    )
    + """
    .file 1 "a.py"
    .section .debug_str { $x: .b8 95,90,0 }
    .func (.reg .b32 sum) f(.reg .b32 x, .param .b64 y, .param .b8 z[]) { mov.b32 sum, x; ret; }
    .entry k() .reqntid 8, 4,2 .maxnreg 64 .pragma "x"; .reqnctapercluster 2,1 { ret; }
    """
)
_WORD = re.compile(r"\s+|[\w$%.:]+|.", re.DOTALL)
WORDS = _WORD.findall(EVERYTHING)


def parse_or_refuse(text: str) -> None:
    try:
        parse.__wrapped__(text)
    except PtxError as error:
        assert error.position.line >= 1 and error.position.column >= 1
        assert str(error)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_broken_text_is_refused_in_order(data: st.DataObject):
    words = list(WORDS)
    for _ in range(data.draw(st.integers(1, 3))):
        if len(words) < 2:
            break
        at = data.draw(st.integers(0, len(words) - 2))
        match data.draw(st.sampled_from(["delete", "insert", "replace", "swap", "cut"])):
            case "delete":
                del words[at]
            case "insert":
                words.insert(at, data.draw(st.sampled_from(WORDS)))
            case "replace":
                words[at] = data.draw(st.sampled_from(WORDS))
            case "swap":
                words[at], words[at + 1] = words[at + 1], words[at]
            case "cut":
                del words[at + 2 :]
    parse_or_refuse("".join(words))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(sorted(set(WORDS))), max_size=60))
def test_words_in_any_order_are_refused_in_order(words: list[str]):
    parse_or_refuse(HEADER + " ".join(words))
    parse_or_refuse(kernel_text(" ".join(words)))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_refused_in_order(text: str):
    parse_or_refuse(text)
    parse_or_refuse(HEADER + text)
    parse_or_refuse(kernel_text(text))
    parse_or_refuse(HEADER + ".global .b8 x[] = {" + text)


# Work ---------------------------------------------------------------------------------------------


def calls_in(function: Callable[..., Any], *arguments: Any) -> int:
    """How many functions are called in a call, those of Python and those in C."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(before)
    return calls


def test_work_grows_with_the_lines():
    """Each line takes so many calls, however many others there are."""
    source = random.Random(3)
    lines = "".join(f"{source.choice(list(OPERANDS))};\n" for _ in range(1000))
    parse.__wrapped__(kernel_text(lines))  # What is made once for all texts is made now.
    calls = [calls_in(parse.__wrapped__, kernel_text(lines * times)) for times in (1, 2, 5)]
    each = (calls[1] - calls[0]) / 1000
    assert (calls[2] - calls[1]) / 3000 == pytest.approx(each, rel=0.01)
    assert 20 < each < 80
