"""``setmaxnreg``: warps of a block release registers, and wait for those of others.

At the launch every lane has an equal share of the multiprocessor's registers, as far as the
kernel's directives let it. What is not allocated then cannot be requested later.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallasite_simulator.binder import Binder
from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.engine.wait import Wait
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.tensor_core import check_whole_warps
from pallasite_simulator.ptx.syntax import Immediate, Instruction

instructions = InstructionSet()

LEAST, MOST, UNIT = 24, 256, 8

FILE = 65536
"""Registers of a multiprocessor."""


class Registers:
    """Registers of the warps of a wave.

    Attributes:
      at_launch: of each lane when the kernel starts.
      held: of each lane of each warp.
      free: of each block, released and not requested.
    """

    def __init__(self, wave: Wave, at_launch: int):
        self.at_launch = at_launch
        self.held = np.full(wave.lane_count // WARP, at_launch, np.int64)
        self.free = np.zeros(wave.block_count, np.int64)

    @classmethod
    def of(cls, wave: Wave, at_launch: int) -> Registers:
        """Those of a wave."""
        found: Any = wave.resources.get("registers")
        if found is None:
            found = wave.resources["registers"] = cls(wave, at_launch)
        result: Registers = found
        return result


def registers_at_launch(directives: dict[str, tuple[int, ...]], threads: int) -> int:
    """The most registers that each lane of a kernel can have when it starts."""
    blocks = directives.get("minnctapersm", (1,))[0]
    warps = -(-threads // WARP)
    share = FILE // (warps * WARP * blocks) // UNIT * UNIT
    return min(MOST, share, *directives.get("maxnreg", (MOST,)))


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
    wanted = int(count.value)
    if not LEAST <= wanted <= MOST or wanted % UNIT:
        raise binder.error(
            "wrong number of registers",
            got=wanted,
            expected=f"a multiple of {UNIT} from {LEAST} to {MOST}",
        )
    directives = dict(binder.program.function.directives)
    increases = instruction.modifiers[0] == "inc"

    def step(lanes: Lanes) -> list[Wait] | None:
        check_whole_warps(lanes, instruction)
        wave = lanes.wave
        registers = Registers.of(
            wave, registers_at_launch(directives, int((wave.lane_block == 0).sum()))
        )
        late = []
        for warp in lanes.warps:
            block = int(wave.lane_block[warp * WARP])
            more = (wanted - int(registers.held[warp])) * WARP
            if more > 0 and not increases:
                raise SimulationError(
                    "setmaxnreg.dec to more registers than a lane has",
                    got=f"{wanted}, a lane has {registers.held[warp]}",
                    expected="fewer, or setmaxnreg.inc",
                    location=instruction.location,
                )
            if more < 0 and increases:
                # A lane starts with fewer than its share if the kernel never needs all of them.
                registers.held[warp] = wanted
                continue
            if more > registers.free[block]:
                late.append(warp)
                continue
            registers.free[block] -= more
            registers.held[warp] = wanted
            if more < 0:
                wave.wake(("registers", block))
        if not late:
            return None
        waits = []
        for block in {int(wave.lane_block[warp * WARP]) for warp in late}:
            mine = [w for w in late if int(wave.lane_block[w * WARP]) == block]
            numbers = (np.array(mine)[:, None] * WARP + np.arange(WARP)).reshape(-1)
            waits.append(
                Wait(
                    numbers,
                    ("registers", block),
                    _description(registers, block, wanted),
                    again=True,
                )
            )
        return waits

    return step


def _description(registers: Registers, block: int, wanted: int) -> Any:
    return lambda: (
        f"setmaxnreg.inc to {wanted} registers per lane: a lane starts with"
        f" {registers.at_launch}, and other warps have released {registers.free[block]} registers"
    )
