"""What the simulator needs to run Blackwell's instructions; imported only when it asks."""

from __future__ import annotations

from pallasite_blackwell.simulation import (
    allocation,
    completion,
    copies,
    launch_control,
    moves,
    products,
    warp_products,
)
from pallasite_simulator.instruction_set import InstructionSet

instructions = InstructionSet()
instructions.extend(
    allocation.instructions,
    completion.instructions,
    copies.instructions,
    launch_control.instructions,
    moves.instructions,
    products.instructions,
    warp_products.instructions,
)
