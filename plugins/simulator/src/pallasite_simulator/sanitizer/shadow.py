"""Shadow memory: for each piece of a memory, who wrote it last and who has read it since.

Pieces are as small as the accesses: the memory is cut into pages, and a page into granules of the
smallest access that it has seen. When there is a smaller one, all that is known of the page is
copied to the new granules, which loses nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallasite_simulator.distinct import distinct
from pallasite_simulator.types import Array

PAGE_SHIFT = 10
LARGEST = 4
"""Granules have at most 16 bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """The granules of some accesses.

    Attributes:
      level: granules have ``1 << level`` bytes.
      granules: their numbers (an array, or a slice): ``each`` for every access, in order.
      each: how many granules an access has.
      chosen: which of the accesses these are; None for all.
    """

    level: int
    granules: Any
    each: int = 1
    chosen: Array | None = None

    def owners(self, positions: Array) -> Array:
        """The accesses to which granules belong, both by position."""
        found: Array = positions if self.each == 1 else positions // self.each
        return found if self.chosen is None else self.chosen[found]


class Shadow:
    """Shadow of one memory.

    Attributes:
      writes: by level: the last write to each granule, as in :mod:`.entries`.
      strong: by level: the last strong write, or atomic operation.
      first, last: by level: reads since: the first, and the last.
    """

    def __init__(self, size: int, level: int = LARGEST):
        pages = -(-size >> PAGE_SHIFT)
        self._size = pages << PAGE_SHIFT
        self._common: int | None = level
        self._levels: Array = np.full(pages, level, np.uint8)
        self.writes: dict[int, Array] = {}
        self.strong: dict[int, Array] = {}
        self.first: dict[int, Array] = {}
        self.last: dict[int, Array] = {}

    def written(self, level: int) -> Array:
        """:attr:`writes` of a level."""
        return self._array(self.writes, level)

    def strongly_written(self, level: int) -> Array:
        """:attr:`strong` of a level."""
        return self._array(self.strong, level)

    def reads(self, level: int) -> tuple[Array, Array]:
        """:attr:`first` and :attr:`last` of a level."""
        return self._array(self.first, level), self._array(self.last, level)

    def _array(self, arrays: dict[int, Array], level: int) -> Array:
        found = arrays.get(level)
        if found is None:
            # Memory of zeros costs nothing until it is used.
            found = arrays[level] = np.zeros(self._size >> level, np.int64)
        return found

    def known(self, start: int, end: int) -> Iterator[tuple[str, int, int, Array]]:
        """What is known of the bytes from ``start`` to ``end``, which are whole pages: the kind of
        access, the level, the number of the first granule, and entries."""
        kinds = (
            ("wrote", self.writes),
            ("changed", self.strong),
            ("read", self.first),
            ("read", self.last),
        )
        for verb, arrays in kinds:
            for level, entries in arrays.items():
                yield verb, level, start >> level, entries[start >> level : end >> level]

    def places(self, offsets: Array, size: int) -> Iterator[Places]:
        """Granules of accesses of ``size`` bytes (a power of two) at multiples of it."""
        width = min(size.bit_length() - 1, LARGEST)
        common = self._common
        if common is not None and width >= common:
            yield Places(common, *_granules(offsets, size, common))
            return
        pages = offsets >> PAGE_SHIFT
        levels = self._levels[pages]
        highest = int(levels.max())
        if highest > width:
            self._refine(distinct(pages[levels > width]), width)
            levels = self._levels[pages]
            highest = int(levels.max())
        lowest = int(levels.min())
        if lowest == highest:
            yield Places(lowest, *_granules(offsets, size, lowest))
            return
        for level in range(lowest, highest + 1):
            chosen = np.flatnonzero(levels == level)
            if len(chosen):
                yield Places(level, *_granules(offsets[chosen], size, level), chosen)

    def ranges(self, offsets: Array, size: int) -> Iterator[Places]:
        """Granules of pieces of any size at any offsets, such as bulk copies have them; runs of
        pieces become slices."""
        if len(offsets) > 1:
            offsets = np.sort(offsets)
            if int(offsets[-1] - offsets[0]) == size * (len(offsets) - 1) and bool(
                (np.diff(offsets) == size).all()
            ):
                size *= len(offsets)
                offsets = offsets[:1]
        bits = int(np.bitwise_or.reduce(offsets)) | size
        width = min((bits & -bits).bit_length() - 1, LARGEST)
        if len(offsets) > 1:
            piece = 1 << width
            if size > piece:
                offsets = (offsets[:, None] + np.arange(0, size, piece)).reshape(-1)
            yield from self.places(offsets, piece)
            return
        start, end = int(offsets[0]), int(offsets[0]) + size
        if self._common is not None and width >= self._common:
            yield Places(self._common, slice(start >> self._common, end >> self._common))
            return
        first, last = start >> PAGE_SHIFT, (end - 1 >> PAGE_SHIFT) + 1
        levels = self._levels[first:last]
        if int(levels.max()) > width:
            self._refine(first + np.flatnonzero(levels > width), width)
            levels = self._levels[first:last]
        breaks = np.flatnonzero(levels[1:] != levels[:-1]) + 1
        for begin, finish in zip([0, *breaks], [*breaks, last - first], strict=True):
            level = int(levels[begin])
            low = max(start, first + int(begin) << PAGE_SHIFT)
            high = min(end, first + int(finish) << PAGE_SHIFT)
            yield Places(level, slice(low >> level, high >> level))

    def _refine(self, pages: Array, level: int) -> None:
        """Makes the granules of pages smaller."""
        self._common = None
        before = self._levels[pages]
        for coarse in np.unique(before):
            chosen = pages[before == coarse]
            for arrays in (self.writes, self.strong, self.first, self.last):
                if int(coarse) not in arrays:
                    continue
                source = arrays[int(coarse)].reshape(-1, 1 << PAGE_SHIFT - int(coarse))[chosen]
                if source.any():
                    target = self._array(arrays, level).reshape(-1, 1 << PAGE_SHIFT - level)
                    target[chosen] = np.repeat(source, 1 << int(coarse) - level, axis=1)
        self._levels[pages] = level


def _granules(offsets: Array, size: int, level: int) -> tuple[Array, int]:
    """Numbers of granules, and how many each access has."""
    first = offsets >> level
    each = size >> level
    if each <= 1:
        return first, 1
    return (first[:, None] + np.arange(each)).reshape(-1), each


def granule(places: Places, position: int) -> int:
    """The number of the granule that is at a position."""
    granules: Any = places.granules
    if isinstance(granules, slice):
        return int(granules.start) + position
    return int(granules[position])
