"""How the blocks of a kernel share an array: tiles of rows, and what is left at the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax.experimental import pallas as pl

LANES = 128
VECTOR_BYTES = 16
"""Bytes of the widest access of a lane."""
BLOCKS = "blocks"
"""The axis of the grid."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """An array of ``rows`` x ``columns`` in tiles of full rows, or of parts of one row.

    Attributes:
      rows, columns: extents of the array.
      rows_of_tile, columns_of_tile: extents of a tile; the last tiles of a row or of the array may
        be smaller.
      blocks: how many blocks share the tiles.
    """

    rows: int
    columns: int
    rows_of_tile: int
    columns_of_tile: int
    blocks: int

    def each(self, use: Callable[[Any, Any], None], block: Any = None) -> None:
        """Calls ``use(rows, columns)``, with slices (``pl.ds``), for each tile of a block: of this
        one, unless its number is given."""
        block = lax.axis_index(BLOCKS) if block is None else block
        across, rest_across = divmod(self.columns, self.columns_of_tile)
        down, rest_down = divmod(self.rows, self.rows_of_tile)
        number = across * down

        @pl.when(block < number)  # type: ignore[untyped-decorator]
        def _() -> None:
            def step(index: Any, _: Any) -> None:
                tile = block + index * self.blocks
                row, column = lax.div(tile, np.int32(across)), lax.rem(tile, np.int32(across))
                use(
                    pl.ds(row * self.rows_of_tile, self.rows_of_tile),
                    pl.ds(column * self.columns_of_tile, self.columns_of_tile),
                )

            lax.fori_loop(
                np.int32(0),
                lax.div(number - block + self.blocks - 1, np.int32(self.blocks)),
                step,
                None,
            )

        # What is left: the ends of rows, then the last rows, one after another.
        ends = []
        if rest_across:
            columns = pl.ds(across * self.columns_of_tile, rest_across)
            ends += [(pl.ds(row, 1), columns) for row in range(self.rows)]
        if rest_down:
            ends += [(pl.ds(down * self.rows_of_tile, rest_down), pl.ds(0, self.columns))]
        for number_of_end, end in enumerate(ends):

            @pl.when(block == (number + number_of_end) % self.blocks)  # type: ignore[untyped-decorator]
            def _(end: Any = end) -> None:
                use(*end)


def tiles_of(rows: int, columns: int, tile: int, blocks: int) -> Tiles:
    """The tiles of an array.

    Args:
      rows, columns: its extents.
      tile: elements of a tile, at most.
      blocks: how many blocks share them, at most.
    """
    if columns >= tile or rows == 1:
        width, height = min(tile, columns), 1
    else:
        width, height = columns, min(max(tile // columns, 1), rows)
    number = (rows // height) * (columns // width)
    number += (rows if columns % width else 0) + (1 if rows % height else 0)
    return Tiles(rows, columns, height, width, max(min(blocks, number), 1))


def elements_of_tile(itemsize: int, arrays: int, unroll: int) -> int:
    """Elements of a tile of which a lane holds ``unroll`` vectors, fewer if of several arrays."""
    vectors = max(unroll // max(arrays, 1), 1)
    return LANES * VECTOR_BYTES // itemsize * vectors


def split(shape: tuple[int, ...], dimension: int) -> tuple[int, int]:
    """An array as rows and columns: the dimensions before one, and that one with those behind."""
    return math.prod(shape[:dimension]), math.prod(shape[dimension:])
