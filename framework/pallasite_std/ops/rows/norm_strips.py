"""Gradients of norms whose rows registers do not hold: sums of rows, then strips of columns.

The first kernel reads the rows and reduces the gradients; the second goes over the rows of a strip
of columns, and so keeps the sums for the gradients by weight and bias in registers. Together they
read x and the cotangent twice, and need no third kernel that reads them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import Chunk, Rows, row_kernel
from pallasite_std.ops.rows.norm_body import Norm, affine
from pallasite_std.ops.rows.segments import (
    LEAST_GRADIENT_COLUMNS,
    MOST_PARTS,
    in_segments,
    segment_kernel,
)
from pallasite_std.ops.rows.tiling import LANES, Registers, RowTiling, row_tiling, size_of

WIDTH = 8 * LANES
"""Columns of a strip: a vector of 16 bits for each lane."""

RESIDENT = 8
"""Blocks of a multiprocessor that go over strips."""


@functools.lru_cache(maxsize=512)
def reductions(
    norm: Norm, rows: int, columns: int, dtype: np.dtype[Any], multiprocessors: int
) -> Callable[..., Any]:
    """The first kernel, a function of x, d_out, the moments that the forward saves, and weight?.

    Returns:
      float32 (rows,) each: the factor of its normalised elements that is subtracted from their
      gradients and, with a mean, the mean gradient; or sums of parts of each row, (rows, parts),
      which the number of columns is to divide.
    """
    tiling = row_tiling(rows, columns, size_of(dtype), Registers())

    def reduced(
        block: Rows, reduce: Callable[..., tuple[Any, ...]], x: Any, d_out: Any, operands: list[Any]
    ) -> tuple[Any, ...]:
        scale, *mean = (block.values(operands.pop(0)) for _ in range(norm.moments))
        weight = operands.pop(0) if norm.weight else None

        def products(chunk: Chunk) -> tuple[Any, ...]:
            value = chunk.load(x)
            if mean:
                value = value - block.spread(mean[0], chunk)
            gradient = affine(norm, chunk, chunk.load(d_out), weight, None)
            along = gradient * (value * block.spread(scale, chunk))
            return (along, gradient) if mean else (along,)

        return reduce(products)

    def body(block: Rows, x: Any, d_out: Any, *refs: Any) -> None:
        operands = list(refs)

        def whole(products: Callable[[Chunk], Any]) -> tuple[Any, ...]:
            return block.reduce(products, *("sum",) * norm.moments)

        totals = reduced(block, whole, x, d_out, operands)
        for ref, value in zip(operands, totals, strict=True):
            block.store(ref, value / columns)

    def of_segment(block: Rows, chunk: Chunk, x: Any, d_out: Any, *refs: Any) -> tuple[Any, ...]:
        def part(products: Callable[[Chunk], Any]) -> tuple[Any, ...]:
            return tuple(jnp.sum(one) for one in products(chunk))

        return reduced(block, part, x, d_out, list(refs))

    out_types = [jax.ShapeDtypeStruct((rows,), jnp.float32)] * norm.moments
    name = f"{norm.name}_gradient_rows"
    if in_segments((rows, columns), multiprocessors, size_of(dtype), LEAST_GRADIENT_COLUMNS):
        kernel = segment_kernel(of_segment, rows, columns, norm.moments, name)

        def run(*operands: jax.Array) -> list[jax.Array]:
            parts = list(kernel(*operands))
            if parts[0].shape[1] > MOST_PARTS:
                return [jnp.sum(one, axis=1) / columns for one in parts]
            return parts

        return run
    return row_kernel(body, rows, tiling, out_types, name, norm.moments)


@functools.lru_cache(maxsize=512)
def gradients(
    norm: Norm, rows: int, columns: int, dtype: np.dtype[Any], multiprocessors: int
) -> Callable[..., Any]:
    """The second kernel, a function of x, d_out, the moments that the forward saves, what the first
    kernel returns, weight? and d_sum?.

    Returns:
      the gradient by x, and sums over the rows of each block, float32 (blocks, columns), for the
      gradients by weight and bias, as far as there are such operands.
    """
    strips = -(-columns // WIDTH)
    blocks = max(1, min(rows, RESIDENT * multiprocessors // strips))
    sums = norm.weight + norm.bias

    def body(*refs: Any) -> None:
        strip, rest = lax.axis_index("strip"), columns % WIDTH
        full = columns // WIDTH
        if rest and full:
            pl.when(strip < full)(lambda: over_rows(strip * WIDTH, WIDTH, *refs))
            pl.when(strip == full)(lambda: over_rows(full * WIDTH, rest, *refs))
        else:
            over_rows(strip * WIDTH if full else 0, rest or WIDTH, *refs)

    def over_rows(first: Any, width: int, x: Any, d_out: Any, *refs: Any) -> None:
        operands = list(refs)
        scale, *mean = (operands.pop(0) for _ in range(norm.moments))
        along, *shift = (operands.pop(0) for _ in range(norm.moments))
        weight = operands.pop(0) if norm.weight else None
        d_sum = operands.pop(0) if norm.residual else None
        d_x, *folded = operands
        block = lax.axis_index("block")
        if not isinstance(first, int):
            first = pl.multiple_of(first, WIDTH)
        window = pl.ds(first, width)

        def chunk_of(row: Any) -> Chunk:
            tiling = RowTiling(1, 1, width, columns)
            return Chunk(Rows(tiling, row, 0), first, width, kept=False)

        def load(row: Any) -> tuple[Any, Any]:
            return x[row, window], d_out[row, window]

        def mean_of(ref: Any, row: Any) -> Any:
            return ref[row] if len(ref.shape) == 1 else jnp.sum(ref[row]) / columns

        def step(number: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            value, cotangent, *so_far = carry
            row = block + number * blocks
            # The next row's, early.
            following = load(lax.min(row + blocks, rows - 1))
            chunk = chunk_of(row)
            value, cotangent = value.astype(jnp.float32), cotangent.astype(jnp.float32)
            if mean:
                value = value - mean[0][row]
            value = value * scale[row]
            gradient = affine(norm, chunk, cotangent, weight, None)
            if shift:
                gradient = gradient - mean_of(shift[0], row)
            result = (gradient - value * mean_of(along, row)) * scale[row]
            if d_sum is not None:
                result = result + chunk.load_again(d_sum)
            chunk.store(d_x, result)
            added = [cotangent * value] if norm.weight else []
            added += [cotangent] if norm.bias else []
            return (*following, *(one + more for one, more in zip(so_far, added, strict=True)))

        steps = lax.div(rows - block + (blocks - 1), blocks)
        start = (jnp.zeros((width,), jnp.float32),) * sums
        _, _, *totals = lax.fori_loop(0, steps, step, (*load(block), *start))
        for ref, total in zip(folded, totals, strict=True):
            ref[block, window] = total

    out_types = [
        jax.ShapeDtypeStruct((rows, columns), dtype),
        *[jax.ShapeDtypeStruct((blocks, columns), jnp.float32)] * sums,
    ]
    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=tuple(out_types),
        grid=(strips, blocks),
        grid_names=("strip", "block"),
        kernel_name=f"{norm.name}_gradient_strips",
    )
    return kernel
