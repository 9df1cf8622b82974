"""Which variables of shared memory an instruction may access, by where its address comes from."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pallasite_simulator.engine.program import registers_in
from pallasite_simulator.ptx.syntax import Address, Instruction, Operand, Register, Symbol

if TYPE_CHECKING:
    from pallasite_simulator.engine.program import Program

_COPY = ("mov", "cvt", "cvta", "mapa")
_SUM = ("add", "sub", "mad")
_ONE_ADDRESS = ("ld", "st", "atom", "red", "ldmatrix", "stmatrix", "cp")


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
        instructions = [entry.instruction for entry in program.code]
        changed = len(self._variables) > 1
        while changed:
            changed = False
            for one in instructions:
                found = self._result(one)
                if found == _NUMBER:
                    continue
                for register in registers_in(one.operands[:1]):
                    before = self._known.get(register.name, _NUMBER)
                    both = None if before is None or found is None else before | found
                    if both != before:
                        self._known[register.name] = both
                        changed = True

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
