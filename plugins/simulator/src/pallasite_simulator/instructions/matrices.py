"""Matrix instructions of warps (PTX ISA 9.7.14)."""

from __future__ import annotations

from pallasite_simulator.instruction_set import InstructionSet
from pallasite_simulator.instructions import matrix_moves, mma, wmma

instructions = InstructionSet()
instructions.extend(matrix_moves.instructions, mma.instructions, wmma.instructions)
