"""Kernels that compute each element of matrices by itself, with values of its row at most."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.grouped import FlattenedChunk, flattened_kernel, grouped_kernel
from pallasite_std.ops.rows.kernel import Chunk, Rows
from pallasite_std.ops.rows.tiling import LANES, VECTOR_BYTES, RowTiling, size_of

ELEMENTS = 16
"""Of each matrix for a lane: enough loads in flight, few enough registers for many blocks."""


_SMALL, _SMALLEST = 1 << 22, 1 << 18
"""Elements of a matrix below which tiles of 32 bits have half as many, and below which lanes have a
vector each: blocks are few."""


def tile_elements(size: int, dtype: Any) -> int:
    """Elements of each matrix for a lane, of matrices of so many elements.

    Gated activations of 2 MiB in float32 took 0.84 to 0.92 of the time with 8 on an H200, of 16
    bits 0.97 to 1.02.
    """
    if size < _SMALLEST:
        return min(ELEMENTS, VECTOR_BYTES // size_of(dtype))
    return min(ELEMENTS, 8) if size < _SMALL and size_of(dtype) == 4 else ELEMENTS


_LEAST = 8
"""Tiles in a row from which on, rather than rows, tiles begin at whole vectors: of those that have
elements of two rows there are few."""

LEAST_GROUPED = VECTOR_BYTES
"""Columns from which on no vector has elements of three rows."""

_RESIDENT_BLOCKS = 12
"""As many as a multiprocessor has of the other kernels."""

_PARTS = 4
"""Of a tile of two rows, one after the other."""


def flattened(*arrays: jax.Array, elements: int | None = None) -> list[jax.Array]:
    """Arrays of one shape as matrices of whole tiles, or of a single row if that is not possible:
    then all tiles but the last one are whole. Rows stay as they are if one had too many columns to
    be counted by 32 bits. Lanes have ``elements`` of each tile."""
    size, width = arrays[0].size, LANES * (elements or ELEMENTS)
    columns = width if size % width == 0 else size
    if columns > np.iinfo(np.int32).max:
        columns = arrays[0].shape[-1]
    return [one.reshape(size // columns, columns) for one in arrays]


class FlatRows(Rows):
    """The row, or the two rows, that a tile of a flattened matrix is of."""

    def row_values(
        self, compute: Callable[..., tuple[Any, ...]], chunk: Chunk, *refs: Any
    ) -> tuple[Any, ...]:
        """See the base class."""
        values = compute(*(ref[self.first] for ref in refs))
        later = cast(FlatChunk, chunk).later
        if later is None:
            return values
        others = compute(*(ref[self.first + 1] for ref in refs))
        return tuple(jnp.where(later, two, one) for one, two in zip(values, others, strict=True))


class FlatChunk(FlattenedChunk):
    """Consecutive elements of a flattened matrix.

    Attributes:
      later: which of them are of a second row; None if there is one row alone.
    """

    def __init__(self, rows: FlatRows, first: Any, width: int, *, several: bool) -> None:
        super().__init__(rows, first, width)
        end = (rows.first + 1) * rows.tiling.columns
        self._places = lax.broadcasted_iota(jnp.int32, (width,), 0) + (first - end)
        self.later = self._places >= 0 if several else None

    def columns(self) -> Any:
        """See the base class."""
        columns = self.rows.tiling.columns
        if self.later is None:
            return self._places + columns
        return jnp.where(self.later, self._places, self._places + columns)


def _flat_kernel(
    work: Callable[..., None],
    rows: int,
    columns: int,
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    params: Any,
    matrices: int,
) -> Callable[..., tuple[jax.Array, ...]]:
    """:func:`elementwise_kernel` by tiles of flattened matrices, which begin at whole vectors."""
    size, width = rows * columns, LANES * ELEMENTS
    full, rest = divmod(size, width)

    def body(*refs: Any) -> None:
        number = lax.axis_index("tile")

        first = pl.multiple_of(number * width, width)
        row = lax.div(first, columns)

        def part(first: Any, wide: int, *, several: bool) -> None:
            place = FlatRows(RowTiling(1, 1, wide, columns), row, 0)
            work(place, FlatChunk(place, first, wide, several=several), *refs)

        def of_two_rows() -> None:
            # Values of both take registers, which the other tiles are to have for more blocks.
            small = width // _PARTS

            def step(one: Any, carry: tuple[()]) -> tuple[()]:
                part(pl.multiple_of(first + one * small, small), small, several=True)
                return carry

            lax.fori_loop(0, _PARTS, step, ())

        def whole() -> None:
            several = first + width > (row + 1) * columns
            pl.when(several)(of_two_rows)
            pl.when(jnp.logical_not(several))(lambda: part(first, width, several=False))

        if not rest:
            whole()
            return
        pl.when(number < full)(whole)
        # The last elements, fewer than there are columns, are of the last row.
        pl.when(number == full)(lambda: part(first, rest, several=False))

    params = dataclasses.replace(params or plgpu.CompilerParams(), min_blocks=_RESIDENT_BLOCKS)
    return flattened_kernel(body, rows, columns, width, out_types, name, params, matrices)


def elementwise_kernel(
    work: Callable[..., None],
    rows: int,
    columns: int,
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    params: Any = None,
    matrices: int = 0,
    grouped: bool = False,
    elements: int | None = None,
) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel with a block for each tile.

    Args:
      work: ``work(rows, chunk, *refs)`` loads, computes and stores one chunk; ``rows`` gives it
        values of rows.
      rows, columns: of the matrices.
      out_types: types of the results.
      name: of the kernel, in profiles.
      params: ``CompilerParams``.
      matrices: how many of the first operands are matrices, if the others are none, or have an
        element for each row, of which :meth:`Rows.row_values` gives values.
      grouped: whether tiles begin at whole vectors where rows do not, also if rows have few of
        them; that takes more values of rows, which should be few and cheap.
      elements: of a tile for a lane, unless tiles are those of a flattened matrix.
    """
    area = LANES * (elements or ELEMENTS)
    unaligned = any(columns * size_of(one.dtype) % VECTOR_BYTES for one in out_types)
    if matrices and unaligned and 1 < rows < 2**31 // columns:
        given = work, rows, columns, out_types, name, params, matrices
        if columns >= _LEAST * area:
            return _flat_kernel(*given)
        if grouped and columns >= LEAST_GROUPED:
            return grouped_kernel(*given)
    width = columns if columns <= area else area
    height = 1
    while 2 * height * width <= area and 2 * height <= rows:
        height *= 2
    tiling = RowTiling(height, 1, width, columns)
    full_rows, full_columns = rows // height, columns // width

    def body(*refs: Any) -> None:
        block = lax.axis_index("tile")
        # Tiles of one row follow one another.
        across = -(-columns // width)
        row, column = (
            (block, 0) if across == 1 else (lax.div(block, across), lax.rem(block, across))
        )

        def tile(count: int, part: int) -> None:
            place = Rows(dataclasses.replace(tiling, height=count), row * height, 0)
            first = pl.multiple_of(column * width, width) if across > 1 else 0
            work(place, Chunk(place, first, part, kept=True), *refs)

        def across_columns(count: int) -> None:
            rest = columns % width
            if not rest:
                tile(count, width)
                return
            pl.when(column < full_columns)(lambda: tile(count, width))
            pl.when(column == full_columns)(lambda: tile(count, rest))

        rest = rows % height
        if not rest:
            across_columns(height)
            return
        pl.when(row < full_rows)(lambda: across_columns(height))
        pl.when(row == full_rows)(lambda: across_columns(rest))

    kernel: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
        body,
        out_type=tuple(out_types),
        grid=(-(-rows // height) * -(-columns // width),),
        grid_names=("tile",),
        kernel_name=name,
        compiler_params=params,
    )
    return kernel
