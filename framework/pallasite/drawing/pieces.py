"""The pieces of an array that lie together in memory, and the banks that they are in."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from pallasite.layouts.memory import BANK_BYTES, BANKS, MemoryLayout

CHUNK = 16
"""Bytes that a swizzle moves as one."""
LINE = BANKS * BANK_BYTES
"""Bytes that lie in different banks."""
GROUPS = LINE // CHUNK
"""Groups of banks, each as wide as a chunk."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements of one chunk that lie one after the other.

    Attributes:
      index: the first element.
      shape: how many elements along each dimension; all but one are 1.
      address: byte address from an aligned base.
      size: bytes, at least 1.
    """

    index: tuple[int, ...]
    shape: tuple[int, ...]
    address: int
    size: int

    @property
    def group(self) -> int:
        """The group of four banks in which the piece begins."""
        return self.address // CHUNK % GROUPS

    @property
    def words(self) -> range:
        """The 4-byte words that the piece touches."""
        return range(self.address // BANK_BYTES, -(-(self.address + self.size) // BANK_BYTES))

    @property
    def banks(self) -> tuple[int, ...]:
        """The banks of its words."""
        return tuple(word % BANKS for word in self.words)

    @property
    def last(self) -> tuple[int, ...]:
        """The index of its last element."""
        return tuple(i + extent - 1 for i, extent in zip(self.index, self.shape, strict=True))


class Pieces:
    """All pieces of an array.

    Args:
      layout: where its elements lie.
      offset: element offset of the first one from a base that is aligned to the swizzle.
    """

    def __init__(self, layout: MemoryLayout, offset: int = 0):
        self.layout = layout
        self.offset = offset
        self.shape = self._piece_shape()
        """Elements of one piece along each dimension."""
        self.counts = tuple(n // m for n, m in zip(layout.shape, self.shape, strict=True))
        """Pieces along each dimension."""
        elements = max(self.shape, default=1)
        self.size = max(1, elements * layout.element_bits // 8)
        self._tables = [self._table(dim) for dim in range(len(layout.shape))]

    @functools.cached_property
    def along(self) -> int | None:
        """The dimension along which a piece has several elements, if any."""
        return next((dim for dim, extent in enumerate(self.shape) if extent > 1), None)

    def _table(self, dim: int) -> list[int]:
        """The element offset that an index along a dimension adds, for the first of each piece."""
        zero = [0] * len(self.layout.shape)
        step = self.shape[dim]
        return [
            self.layout.offset([*zero[:dim], position * step, *zero[dim + 1 :]])
            for position in range(self.counts[dim])
        ]

    def _piece_shape(self) -> tuple[int, ...]:
        layout = self.layout
        alone = (1,) * len(layout.shape)
        for dim, extents in enumerate(layout.dims):
            if not extents or extents[-1].stride != 1:
                continue
            run = extents[-1].size
            others = [
                extent.stride
                for other in layout.dims
                for extent in other
                if extent is not extents[-1]
            ]
            count = CHUNK * 8 // layout.element_bits
            while count > 1:
                if not any(stride % count for stride in (run, self.offset, *others)):
                    return (*alone[:dim], count, *alone[dim + 1 :])
                count //= 2
        return alone

    def at(self, position: Sequence[int]) -> Piece:
        """The piece at a position, counted in pieces along each dimension."""
        layout = self.layout
        offset = self.offset + sum(
            table[i] for table, i in zip(self._tables, position, strict=True)
        )
        return Piece(
            tuple(i * extent for i, extent in zip(position, self.shape, strict=True)),
            self.shape,
            layout.swizzle_bytes(offset * layout.element_bits // 8),
            self.size,
        )

    def all(self) -> Iterator[Piece]:
        """Every piece, in row-major order."""
        for position in itertools.product(*map(range, self.counts)):
            yield self.at(position)


def passes(pieces: Sequence[Piece]) -> int:
    """Passes through shared memory that are needed to access some pieces at once."""
    return max(_words_in_banks(pieces).values(), default=0)


def fewest_passes(pieces: Sequence[Piece]) -> int:
    """The same if their words were distributed evenly over the banks."""
    return -(-sum(_words_in_banks(pieces).values()) // BANKS)


def crowded_banks(pieces: Sequence[Piece]) -> list[int]:
    """The banks that hold more words of the pieces than an even distribution would give them."""
    fair = fewest_passes(pieces)
    return [bank for bank, words in _words_in_banks(pieces).items() if words > fair]


def _words_in_banks(pieces: Sequence[Piece]) -> Counter[int]:
    words = {word for piece in pieces for word in piece.words}
    return Counter(word % BANKS for word in words)
