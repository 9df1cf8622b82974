"""Arithmetic that integers and floats share, given to the module of its type.

Integer instructions are PTX ISA 9.7.1; those of floats are 9.7.3 (f32 and f64), 9.7.4 (half
precision) and 9.7.5 (mixed precision).
"""

from __future__ import annotations

from pallasite_simulator.binder import Binder
from pallasite_simulator.instruction_set import Bind, InstructionSet, Step
from pallasite_simulator.instructions import floats, integers
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import PtxType

instructions = InstructionSet()


@instructions.register("add", "sub", "mul", "mad", "fma", "div", "rem", "abs", "neg", "min", "max")
def bind_arithmetic(instruction: Instruction, binder: Binder) -> Step:
    """Arithmetic of any type: PTX ISA 9.7.1 for integers, 9.7.3 to 9.7.5 for floats.

    The last type decides: it is that of the operands.
    """
    if not binder.types:
        raise binder.error("the instruction has no type")
    module = floats if is_float(binder.types[-1]) else integers
    bind: Bind | None = getattr(module, f"bind_{instruction.opcode}", None)
    if bind is None:
        raise binder.error(f"{instruction.opcode} has no type .{binder.types[-1].name}")
    return bind(instruction, binder)


def is_float(kind: PtxType) -> bool:
    """Whether values of a type are floats, or several of them."""
    return kind.kind == "float" or (kind.kind == "packed" and kind.name not in ("u16x2", "s16x2"))
