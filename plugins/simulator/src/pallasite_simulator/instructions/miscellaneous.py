"""Instructions that change nothing that a program can see (PTX ISA 9.7.13.13 and 9.7.19)."""

from __future__ import annotations

from pallasite_simulator.binder import U32, Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.modifiers import OPTIONAL, choose
from pallasite_simulator.ptx.syntax import Immediate, Instruction

instructions = InstructionSet()


@instructions.register("nanosleep")
def bind_nanosleep(instruction: Instruction, binder: Binder) -> Step:
    """Lets other threads go first: PTX ISA 9.7.19.2, nanosleep."""
    choose(binder, type=("u32",))
    binder.expect_operands(1)
    binder.source(0, U32)
    return lambda lanes: lanes.wave.poll()


@instructions.register("pmevent")
def bind_pmevent(instruction: Instruction, binder: Binder) -> Step:
    """An event for a profiler, of which there is none here: PTX ISA 9.7.19.3, pmevent."""
    masked = choose(binder, form=(OPTIONAL, "mask"))["form"]
    binder.expect_operands(1)
    number = binder.operand(0)
    if not isinstance(number, Immediate) or not 0 <= number.value < (2**16 if masked else 16):
        raise binder.error("the event must be a constant", got=number, expected="0 to 15")
    return _nothing


@instructions.register("griddepcontrol")
def bind_griddepcontrol(instruction: Instruction, binder: Binder) -> Step:
    """Dependence on the grids before and after, which never run at the same time here: PTX ISA
    9.7.13.13, griddepcontrol."""
    choose(binder, action=("wait", "launch_dependents"))
    binder.expect_operands(0)
    return _nothing


def _nothing(lanes: Lanes) -> None:
    """Has no effect."""
