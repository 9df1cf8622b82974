"""What norms compute of rows, whichever kernel goes over these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite_std.ops.rows.kernel import Chunk, Rows, Work
from pallasite_std.ops.rows.quantization import quantized_values, row_scale
from pallasite_std.ops.rows.tiling import size_of


@dataclasses.dataclass(frozen=True)
class Norm:
    """One norm.

    Attributes:
      centered: whether the mean is subtracted (layer norm).
      epsilon: added to the variance or mean square.
      offset: added to the weight.
      weight, bias, residual: which operands there are.
      out_dtype: of the result.
      weight_size: bytes of an element of the weight.
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
    weight_size: int = 4

    @property
    def moments(self) -> int:
        """Numbers of a row that its gradient depends on: a factor, and a mean."""
        return 2 if self.centered else 1

    @property
    def name(self) -> str:
        """For profiles."""
        return "layer_norm" if self.centered else "rms_norm"


def forward_types(
    norm: Norm, rows: int, columns: int, dtype: np.dtype[Any], saves: bool
) -> list[jax.ShapeDtypeStruct]:
    """Types of what the forward kernel returns."""
    matrix = (rows, columns)
    out_types = [jax.ShapeDtypeStruct(matrix, norm.quantized or norm.out_dtype)]
    if norm.quantized is not None:
        out_types.append(jax.ShapeDtypeStruct((rows,), jnp.float32))
    if norm.residual:
        out_types.append(jax.ShapeDtypeStruct(matrix, dtype))
    if saves:
        out_types += [jax.ShapeDtypeStruct((rows,), jnp.float32)] * norm.moments
    return out_types


def forward_body(
    norm: Norm, columns: int, dtype: np.dtype[Any], early_vectors: bool = False
) -> Callable[..., Work]:
    """The body of a forward kernel, of the operands and results of :func:`.norm_kernels.forward`.

    Args:
      norm: which it is.
      columns: of the rows.
      dtype: of x.
      early_vectors: whether weight and bias are fetched before a reduction.
    """

    def body(block: Rows, x: Any, *refs: Any) -> Work:
        operands = list(refs)
        residual = operands.pop(0) if norm.residual else None
        weight = operands.pop(0) if norm.weight else None
        bias = operands.pop(0) if norm.bias else None
        out = operands.pop(0)
        scales = operands.pop(0) if norm.quantized is not None else None
        summed = operands.pop(0) if norm.residual else None
        saved = operands

        if early_vectors and block.tiling.resident and not (block.staged or block.near):
            place = pl.ds(block.resident.first, block.resident.width)
            block.held |= {id(one): one[place] for one in (weight, bias) if one is not None}

        def add(chunk: Chunk) -> Any:
            # What is normalised is what others read: the rounded sum.
            return (chunk.load_again(x) + chunk.load_again(residual)).astype(dtype)

        def add_first(chunk: Chunk) -> None:
            value = add(chunk)
            chunk.keep(summed, value.astype(jnp.float32))
            chunk.store(summed, value)

        # Rows that wait in shared memory are added anew, and stored at the end.
        staged = residual is not None and bool(block.staged)
        if residual is not None and not staged:
            block.each(add_first)

        def source(chunk: Chunk) -> Any:
            if staged:
                return chunk.computed(summed, lambda: add(chunk).astype(jnp.float32))
            return chunk.load(x if residual is None else summed)

        def sampled(block: Rows) -> Any:
            """About the mean of a row, from a few elements."""
            some = block.samples(x)
            others = block.samples(residual) if residual is not None else None
            if some is not None and others is not None:
                both = zip(some, others, strict=True)
                some = [(a + b).astype(dtype).astype(jnp.float32) for a, b in both]
            return None if some is None else sum(some) / len(some)

        mean = squares = None
        # Without a bias the largest magnitude is known but for a factor before the norm is.
        early = norm.quantized is not None and bias is None
        one_pass = ONE_PASS_NEAR if block.near else ONE_PASS
        if norm.centered and one_pass and not early and _has_chunks(block):
            mean, squares = _moments(block, source)
        elif at_once(norm, dtype) and (pivot := sampled(block)) is not None:
            sums = yield lambda chunk: _apart(source(chunk), pivot), ("sum", "sum"), []
            mean = pivot + sums[0] / columns
            squares = jnp.maximum(sums[1] - sums[0] * sums[0] / columns, 0.0)
        elif norm.centered:
            (total,) = yield lambda chunk: (source(chunk),), ("sum",), []
            mean = total / columns

        def centered(chunk: Chunk) -> Any:
            x = source(chunk)
            return x if mean is None else x - block.spread(mean, chunk)

        def squared(chunk: Chunk) -> Any:
            x = centered(chunk)
            return x * x if block.fused else jnp.square(x)

        def weighted(chunk: Chunk) -> Any:
            return chunk.computed(out, lambda: affine(norm, chunk, centered(chunk), weight, None))

        def magnitudes(chunk: Chunk) -> tuple[Any, ...]:
            x = centered(chunk)
            return x * x, abs(weighted(chunk))

        if early:
            total, largest = yield magnitudes, ("sum", "max"), []
        elif squares is not None:
            total = squares
        else:
            (total,) = yield lambda chunk: (squared(chunk),), ("sum",), []
        scale = lax.rsqrt(total / columns + norm.epsilon)

        def value(chunk: Chunk) -> Any:
            return affine(norm, chunk, centered(chunk) * block.spread(scale, chunk), weight, bias)

        def exact(chunk: Chunk) -> Any:
            return weighted(chunk) if early else chunk.computed(out, lambda: value(chunk))

        if scales is not None and not early:
            (largest,) = yield lambda chunk: (abs(exact(chunk)),), ("max",), []
        if scales is not None:
            step, inverse = row_scale(largest, norm.quantized)
            if early:
                step = jnp.where(largest == 0.0, 1.0, step * scale)
            block.store(scales, step)
        for ref, one in zip(saved, (scale, mean), strict=False):
            block.store(ref, one)

        def store(chunk: Chunk) -> None:
            if staged:
                chunk.store(summed, source(chunk))
            if scales is None:
                chunk.store(out, value(chunk))
                return
            units = exact(chunk) * block.spread(inverse, chunk)
            chunk.store(out, quantized_values(units, norm.quantized))

        block.each(store)

    return body


ONE_PASS = False
"""Whether mean and variance of rows that registers do not hold are computed in one pass."""

ONE_PASS_NEAR = False
"""The same of rows in shared memory."""


AT_ONCE = True
"""Whether pipelined layer norms of 16 bits reduce differences to the mean of a few elements, and
their squares, at once. Of a row of n elements, these are at most n / 4 times the variance for each:
24 bits leave more than the result has. That took 0.92 to 0.93 of the time with 11333 and 16229
columns on an H200; of rows in registers 0.95 to 1.06."""


def at_once(norm: Norm, dtype: np.dtype[Any]) -> bool:
    """Whether a layer norm reduces once for mean and variance, where elements are at hand."""
    return AT_ONCE and norm.centered and norm.quantized is None and size_of(dtype) < 4


def _apart(value: Any, pivot: Any) -> tuple[Any, Any]:
    """Differences, and their squares."""
    value = value - pivot
    return value, value * value


def _has_chunks(block: Rows) -> bool:
    """Whether a row is read chunk by chunk, and each warpgroup has some."""
    tiling = block.tiling
    return not tiling.resident and tiling.columns // tiling.chunk >= tiling.threads


def _moments(block: Rows, source: Callable[[Chunk], Any]) -> tuple[Any, Any]:
    """The mean of a row, and the sum of squares relative to it, in one pass.

    Each place of a chunk has sums relative to the mean of a warpgroup's first chunk. Its square,
    relative to the variance, is at most the number of the warpgroup's chunks: few digits are lost.
    The places' means and sums of squares are combined as in T. F. Chan, G. H. Golub and R. J.
    LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """
    tiling, thread = block.tiling, block.thread
    first = source(block.chunk_at(thread * tiling.chunk, tiling.chunk))
    pivot = jnp.sum(first) / tiling.chunk

    def step(chunk: Chunk, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        value = source(chunk) - pivot
        return carry[0] + value, carry[1] + value * value

    start = (jnp.zeros((tiling.chunk,), jnp.float32),) * 2
    sums, squares = block.fold(step, start)
    full = tiling.columns // tiling.chunk
    count = lax.div(jnp.int32(full - thread + tiling.threads - 1), jnp.int32(tiling.threads))
    count = count.astype(jnp.float32)
    below = sums / count
    rest = block.rest()

    def with_rest(mine: Any, of_rest: Callable[[Any], Any]) -> Any:
        if rest is None:
            return mine
        last = thread == tiling.threads - 1
        return mine + lax.cond(last, lambda: of_rest(source(rest)), lambda: jnp.float32(0.0))

    (total,) = block.exchange((with_rest(jnp.sum(pivot * count + sums), jnp.sum),), ("sum",))
    mean = total / tiling.columns
    apart = pivot + below - mean
    parts = jnp.sum(squares - sums * below + count * apart * apart)
    parts = with_rest(parts, lambda values: jnp.sum(jnp.square(values - mean)))
    (total,) = block.exchange((parts,), ("sum",))
    return mean, total


def affine(norm: Norm, chunk: Chunk, x: Any, weight: Any, bias: Any) -> Any:
    """Normalised values times weight, plus bias."""
    if weight is not None:
        x = x * (chunk.vector(weight) + norm.offset if norm.offset else chunk.vector(weight))
    if bias is not None:
        x = x + chunk.vector(bias)
    return x
