"""Lanes grouped by what they use: a barrier, a place in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pallasite_simulator.types import Array


class Groups:
    """Equal values of an array, put together.

    Arrays whose equal values are neighbours, in ascending order, are the usual case: lanes come
    block by block.

    Attributes:
      distinct: the different values, ascending.
      first: for each of them, where it is first.
    """

    __slots__ = ("_order", "_starts", "count", "distinct", "first")

    def __init__(self, values: Array):
        self.count = count = len(values)
        self._order: Array | None = None
        if count == 1:
            self._starts = self.first = np.zeros(1, np.int64)
            self.distinct = values
            return
        starts = np.flatnonzero(values[1:] != values[:-1])
        starts += 1
        starts = np.concatenate([np.zeros(1, np.int64), starts])
        distinct = values[starts]
        if len(distinct) > 1 and not (distinct[1:] > distinct[:-1]).all():
            self._order = np.argsort(values, kind="stable")
            distinct, starts = np.unique(values[self._order], return_index=True)
            self.first = self._order[starts]
        else:
            self.first = starts
        self._starts = starts
        self.distinct = distinct

    @property
    def sizes(self) -> Array:
        """How often each value is there."""
        return np.diff(self._starts, append=self.count)

    def sum(self, amounts: Array) -> Array:
        """The sum of amounts (one for each element, or a scalar) for each distinct value."""
        if amounts.ndim == 0 or (len(amounts) == 1 and self.count > 1):
            total: Array = self.sizes * amounts
            return total
        if self._order is not None:
            amounts = amounts[self._order]
        summed: Array = np.add.reduceat(amounts, self._starts)
        return summed

    def sum_before(self, amounts: Array) -> Array:
        """For each element, the sum of the amounts of equal ones before it."""
        amounts = np.broadcast_to(amounts, (self.count,))
        if self._order is not None:
            amounts = amounts[self._order]
        running = np.cumsum(amounts) - amounts
        before: Array = running - np.repeat(running[self._starts], self.sizes)
        if self._order is None:
            return before
        result: Array = np.empty_like(before)
        result[self._order] = before
        return result

    def split(self, numbers: Array) -> Iterator[tuple[Array, int]]:
        """The elements of ``numbers`` that belong to each value, and the value."""
        if self._order is not None:
            numbers = numbers[self._order]
        ends = np.append(self._starts[1:], self.count)
        for start, end, value in zip(
            self._starts.tolist(), ends.tolist(), self.distinct.tolist(), strict=True
        ):
            yield numbers[start:end], value
