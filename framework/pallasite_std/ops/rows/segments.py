"""Few long rows: too few for a block each, so that blocks reduce segments of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import Chunk, Rows
from pallasite_std.ops.rows.tiling import LANES, RowTiling

WIDTH = 32 * LANES
"""Columns of a segment: of two matrices, registers have room for what several blocks read."""

LEAST_COLUMNS, LEAST_GRADIENT_COLUMNS = 1 << 14, 1 << 13
"""Shorter rows take one multiprocessor less than a second kernel costs. On an H200, norms of 8 rows
of 65536 in bfloat16 took 2.6 us by two kernels, of 4 rows of 28672 4.1 by one; gradients of 4 rows
of 65536 4.1, and of 26534 in float32 5.9."""

LEAST_QUANTIZED = 1 << 15
"""The same for quantised norms, which take a third kernel: 4.1 us with 2 rows of 55869."""

LEAST_REDUCED = 1 << 14
"""The same for losses, whose rows are not read again: 20 to 40 rows of 20000 took 0.67 and 0.74 of
the time."""

LEAST_BYTES = 64 << 10
"""Bytes of more rows from which on blocks share them: 20 rows of 47006 in float32 took 8.4 us by a
block each, 28 of 37417 in bfloat16 8.8."""

MOST_PARTS = 256
"""Of a row, which each block of the next kernel combines by itself: a kernel between them takes as
long as either of them with rows of 65536 elements."""

FEW, MORE = 8, 3
"""Rows for which an eighth of the multiprocessors suffices leave the others without work; of longer
ones, those for which a third does."""


def in_segments(
    shape: Sequence[int], multiprocessors: int, size: int, least: int | None = None
) -> bool:
    """Whether blocks are to share the rows of a matrix, which are few and long.

    Args:
      shape: of the matrix.
      multiprocessors: of the machine.
      size: of an element, in bytes.
      least: columns of a few rows that are shared, by default :data:`LEAST_COLUMNS`.
    """
    rows, columns = shape
    if columns < (LEAST_COLUMNS if least is None else least):
        return False
    if FEW * rows <= multiprocessors:
        return True
    return MORE * rows <= multiprocessors and columns * size >= LEAST_BYTES


def reduced_in_segments(shape: Sequence[int], multiprocessors: int) -> bool:
    """The same of rows that are only reduced."""
    rows, columns = shape
    return MORE * rows <= multiprocessors and columns >= LEAST_REDUCED


def segment_kernel(
    work: Callable[..., tuple[Any, ...]],
    rows: int,
    columns: int,
    count: int,
    name: str,
    params: Any = None,
) -> Callable[..., Sequence[jax.Array]]:
    """A kernel with a block for each segment of a row.

    Args:
      work: ``work(rows, chunk, *refs)`` returns what it reduces the chunk to: ``count`` scalars.
      rows, columns: of the matrices.
      name: of the kernel, in profiles.
      params: ``CompilerParams``.

    Returns:
      A function of the operands that returns ``count`` arrays, float32 (rows, segments).
    """
    segments, rest = -(-columns // WIDTH), columns % WIDTH

    def body(*refs: Any) -> None:
        row, segment = lax.axis_index("row"), lax.axis_index("segment")
        operands, results = refs[: len(refs) - count], refs[len(refs) - count :]

        def reduce(width: int) -> None:
            block = Rows(RowTiling(1, 1, width, columns), row, 0)
            chunk = Chunk(block, pl.multiple_of(segment * WIDTH, WIDTH), width, kept=True)
            for ref, value in zip(results, work(block, chunk, *operands), strict=True):
                ref[row, segment] = value

        if not rest:
            reduce(WIDTH)
            return
        pl.when(segment < segments - 1)(lambda: reduce(WIDTH))
        pl.when(segment == segments - 1)(lambda: reduce(rest))

    kernel: Callable[..., Sequence[jax.Array]] = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((rows, segments), jnp.float32),) * count,
        grid=(rows, segments),
        grid_names=("row", "segment"),
        kernel_name=name,
        compiler_params=params,
    )
    return kernel


def segment_sizes(columns: int, shape: Sequence[int]) -> Any:
    """Columns of each segment, float32, along the last axis; of one if there is one alone."""
    count, last = shape[-1], columns % WIDTH or WIDTH
    if count == 1:
        return jnp.full(shape, columns, jnp.float32)
    number = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return jnp.where(number < count - 1, jnp.float32(WIDTH), jnp.float32(last))
