"""Translation of inline assembly of the ``llvm`` dialect.

The back end ends the process for a constraint that it does not know, and converts an operand of
another width than that of the register in silence. Both are refused here.
"""

from __future__ import annotations

import re
from typing import Any

from pallasite.codegen.translation.constants import escape, split_types
from pallasite.codegen.translation.emitter import Emitter, Handler
from pallasite.codegen.translation.types import element_type, vector_length
from pallasite.errors import CompilationError

_REGISTER_BITS = dict(b=1, c=16, h=16, r=32, l=64, f=32, d=64, q=128, N=64)
_IMMEDIATES = "nis"
_FLOAT_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64}
_SHARED_POINTER = "ptr addrspace(3)"

_MAY_END = re.compile(r"\b(?:exit|ret|trap|brkpt|call|brx)\b")
"""Instructions after which a thread may not go on."""

_WHOLE_WARPS = re.compile(r"\.(?:sync|aligned)\b")

_escaped: dict[str, str] = {}
_checked: dict[tuple[str, str, tuple[str, ...]], tuple[int, ...]] = {}


def inline_assembly(emitter: Emitter, operation: Any) -> None:
    """Assembly without side effects neither touches memory nor depends on it.

    Assembly with side effects, and what whole warps execute, is convergent: no control dependence
    may be added to it. What comes behind it will run, unless it may end the thread.
    """
    attributes = operation.attributes
    text, constraints = attributes["asm_string"].value, attributes["constraints"].value
    escaped = _escaped.get(text)
    if escaped is None:
        escaped = _escaped[text] = escape(text)
    values = emitter.values
    operands = [values[value] for value in operation.operation.operands]
    results = list(operation.operation.results)
    type_ = emitter.types[results[0].type] if results else "void"
    if emitter.device:
        key = (constraints, type_, tuple([kind for kind, _ in operands]))
        immediates = _checked.get(key)
        if immediates is None:
            immediates = _checked[key] = _check(*key)
        for index in immediates:
            if operands[index][1].startswith("%"):
                raise CompilationError(f"operand {index} of assembly must be a constant", got=text)
    effects = "has_side_effects" in attributes
    arguments = ", ".join([f"{kind} {name}" for kind, name in operands])
    word = "sideeffect " if effects else ""
    if not effects and "~{memory}" not in constraints:
        group = "#3" if _WHOLE_WARPS.search(text) else "#1"
    else:
        group = "#0" if _MAY_END.search(text) else "#2"
    call = f'call {type_} asm {word}"{escaped}", "{constraints}"({arguments}) {group}'
    if type_ != "void":  # Which may be the type of a result.
        emitter.define(operation, type_, call)
    else:
        emitter.statement(call)


def _check(constraints: str, result: str, types: tuple[str, ...]) -> tuple[int, ...]:
    """Checks constraints against types; returns the numbers of operands that are immediate."""
    words = [word for word in constraints.split(",") if word and not word.startswith("~")]
    outputs = [word for word in words if word.startswith("=")]
    inputs = words[len(outputs) :]
    if result == "void":
        results: list[str] = []
    elif result[0] == "{":
        results = split_types(result[1:-1])
    else:
        results = [result]
    if len(outputs) != len(results) or len(inputs) != len(types):
        raise CompilationError(
            f"assembly with {len(results)} results and {len(types)} operands",
            got=f"constraints {constraints!r}",
        )
    for word, type_ in zip(outputs + inputs, [*results, *types], strict=True):
        letter = word.lstrip("=&")
        if letter.isdigit():
            if int(letter) >= len(results) or results[int(letter)] != type_:
                raise CompilationError(
                    f"assembly operand of type {type_} tied to a result of another type",
                    got=f"constraints {constraints!r}",
                )
        elif letter in _REGISTER_BITS:
            _check_width(letter, type_, constraints)
        elif letter not in _IMMEDIATES or word.startswith("=") or len(letter) != 1:
            raise CompilationError(
                f"unknown assembly constraint {word!r}",
                got=f"constraints {constraints!r}",
                expected="letters of " + "".join(_REGISTER_BITS) + _IMMEDIATES + ", or numbers",
            )
    return tuple([index for index, word in enumerate(inputs) if word in _IMMEDIATES])


def _check_width(letter: str, type_: str, constraints: str) -> None:
    """A value may be narrower than a register of up to 32 bits, else their widths are equal."""
    if letter == "r" and type_ == _SHARED_POINTER:
        return
    have, want = _bits(type_), _REGISTER_BITS[letter]
    if have != want and (have > want or want > 32):
        raise CompilationError(
            f"assembly operand of type {type_} in a register of {want} bits",
            got=f"constraint {letter!r} in {constraints!r}",
        )


def _bits(type_: str) -> int:
    if type_.startswith("ptr"):
        return 64
    element = element_type(type_)
    bits = _FLOAT_BITS.get(element)
    if bits is None:
        bits = int(element[1:]) if element[1:].isdigit() else 0
    return bits * (vector_length(type_) or 1)


ASSEMBLY: dict[str, Handler] = {"llvm.inline_asm": inline_assembly}
