"""Which variables of shared memory an instruction may access, by where its address comes from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pallasite_simulator.engine.program import registers_in
from pallasite_simulator.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Register,
    Symbol,
)

if TYPE_CHECKING:
    from pallasite_simulator.engine.program import Program

_COPY = ("mov", "cvt", "cvta", "mapa")
_SUM = ("add", "sub", "mad")
_ONE_ADDRESS = ("ld", "st", "atom", "red", "ldmatrix", "stmatrix", "cp")


@functools.lru_cache(maxsize=16)
def _uses(program: Program) -> tuple[list[Instruction], dict[str, list[Instruction]]]:
    """The instructions with a symbol among their sources, and those that read each register."""
    symbolic: list[Instruction] = []
    readers: dict[str, list[Instruction]] = {}
    for entry in program.code:
        one = entry.instruction
        if not one.operands or isinstance(one.operands[0], Address):
            continue
        for operand in one.operands[1:]:
            if type(operand) is Register:
                known = readers.get(operand.name)
                if known is None:
                    readers[operand.name] = [one]
                else:
                    known.append(one)
            elif type(operand) is Symbol:
                symbolic.append(one)
    return symbolic, readers


def _follow[T](
    program: Program,
    known: dict[str, frozenset[T] | None],
    result: Callable[[Instruction], frozenset[T] | None],
    most: int | None = None,
) -> None:
    """Adds what instructions make of symbols and of registers, until nothing changes any more.

    What is known of a register only grows, from nothing to None (anything), and so do the results;
    so their order does not matter.

    Args:
      program: all its instructions count.
      known: what is known of registers, by name; changed in place.
      result: what an instruction writes, by what is known.
      most: how many elements are told apart; more are None.
    """
    symbolic, readers = _uses(program)
    nothing: frozenset[T] = frozenset()
    left = list(symbolic)
    while left:
        one = left.pop()
        found = result(one)
        if found == nothing:
            continue
        for register in registers_in(one.operands[:1]):
            before = known.get(register.name, nothing)
            both = None if before is None or found is None else before | found
            if both is not None and most is not None and len(both) > most:
                both = None
            if both != before:
                known[register.name] = both
                left += readers.get(register.name, ())


@functools.lru_cache(maxsize=16)
def provenance(program: Program, variables: tuple[str, ...]) -> Provenance:
    """That of a program and of some of its variables; made once for all its waves."""
    return Provenance(program, variables)


type Names = frozenset[str] | None
"""Of variables; none for a number that is no address, None if nothing is known."""

_NUMBER: Names = frozenset()


class Provenance:
    """Follows the addresses of variables through moves, sums and choices of a program.

    What is added to the address of a variable stays an address of that variable: a pointer may not
    leave its array (C++ [expr.add]), and compilers place arrays as they like. Addresses that are
    made in other ways, or loaded, are not followed. All that is ever written to a register counts,
    wherever that is.
    """

    def __init__(self, program: Program, variables: Iterable[str]):
        self._variables = frozenset(variables)
        self._known: dict[str, Names] = {}
        if len(self._variables) > 1:
            _follow(program, self._known, self._result)

    def of(self, instruction: Instruction) -> Names:
        """The variables that an access belongs to; None or empty if that is not known."""
        if instruction.opcode not in _ONE_ADDRESS or instruction.has("bulk"):
            return None
        for operand in instruction.operands[:2]:
            if isinstance(operand, Address):
                return None if operand.base is None else self._operand(operand.base)
        return None

    def _operand(self, operand: Operand) -> Names:
        if isinstance(operand, Symbol):
            return frozenset({operand.name}) & self._variables or None
        return self._known.get(operand.name, _NUMBER) if isinstance(operand, Register) else _NUMBER

    def _result(self, instruction: Instruction) -> Names:
        opcode, operands = instruction.opcode, instruction.operands
        if not operands or isinstance(operands[0], Address):
            return _NUMBER
        if opcode in _COPY:
            return self._operand(operands[1])
        sources = [self._operand(one) for one in operands[1:]]
        if opcode in ("ld", "call") or all(one == _NUMBER for one in sources):
            return _NUMBER
        if opcode == "selp":
            first, second = sources[:2]
            return None if first is None or second is None else first | second
        if opcode in _SUM:
            *added, base = sources if opcode == "mad" else sources[::-1]
            if opcode == "add" and base == _NUMBER:
                (base,), added = added, [base]
            return base if all(one == _NUMBER for one in added) else None
        return None if opcode != "setp" else _NUMBER


@functools.lru_cache(maxsize=16)
def starts_of_accesses(program: Program, variables: tuple[str, ...]) -> Starts:
    """Those of a program; made once for all its waves."""
    return Starts(program, variables)


type Numbers = frozenset[int] | None
"""Constant parts of addresses; none for a number that is no address, None if nothing is known."""

_NO_ADDRESS: Numbers = frozenset()

_MOST_STARTS = 8


class Starts:
    """The constant parts of the addresses of a program's accesses.

    What is not constant is left out, and so is what a compiler has added to it. All that is ever
    written to a register counts, wherever that is.
    """

    def __init__(self, program: Program, variables: Iterable[str]):
        self._variables = frozenset(variables)
        self._known: dict[str, Numbers] = {}
        if self._variables:
            _follow(program, self._known, self._result, _MOST_STARTS)

    def of(self, instruction: Instruction) -> Numbers:
        """The constant parts of the addresses of an access, relative to the variable; None or
        empty if they are not known."""
        if instruction.opcode not in ("ld", "st", "atom", "red") or instruction.has("bulk"):
            return None
        for operand in instruction.operands[:2]:
            if isinstance(operand, Address):
                if operand.base is None:
                    return None
                return _plus(self._operand(operand.base), operand.offset)
        return None

    def _operand(self, operand: Operand) -> Numbers:
        if isinstance(operand, Symbol):
            return frozenset({0}) if operand.name in self._variables else _NO_ADDRESS
        if isinstance(operand, Register):
            return self._known.get(operand.name, _NO_ADDRESS)
        return _NO_ADDRESS

    def _result(self, instruction: Instruction) -> Numbers:
        opcode, operands = instruction.opcode, instruction.operands
        if not operands or isinstance(operands[0], Address):
            return _NO_ADDRESS
        if opcode in _COPY:
            return self._operand(operands[1])
        sources = [self._operand(one) for one in operands[1:]]
        if opcode in ("ld", "call", "setp") or all(one == _NO_ADDRESS for one in sources):
            return _NO_ADDRESS
        if opcode == "add" and len(sources) == 2:
            first, second = sources
            if second == _NO_ADDRESS:
                return _plus(first, _constant(operands[2]))
            if first == _NO_ADDRESS:
                return _plus(second, _constant(operands[1]))
        return None


def _constant(operand: Operand) -> int:
    return operand.value if isinstance(operand, Immediate) else 0


def _plus(numbers: Numbers, constant: int) -> Numbers:
    return None if numbers is None else frozenset(one + constant for one in numbers)
