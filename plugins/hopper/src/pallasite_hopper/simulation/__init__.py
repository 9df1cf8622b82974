"""What the simulator needs to run Hopper's instructions; imported only when it asks."""

from __future__ import annotations

from pallasite_hopper.simulation import synchronization, wgmma
from pallasite_simulator.instruction_set import InstructionSet

instructions = InstructionSet()
instructions.extend(wgmma.instructions, synchronization.instructions)
