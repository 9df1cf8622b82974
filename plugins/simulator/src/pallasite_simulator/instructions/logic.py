"""Logic and shifts (PTX ISA 9.7.8)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from pallasite_simulator.binder import PRED, U32, Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.bit_fields import shift_amount
from pallasite_simulator.instructions.modifiers import OPTIONAL, choose
from pallasite_simulator.ptx.syntax import Immediate, Instruction, Pair
from pallasite_simulator.types import TYPES, Values

instructions = InstructionSet()

BITS = ("b16", "b32", "b64")

_BINARY = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@instructions.register("and", "or", "xor")
def bind_binary(instruction: Instruction, binder: Binder) -> Step:
    """Bitwise logic: PTX ISA 9.7.8.1 (and), 9.7.8.2 (or), 9.7.8.3 (xor)."""
    kind = TYPES[choose(binder, type=("pred", *BITS))["type"]]
    return binder.elementwise(_BINARY[instruction.opcode], kind, kind, kind)


@instructions.register("not")
def bind_not(instruction: Instruction, binder: Binder) -> Step:
    """Complement: PTX ISA 9.7.8.4, not."""
    kind = TYPES[choose(binder, type=("pred", *BITS))["type"]]
    return binder.elementwise(np.bitwise_not, kind, kind)


@instructions.register("cnot")
def bind_cnot(instruction: Instruction, binder: Binder) -> Step:
    """Whether a number is zero, as 1 or 0: PTX ISA 9.7.8.5, cnot."""
    kind = TYPES[choose(binder, type=BITS)["type"]]
    return binder.elementwise(lambda a: (a == 0).astype(kind.storage), kind, kind)


# Any function of three operands -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Formula:
    """``operation`` of other formulas, or an operand (by its number), or 0 or ~0 (number 3 or 4).

    ``operations`` is how many there are in all.
    """

    operands: tuple[_Formula, ...] = ()
    operation: Any = None
    number: int = 0
    operations: int = 0

    def __call__(self, values: tuple[Values, ...]) -> Values:
        if self.operation is None:
            return values[self.number]
        return self.operation(*[operand(values) for operand in self.operands])


_LEAVES = (0xF0, 0xCC, 0xAA, 0x00, 0xFF)
"""Truth tables of a, b and c, as ``lop3`` counts them, and of the constants."""

_ZERO_AND_ONES = (np.uint32(0), np.uint32(0xFFFFFFFF))


@functools.cache
def _formulas() -> dict[int, _Formula]:
    """A formula of as few operations as possible for each of the 256 truth tables."""
    found = {table: _Formula(number=number) for number, table in enumerate(_LEAVES)}
    by_size = [list(_LEAVES)]
    while len(found) < 256:
        size = len(by_size)
        new: list[int] = []

        def add(
            table: int, operation: Any, *operands: int, new: list[int] = new, size: int = size
        ) -> None:
            if table not in found:
                parts = tuple(found[one] for one in operands)
                found[table] = _Formula(parts, operation, 0, size)
                new.append(table)

        for one in by_size[-1]:
            add(one ^ 0xFF, np.bitwise_not, one)
        for left_size in range((size + 1) // 2):
            for left in by_size[left_size]:
                for right in by_size[size - 1 - left_size]:
                    add(left & right, np.bitwise_and, left, right)
                    add(left | right, np.bitwise_or, left, right)
                    add(left ^ right, np.bitwise_xor, left, right)
        by_size.append(new)
    return found


@instructions.register("lop3")
def bind_lop3(instruction: Instruction, binder: Binder) -> Step:
    """Any bitwise logic of three operands, given by its truth table: PTX ISA 9.7.8.6, lop3.

    With ``.or`` or ``.and``, a predicate gets whether the result is not zero, combined with another
    predicate.
    """
    form = choose(binder, combine=(OPTIONAL, "or", "and"), type=("b32",))
    binder.expect_operands(6 if form["combine"] else 5)
    table = binder.operand(4)
    if not isinstance(table, Immediate) or table.kind != "int":
        raise binder.error("the truth table must be a constant", got=table)
    formula = _formulas()[table.value & 0xFF]
    reads = [binder.source(1 + number, U32) for number in range(3)]

    def compute(lanes: Lanes) -> Values:
        values = (*[read(lanes) for read in reads], *_ZERO_AND_ONES)
        result = formula(values)
        # A register itself must not be given to another one.
        return result if formula.operation else +result

    if not form["combine"]:
        write = binder.destination(0, U32)
        return lambda lanes: write(lanes, compute(lanes))
    pair = binder.operand(0)
    if not isinstance(pair, Pair):
        raise binder.error("the predicate for the result is missing", expected="d|p")
    write_bits = binder.destination(pair.first, U32)
    write_predicate = binder.destination(pair.second, PRED)
    combine, predicate = _BINARY[form["combine"]], binder.source(5, PRED)

    def step(lanes: Lanes) -> None:
        result = compute(lanes)
        truth = combine(result != 0, predicate(lanes))
        write_bits(lanes, result)
        write_predicate(lanes, truth)

    return step


# Shifts -------------------------------------------------------------------------------------------


@instructions.register("shf")
def bind_shf(instruction: Instruction, binder: Binder) -> Step:
    """Funnel shift of two words, the first of which is the lower one: PTX ISA 9.7.8.7, shf.

    ``.l`` gives the upper word of the result, ``.r`` the lower one.
    """
    form = choose(binder, direction=("l", "r"), mode=("clamp", "wrap"), type=("b32",))
    left, wraps = form["direction"] == "l", form["mode"] == "wrap"

    def shift(low: Values, high: Values, amount: Values) -> Values:
        amount = (amount & 31 if wraps else np.minimum(amount, 32)).astype(np.uint64)
        both = high.astype(np.uint64) << 32 | low
        return (both << amount >> 32 if left else both >> amount).astype(np.uint32)

    return binder.elementwise(shift, U32, U32, U32, U32)


@instructions.register("shl")
def bind_shl(instruction: Instruction, binder: Binder) -> Step:
    """Shift to the left, to zero by the width or more: PTX ISA 9.7.8.8, shl."""
    kind = TYPES[choose(binder, type=BITS)["type"]]
    return binder.elementwise(lambda a, n: a << shift_amount(n, kind.bits), kind, kind, U32)


@instructions.register("shr")
def bind_shr(instruction: Instruction, binder: Binder) -> Step:
    """Shift to the right, which fills in zeros or copies of the sign: PTX ISA 9.7.8.9, shr.

    Amounts of the width or more leave only those.
    """
    names = (*BITS, "u16", "u32", "u64", "s16", "s32", "s64")
    kind = TYPES[choose(binder, type=names)["type"]]
    return binder.elementwise(
        lambda a, n: a >> shift_amount(n, kind.bits).astype(kind.dtype), kind, kind, U32
    )
