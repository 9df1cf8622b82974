"""``setmaxnreg``: registers do not run out in the simulator, so only its form is checked."""

from __future__ import annotations

from pallasite_simulator.binder import Binder
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.tensor_core import check_whole_warps
from pallasite_simulator.ptx.syntax import Immediate, Instruction

instructions = InstructionSet()

LEAST, MOST, UNIT = 24, 256, 8


@instructions.register("setmaxnreg", needs_warp=True)
def bind_register_count(instruction: Instruction, binder: Binder) -> Step:
    """Releases or requests registers: PTX ISA 9.7.19.5, setmaxnreg."""
    if instruction.modifiers not in (
        ("inc", "sync", "aligned", "u32"),
        ("dec", "sync", "aligned", "u32"),
    ):
        raise binder.error(
            "unknown form", expected="setmaxnreg.inc.sync.aligned.u32, or the same with .dec"
        )
    binder.expect_operands(1)
    count = binder.operand(0)
    if not isinstance(count, Immediate) or count.kind != "int":
        raise binder.error("the number of registers must be a constant", got=count)
    if not LEAST <= count.value <= MOST or count.value % UNIT:
        raise binder.error(
            "wrong number of registers",
            got=count.value,
            expected=f"a multiple of {UNIT} from {LEAST} to {MOST}",
        )

    def step(lanes: Lanes) -> None:
        check_whole_warps(lanes, instruction)

    return step
