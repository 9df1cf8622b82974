"""Where ``tcgen05.fence`` is missing: PTX ISA 9.7.16.6.4.

What one warp did in tensor memory comes before what another does there only if the first fenced it
(``before_thread_sync``, or ``tcgen05.commit``, which implies it) before they synchronized, and the
other (``after_thread_sync``) behind that. That they synchronized is checked by the sanitizer of the
simulator; here, whether there were fences. Fences of any lane count for its whole warp.
"""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np

from pallasite_blackwell.simulation.tensor_memory import COLUMNS, LANES, TensorMemory
from pallasite_simulator.engine.lanes import WARP
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

GROUP = "fences"
"""The group of checks of the sanitizer."""

_ROWS = 16
"""Lanes that are looked at together: no instruction uses fewer of them."""

_NOBODY = -1

_VERBS = {"read": ("reads", "read"), "write": ("writes", "wrote")}


class ThreadFences:
    """Who used which columns last, and which warps had fences since."""

    def __init__(self, memory: TensorMemory):
        wave = memory.wave
        size = wave.block_count * (LANES // _ROWS) * COLUMNS
        self._memory = memory
        self._time = 0
        # By kind of access: the warp that made the last one, and when.
        self._warps = {kind: np.full(size, _NOBODY, np.int32) for kind in _VERBS}
        self._times = {kind: np.zeros(size, np.int64) for kind in _VERBS}
        self._before: dict[int, list[int]] = {}
        self._after: dict[int, int] = {}

    @classmethod
    def of(cls, wave: Wave) -> ThreadFences | None:
        """That of a wave, if fences are checked."""
        observer = wave.observer
        if observer is None or not observer.checks(GROUP):
            return None
        found: Any = wave.resources.get("tensor memory fences")
        if found is None:
            found = wave.resources["tensor memory fences"] = cls(TensorMemory.of(wave))
        result: ThreadFences = found
        return result

    def fenced(self, lanes: Array, moment: str) -> None:
        """Lanes execute a fence (``"before"`` or ``"after"``)."""
        self._time += 1
        for warp in np.unique(lanes // WARP).tolist():
            if moment == "after":
                self._after[warp] = self._time
            else:
                self._before.setdefault(warp, []).append(self._time)

    def forget(self, block: int, start: int, count: int) -> None:
        """Columns of a block are allocated: whatever was there does not matter."""
        for warps in self._warps.values():
            table = warps.reshape(-1, LANES // _ROWS, COLUMNS)
            table[block, :, start : start + count] = _NOBODY

    def access(self, kind: str, cells: Array, lanes: Array, instruction: Instruction) -> None:
        """Lanes access cells (of which one is given for each lane, or any number for one lane),
        ``"read"`` or ``"write"``.

        Args:
          cells: numbers of cells; the last dimension is that of the lanes, or of any length.
          lanes: numbers of the lanes.
        """
        self._time += 1
        places = cells // (_ROWS * COLUMNS) * COLUMNS + cells % COLUMNS
        warps = np.broadcast_to(lanes // WARP, places.shape)
        for earlier in ("write",) if kind == "read" else ("write", "read"):
            self._check(kind, earlier, places, warps, instruction)
        self._warps[kind][places] = warps
        self._times[kind][places] = self._time

    def _check(
        self, kind: str, earlier: str, places: Array, warps: Array, instruction: Instruction
    ) -> None:
        held = self._warps[earlier][places]
        others = (held != warps) & (held != _NOBODY)
        if not others.any():
            return
        times = self._times[earlier][places]
        found = np.stack([held[others], warps[others], times[others]])
        for first, second, time in np.unique(found, axis=1).T.tolist():
            missing = self._missing(first, second, time)
            if missing is None:
                continue
            fence, culprit = missing
            wave = self._memory.wave
            where = places[others][(found == [[first], [second], [time]]).all(axis=0)][0]
            observer = wave.observer
            assert observer is not None
            observer.misuse(
                np.array([second * WARP]),
                f"{_VERBS[kind][0]} column {int(where) % COLUMNS} of tensor memory, which the warp"
                f" of {wave.thread_name(first * WARP)} {_VERBS[earlier][1]} before, but the warp of"
                f" {wave.thread_name(culprit * WARP)} lacks a tcgen05.fence::{fence}_thread_sync"
                f" {'before' if fence == 'before' else 'after'} they synchronized",
                instruction,
            )
            return

    def _missing(self, first: int, second: int, time: int) -> tuple[str, int] | None:
        """Which fence is missing between accesses of two warps, and in which of them."""
        fences = self._before.get(first, [])
        position = bisect.bisect_right(fences, time)
        if position == len(fences):
            return "before", first
        if self._after.get(second, 0) < fences[position]:
            return "after", second
        return None
