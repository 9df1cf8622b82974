"""Rows that do not begin at whole vectors, read by whole vectors of the flattened matrix.

That serves where an element's column does not matter, as in reductions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite_std.ops.rows.kernel import Chunk, Rows


class AlignedChunk(Chunk):
    """Consecutive elements of a flattened matrix."""

    def load_again(self, ref: Any) -> Any:
        """See the base class; ``ref`` is flat."""
        return ref[pl.ds(self.first, self.width)].astype(jnp.float32)


class AlignedRow(Rows):
    """The chunks of a row that begin with its first whole vector, and its ends.

    Args:
      block: of height 1.
      rows, columns: of the matrix, which has less than 2**31 elements.
      vector: elements.
    """

    def __init__(self, block: Rows, rows: int, columns: int, vector: int) -> None:
        self._columns, self._vector, self._size = columns, vector, rows * columns
        self._start = block.first * columns
        self._stop = self._start + columns
        self._base = lax.div(self._start + (vector - 1), vector) * vector
        chunk = block.tiling.chunk
        inside = (columns - (vector - 1)) // chunk * chunk
        tiling = dataclasses.replace(block.tiling, columns=inside)
        super().__init__(tiling, block.first, block.thread, block.exchanged)

    def chunk_at(self, first: Any, width: int) -> Chunk:
        """See the base class."""
        place = pl.multiple_of(self._base + first, self._vector)
        return AlignedChunk(self, place, width, kept=False)

    def fold(self, step: Callable[[Chunk, Any], Any], start: Any) -> Any:
        """See the base class: of the chunks without the ends."""
        return self._over_chunks(step, start)

    def ends(self, ref: Any) -> list[tuple[Any, Any]]:
        """Elements of the row besides the chunks, as float32, and whether they are such."""
        vector, inside = self._vector, self.tiling.columns
        width = -(-(self._columns - inside) // vector) * vector
        # Behind the last whole vector of the matrix there is no room for one.
        begin = lax.min(self._base + inside, self._size // vector * vector - width)
        whole = ref[pl.ds(pl.multiple_of(begin, vector), width)]
        places = begin + lax.broadcasted_iota(jnp.int32, (width,), 0)
        last = lax.div(self._stop, vector) * vector
        there = (places >= self._base + inside) & (places < last)
        lanes = lax.broadcasted_iota(jnp.int32, (2 * vector,), 0)
        head = lanes < vector
        edge = jnp.where(head, self._start, self._stop - 2 * vector) + lanes
        outside = jnp.where(head, edge < self._base, edge >= last)
        return [(whole.astype(jnp.float32), there), (ref[edge].astype(jnp.float32), outside)]

    def elements(self, ref: Any, columns: Any) -> Any:
        """See the base class; ``ref`` is flat."""
        return ref[self._start + columns].astype(jnp.float32)
