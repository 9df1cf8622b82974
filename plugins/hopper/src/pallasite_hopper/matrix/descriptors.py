"""Matrices in shared memory as the tensor cores see them: matrix descriptors.

A descriptor says where a matrix starts, how it is swizzled and how far its blocks are apart (PTX
ISA, "Shared Memory Matrix Layout" and "Matrix Descriptor Format"). Blocks are 8 rows along the
slow direction and, along the contiguous one, 16 bytes or the width of the swizzle. What the strides
are is read off the memory layout by asking it where elements lie, so every view that has the right
form will do, however it came about.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError
from pallasite.plugin.layouts import MemoryLayout
from pallasite_std.api import places_of

type Places = np.ndarray[Any, np.dtype[np.int64]]
"""Byte offsets of the elements of a matrix."""

CHUNK = 16
"""Bytes that are never taken apart."""

_GROUP = 8
"""Chunks (or swizzled rows) that make a block."""

_MODES = {16: 0, 128: 1, 64: 2, 32: 3}
"""The descriptor's field of the swizzle."""

_FIELD = (1 << 18) - CHUNK
"""Offsets have 14 bits and count in chunks."""


@dataclasses.dataclass(frozen=True)
class MatrixOperand:
    """How one operand's descriptors are made.

    Attributes:
      constant: all of the descriptor but the start address.
      transposed: the elements along M or N are contiguous, not those along K.
      starts: offsets in bytes from the first element: of each block of rows, of each step along K.
    """

    constant: int
    transposed: bool
    starts: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=512)
def plan_operand(
    layout: MemoryLayout, rows: tuple[tuple[int, int], ...], depth: int, what: str
) -> MatrixOperand:
    """The descriptors for an operand.

    Args:
      layout: of the matrix, its first dimension along M or N, its second along K.
      rows: (start, size) of the rows that each instruction reads.
      depth: elements along K that each instruction reads.
      what: the operand's name, for messages.

    Raises:
      InvalidValueError: the tensor cores cannot read it as it lies.
    """
    size = layout.element_bits // 8
    extent_k = layout.shape[1]
    places = places_of(layout) * size
    fields = _fields(places, rows, depth, size, layout.swizzle)
    transposed = False
    if fields is None and size == 2:
        fields = _fields_transposed(places, rows, depth, size, layout.swizzle)
        transposed = fields is not None
    if fields is None or any(field % CHUNK for field in fields):
        raise _unreadable(layout, size, what)
    leading, stride = fields
    for name, field in (("leading", leading), ("stride", stride)):
        if not 0 <= field <= _FIELD:
            raise InvalidValueError(
                f"the blocks of {what} are too far apart for the tensor cores",
                got=f"{name} offset of {field} bytes",
                expected=f"at most {_FIELD} bytes",
            )
    starts = tuple(
        tuple(int(places[start, k]) for k in range(0, extent_k, depth)) for start, _ in rows
    )
    constant = leading // CHUNK << 16 | stride // CHUNK << 32 | _MODES[layout.swizzle] << 62
    return MatrixOperand(constant, transposed, starts)


def _common(found: list[int | None]) -> int | None:
    """The one step of all instructions; those that take none do not count."""
    known = {step for step in found if step is not None}
    return known.pop() if len(known) == 1 else None if known else 0


def _tiles(
    places: Places, rows: tuple[tuple[int, int], ...], depth: int
) -> Iterator[tuple[int, Places]]:
    """For each instruction the number of its rows, and offsets relative to its first element."""
    for start, count in rows:
        for k in range(0, places.shape[1], depth):
            tile = places[start : start + count, k : k + depth]
            yield count, tile - tile[0, 0]


def _fields(
    places: Places, rows: tuple[tuple[int, int], ...], depth: int, size: int, swizzle: int
) -> tuple[int, int] | None:
    """(leading, stride) offsets of a matrix that is contiguous along K; None if it is not."""
    chunk = CHUNK // size
    leadings: list[int | None] = []
    strides: list[int | None] = []
    k = np.arange(depth)
    for count, tile in _tiles(places, rows, depth):
        row = np.arange(count)
        leading = int(tile[0, chunk])
        stride = int(tile[_GROUP, 0]) if count > _GROUP else None
        expected = (
            (row % _GROUP * swizzle + row // _GROUP * (stride or 0))[:, None]
            + k % chunk * size
            + k // chunk * leading
        )
        if (tile != expected).any() or (swizzle != CHUNK and leading != CHUNK):
            return None
        leadings.append(leading)
        strides.append(stride)
    leading_field, stride_field = _common(leadings), _common(strides)
    if leading_field is None or stride_field is None:
        return None
    return leading_field, stride_field


def _fields_transposed(
    places: Places, rows: tuple[tuple[int, int], ...], depth: int, size: int, swizzle: int
) -> tuple[int, int] | None:
    """(leading, stride) offsets of a matrix that is contiguous along M or N."""
    run = swizzle // size
    along_rows: list[int | None] = []
    along_k: list[int | None] = []
    k = np.arange(depth)
    for count, tile in _tiles(places, rows, depth):
        row = np.arange(count)
        between_rows = int(tile[run, 0]) if count > run else None
        between_k = int(tile[0, _GROUP])
        expected = (row % run * size + row // run * (between_rows or 0))[:, None] + (
            k % _GROUP * swizzle + k // _GROUP * between_k
        )
        if (tile != expected).any():
            return None
        along_rows.append(between_rows)
        along_k.append(between_k)
    rows_field, k_field = _common(along_rows), _common(along_k)
    if rows_field is None or k_field is None:
        return None
    # Without swizzling the two fields change places.
    return (rows_field, k_field) if swizzle != CHUNK else (k_field, rows_field)


def _unreadable(layout: MemoryLayout, size: int, what: str) -> InvalidValueError:
    # In the program, K is the first dimension of b.
    shown = layout.transpose((1, 0)) if what == "b" else layout
    got = f"{shown.shape} laid out as {shown}"
    if size != 2 and layout.contiguous_run(1) * size < CHUNK <= layout.contiguous_run(0) * size:
        stored = "(n, k)" if what == "b" else "(m, k)"
        return InvalidValueError(
            f"elements of {8 * size} bits are not contiguous along k in {what}",
            got=got,
            expected="rows of k; only elements of 16 bits may be contiguous along m or n",
            hint=f"store {what} as {stored}"
            + (", and pass plgpu.transpose_ref(b, (1, 0))" if what == "b" else ""),
        )
    contiguous = max(range(2), key=shown.contiguous_run)
    extent = shown.shape[contiguous] * size
    width = next((width for width in (128, 64, 32) if extent % width == 0), 32)
    tiling = (_GROUP, width // size)
    return InvalidValueError(
        f"the tensor cores cannot read {what} from shared memory as it lies there",
        got=got,
        expected="tiles of 8 rows as wide as the swizzle, or of 16 bytes without swizzle",
        hint=f"plgpu.SMEM(..., transforms=(plgpu.TilingTransform({tiling}),"
        f" plgpu.SwizzleTransform({width})))",
    )
