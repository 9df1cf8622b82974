"""Kernels that compute each element of matrices by itself, with values of its row at most."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import Chunk, Rows
from pallasite_std.ops.rows.tiling import LANES, RowTiling

ELEMENTS = 16
"""Of each matrix for a lane: enough loads in flight, few enough registers for many blocks."""


def flattened(*arrays: jax.Array) -> list[jax.Array]:
    """Arrays of one shape as matrices of whole tiles, or of a single row if that is not possible:
    then all tiles but the last one are whole."""
    size, width = arrays[0].size, LANES * ELEMENTS
    columns = width if size % width == 0 else size
    return [one.reshape(size // columns, columns) for one in arrays]


def elementwise_kernel(
    work: Callable[..., None],
    rows: int,
    columns: int,
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    params: Any = None,
) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel with a block for each tile.

    Args:
      work: ``work(rows, chunk, *refs)`` loads, computes and stores one chunk; ``rows`` gives it
        values of rows.
      rows, columns: of the matrices.
      out_types: types of the results.
      name: of the kernel, in profiles.
      params: ``CompilerParams``.
    """
    area = LANES * ELEMENTS
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
