"""Boxes of tensors: where their elements are in global and in shared memory, and moving them.

PTX ISA 5.5.3 (tiled mode) and 5.5.7 (swizzling). Boxes are moved in pieces of 16 bytes, which keep
together under all swizzles but one, and rows of boxes start at multiples of 16 bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pallasite_simulator.engine.memory import GLOBAL_BASE, Region
from pallasite_simulator.engine.tensor_map import SWIZZLES, TensorMap
from pallasite_simulator.types import Array

PIECE = 16

NAN_FILL = 0x7FF7
"""What each 16 bits of elements out of bounds hold, if they are filled with NaN."""

_PIECES = np.dtype(np.complex128)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The part of a box that is inside the tensor.

    Attributes:
      first: for each dimension, minor to major, the first element of the box inside.
      counts: how many there are.
      start: byte offset in global memory of the first element.
      row_bytes: of the part's rows; those of stores are whole pieces.
      end: byte offset behind the last element.
      whole: whether it is all of the box.
    """

    first: tuple[int, ...]
    counts: tuple[int, ...]
    start: int
    row_bytes: int
    end: int
    whole: bool

    @property
    def row_count(self) -> int:
        """How many rows there are."""
        return math.prod(self.counts[1:])


class Box:
    """How the boxes of a tensor map are moved.

    Attributes:
      tensor: the tensor map.
      bytes: that a copy moves, whether in bounds or not.
      footprint: bytes of shared memory from the first to the last row's end. Rows of swizzled
        boxes are as far apart as the swizzle is wide.
      contiguous: whether the footprint is filled.
      piece_bytes: of the pieces that keep together when the box is swizzled.
      together: whether many whole boxes can be moved at once.
    """

    def __init__(self, tensor: TensorMap):
        self.tensor = tensor
        extents = tensor.extents
        size = tensor.element.bytes
        self._extents = extents
        self._steps = (1, *tensor.element_strides[1:])
        self._strides = (size, *tensor.strides)
        self._byte_steps = tuple(a * b for a, b in zip(self._steps, self._strides, strict=True))
        self._row_bytes = extents[0] * size
        self._rows = math.prod(extents[1:])
        self._swizzle = SWIZZLES.get(tensor.swizzle)
        pitch = self._row_bytes if self._swizzle is None else self._swizzle.span
        self._pitch = pitch
        self.bytes = self._rows * self._row_bytes
        self.footprint = self._rows * pitch
        self.contiguous = pitch == self._row_bytes
        self._outer = extents[:0:-1]
        self._pieces = (*self._outer, self._row_bytes // PIECE)
        self._outer_steps = self._byte_steps[:0:-1]
        self.piece_bytes = 8 if self._swizzle is not None and self._swizzle.flip else PIECE
        self._places: dict[int, Array] = {}
        self._raw = np.dtype(f"u{size}")
        self._sizes = np.array(tensor.sizes)
        self._reach = (np.array(extents) - 1) * np.array(self._steps)
        self._element_strides = np.array(self._strides)
        self._row_offsets = self._offsets_of_rows(extents)
        self.together = self.piece_bytes == PIECE and not tensor.element.round_tf32

    # Shared memory --------------------------------------------------------------------------------

    def places(self, offset: int) -> Array:
        """Byte offsets of the pieces of a box that starts at an offset in shared memory, row by
        row."""
        assert self._swizzle is not None
        base = offset % self._swizzle.period
        found = self._places.get(base)
        if found is None:
            rows = np.arange(self._rows)[:, None] * self._pitch
            within = np.arange(0, self._row_bytes, self.piece_bytes)
            found = self._swizzle.apply(base + rows + within).reshape(-1) - base
            self._places[base] = found
        places: Array = found + offset
        return places

    def whole_places(self, offset: int) -> tuple[Array, int]:
        """Byte offsets of pieces that a box at an offset in shared memory has, and their size."""
        if self.contiguous:
            return np.array([offset]), self.bytes
        return self.places(offset), self.piece_bytes

    def stored_places(self, offset: int, part: Part) -> tuple[Array, int]:
        """Byte offsets of pieces of a box in shared memory that are inside the tensor, and their
        size."""
        valid = part.counts[0] * self._raw.itemsize
        if self._swizzle is None:
            places = offset + np.arange(0, self.bytes, self.piece_bytes)
        else:
            places = self.places(offset)
        unit = min(self.piece_bytes, valid & -valid)
        rows = places.reshape(*self._outer, -1)[tuple(slice(n) for n in part.counts[:0:-1])]
        pieces = (rows[..., None] + np.arange(0, self.piece_bytes, unit)).reshape(
            -1, self._row_bytes // unit
        )
        return pieces[:, : valid // unit].reshape(-1), unit

    def read_shared(self, shared: Region, offset: int) -> Array:
        """The pieces of a box in shared memory, shaped as the box: an array or a view."""
        if self._swizzle is None:
            start = offset // PIECE
            found = shared.views[PIECE][start : start + self.bytes // PIECE]
        else:
            found = shared.views[self.piece_bytes][self.places(offset) // self.piece_bytes]
        pieces: Array = found.view(_PIECES).reshape(self._pieces)
        return pieces

    def write_shared(self, shared: Region, offset: int, pieces: Array) -> None:
        """Writes the pieces of a box to shared memory."""
        if self._swizzle is None:
            start = offset // PIECE
            view = shared.views[PIECE][start : start + self.bytes // PIECE]
            view.reshape(self._pieces)[...] = pieces
            return
        if self.piece_bytes != PIECE:
            pieces = np.ascontiguousarray(pieces).view(f"u{self.piece_bytes}")
        shared.views[self.piece_bytes][self.places(offset) // self.piece_bytes] = pieces.reshape(-1)

    # Global memory --------------------------------------------------------------------------------

    def clip(self, coordinates: Sequence[int], *, whole_pieces: bool = False) -> Part | None:
        """The part of the box at some coordinates that is inside the tensor; None if nothing is.

        With ``whole_pieces``, rows go on to the end of a piece of 16 bytes, as stores do.
        """
        tensor = self.tensor
        start = end = tensor.address - GLOBAL_BASE
        firsts, counts = [], []
        for place, extent, step, length, stride in zip(
            coordinates, self._extents, self._steps, tensor.sizes, self._strides, strict=True
        ):
            first = 0 if place >= 0 else -(place // step)
            last = min(extent, -((place - length) // step))
            if last <= first:
                return None
            start += (place + first * step) * stride
            end += (place + (last - 1) * step) * stride
            firsts.append(first)
            counts.append(last - first)
        size = self._raw.itemsize
        row_bytes = counts[0] * size
        whole = tuple(counts) == self._extents
        if whole_pieces and row_bytes % PIECE:
            row_bytes = -(-row_bytes // PIECE) * PIECE
        return Part(
            tuple(firsts),
            tuple(counts),
            start,
            row_bytes,
            end + row_bytes - (counts[0] - 1) * size,
            whole,
        )

    def rows(self, part: Part) -> Array:
        """Byte offsets in global memory of the rows of a part."""
        return part.start + self._offsets_of_rows(part.counts)

    def _offsets_of_rows(self, counts: tuple[int, ...]) -> Array:
        found = np.zeros(1, np.int64)
        for count, step in zip(counts[1:], self._byte_steps[1:], strict=True):
            found = (np.arange(count)[:, None] * step + found).reshape(-1)
        return found

    def load(self, memory: Region, part: Part | None) -> Array:
        """The pieces of a box from global memory; a view if it is whole."""
        element = self.tensor.element
        if part is not None and part.whole and not element.round_tf32:
            return self._view(memory, part.start, self._pieces, _PIECES)
        fill = NAN_FILL if self.tensor.nan_fill else 0
        box = np.full(self.bytes // 2, fill, np.uint16)
        if part is not None:
            shape = part.counts[::-1]
            inside = self._view(memory, part.start, shape, self._raw)
            if element.round_tf32:
                inside = _rounded_to_tf32(inside)
            where = tuple(
                slice(first, first + count)
                for first, count in zip(part.first[::-1], shape, strict=True)
            )
            box.view(self._raw).reshape(self._extents[::-1])[where] = inside
        return box.view(_PIECES).reshape(self._pieces)

    def store(self, memory: Region, part: Part, pieces: Array) -> None:
        """Writes a part of a box to global memory, given all pieces of the box."""
        if not part.whole:
            pieces = pieces[self._kept(part)]
        self._view(memory, part.start, pieces.shape, _PIECES)[...] = pieces

    def reduce(
        self,
        memory: Region,
        part: Part,
        pieces: Array,
        combine: Callable[[Array, Array], Array],
    ) -> None:
        """Combines global memory with a part of a box, given all its pieces."""
        dtype = self.tensor.element.dtype
        if not part.whole:
            pieces = pieces[self._kept(part)]
        values = np.ascontiguousarray(pieces).view(dtype)
        target = self._view(memory, part.start, values.shape, dtype)
        self._combine(target, values, combine)

    def _combine(
        self, target: Array, values: Array, combine: Callable[[Array, Array], Array]
    ) -> None:
        shared = [n for n, step in enumerate(target.strides) if not step and target.shape[n] > 1]
        if shared:
            # Rows that lie on one another are added one by one.
            for place in range(target.shape[shared[0]]):
                chosen = (slice(None),) * shared[0] + (slice(place, place + 1),)
                self._combine(target[chosen], values[chosen], combine)
            return
        target[...] = combine(np.ascontiguousarray(target), values)

    def _kept(self, part: Part) -> tuple[slice, ...]:
        """Slices of the pieces of a box for a part that starts at its first element."""
        return (*(slice(0, count) for count in part.counts[:0:-1]), slice(part.row_bytes // PIECE))

    def _view(
        self, memory: Region, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> Array:
        return np.ndarray(shape, dtype, memory.bytes, start, (*self._outer_steps, dtype.itemsize))

    # Many whole boxes ----------------------------------------------------------------------------

    @property
    def row_bytes(self) -> int:
        """Of a row of a whole box."""
        return self._row_bytes

    @property
    def extent(self) -> int:
        """Bytes of global memory from the first to the last byte of a whole box."""
        return int(self._row_offsets[-1]) + self._row_bytes

    def whole(self, corners: Array) -> Array:
        """Which of the boxes at some corners (rows of coordinates) are wholly inside the tensor,
        and start at whole pieces."""
        inside = (corners >= 0).all(axis=1) & (corners + self._reach < self._sizes).all(axis=1)
        found: Array = inside & (corners[:, 0] * self._raw.itemsize % PIECE == 0)
        return found

    def starts(self, corners: Array) -> Array:
        """Byte offsets of boxes in global memory."""
        found: Array = corners @ self._element_strides + (self.tensor.address - GLOBAL_BASE)
        return found

    def rows_of(self, starts: Array) -> Array:
        """Byte offsets of all rows of whole boxes: a row of the result for each."""
        found: Array = starts[:, None] + self._row_offsets
        return found

    def load_whole(
        self, memory: Region, shared: Region, starts: Array, targets: Array, owners: Array
    ) -> None:
        """Copies boxes to offsets in shared memory; ``owners`` has the number of a box for each
        target."""
        values = memory.views[PIECE][self._global_pieces(starts)]
        if len(owners) != len(starts):
            values = values[owners]
        for chosen, pieces in self._shared_pieces(targets):
            shared.views[PIECE][pieces] = values[chosen]

    def store_whole(self, memory: Region, shared: Region, starts: Array, sources: Array) -> None:
        """Copies boxes from offsets in shared memory."""
        pieces = self._global_pieces(starts)
        for chosen, places in self._shared_pieces(sources):
            memory.views[PIECE][pieces[chosen]] = shared.views[PIECE][places]

    def _global_pieces(self, starts: Array) -> Array:
        """Numbers of the pieces of whole boxes."""
        within = np.arange(self._row_bytes // PIECE)
        relative = (self._row_offsets[:, None] // PIECE + within).reshape(-1)
        found: Array = (starts // PIECE)[:, None] + relative
        return found

    def _shared_pieces(self, offsets: Array) -> Iterator[tuple[Any, Array]]:
        """Numbers of the pieces of boxes in shared memory: those whose patterns are alike
        together."""
        if self._swizzle is None:
            pieces = np.arange(self.bytes // PIECE)
            yield slice(None), (offsets // PIECE)[:, None] + pieces
            return
        bases = offsets % self._swizzle.period
        alike = (bases == bases[0]).all()
        for base in bases[:1].tolist() if alike else np.unique(bases).tolist():
            chosen = slice(None) if alike else bases == base
            relative = (self.places(base) - base) // PIECE
            yield chosen, (offsets[chosen] // PIECE)[:, None] + relative


@functools.lru_cache(maxsize=1024)
def box_of(tensor: TensorMap) -> Box:
    """How the boxes of a tensor map are moved."""
    if tensor.element.group_bytes:
        from pallasite_simulator.engine.padded_boxes import PaddedBox

        return PaddedBox(tensor)
    return Box(tensor)


def _rounded_to_tf32(bits: Array) -> Array:
    """Bits of ``f32`` to the nearest ``tf32``, ties away from zero; NaN become one NaN."""
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(nan, np.uint32(0x7FFFE000), rounded)
