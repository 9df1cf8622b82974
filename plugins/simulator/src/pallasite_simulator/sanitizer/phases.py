"""What is released to mbarriers: rows of clocks for the phases that may still be waited for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pallasite_simulator.distinct import distinct, distinct_inverse
from pallasite_simulator.sanitizer.clocks import NOTHING, Clocks
from pallasite_simulator.types import Array, Values


class PhaseRows:
    """For each mbarrier, the rows of its last two phases."""

    def __init__(self, clocks: Clocks):
        self._clocks = clocks
        # Places to their numbers from 1; a place is where an mbarrier is.
        self._numbers: Array = np.zeros(0, np.int32)
        self._rows: Array = np.zeros((1, 2), np.int64)
        self._phases: Array = np.full((1, 2), -1, np.int64)
        self._count = 1

    def numbers(self, places: Array) -> Array:
        """Numbers of places, by which their rows are found."""
        highest = int(places.max())
        if highest >= len(self._numbers):
            grown = np.zeros(2 * highest + 64, np.int32)
            grown[: len(self._numbers)] = self._numbers
            self._numbers = grown
        found: Array = self._numbers[places]
        if not found.all():
            new = distinct(places[found == 0])
            self._numbers[new] = np.arange(self._count, self._count + len(new))
            self._count += len(new)
            if self._count > len(self._rows):
                more = ((0, self._count + len(self._rows)), (0, 0))
                self._rows = np.pad(self._rows, more)
                self._phases = np.pad(self._phases, more, constant_values=-1)
            found = self._numbers[places]
        return found

    def get(self, numbers: Array, phases: Array) -> Array:
        """Rows of phases."""
        halves = phases & 1
        rows: Array = self._rows[numbers, halves]
        rows[self._phases[numbers, halves] != phases] = NOTHING
        return rows

    def add(self, numbers: Array, phases: Array, rows: Values) -> None:
        """What rows know becomes part of phases of different places."""
        halves = phases & 1
        self._rows[numbers, halves] = join_pairs(self._clocks, self.get(numbers, phases), rows)
        self._phases[numbers, halves] = phases

    def used(self) -> Iterable[int]:
        """Rows in use."""
        return (int(row) for row in np.unique(self._rows))


def join_pairs(clocks: Clocks, ones: Values, others: Values) -> Values:
    """Joins rows with rows, each an array or an integer: an integer if all results are the same."""
    if isinstance(ones, int) and isinstance(others, int):
        return clocks.join(ones, others)
    ones, others = np.broadcast_arrays(np.asarray(ones), np.asarray(others))
    codes = (ones.astype(np.int64) << 32) | others
    if (codes == codes[0]).all():
        return clocks.join(int(ones[0]), int(others[0]))
    pairs, inverse = distinct_inverse(codes)
    joined = [clocks.join(pair >> 32, pair & (1 << 32) - 1) for pair in pairs.tolist()]
    return np.array(joined)[inverse]
