"""Which columns of the clocks stand for asynchronous engines."""

from __future__ import annotations

import numpy as np

from pallasite_simulator.distinct import distinct_inverse
from pallasite_simulator.engine.observer import AsyncOperation
from pallasite_simulator.sanitizer.clocks import Clocks
from pallasite_simulator.sanitizer.ordering import Ordering
from pallasite_simulator.types import Array

_MOST = 256
"""How many operations of a domain that are over in any order are told apart at one time."""

_ENGINES = {"tma": "mbarrier"}
"""Engines whose operations complete on mbarriers."""


class Columns:
    """The columns for the operations of one wave.

    Operations that are waited for in order share a column: the bulk groups of a thread, the
    products of a warpgroup. Others are over in any order; each has a column until it is known to be
    over.
    """

    def __init__(self, ordering: Ordering):
        self._ordering = ordering
        self._slots: dict[str, _Slots] = {}

    def of(self, operation: AsyncOperation, firsts: Array, rows: Array, time: int) -> Array:
        """Columns for the parts of an operation.

        Args:
          operation: the operation.
          firsts: the first lane of each part.
          rows: of the clocks: what is known when each part begins.
          time: the last event of the operation.
        """
        ordering = self._ordering
        clocks = ordering.clocks
        serial = operation.serial or operation.engine == "wgmma"
        if serial or operation.instruction.has("bulk_group"):
            kind = operation.engine if serial else "bulk"
            threads, inverse = distinct_inverse(ordering.column[firsts])
            named = [clocks.column((kind, thread)) for thread in threads.tolist()]
            columns: Array = np.array(named)[inverse]
            return columns
        engine = _ENGINES.get(operation.engine, operation.engine)
        slots = self._slots.get(engine)
        if slots is None:
            domains = len(ordering.rows) // ordering.width
            slots = self._slots[engine] = _Slots(clocks, engine, domains)
        places = ordering.domain[firsts] - ordering.first_domain
        if len(places) == 1 or (places[1:] > places[:-1]).all():
            return slots.take(places, rows, time)
        starts = np.append(0, np.flatnonzero(places[1:] != places[:-1]) + 1)
        each = zip(places[starts].tolist(), np.split(rows, starts[1:]), strict=True)
        return np.concatenate([slots.take_several(place, known, time) for place, known in each])


class _Slots:
    """Columns for operations that are over in any order."""

    def __init__(self, clocks: Clocks, engine: str, domains: int):
        self._clocks = clocks
        self._engine = engine
        self._columns: Array = np.zeros(0, np.int64)
        # For each domain and column, the event of the operation that has it.
        self._taken: Array = np.zeros((domains, 0), np.int64)
        self._next = 0

    def take(self, domains: Array, rows: Array, time: int) -> Array:
        """Columns for operations of different domains (their numbers in the wave), given the rows
        of what is known when they begin."""
        count = len(domains)
        over = self._clocks.generic[rows[:, None], self._columns] >= self._taken[domains]
        found, free = np.zeros(count, np.int64), np.zeros(count, np.bool_)
        if len(self._columns):
            found = over.argmax(axis=1)
            free = over[np.arange(count), found]
        if not free.all():
            full = len(self._columns) >= _MOST
            number = self._next if full else self._add()
            self._next = (number + 1) % _MOST
            found = np.where(free, found, number)
        self._taken[domains, found] = time
        columns: Array = self._columns[found]
        return columns

    def take_several(self, domain: int, rows: Array, time: int) -> Array:
        """Columns for several operations of a domain, which begin one after the other."""
        over = self._clocks.generic[rows[:, None], self._columns] >= self._taken[domain]
        ends = np.flatnonzero((over[1:] != over[:-1]).any(axis=1)) + 1
        found: list[int] = []
        for start, end in zip([0, *ends.tolist()], [*ends.tolist(), len(rows)], strict=True):
            free = over[start]
            free[[one for one in found if one < len(free)]] = False
            found += np.flatnonzero(free)[: end - start].tolist()
            while len(found) < end:
                full = len(self._columns) >= _MOST
                found.append(self._next if full else self._add())
                self._next = (found[-1] + 1) % _MOST
        self._taken[domain, found] = time
        columns: Array = self._columns[found]
        return columns

    def _add(self) -> int:
        number = len(self._columns)
        column = self._clocks.column((self._engine, number))
        self._columns = np.append(self._columns, column)
        self._taken = np.pad(self._taken, ((0, 0), (0, 1)))
        return number
