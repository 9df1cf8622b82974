"""Which of the lanes that can run has its turn.

Lanes at one instruction run together. Of those at different ones, the earliest in the program's
order run first, so that those behind catch up and lanes reconverge. That alone is not fair: lanes
in a loop could complete one phase of a barrier after another, while those that are to see the first
of them never get to look. So lanes have an *age* too: whoever completes a phase goes behind all who
could have run at that time, and these run until they wait. No lane that is ready, or polls, misses
two phases that the same lanes complete.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.types import Array

PATIENCE = 5000
"""How many basic blocks run before lanes that were ready all the time have their turn, whatever
comes first: for loops that wait for others by weak loads."""


class Schedule:
    """The lanes of a wave that can run, by the number of the instruction where they are.

    Attributes:
      ready: lanes that can run.
      yielded: lanes whose loop looks for what others do: they run when no other can, or when a
        phase of a barrier is complete.
      turn: how many basic blocks have run.
    """

    def __init__(self, rank: Sequence[int], lane_count: int):
        self.ready: dict[int, Lanes] = {}
        self.yielded: dict[int, Lanes] = {}
        self.turn = 0
        self._rank = rank
        self._lane_count = lane_count
        self._since: dict[int, int] = {}
        self._ages: dict[int, int] = {}
        self._age = 0
        self._youngest = 0

    def begin(self) -> tuple[int, Lanes]:
        """Takes out the lanes whose turn it is: where they are, and who they are."""
        ready, since, ages, rank = self.ready, self._since, self._ages, self._rank
        if len(ready) == 1:
            (pc,) = ready
        else:
            pc = min(ready, key=lambda one: (ages[one], rank[one]))
            oldest = min(ready, key=since.__getitem__)
            if self.turn - since[oldest] > PATIENCE:
                ages[oldest] = ages[pc] - 1
                pc = oldest
        del since[pc]
        self._age = ages.pop(pc)
        return pc, ready.pop(pc)

    def end(self) -> None:
        """The lanes whose turn it was wait, or have been put back: lanes that are woken from now on
        are the youngest."""
        self._age = self._youngest

    def stop(self, pc: int) -> bool:
        """Whether the lanes whose turn it is, which have come to ``pc``, stop there: others come
        first, or are at the same place."""
        rank, ages, age, mine = self._rank, self._ages, self._age, self._rank[pc]
        for other in self.ready:
            if other == pc or ages[other] < age or (ages[other] == age and rank[other] < mine):
                return True
        return self.turn % 64 == 0 and any(
            self.turn - self._since[other] > PATIENCE for other in self.ready
        )

    def put(self, pc: int, lanes: Lanes) -> None:
        """Lanes whose turn it was can go on at ``pc``."""
        self._put(pc, lanes, self._age)

    def wake(self, pc: int, lanes: Lanes) -> None:
        """Lanes that have waited can go on at ``pc``."""
        self._put(pc, lanes, self._youngest)

    def put_off(self, pc: int, lanes: Lanes) -> None:
        """Lanes whose turn it was go on at ``pc`` after all others."""
        there = self.yielded.get(pc)
        self.yielded[pc] = lanes if there is None else self._union(there, lanes)

    def resume(self) -> None:
        """Those that were put off can go on."""
        yielded, self.yielded = self.yielded, {}
        for pc, lanes in yielded.items():
            self._put(pc, lanes, self._youngest)

    def phase_completed(self) -> None:
        """The lanes whose turn it is have completed a phase of a barrier: all others come before
        them, until they wait."""
        self.resume()
        self._youngest += 1
        self._age = self._youngest

    def _put(self, pc: int, lanes: Lanes, age: int) -> None:
        there = self.ready.get(pc)
        if there is not None:
            lanes = self._union(there, lanes)
            age = min(age, self._ages[pc])
        self.ready[pc] = lanes
        self._ages[pc] = age
        self._since.setdefault(pc, self.turn)

    def _union(self, one: Lanes, other: Lanes) -> Lanes:
        mask: Array = np.zeros(self._lane_count, np.bool_)
        mask[one.index] = True
        mask[other.index] = True
        return one.wave.lanes(np.flatnonzero(mask))
