"""Groups of asynchronous wgmma, for an observer; not needed otherwise, since results
are there at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallasite_simulator.engine.lanes import WARP
from pallasite_simulator.engine.observer import AsyncOperation
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.types import Array

_OPEN = 1 << 62
"""The group of what is not committed yet."""

_NONE = -1
"""The group in which a warp has nothing in flight."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Issued:
    """An operation and, for each warp of the wave, in which group it is there.

    Attributes:
      accumulator, left: numbers of the registers that it adds to, and of those of A.
    """

    operation: AsyncOperation
    group: Array
    accumulator: frozenset[int]
    left: frozenset[int]


class Groups:
    """The groups of all warps of a wave.

    Attributes:
      fenced: which warps have executed ``wgmma.fence``.
    """

    def __init__(self, wave: Wave):
        self._wave = wave
        self._committed = np.zeros(wave.lane_count // WARP, np.int64)
        self._issued: list[_Issued] = []
        self.fenced = np.zeros(wave.lane_count // WARP, np.bool_)

    @classmethod
    def of(cls, wave: Wave) -> Groups:
        """Those of a wave."""
        found: Any = wave.resources.get("wgmma groups")
        if found is None:
            found = wave.resources["wgmma groups"] = cls(wave)
        result: Groups = found
        return result

    def issue(
        self,
        operation: AsyncOperation,
        warps: Array,
        accumulator: frozenset[int],
        left: frozenset[int],
    ) -> None:
        """Warps begin an operation, with an accumulator and, in registers, A."""
        group = np.full(len(self._committed), _NONE)
        group[warps] = _OPEN
        self._issued.append(_Issued(operation, group, accumulator, left))

    def conflicts(
        self, warps: Array, accumulator: frozenset[int], left: frozenset[int]
    ) -> frozenset[int]:
        """Registers that MMAs in flight write and a new one would read as A, or vice versa.

        An accumulator that is added to again is no conflict: MMAs are done in order.
        """
        found: frozenset[int] = frozenset()
        for one in self._issued:
            common = (one.accumulator & left) | (one.left & accumulator)
            if common and (one.group[warps] != _NONE).any():
                found |= common
        return found

    def commit(self, warps: Array) -> None:
        """What warps have begun since their last commit becomes a group."""
        for one in self._issued:
            group = one.group[warps]
            one.group[warps] = np.where(group == _OPEN, self._committed[warps], group)
        self._committed[warps] += 1

    def wait(self, warps: Array, pending: int) -> None:
        """Warps wait until at most ``pending`` of their groups, the last ones, are in flight."""
        observer = self._wave.observer
        done: dict[bytes, list[AsyncOperation]] = {}
        for one in self._issued:
            group = one.group[warps]
            finished = (group != _NONE) & (group < self._committed[warps] - pending)
            if finished.any():
                one.group[warps[finished]] = _NONE
                done.setdefault(finished.tobytes(), []).append(one.operation)
        self._issued = [one for one in self._issued if (one.group != _NONE).any()]
        if observer is None:
            return
        for mask, operations in done.items():
            chosen = warps[np.frombuffer(mask, np.bool_)]
            lanes = (chosen[:, None] * WARP + np.arange(WARP)).reshape(-1)
            observer.complete_for(operations, lanes)
