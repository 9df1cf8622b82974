"""Where segments of tiles of queries and of tiles of keys meet, found before attention's kernel.

By XLA that is ten kernels, which take longer than attention of few tokens; here one of its kernels
finds the extremes of all tiles of one kind, and a kernel of ours compares with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.api import padded

_HIGHEST = 2**31 - 1

_LANES = 128


def spans(
    of_rows: jax.Array, of_columns: jax.Array, rows: int, columns: int, part: int
) -> jax.Array:
    """For each tile of rows the tiles of columns that have to be gone through.

    Args:
      of_rows, of_columns: numbers of segments, (batch, sequence): of queries and keys, or the other
        way round.
      rows, columns: of a tile.
      part: rows of a part of a tile, for which is said where nothing is hidden.

    Returns:
      (batch, tiles of rows, 2 + 2 * parts) of int32: the tiles of columns [begin, end) that may
      have the same segments, then for each part those [begin, end) that have its only segment and
      no other one. Segments in ascending order make the first exact up to the tiles at both ends.
    """
    batch, length = of_rows.shape
    tiles = -(-length // rows)
    compare = _kernel(batch, length, tiles, rows, part, -(-of_columns.shape[1] // columns))
    found: jax.Array = compare(padded(of_rows, 1, rows), extremes(of_columns, columns))
    return found


def extremes(segments: jax.Array, size: int) -> jax.Array:
    """(batch, 2, tiles) of int32: the smallest segment of each tile, and the bitwise complement of
    the largest, which is the smallest complement, too; filled up to whole vectors of lanes with
    tiles of no segments."""
    tiles = -(-segments.shape[1] // size)
    both = jnp.stack([segments, ~segments], axis=1)
    rest = (tiles + -tiles % _LANES) * size - segments.shape[1]
    both = jnp.pad(both, ((0, 0), (0, 0), (0, rest)), constant_values=_HIGHEST)
    return both.reshape(*both.shape[:2], -1, size).min(axis=3)


@functools.lru_cache(maxsize=256)
def _kernel(
    batch: int, length: int, tiles: int, rows: int, part: int, count: int
) -> Callable[..., Any]:
    """Compares segments of rows, in whole tiles, with the extremes of ``count`` tiles."""
    parts = rows // part

    def body(segments: Any, ends: Any, out: Any) -> None:
        batch, tile = lax.axis_index("batch"), lax.axis_index("tile")
        low, complement = ends[batch, 0], ends[batch, 1]
        high = ~complement
        numbers = lax.broadcasted_iota(jnp.int32, low.shape, 0)

        def first(shown: Any, otherwise: Any) -> Any:
            return jnp.min(jnp.where(shown, numbers, otherwise))

        of_parts = [
            _of_part(segments, batch, tile * rows + number * part, part, length)
            for number in range(parts)
        ]
        own_low, own_high = of_parts[0]
        for one_low, one_high in of_parts[1:]:
            own_low, own_high = lax.min(own_low, one_low), lax.max(own_high, one_high)
        meet = (own_low <= high) & (low <= own_high)
        end = jnp.max(jnp.where(meet, numbers + 1, 0))
        found = [lax.min(first(meet, _HIGHEST), end), end]
        for one_low, one_high in of_parts:
            same = (low == one_low) & (high == one_low) & (one_low == one_high)
            begin = first(same, count)
            over = jnp.logical_not(same) & (numbers >= begin)
            found += [begin, lax.min(first(over, count), jnp.int32(count))]
        for place, value in enumerate(found):
            out[batch, tile, place] = value

    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, tiles, 2 + 2 * parts), jnp.int32),
        grid=(tiles, batch),
        grid_names=("tile", "batch"),
        kernel_name="attention_spans",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, unsafe_no_auto_barriers=True
        ),
    )
    return kernel


def _of_part(segments: Any, batch: Any, start: Any, part: int, length: int) -> tuple[Any, Any]:
    """The smallest and the largest segment of some rows; of those that exist."""
    found = segments[batch, pl.ds(start, part)]
    exists = start + lax.broadcasted_iota(jnp.int32, found.shape, 0) < length
    low = jnp.min(jnp.where(exists, found, _HIGHEST))
    return low, jnp.max(jnp.where(exists, found, ~_HIGHEST))
