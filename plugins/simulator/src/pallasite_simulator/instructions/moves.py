"""Moves, selections and permutations of registers (PTX ISA 9.7.6 and 9.7.9)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pallasite_simulator.binder import PRED, U32, Binder, Source
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.modifiers import OPTIONAL, choose
from pallasite_simulator.ptx.syntax import (
    Immediate,
    Instruction,
    Operand,
    Register,
    Sink,
    Symbol,
    Vector,
)
from pallasite_simulator.types import TYPES, PtxType, Values

instructions = InstructionSet()

NUMBERS = ("u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")
BITS = ("b16", "b32", "b64")


# mov ----------------------------------------------------------------------------------------------


@instructions.register("mov")
def bind_mov(instruction: Instruction, binder: Binder) -> Step:
    """Copies a register, a special register, a constant or an address; packs the elements of a
    vector into one register, or unpacks them: PTX ISA 9.7.9, mov."""
    form = choose(binder, vector=(OPTIONAL, "v2", "v4"), type=("pred", *BITS, "b128", *NUMBERS))
    binder.expect_operands(2)
    kind = TYPES[form["type"]]
    target, origin = instruction.operands
    if form["vector"]:
        return _bind_vector_move(binder, kind, int(form["vector"][1]))
    if isinstance(target, Vector) and isinstance(origin, Vector):
        raise binder.error("only one operand can be a vector", expected=".v2 or .v4 for two")
    if isinstance(target, Vector):
        return _bind_unpack(binder, target, origin, kind)
    if isinstance(origin, Vector):
        return _bind_pack(binder, target, origin, kind)
    if isinstance(target, Sink):
        raise binder.error("the destination must be a register", got="_")
    return _bind_vector_move(binder, kind, 1)


def _bind_vector_move(binder: Binder, kind: PtxType, count: int) -> Step:
    """Moves each element, all of which are read first."""
    targets, origins = binder.elements(0), binder.elements(1)
    if len(targets) != count or len(origins) != count:
        raise binder.error(
            "wrong number of vector elements",
            got=f"{len(targets)} and {len(origins)}",
            expected=str(count),
        )
    writes = [binder.destination(_exact(binder, one, kind), kind) for one in targets]
    reads = [_copy(binder, _exact(binder, one, kind), kind) for one in origins]
    if count == 1:
        (write,), (read,) = writes, reads
        return lambda lanes: write(lanes, read(lanes))

    def step(lanes: Lanes) -> None:
        values = [read(lanes) for read in reads]
        for write, one in zip(writes, values, strict=True):
            write(lanes, one)

    return step


def _exact(binder: Binder, operand: Operand, kind: PtxType) -> Operand:
    """PTX ISA 9.4.1: registers of ``mov`` are just as wide as its type."""
    if isinstance(operand, Register) and TYPES[operand.type].bits != kind.bits:
        raise binder.error(
            f"register {operand.name} of type .{operand.type} has the wrong size",
            expected=f"{kind.bits} bits",
        )
    return operand


def _copy(binder: Binder, operand: Operand, kind: PtxType) -> Source:
    """The operand's values as a new array, which a register can keep."""
    if isinstance(operand, Symbol) and kind.kind == "float":
        raise binder.error(f"an address is no .{kind.name}")
    read = binder.source(operand, kind)
    if isinstance(operand, Immediate):
        if kind.bits == 128:
            return lambda lanes: np.tile(read(lanes), (lanes.count, 1))
        return read

    def copy(lanes: Lanes) -> Values:
        values = read(lanes)
        # Of some of the lanes, the values were gathered into a new array already.
        return values.copy() if lanes.full else values

    return copy


def _element_type(binder: Binder, vector: Vector, kind: PtxType) -> PtxType:
    """The type of the elements that a register of a type holds."""
    count = len(vector.elements)
    if kind.kind != "bits":
        raise binder.error(f"a .{kind.name} cannot be packed", expected=".b16 to .b128")
    name = f"b{kind.bits // count}"
    if count not in (1, 2, 4) or name not in TYPES:
        raise binder.error(f"there are no {count} elements in a .{kind.name}")
    return TYPES[name]


def _bind_pack(binder: Binder, target: Operand, vector: Vector, kind: PtxType) -> Step:
    """The first element goes into the lowest bits; elements that are left out (``_``) are zero."""
    element = _element_type(binder, vector, kind)
    write = binder.destination(_exact(binder, target, kind), kind)
    zero = Immediate(0)
    reads = [
        binder.source(zero if isinstance(one, Sink) else _exact(binder, one, element), element)
        for one in vector.elements
    ]
    words = (2,) if kind.bits == 128 else ()

    def step(lanes: Lanes) -> None:
        packed = np.empty((lanes.count, len(reads)), element.storage)
        for number, read in enumerate(reads):
            packed[:, number] = read(lanes)
        write(lanes, packed.view(kind.storage.base).reshape(-1, *words))

    return step


def _bind_unpack(binder: Binder, vector: Vector, origin: Operand, kind: PtxType) -> Step:
    element, count = _element_type(binder, vector, kind), len(vector.elements)
    read = _copy(binder, _exact(binder, origin, kind), kind)
    if all(isinstance(one, Sink) for one in vector.elements):
        raise binder.error("all elements are left out")
    writes = [
        (number, binder.destination(_exact(binder, one, element), element))
        for number, one in enumerate(vector.elements)
        if not isinstance(one, Sink)
    ]

    def step(lanes: Lanes) -> None:
        values = read(lanes)
        parts = np.ascontiguousarray(values).view(element.storage).reshape(-1, count)
        for number, write in writes:
            column = parts[:, number].copy()
            write(lanes, column if values.ndim else column[0])

    return step


# Selections ---------------------------------------------------------------------------------------


@instructions.register("selp")
def bind_selp(instruction: Instruction, binder: Binder) -> Step:
    """One of two values, by a predicate: PTX ISA 9.7.6.3, selp."""
    kind = TYPES[choose(binder, type=(*BITS, *NUMBERS))["type"]]
    return binder.elementwise(lambda a, b, p: np.where(p, a, b), kind, kind, kind, PRED)


@instructions.register("slct")
def bind_slct(instruction: Instruction, binder: Binder) -> Step:
    """One of two values, by the sign of a third: PTX ISA 9.7.6.4, slct.

    A float selects the first if it is not below zero and no NaN; with ``.ftz`` subnormal numbers
    count as zero.
    """
    flushes = instruction.has("ftz")
    types = [one for one in instruction.modifiers if one != "ftz"]
    if len(types) != 2 or len(instruction.modifiers) > 2 + flushes:
        raise binder.error("unknown modifiers", expected="slct.type.s32 or slct{.ftz}.type.f32")
    if types[0] not in (*BITS, *NUMBERS) or types[1] not in ("s32", "f32"):
        raise binder.error("wrong types", expected="slct.type.s32 or slct{.ftz}.type.f32")
    if flushes and types[1] != "f32":
        raise binder.error(".ftz is only for .f32")
    kind, selector = TYPES[types[0]], TYPES[types[1]]
    tiny = np.finfo(np.float32).smallest_normal

    def select(a: Values, b: Values, c: Values) -> Values:
        return np.where(c > -tiny if flushes else c >= 0, a, b)

    return binder.elementwise(select, kind, kind, kind, selector)


# Bytes --------------------------------------------------------------------------------------------


@instructions.register("prmt")
def bind_prmt(instruction: Instruction, binder: Binder) -> Step:
    """Four bytes picked from eight: PTX ISA 9.7.9, prmt.

    The selector has four bits for each byte of the result: which byte to take, and whether to fill
    it with copies of that byte's sign instead. With a mode, its lower two bits choose a pattern.
    """
    form = choose(binder, mode=(OPTIONAL, "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"), type=("b32",))
    if form["mode"]:
        patterns = np.array([_pattern(form["mode"], number) for number in range(4)], np.uint32)
        return binder.elementwise(
            lambda a, b, c: permute(a, b, patterns[c & 3]), U32, U32, U32, U32
        )
    selector = instruction.operands[3] if len(instruction.operands) == 4 else None
    if isinstance(selector, Immediate) and selector.kind == "int":
        fixed = _fixed_permutation(selector.value & 0xFFFF)
        return binder.elementwise(lambda a, b, c: fixed(a, b), U32, U32, U32, U32)
    return binder.elementwise(permute, U32, U32, U32, U32)


def _pattern(mode: str, number: int) -> int:
    """The selector that a mode means by a number from 0 to 3."""
    places = range(4)
    picked = {
        "f4e": [number + place for place in places],
        "b4e": [(number - place) % 8 for place in places],
        "rc8": [number] * 4,
        "ecl": [max(number, place) for place in places],
        "ecr": [min(number, place) for place in places],
        "rc16": [(number & 1) * 2 + (place & 1) for place in places],
    }[mode]
    return sum(byte << 4 * place for place, byte in enumerate(picked))


def permute(a: Values, b: Values, selector: Values) -> Values:
    """As ``prmt`` without a mode."""
    source = b.astype(np.uint64) << 32 | a
    result: Values = np.uint32(0)
    for place in range(4):
        choice = (selector >> 4 * place).astype(np.uint64)
        byte = (source >> ((choice & 7) << 3)).astype(np.uint8)
        filled = byte.view(np.int8) >> 7
        byte = np.where(choice & 8 != 0, filled.view(np.uint8), byte)
        result = result | byte.astype(np.uint32) << 8 * place
    return result


def _fixed_permutation(selector: int) -> Callable[[Values, Values], Values]:
    """As :func:`permute`, for one selector: bytes that move alike move together."""
    moves: dict[tuple[int, int], int] = {}
    signs = []
    for place in range(4):
        choice = selector >> 4 * place & 0xF
        operand, byte = choice >> 2 & 1, choice & 3
        if choice & 8:
            signs.append((operand, np.uint32(0x80 << 8 * byte), np.uint32(0xFF << 8 * place)))
        else:
            key = operand, place - byte
            moves[key] = moves.get(key, 0) | 0xFF << 8 * place
    steps = [(operand, 8 * by, np.uint32(mask)) for (operand, by), mask in moves.items()]

    def apply(a: Values, b: Values) -> Values:
        result: Values = np.uint32(0)
        for operand, by, mask in steps:
            word = b if operand else a
            result = result | (word << by if by >= 0 else word >> -by) & mask
        for operand, sign, mask in signs:
            word = b if operand else a
            result = result | np.where(word & sign != 0, mask, np.uint32(0))
        return result

    return apply
