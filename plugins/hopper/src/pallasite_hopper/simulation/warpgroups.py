"""Warpgroups: four warps of a block, the first of which has a number divisible by four."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.engine.wait import Wait
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.instructions.tensor_core import check_whole_warps
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

WARPS = 4
THREADS = WARPS * WARP


class Convergence:
    """Where the warps of warpgroups wait for each other before one instruction."""

    def __init__(self, instruction: Instruction):
        self._instruction = instruction

    def arrive(self, lanes: Lanes) -> tuple[Lanes | None, list[Wait]]:
        """Whole warpgroups, of these lanes and of those that wait here, and who waits now.

        Those who wait go on behind the instruction: it is executed for them by the last to come.

        Raises:
          SimulationError: a warp is not whole, or the block has no whole warpgroup there.
        """
        wave = lanes.wave
        check_whole_warps(lanes, self._instruction)
        per_block = wave.lanes_per_block // WARP
        absent = self not in wave.resources
        if absent and lanes.full and per_block % WARPS == 0:
            return lanes, []
        slots = self._slots(wave, lanes.warps)
        if absent and _whole(slots):
            return lanes, []
        return self._assemble(lanes, slots)

    def _slots(self, wave: Wave, warps: Array) -> Array:
        """Numbers of warps, as if all blocks had whole warpgroups only."""
        per_block = wave.lanes_per_block // WARP
        if per_block % WARPS == 0:
            return warps
        blocks, inside = np.divmod(warps, per_block)
        short = inside >= per_block // WARPS * WARPS
        if short.any():
            lane = int(warps[short][0]) * WARP
            raise SimulationError(
                f"all 128 threads of a warpgroup must execute this instruction,"
                f" in: {self._instruction.text}",
                got=f"{wave.thread_name(lane)}, in a block of {wave.geometry.threads} threads",
                location=self._instruction.location,
            )
        return blocks * _padded(per_block) + inside

    def _assemble(self, lanes: Lanes, slots: Array) -> tuple[Lanes | None, list[Wait]]:
        wave = lanes.wave
        per_block = wave.lanes_per_block // WARP
        arrived: Any = wave.resources.get(self)
        if arrived is None:
            arrived = np.zeros(wave.block_count * _padded(per_block), np.bool_)
        arrived[slots] = True
        complete = np.repeat(arrived.reshape(-1, WARPS).all(axis=1), WARPS)
        late = ~complete[slots]
        waits = []
        if late.any():
            numbers = (lanes.warps[late][:, None] * WARP + np.arange(WARP)).reshape(-1)
            waits.append(Wait(numbers, self, lambda: "the other warps of its warpgroup"))
        arrived &= ~complete
        if arrived.any():
            wave.resources[self] = arrived
        else:
            wave.resources.pop(self, None)
        if not complete.any():
            return None, waits
        blocks, inside = np.divmod(np.flatnonzero(complete), _padded(per_block))
        warps = blocks * per_block + inside
        converged = (warps[:, None] * WARP + np.arange(WARP)).reshape(-1)
        mask = np.zeros(wave.lane_count, np.bool_)
        mask[converged] = True
        wave.wake(self, mask)
        return wave.lanes(converged), waits


def _padded(warps: int) -> int:
    return -(-warps // WARPS) * WARPS


def _whole(slots: Array) -> bool:
    """Whether ascending numbers of warps are those of whole warpgroups."""
    first = slots[::WARPS]
    return (
        len(slots) % WARPS == 0
        and not (first % WARPS).any()
        and bool((slots[WARPS - 1 :: WARPS] - first == WARPS - 1).all())
    )
