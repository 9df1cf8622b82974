"""Vector clocks: what is known to have happened before.

As in FastTrack (C. Flanagan, S. Freund, "FastTrack: efficient and precise dynamic race detection",
2009), an access is ordered before what a thread does now if the thread's vector clock has reached
the access. Clocks do not count steps of each thread, but are all the number of the last event of
the launch. What many threads know alike, as after a barrier, is one row that they share, whichever
domain they belong to: rows never change once they are made.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from pallasite_simulator.distinct import distinct, distinct_inverse
from pallasite_simulator.types import Array

NOTHING = 0
"""The row of those who know nothing."""

_COLUMNS_MORE = 16

_ROWS_BEFORE_COLLECTION = 2048

_JOINED_FOREIGN = 512
"""How many results of :meth:`Clocks.join_foreign` are remembered."""


class Clocks:
    """All rows of a launch.

    A row has a column for each thread of a domain, for the ``cp.async`` copies of each thread if
    ``copies``, and for each asynchronous engine that was named so far.

    Attributes:
      threads: columns of threads.
      time: the number of the last event.
      global_fence: that of the last event before any fence between accesses of global memory and
        the asynchronous proxy.
      generic: rows by columns: up to which event it is known what a column did.
      fenced: the same, as far as it is visible to the asynchronous proxy too.
      floor: for each row: all events up to this one are known, whoever did them.
      over: for each row: another row, of what is over as well, though what it wrote may not be
        visible; :data:`NOTHING` if that is nothing more.
      foreign: for each row: rows of other domains, by domain; these know of no others.
      last: for each column, its last event in any domain.
    """

    def __init__(self, threads: int, *, copies: bool = False):
        self.threads = threads
        self.copies = copies
        self.fixed = threads * (2 if copies else 1)
        self.time = 0
        self.global_fence = 0
        width = self.fixed + _COLUMNS_MORE
        self.generic: Array = np.zeros((64, width), np.int32)
        self.fenced: Array = np.zeros((64, width), np.int32)
        self.floor: Array = np.zeros(64, np.int64)
        self.over: list[int] = [NOTHING] * 64
        self.foreign: list[Mapping[int, int] | None] = [None] * 64
        self.last: Array = np.zeros(width, np.int32)
        self.names: dict[Hashable, int] = {}
        # For each column of an engine, when its last operation began, and when the one before.
        self._begun: Array = np.zeros(width, np.int32)
        self._begun_before: Array = np.zeros(width, np.int32)
        self._free: list[int] = list(range(63, 0, -1))
        self._limit = _ROWS_BEFORE_COLLECTION
        self._joined: dict[tuple[int, int], int] = {}
        self._made: dict[Hashable, int] = {}
        self._joined_foreign: dict[tuple[int, int], tuple[Any, Any, Mapping[int, int]]] = {}
        self._published: dict[Hashable, int] = {}
        self._published_at = 0

    # Columns --------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Columns of the arrays."""
        return int(self.generic.shape[1])

    def column(self, name: Hashable) -> int:
        """The column of an asynchronous engine."""
        found = self.names.get(name)
        if found is None:
            found = self.names[name] = self.fixed + len(self.names)
            if found >= self.width:
                width = self.width + max(_COLUMNS_MORE, len(self.names))
                rows = len(self.generic)
                self.generic = _extended(self.generic, rows, width)
                self.fenced = _extended(self.fenced, rows, width)
                self.last = _extended(self.last, width)
                self._begun = _extended(self._begun, width)
                self._begun_before = _extended(self._begun_before, width)
        return found

    def name(self, column: int) -> Hashable:
        """The name of an asynchronous engine's column."""
        return next(name for name, number in self.names.items() if number == column)

    def began(self, columns: Array, first: int, last: int) -> None:
        """Operations of asynchronous engines have these events."""
        new = columns[self._begun[columns] < first]
        self._begun_before[new] = self.last[new]
        self._begun[new] = first
        self.last[columns] = last

    # Rows -----------------------------------------------------------------------------------------

    def join(self, one: int, other: int) -> int:
        """The row that knows what both know."""
        if one == other or other == NOTHING:
            return one
        if one == NOTHING:
            return other
        key = (one, other) if one < other else (other, one)
        found = self._joined.get(key)
        if found is None:
            generic = np.maximum(self.generic[one], self.generic[other])
            fenced = np.maximum(self.fenced[one], self.fenced[other])
            foreign = self.join_foreign(self.foreign[one], self.foreign[other])
            over = self.join(self.over[one], self.over[other])
            found = self._joined[key] = self.add(generic, fenced, foreign, (one, other), over)
        return found

    def join_all(self, rows: Iterable[int]) -> int:
        """The row that knows what all know."""
        chosen = sorted({*rows} - {NOTHING})
        if len(chosen) < 3:
            return self.join(chosen[0], chosen[-1]) if chosen else NOTHING
        key = ("join", *chosen)
        found = self._made.get(key)
        if found is None:
            generic, fenced = self.generic[chosen].max(axis=0), self.fenced[chosen].max(axis=0)
            foreign = self.foreign[chosen[0]]
            for row in chosen[1:]:
                foreign = self.join_foreign(foreign, self.foreign[row])
            over = self.join_all(self.over[row] for row in chosen)
            whole = (self.generic[chosen] == generic).all(axis=1)
            like = tuple(row for row, one in zip(chosen, whole, strict=True) if one)
            found = self._made[key] = self.add(generic, fenced, foreign, like, over)
        return found

    def common(self, rows: Iterable[int]) -> int:
        """The row that knows what each of these knows; of other domains, what the first knows."""
        chosen = sorted(set(rows))
        if len(chosen) == 1:
            return chosen[0]
        key = ("common", *chosen)
        found = self._made.get(key)
        if found is None:
            generic, fenced = self.generic[chosen].min(axis=0), self.fenced[chosen].min(axis=0)
            over = {self.over[row] for row in chosen}
            found = self._made[key] = self.add(
                generic, fenced, self.foreign[chosen[0]], over=over.pop() if len(over) == 1 else 0
            )
        return found

    def publish(
        self, rows: Array, columns: Array, own: Array, copies: Any = None, time: int | None = None
    ) -> int:
        """The row of what some threads know, and of what they did themselves up to now.

        Args:
          rows: of the threads.
          columns: of the threads.
          own: for each, up to which event its writes are visible to the asynchronous proxy.
          copies: for each, up to which event it has waited for its own copies, and up to which they
            are visible to the asynchronous proxy.
          time: another event than the last one, to which they did it.
        """
        time = self.time if time is None else time
        if self._published_at != self.time:
            self._published_at = self.time
            self._published.clear()
        key: Hashable
        if len(rows) == 1 and copies is None:
            key = (time, int(rows[0]), int(columns[0]), int(own[0]))
        else:
            key = (time, rows.tobytes(), columns.tobytes(), own.tobytes())
            if copies is not None:
                key = (key, copies[0].tobytes(), copies[1].tobytes())
        found = self._published.get(key)
        if found is not None:
            return found
        if len(rows) == 1 or (rows == rows[0]).all():
            before = int(rows[0])
        else:
            before = self.join_all(distinct(rows).tolist())
        generic, fenced = self.generic[before].copy(), self.fenced[before].copy()
        generic[columns] = time
        fenced[columns] = np.maximum(fenced[columns], own)
        if copies is not None:
            behind = columns + self.threads
            generic[behind] = np.maximum(generic[behind], copies[0])
            fenced[behind] = np.maximum(fenced[behind], copies[1])
        found = self._published[key] = self.add(
            generic, fenced, self.foreign[before], over=self.over[before]
        )
        return found

    def publish_each(self, rows: Array, columns: Array, own: Array, copies: Any = None) -> Array:
        """:meth:`publish` for each of some threads alone."""
        if len(rows) == 1:
            return np.array([self.publish(rows, columns, own, copies)])
        # Threads of several domains that know and did alike get the same row.
        lists = [one.tolist() for one in (rows, columns, own, *(copies or ()))]
        numbers: dict[tuple[int, ...], int] = {}
        which = [numbers.setdefault(key, len(numbers)) for key in zip(*lists, strict=True)]
        if len(numbers) < len(rows):
            _, chosen = np.unique(which, return_index=True)
            some = None if copies is None else (copies[0][chosen], copies[1][chosen])
            found: Array = self.publish_each(rows[chosen], columns[chosen], own[chosen], some)
            return found[which]
        generic, fenced = self.generic[rows], self.fenced[rows]
        each = np.arange(len(rows))
        generic[each, columns] = self.time
        fenced[each, columns] = np.maximum(fenced[each, columns], own)
        if copies is not None:
            behind = columns + self.threads
            generic[each, behind] = np.maximum(generic[each, behind], copies[0])
            fenced[each, behind] = np.maximum(fenced[each, behind], copies[1])
        known, inverse = distinct_inverse(rows)
        over: Array = np.array([self.over[row] for row in known.tolist()])[inverse]
        over[(self.generic[over] <= generic).all(axis=1)] = NOTHING
        while len(self._free) < len(rows):
            self._grow()
        made: Array = np.array(self._free[-len(rows) :])
        del self._free[-len(rows) :]
        self.generic[made], self.fenced[made] = generic, fenced
        self.floor[made] = self._floors(generic)
        for row, before, one in zip(made.tolist(), rows.tolist(), over.tolist(), strict=True):
            self.foreign[row] = self.foreign[before]
            self.over[row] = one
        return made

    def advance_all(self, columns: Array, time: int, *, fenced: bool, over: int = NOTHING) -> int:
        """The row that knows what columns did up to an event, as :meth:`advance` for one."""
        if len(columns) == 1:
            return self.advance(NOTHING, int(columns[0]), time, fenced=fenced, over=over)
        key = ("advance all", columns.tobytes(), time, fenced, over)
        found = self._made.get(key)
        if found is None:
            generic = np.zeros(self.width, np.int32)
            generic[columns] = time
            visible = generic if fenced else np.zeros_like(generic)
            found = self._made[key] = self.add(generic, visible, None, over=over)
        return found

    def advance(
        self, row: int, column: int, time: int, *, fenced: bool, over: int = NOTHING
    ) -> int:
        """The row that also knows what a column did up to an event, and that what the row ``over``
        knows is over."""
        key = ("advance", row, column, time, fenced, over)
        found = self._made.get(key)
        if found is None:
            if (
                self.generic[row, column] >= time
                and (not fenced or self.fenced[row, column] >= time)
                and over == NOTHING
            ):
                return row
            generic, visible = self.generic[row].copy(), self.fenced[row].copy()
            generic[column] = max(int(generic[column]), time)
            if fenced:
                visible[column] = max(int(visible[column]), time)
            over = self.join(self.over[row], over)
            found = self._made[key] = self.add(generic, visible, self.foreign[row], over=over)
        return found

    def all_over(self, row: int) -> int:
        """The row of all that a row knows to be over, for :meth:`advance`; it knows of no other
        domains."""
        key = ("over", row)
        found = self._made.get(key)
        if found is None:
            generic = np.maximum(self.generic[row], self.generic[self.over[row]])
            found = NOTHING
            if generic.any():
                found = self.add(generic, np.zeros_like(generic), None, (self.over[row],))
            self._made[key] = found
        return found

    def fence(self, row: int) -> int:
        """The row for which all that is known is visible to the asynchronous proxy."""
        key = ("fence", row)
        found = self._made.get(key)
        if found is None:
            generic = self.generic[row]
            found = row
            if not np.array_equal(generic, self.fenced[row]):
                foreign, over = self.foreign[row], self.over[row]
                found = self.add(generic.copy(), generic.copy(), foreign, over=over)
            self._made[key] = found
        return found

    def plain(self, row: int) -> int:
        """The row without what it knows of other domains: what they keep of this one."""
        if not self.foreign[row]:
            return row
        key = ("plain", row)
        found = self._made.get(key)
        if found is None:
            found = self.add(self.generic[row].copy(), self.fenced[row].copy(), None)
            self._made[key] = found
        return found

    def with_foreign(self, row: int, foreign: Mapping[int, int]) -> int:
        """The row that also knows what rows of other domains, given by domain, know."""
        joined = self.join_foreign(self.foreign[row], foreign)
        if joined is self.foreign[row] or not joined:
            return row
        key = ("foreign", row, id(joined))
        found = self._made.get(key)
        if found is None:
            found = self.add(
                self.generic[row].copy(), self.fenced[row].copy(), joined, over=self.over[row]
            )
            self._made[key] = found
        return found

    def join_foreign(
        self, one: Mapping[int, int] | None, other: Mapping[int, int] | None
    ) -> Mapping[int, int] | None:
        """What two rows know of other domains; one of them, if it knows all that the other does."""
        if one is other or not other:
            return one
        if not one:
            return other
        key = (id(one), id(other))
        known = self._joined_foreign.get(key)
        if known is not None:
            return known[2]
        result = dict(one)
        for domain, row in other.items():
            result[domain] = self.join(result.get(domain, NOTHING), row)
        found = other if result == other else one if result == one else result
        if len(self._joined_foreign) > _JOINED_FOREIGN:
            self._joined_foreign.clear()
        # It holds on to both, so that their identities stay theirs.
        self._joined_foreign[key] = (one, other, found)
        return found

    def add(
        self,
        generic: Array,
        fenced: Array,
        foreign: Mapping[int, int] | None,
        like: tuple[int, ...] = (),
        over: int = NOTHING,
    ) -> int:
        """Makes a row, unless it is equal to one of ``like``."""
        if over != NOTHING and (self.generic[over] <= generic).all():
            over = NOTHING
        for row in like:
            if (
                self.foreign[row] == foreign
                and self.over[row] == over
                and np.array_equal(self.generic[row], generic)
                and np.array_equal(self.fenced[row], fenced)
            ):
                return row
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.generic[row] = generic
        self.fenced[row] = fenced
        self.foreign[row] = foreign
        self.over[row] = over
        self.floor[row] = self._floor(generic)
        return row

    def _floor(self, generic: Array) -> int:
        behind = np.flatnonzero(generic < self.last)
        if not len(behind):
            return self.time
        values = generic[behind]
        if behind[-1] >= self.fixed:
            # Where only the last operation is unknown, all that was before it is known.
            only_last = (behind >= self.fixed) & (values >= self._begun_before[behind])
            values[only_last] = self._begun[behind[only_last]] - 1
        return int(values.min())

    def _floors(self, generic: Array) -> Array:
        """:meth:`_floor` of each of some rows."""
        fixed, unknown = self.fixed, np.iinfo(np.int64).max
        behind = generic < self.last
        values: Array = np.where(behind, generic.astype(np.int64), unknown)
        only_last = behind[:, fixed:] & (generic[:, fixed:] >= self._begun_before[fixed:])
        values[:, fixed:] = np.where(only_last, self._begun[fixed:] - 1, values[:, fixed:])
        lowest: Array = values.min(axis=1)
        lowest[lowest == unknown] = self.time
        return lowest

    # Memory ---------------------------------------------------------------------------------------

    def _grow(self) -> None:
        count = len(self.generic)
        self.generic = _extended(self.generic, 2 * count, self.width)
        self.fenced = _extended(self.fenced, 2 * count, self.width)
        self.floor = _extended(self.floor, 2 * count)
        self.foreign += [None] * count
        self.over += [NOTHING] * count
        self._free = [*range(2 * count - 1, count - 1, -1), *self._free]

    @property
    def crowded(self) -> bool:
        """Whether it is time to look for unused rows."""
        return len(self.generic) - len(self._free) > self._limit

    def collect(self, used: Iterable[int]) -> None:
        """Frees all rows but these, and those that they refer to."""
        live = {NOTHING}
        stack = list(used)
        while stack:
            row = stack.pop()
            if row not in live:
                live.add(row)
                stack.append(self.over[row])
                stack.extend((self.foreign[row] or {}).values())
        self._joined.clear()
        self._joined_foreign.clear()
        self._made.clear()
        self._published.clear()
        self._free = [row for row in range(len(self.generic) - 1, 0, -1) if row not in live]
        for row in self._free:
            self.foreign[row] = None
            self.over[row] = NOTHING
        self._limit = max(_ROWS_BEFORE_COLLECTION, 2 * len(live))


def _extended(array: Array, *shape: int) -> Array:
    """An array with zeros behind its elements; the system makes pages of zeros when they are used,
    which takes less time than writing them (``numpy.pad``)."""
    result: Array = np.zeros(shape, array.dtype)
    result[tuple(map(slice, array.shape))] = array
    return result
