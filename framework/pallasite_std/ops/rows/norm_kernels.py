"""The kernels of RMSNorm and layer norm, forward and backward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import (
    Chunk,
    Rows,
    Staging,
    Work,
    folding_row_kernel,
    in_step,
    row_kernel,
    streamed_row_kernel,
)
from pallasite_std.ops.rows.quantization import quantized_values, row_scale
from pallasite_std.ops.rows.tiling import (
    LANES,
    MOST_WARPGROUPS,
    VECTOR_BYTES,
    Registers,
    RowTiling,
    row_tiling,
    size_of,
)

FORWARD = Registers()
GRADIENT = Registers(alone=8, shared=10, crowded=16, area=1024)
"""Sums for the gradients by weight and bias stay in registers: of 64, with which a multiprocessor
has 32 warps, they are not to take more than half."""
HELD = 8
"""Elements that a lane may have of a row if the weight stays in registers, too."""
PAIRED = 10
"""The same if two rows are worked on at a time, as is better where there are two sums."""


@dataclasses.dataclass(frozen=True)
class Norm:
    """One norm.

    Attributes:
      centered: whether the mean is subtracted (layer norm).
      epsilon: added to the variance or mean square.
      offset: added to the weight.
      weight, bias, residual: which operands there are.
      out_dtype: of the result.
      quantized: dtype to which the result is quantised, with a scale for each row; or None.
    """

    centered: bool
    epsilon: float
    offset: float
    weight: bool
    bias: bool
    residual: bool
    out_dtype: np.dtype[Any]
    quantized: np.dtype[Any] | None = None

    @property
    def moments(self) -> int:
        """Numbers of a row that its gradient depends on: a factor, and a mean."""
        return 2 if self.centered else 1

    @property
    def name(self) -> str:
        """For profiles."""
        return "layer_norm" if self.centered else "rms_norm"


@functools.lru_cache(maxsize=512)
def forward(
    norm: Norm,
    rows: int,
    columns: int,
    dtype: np.dtype[Any],
    saves: bool = False,
    multiprocessors: int = 1,
    shared_memory: int = 0,
    clusters: bool = False,
) -> Callable[..., Any]:
    """The kernel, a function of x, residual?, weight?, bias?; ``shared_memory`` may hold rows that
    are fetched before their turn, of which the blocks of a cluster may have a part each.

    Returns:
      the result, the scales of its rows if it is quantised, and the sum of x and residual if there
      is a residual; with ``saves`` then the factor that normalises each row, and its mean if that
      is subtracted, float32 (rows,), for :func:`backward`.
    """
    tiling = row_tiling(rows, columns, size_of(dtype), FORWARD)

    def body(block: Rows, x: Any, *refs: Any) -> None:
        operands = list(refs)
        residual = operands.pop(0) if norm.residual else None
        weight = operands.pop(0) if norm.weight else None
        bias = operands.pop(0) if norm.bias else None
        out = operands.pop(0)
        scales = operands.pop(0) if norm.quantized is not None else None
        summed = operands.pop(0) if norm.residual else None
        saved = operands
        source = x
        if residual is not None:
            # What is normalised is what others read: the rounded sum.
            def add(chunk: Chunk) -> None:
                value = chunk.load_again(x) + chunk.load_again(residual)
                value = value.astype(dtype)
                chunk.keep(summed, value.astype(jnp.float32))
                chunk.store(summed, value)

            block.each(add)
            source = summed

        mean = None
        if norm.centered:
            (total,) = block.reduce(lambda chunk: (chunk.load(source),), "sum")
            mean = total / columns

        def centered(chunk: Chunk) -> Any:
            x = chunk.load(source)
            return x if mean is None else x - block.spread(mean, chunk)

        def weighted(chunk: Chunk) -> Any:
            return chunk.computed(out, lambda: affine(norm, chunk, centered(chunk), weight, None))

        def magnitudes(chunk: Chunk) -> tuple[Any, ...]:
            x = centered(chunk)
            return x * x, abs(weighted(chunk))

        # Without a bias the largest magnitude is known but for a factor before the norm is.
        early = norm.quantized is not None and bias is None
        if early:
            total, largest = block.reduce(magnitudes, "sum", "max")
        else:
            (total,) = block.reduce(lambda chunk: (jnp.square(centered(chunk)),), "sum")
        scale = lax.rsqrt(total / columns + norm.epsilon)
        for ref, one in zip(saved, (scale, mean), strict=False):
            block.store(ref, one)

        def value(chunk: Chunk) -> Any:
            return affine(norm, chunk, centered(chunk) * block.spread(scale, chunk), weight, bias)

        if scales is None:
            block.each(lambda chunk: chunk.store(out, value(chunk)))
            return

        def exact(chunk: Chunk) -> Any:
            if early:
                return weighted(chunk) * block.spread(scale, chunk)
            return chunk.computed(out, lambda: value(chunk))

        if early:
            largest = largest * scale
        else:
            (largest,) = block.reduce(lambda chunk: (abs(exact(chunk)),), "max")
        step, inverse = row_scale(largest, norm.quantized)
        block.store(scales, step)

        def quantize(chunk: Chunk) -> None:
            units = exact(chunk) * block.spread(inverse, chunk)
            chunk.store(out, quantized_values(units, norm.quantized))

        block.each(quantize)

    matrix = (rows, columns)
    out_types = [jax.ShapeDtypeStruct(matrix, norm.quantized or norm.out_dtype)]
    if norm.quantized is not None:
        out_types.append(jax.ShapeDtypeStruct((rows,), jnp.float32))
    if norm.residual:
        out_types.append(jax.ShapeDtypeStruct(matrix, dtype))
    if saves:
        out_types += [jax.ShapeDtypeStruct((rows,), jnp.float32)] * norm.moments
    exchanges = (2 if norm.centered else 1) + (norm.quantized is not None)
    machine = multiprocessors, shared_memory, clusters
    streamed = None if norm.residual else streamed_rows(rows, columns, dtype, *machine)
    if streamed is None:
        return row_kernel(body, rows, tiling, out_types, norm.name, exchanges)
    parts, staging = streamed
    blocks = resident_clusters(multiprocessors, parts.blocks)
    vectors = range(1, 1 + norm.weight + norm.bias) if HOLD else ()
    return streamed_row_kernel(
        body, rows, parts, blocks, staging, out_types, norm.name, exchanges, vectors
    )


HOLD = False
"""Whether weight and bias stay in registers meanwhile."""
STREAMED_BYTES = 48 * 1024
"""Rows of so many bytes are fetched before their turn: a multiprocessor has registers for few."""
STREAMED_WARPGROUPS = range(4, MOST_WARPGROUPS + 1)


def streamed_rows(
    rows: int,
    columns: int,
    dtype: np.dtype[Any],
    multiprocessors: int,
    shared_memory: int,
    clusters: bool,
) -> tuple[RowTiling, Staging] | None:
    """How a block on each multiprocessor goes over long rows; None where it is not to.

    Args:
      rows, columns, dtype: of the matrix.
      multiprocessors: that share the rows.
      shared_memory: bytes that a block may use for them.
      clusters: whether blocks may share a row.
    """
    size = size_of(dtype)
    if columns * size < STREAMED_BYTES or not shared_memory:
        return None
    for blocks in (1, 2, 4, 8) if clusters else (1,):
        stages = (shared_memory - 4096) * blocks // (columns * size)
        for threads in STREAMED_WARPGROUPS:
            chunk, rest = divmod(columns, threads * blocks)
            whole = not rest and chunk * size % VECTOR_BYTES == 0
            if stages < 2 or not whole or chunk > FORWARD.limit(threads):
                continue
            if rows < 4 * resident_clusters(multiprocessors, blocks):
                return None
            tiling = RowTiling(1, threads, chunk, columns, blocks)
            return tiling, Staging(min(MOST_STAGES, stages), (dtype,))
    return None


def affine(norm: Norm, chunk: Chunk, x: Any, weight: Any, bias: Any) -> Any:
    """Normalised values times weight, plus bias."""
    if weight is not None:
        x = x * (chunk.vector(weight) + norm.offset if norm.offset else chunk.vector(weight))
    if bias is not None:
        x = x + chunk.vector(bias)
    return x


# Backward -----------------------------------------------------------------------------------------


def keeps_rows(
    norm: Norm, rows: int, columns: int, dtype: np.dtype[Any], clusters: bool = False
) -> bool:
    """Whether :func:`backward` serves: registers hold a row, or there are no sums over rows."""
    tiling = _gradient_tiling(norm, rows, columns, dtype, clusters)
    return tiling.resident or not (norm.weight or norm.bias)


def _gradient_tiling(
    norm: Norm, rows: int, columns: int, dtype: np.dtype[Any], clusters: bool
) -> RowTiling:
    if clusters and (norm.weight or norm.bias) and columns > MOST_WARPGROUPS * PAIRED * LANES:
        shared = shared_tiling(columns, size_of(dtype))
        if shared is not None:
            return shared
    return row_tiling(rows, columns, size_of(dtype), GRADIENT)


MOST_SHARED = 32
"""Elements that a lane of four warpgroups may have of a row that a cluster of eight shares."""


def shared_tiling(columns: int, itemsize: int) -> RowTiling | None:
    """The tiling of rows that the blocks of a cluster share, as few as possible; None if such
    blocks cannot hold them."""
    vector = VECTOR_BYTES // itemsize
    counts = range(4, MOST_WARPGROUPS + 1)

    def fitting(blocks: int, limit: int) -> list[RowTiling]:
        return [
            RowTiling(1, threads, columns // (threads * blocks), columns, blocks)
            for threads in counts
            if columns % (threads * blocks * vector) == 0
            and columns // (threads * blocks) <= limit * LANES
        ]

    for blocks in (2, 4, 8):
        found = fitting(blocks, PAIRED)
        if found:
            # Whole vectors of sums in float32 for each lane, if possible, of few elements.
            return min(found, key=lambda one: (one.chunk % (4 * LANES) > 0, one.chunk))
    # Registers for values in between are the fewest where warpgroups are few.
    return next(iter(fitting(8, MOST_SHARED)), None)


def resident_clusters(multiprocessors: int, blocks: int) -> int:
    """How many clusters of so many blocks run at a time, one block on each multiprocessor.

    Clusters lie within parts of the chip that have 16 or 18 multiprocessors.
    """
    whole = multiprocessors if blocks <= 2 else multiprocessors - multiprocessors % 16
    return max(1, whole // blocks)


@functools.lru_cache(maxsize=512)
def backward(
    norm: Norm,
    rows: int,
    columns: int,
    dtype: np.dtype[Any],
    multiprocessors: int,
    shared_memory: int,
    clusters: bool = False,
) -> Callable[..., Any]:
    """The kernel, a function of x (or the sum with the residual), d_out, the moments that
    :func:`forward` saves, weight?, d_sum?.

    Returns:
      the gradient by x; then, if there are such operands, sums over the rows of each block from
      which gradients by weight and bias are made, float32 (blocks, columns) each: registers have to
      hold a row (:func:`keeps_rows`).
    """
    tiling = _gradient_tiling(norm, rows, columns, dtype, clusters)
    count = norm.weight + norm.bias

    def body(block: Rows, x: Any, d_out: Any, *refs: Any) -> Work:
        operands = list(refs)
        scale, *mean = (block.values(operands.pop(0)) for _ in range(norm.moments))
        weight = operands.pop(0) if norm.weight else None
        d_sum = operands.pop(0) if norm.residual else None
        d_x = operands.pop(0)

        # Normalised values are x * scale + below.
        below = -mean[0] * scale if mean else None
        added: list[Any] = []

        def products(chunk: Chunk) -> tuple[Any, ...]:
            cotangent = chunk.load(d_out)
            value = chunk.load(x) * block.spread(scale, chunk)
            if below is not None:
                value = value + block.spread(below, chunk)
            if chunk is block.resident:
                # With sums, registers hold the row: it is a single chunk.
                added.extend([cotangent * value] if norm.weight else [])
                added.extend([cotangent] if norm.bias else [])
            gradient = affine(norm, chunk, cotangent, weight, None)
            return (gradient * value, gradient) if mean else (gradient * value,)

        along, *shift = yield products, ("sum",) * norm.moments, added
        # The result is (gradient - shift / columns - value * along / columns) * scale.
        factor = -along * scale / columns
        offset = None
        if below is not None:
            offset = factor * below - shift[0] * scale / columns
        factor = factor * scale

        def store(chunk: Chunk) -> None:
            result = chunk.load(x) * block.spread(factor, chunk)
            if offset is not None:
                result = result + block.spread(offset, chunk)
            gradient = affine(norm, chunk, chunk.load(d_out), weight, None)
            result = gradient * block.spread(scale, chunk) + result
            if d_sum is not None:
                result = result + chunk.load_again(d_sum)
            chunk.store(d_x, result)

        block.each(store)

    def finish(first: Any, block: Any, sums: tuple[Any, ...], *refs: Any) -> None:
        for ref, value in zip(refs[len(refs) - len(sums) :], sums, strict=True):
            ref[block, pl.ds(first, tiling.chunk)] = value

    def alone(block: Rows, *refs: Any) -> None:
        in_step([body(block, *refs)], [block])

    name, exchanges = f"{norm.name}_gradient", norm.moments
    out_types = [jax.ShapeDtypeStruct((rows, columns), dtype)]
    if not count:
        return row_kernel(alone, rows, tiling, out_types, name, exchanges)
    resident, staging = staged_rows(tiling, rows, count, (dtype, norm.out_dtype), shared_memory)
    group = tiling.height * (1 if staging is None else staging.together)
    most = multiprocessors * resident
    if tiling.blocks > 1:
        most = resident_clusters(multiprocessors, tiling.blocks)
    blocks = max(1, min(rows // group, most))
    out_types += [jax.ShapeDtypeStruct((blocks, columns), jnp.float32)] * count
    params = None if staging is None else plgpu.CompilerParams(min_blocks=resident)
    held = norm.weight and tiling.height * tiling.chunk <= HELD * LANES
    vectors = [2 + norm.moments] if held else []
    return folding_row_kernel(
        body,
        finish,
        rows,
        tiling,
        blocks,
        count,
        out_types,
        name,
        exchanges,
        staging,
        params,
        vectors,
        range(2, 2 + norm.moments),
    )


_UNIT = 16
"""Bytes of which rows that are copied in one piece consist."""
MOST_STAGES = 4
_WARPGROUPS = 512
"""Registers of a multiprocessor by lanes of a warpgroup."""
_TEMPORARIES = (28, 1.5, 88)
"""Registers of a lane besides sums: some, more for each element of its columns, and at most."""


def staged_rows(
    tiling: RowTiling, rows: int, sums: int, dtypes: tuple[np.dtype[Any], ...], shared_memory: int
) -> tuple[int, Staging | None]:
    """How many blocks a multiprocessor has, and how their rows are fetched before their turn: None
    where they cannot be, or shared memory does not suffice.

    Args:
      tiling: whose warpgroups hold the rows.
      rows: of the matrices.
      sums: that each lane keeps for its columns.
      dtypes: of the matrices that are read.
      shared_memory: bytes that a block may use for it; a multiprocessor has little more.
    """
    most = max(1, 8 // tiling.threads)
    sizes = [size_of(dtype) for dtype in dtypes]
    if any(tiling.chunk * size % _UNIT for size in sizes):
        return most, None
    least, each, most_temporaries = _TEMPORARIES
    elements = tiling.height * tiling.chunk / LANES
    registers = min(least + each * elements, most_temporaries) + sums * elements
    stage = sum(sizes) * tiling.height * tiling.threads * tiling.chunk
    fitting = _WARPGROUPS / (tiling.threads * registers)
    for resident in range(min(most, max(1, int(fitting + 0.2))), 0, -1):
        room = (shared_memory - 4096) // (resident * stage)
        paired = tiling.threads > 1 and sums > 1 and tiling.chunk <= PAIRED * LANES
        if paired and room >= 4 and rows >= 2:
            return resident, Staging(min(MOST_STAGES, room // 2), dtypes, together=2)
        if room >= 2:
            return resident, Staging(min(MOST_STAGES, room), dtypes)
    return most, None
