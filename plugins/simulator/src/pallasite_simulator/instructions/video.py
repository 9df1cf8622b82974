"""Video instructions: integer arithmetic on parts of registers (PTX ISA 9.7.17 and 9.7.18).

Scalar ones work on a byte, a half or all of each register, the others on two halves or four bytes
at a time. All numbers are computed in 64 bits, of which the result is cut. Chips have no such
instructions any more: ptxas emits others for them, and 13.0 does so wrongly where a negative number
is clamped for a part of the destination, which becomes the largest one; here it is the least.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pallasite_simulator.binder import U32, Binder, Source
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.modifiers import OPTIONAL, choose
from pallasite_simulator.ptx.syntax import Instruction, Negated, Operand, Part
from pallasite_simulator.types import Values

instructions = InstructionSet()

type Function = Callable[[Values, Values], Values]

_SIGNS = {"u32": False, "s32": True}
_SECOND = ("add", "min", "max")

_ARITHMETIC: Mapping[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "absdiff": lambda a, b: np.abs(a - b),
    "min": np.minimum,
    "max": np.maximum,
    # Halves are rounded away from zero.
    "avrg": lambda a, b: (a + b + (a + b >= 0)) >> 1,
}

_COMPARE: Mapping[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


# Operands -----------------------------------------------------------------------------------------


def _types(binder: Binder, count: int) -> tuple[list[str], Binder]:
    """The first modifiers, which are types, and the instruction with the rest of them."""
    modifiers = binder.instruction.modifiers
    types = list(modifiers[:count])
    if len(types) < count or any(one not in _SIGNS for one in types):
        raise binder.error(f"{count} types are missing", expected="each .u32 or .s32")
    rest = dataclasses.replace(binder.instruction, modifiers=modifiers[count:])
    return types, dataclasses.replace(binder, instruction=rest)


def _selection(operand: Operand) -> tuple[Operand, str]:
    return (operand.register, operand.selection) if isinstance(operand, Part) else (operand, "")


def _place(binder: Binder, selection: str) -> tuple[int, int]:
    """First bit and number of bits of a part such as ``b2``; of all bits for ``""``."""
    if not selection:
        return 0, 32
    bits = {"b": 8, "h": 16}[selection[0]]
    number = int(selection[1:])
    if len(selection) != 2 or (number + 1) * bits > 32:
        raise binder.error(f"there is no part .{selection}", expected=".b0 to .b3, .h0 or .h1")
    return number * bits, bits


def _extracted(values: Values, first: int, bits: int, signed: bool) -> Values:
    field = (values >> np.uint32(first)).astype(np.int64) & ((1 << bits) - 1)
    return field - ((field >> (bits - 1)) << bits) if signed else field


def _part(binder: Binder, operand: Operand, type: str) -> Source:
    """An operand as numbers of 64 bits."""
    inner, selection = _selection(operand)
    read, (first, bits) = binder.source(inner, U32), _place(binder, selection)
    return lambda lanes: _extracted(read(lanes), first, bits, _SIGNS[type])


def _clamped(values: Values, bits: int, signed: bool) -> Values:
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return np.clip(values, least, most)


def _cut(values: Values) -> Values:
    return (values & 0xFFFFFFFF).astype(np.uint32)


# One part of each register ------------------------------------------------------------------------


def _bind_scalar(
    binder: Binder, function: Function, types: list[str], saturates: bool, second: str
) -> Step:
    """``d = function(a, b)``, which is then clamped, combined with c or put into it.

    Args:
      types: of d, a and b.
    """
    operands = binder.instruction.operands
    destination, selection = _selection(binder.operand(0))
    third = bool(second or selection)
    binder.expect_operands(4 if third else 3)
    if second and selection:
        raise binder.error(f"a part of the destination and .{second} exclude each other")
    signed = _SIGNS[types[0]]
    first, bits = _place(binder, selection)
    mask = np.uint32(((1 << bits) - 1) << first)
    a, b = (_part(binder, one, kind) for one, kind in zip(operands[1:3], types[1:], strict=True))
    c = binder.source(3, U32) if third else None
    write = binder.destination(destination, U32)

    def step(lanes: Any) -> None:
        result = function(a(lanes), b(lanes)).astype(np.int64)
        if saturates:
            result = _clamped(result, bits, signed)
        if c is None:
            write(lanes, _cut(result))
        elif second:
            other = _extracted(c(lanes), 0, 32, signed)
            write(lanes, _cut(_ARITHMETIC[second](result, other)))
        else:
            placed = _cut(result) << np.uint32(first) & mask
            write(lanes, placed | c(lanes) & ~mask)

    return step


def _register_scalar(name: str) -> None:
    @instructions.register(f"v{name}")
    def bind(instruction: Instruction, binder: Binder) -> Step:
        types, binder = _types(binder, 3)
        form = choose(binder, sat=(OPTIONAL, "sat"), second=(OPTIONAL, *_SECOND))
        return _bind_scalar(binder, _ARITHMETIC[name], types, bool(form["sat"]), form["second"])


def _register_shift(name: str) -> None:
    @instructions.register(f"v{name}")
    def bind(instruction: Instruction, binder: Binder) -> Step:
        types, binder = _types(binder, 3)
        if types[2] != "u32":
            raise binder.error("the amount of a shift has the type .u32", got=f".{types[2]}")
        form = choose(
            binder, sat=(OPTIONAL, "sat"), mode=("clamp", "wrap"), second=(OPTIONAL, *_SECOND)
        )

        def shift(value: Values, amount: Values) -> Values:
            amount = np.minimum(amount, 32) if form["mode"] == "clamp" else amount & 31
            return value << amount if name == "shl" else value >> amount

        return _bind_scalar(binder, shift, types, bool(form["sat"]), form["second"])


for _name in ("add", "sub", "absdiff", "min", "max"):
    _register_scalar(_name)
for _name in ("shl", "shr"):
    _register_shift(_name)


@instructions.register("vset")
def bind_vset(instruction: Instruction, binder: Binder) -> Step:
    """1 where a comparison holds: PTX ISA, vset."""
    types, binder = _types(binder, 2)
    form = choose(binder, compare=tuple(_COMPARE), second=(OPTIONAL, *_SECOND))
    function = _COMPARE[form["compare"]]
    return _bind_scalar(binder, function, [types[0], *types], False, form["second"])


@instructions.register("vmad")
def bind_vmad(instruction: Instruction, binder: Binder) -> Step:
    """``a * b + c``, shifted to the right: PTX ISA, vmad; ``.po`` adds 1."""
    types, binder = _types(binder, 3)
    form = choose(
        binder, po=(OPTIONAL, "po"), sat=(OPTIONAL, "sat"), scale=(OPTIONAL, "shr7", "shr15")
    )
    binder.expect_operands(4)
    negated = [isinstance(one, Negated) for one in binder.instruction.operands[1:]]
    plain = [
        one.operand if isinstance(one, Negated) else one for one in binder.instruction.operands[1:]
    ]
    if form["po"] and any(negated):
        raise binder.error(".po and negated operands exclude each other")
    if sum(negated) > 1:
        raise binder.error("more than one operand is negated")
    a, b = (_part(binder, one, kind) for one, kind in zip(plain, types[1:], strict=False))
    signed = "s32" in types[1:] or any(negated)
    c = binder.source(plain[2], U32)
    write = binder.destination(0, U32)
    shift = int(form["scale"].removeprefix("shr") or 0)

    def step(lanes: Any) -> None:
        # Products of two numbers of 32 bits without sign need Python's integers.
        product = np.asarray(a(lanes)).astype(object) * np.asarray(b(lanes)).astype(object)
        other = np.asarray(_extracted(c(lanes), 0, 32, signed)).astype(object)
        if negated[0] or negated[1]:
            product = -product
        total = product + (-other if negated[2] else other) + bool(form["po"])
        total = total >> shift
        if form["sat"]:
            total = _clamped(total, 32, signed)
        write(lanes, np.asarray(total & 0xFFFFFFFF).astype(np.uint32))

    return step


# Several parts ------------------------------------------------------------------------------------


def _bind_parts(
    binder: Binder, count: int, function: Function, types: list[str], saturates: bool, adds: bool
) -> Step:
    """``function`` of ``count`` parts of a and b each, put into c or added to it."""
    binder.expect_operands(4)
    bits, letter = 32 // count, "bh"[count == 2]
    destination, mask = _selection(binder.operand(0))

    def places(selection: str, most: int) -> list[int]:
        numbers = [int(one) for one in reversed(selection[1:])]
        if selection[:1] != letter or any(number >= most for number in numbers):
            raise binder.error(f"there is no selection .{selection} of {count} parts")
        return numbers

    chosen = places(mask, count) if mask else list(range(count))
    if chosen != sorted(set(chosen)):
        raise binder.error(f"a mask names parts in order, the highest first, not .{mask}")
    sources = [_selection(one) for one in binder.instruction.operands[1:3]]
    whole = [binder.source(one, U32) for one, _ in sources]
    taken = [
        places(selection, 2 * count)
        if selection
        else list(range(number * count, number * count + count))
        for number, (_, selection) in enumerate(sources)
    ]
    if any(len(one) != count for one in taken):
        raise binder.error(f"{count} parts are to be selected")
    c, write = binder.source(3, U32), binder.destination(destination, U32)

    def step(lanes: Any) -> None:
        registers = [read(lanes) for read in whole]
        result = c(lanes).astype(np.int64)
        for place in chosen:
            operands = [
                _extracted(
                    registers[one[place] // count], one[place] % count * bits, bits, _SIGNS[kind]
                )
                for one, kind in zip(taken, types[1:], strict=True)
            ]
            value = function(*operands).astype(np.int64)
            if saturates:
                value = _clamped(value, bits, _SIGNS[types[0]])
            field = (1 << bits) - 1
            if adds:
                result = result + value
            else:
                shifted = place * bits
                result = result & ~(field << shifted) | (value & field) << shifted
        write(lanes, _cut(result))

    return step


def _register_parts(name: str, count: int) -> None:
    @instructions.register(f"v{name}{count}")
    def bind(instruction: Instruction, binder: Binder) -> Step:
        types, binder = _types(binder, 3)
        form = choose(binder, end=(OPTIONAL, "sat", "add"))
        return _bind_parts(
            binder, count, _ARITHMETIC[name], types, form["end"] == "sat", form["end"] == "add"
        )


def _register_comparison(count: int) -> None:
    @instructions.register(f"vset{count}")
    def bind(instruction: Instruction, binder: Binder) -> Step:
        types, binder = _types(binder, 2)
        form = choose(binder, compare=tuple(_COMPARE), end=(OPTIONAL, "add"))
        function = _COMPARE[form["compare"]]
        return _bind_parts(binder, count, function, ["u32", *types], False, bool(form["end"]))


for _count in (2, 4):
    for _name in ("add", "sub", "avrg", "absdiff", "min", "max"):
        _register_parts(_name, _count)
    _register_comparison(_count)
