"""``wgmma.fence``, ``wgmma.commit_group`` and ``wgmma.wait_group`` (PTX ISA 9.7.15.7).

MMAs are computed when they are issued, so these only matter to an observer.
"""

from __future__ import annotations

from pallasite_hopper.simulation.groups import Groups
from pallasite_simulator.binder import Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.tensor_core import check_whole_warps
from pallasite_simulator.ptx.syntax import Immediate, Instruction

instructions = InstructionSet()


@instructions.register("wgmma.fence", needs_warp=True)
def bind_fence(instruction: Instruction, binder: Binder) -> Step:
    """Orders accesses to registers before later MMAs: PTX ISA 9.7.15.7.1, wgmma.fence."""
    _check(instruction, binder, "fence", 0)

    def step(lanes: Lanes) -> None:
        check_whole_warps(lanes, instruction)
        observer = lanes.wave.observer
        if observer is not None:
            Groups.of(lanes.wave).fenced[lanes.warps] = True
            observer.registers_fenced(lanes.numbers)

    return step


@instructions.register("wgmma.commit_group", needs_warp=True)
def bind_commit(instruction: Instruction, binder: Binder) -> Step:
    """Makes a group of the MMAs begun: PTX ISA 9.7.15.7.2, wgmma.commit_group."""
    _check(instruction, binder, "commit_group", 0)

    def step(lanes: Lanes) -> None:
        check_whole_warps(lanes, instruction)
        if lanes.wave.observer is not None:
            Groups.of(lanes.wave).commit(lanes.warps)

    return step


@instructions.register("wgmma.wait_group", needs_warp=True)
def bind_wait(instruction: Instruction, binder: Binder) -> Step:
    """Waits for groups of MMAs: PTX ISA 9.7.15.7.3, wgmma.wait_group."""
    _check(instruction, binder, "wait_group", 1)
    pending = binder.operand(0)
    if not isinstance(pending, Immediate) or pending.kind != "int" or pending.value < 0:
        raise binder.error("the number of groups must be a constant", got=pending)
    allowed = pending.value

    def step(lanes: Lanes) -> None:
        check_whole_warps(lanes, instruction)
        if lanes.wave.observer is not None:
            Groups.of(lanes.wave).wait(lanes.warps, allowed)

    return step


def _check(instruction: Instruction, binder: Binder, name: str, operands: int) -> None:
    if instruction.modifiers != (name, "sync", "aligned"):
        raise binder.error("unknown form", expected=f"wgmma.{name}.sync.aligned")
    binder.expect_operands(operands)
