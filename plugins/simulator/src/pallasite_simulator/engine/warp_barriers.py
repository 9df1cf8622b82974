"""Barriers of lanes of a warp (PTX ISA 9.7.13.2, ``bar.warp.sync``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.engine.wait import Wait
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array, Values

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave

ALL_LANES = 0xFFFFFFFF
_KEY = "warp barrier"


class WarpBarriers:
    """The lanes of a wave that wait for others of their warps, which may be at other instructions.

    Unlike other instructions with a member mask, lanes converge here from wherever they are.
    """

    def __init__(self, wave: Wave):
        self.wave = wave
        self._masks: Array = np.zeros(wave.lane_count, np.uint32)
        self._waiting = 0
        self._instruction: Instruction | None = None

    def arrive(self, lanes: Lanes, members: Values, instruction: Instruction) -> list[Wait] | None:
        """Lanes arrive, and wait for all lanes that their masks name and that have not ended.

        Args:
          lanes: who.
          members: the mask of each, or of all.
          instruction: for messages.

        Raises:
          SimulationError: a mask does not name its lane, or lanes that wait for one another name
            different members.
        """
        whole = lanes.whole_warps and bool(np.all(members == ALL_LANES))
        if whole and not self._waiting:
            self._tell(lanes.numbers, np.uint32(ALL_LANES))
            return None
        numbers = lanes.numbers
        self._masks[numbers] = members
        own = self._masks[numbers] >> (numbers % WARP).astype(np.uint32) & 1
        self._require(own == 1, numbers, "whose member mask does not name it", instruction)
        # Lanes that have arrived and are named must agree on who takes part.
        present = np.flatnonzero(self._masks)
        masks = self._masks[present]
        rows = self._masks.reshape(-1, WARP)[present // WARP]
        named = masks[:, None] >> np.arange(WARP, dtype=np.uint32) & 1 == 1
        mismatched = (named & (rows != 0) & (rows != masks[:, None])).any(axis=1)
        self._require(
            ~mismatched, present, "with another mask than lanes that it names", instruction
        )
        self._instruction = instruction
        complete = self._complete()
        late = numbers[~complete[numbers]]
        if len(late) and self.wave.observer is not None:
            self.wave.observer.meets(late)
        self._waiting += len(late)
        return [Wait(late, _KEY, lambda: "other lanes of the warp")] if len(late) else None

    def recheck(self) -> bool:
        """Completes barriers that lack only lanes that have ended; whether there were any."""
        return bool(self._waiting) and bool(self._complete().any())

    def _complete(self) -> Array:
        """Lets those go on whose partners are all there; says which (for each lane of the wave)."""
        complete = self.wave.with_partners(self._masks)
        numbers = np.flatnonzero(complete)
        if len(numbers):
            self._tell(numbers, self._masks[numbers])
            if self.wave.observer is not None and self._instruction is not None:
                self.wave.tell_absent(numbers, self._masks, self._instruction)
            self._masks[numbers] = 0
            if self._waiting:
                self.wave.wake(_KEY, complete)
                self._waiting = int(np.count_nonzero(self._masks))
        return complete

    def _tell(self, numbers: Array, masks: Values) -> None:
        observer = self.wave.observer
        if observer is not None:
            observer.barriers(numbers, numbers // WARP << WARP | np.int64(1) * masks)

    def _require(self, right: Array, numbers: Array, what: str, instruction: Instruction) -> None:
        if right.all():
            return
        lane = int(numbers[~right][0])
        raise SimulationError(
            f"{self.wave.thread_name(lane)} executes an instruction {what}, in: {instruction.text}",
            got=f"{int(self._masks[lane]):#010x} in lane {lane % WARP}",
            location=instruction.location,
        )
