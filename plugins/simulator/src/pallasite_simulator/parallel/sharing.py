"""Whether the blocks of a kernel can run in different processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallasite_simulator.statistics.kinds import space_of

if TYPE_CHECKING:
    from pallasite_simulator.engine.program import Program
    from pallasite_simulator.ptx.syntax import Instruction

_STRONG = ("volatile", "relaxed", "acquire", "release", "mmio")


def obstacle(program: Program) -> str | None:
    """Why blocks of a kernel must run in one process; None if they need nothing of one another.

    Blocks may communicate through atomic operations, reductions by bulk copies, and strong loads
    and stores of global memory, all of which need one memory and one scheduler. Whether they do
    cannot be seen from the text: that they could is enough.
    """
    for entry in program.code:
        what = _communication(entry.instruction)
        if what is not None:
            place = entry.instruction.location or entry.instruction.position
            return f"its blocks may communicate through {what} ({place})"
    return None


def _communication(instruction: Instruction) -> str | None:
    opcode = instruction.opcode
    if opcode in ("atom", "red", "multimem"):
        if space_of(instruction) in ("global", "generic"):
            return "atomic operations"
    elif opcode == "cp":
        if instruction.has("reduce") and not _stays_in_cluster(instruction):
            return "reductions by bulk copies"
    elif opcode in ("ld", "st"):
        if space_of(instruction) in ("global", "generic") and any(map(instruction.has, _STRONG)):
            return "strong loads and stores"
    elif opcode == "clusterlaunchcontrol":
        return "the cancellation of other clusters"
    elif opcode == "call":
        return "the heap" if "malloc" in instruction.text else None
    return None


def _stays_in_cluster(instruction: Instruction) -> bool:
    """Whether the destination, which is named first, is shared memory."""
    spaces = [one for one in instruction.modifiers if one.partition("::")[0] in _SPACES]
    return bool(spaces) and spaces[0].startswith("shared")


_SPACES = ("global", "shared")
