"""RMSNorm and layer norm of few long rows: moments of segments, then each element by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite_std.ops.rows.elementwise import elementwise_kernel
from pallasite_std.ops.rows.kernel import Chunk, Rows
from pallasite_std.ops.rows.norm_body import Norm, affine
from pallasite_std.ops.rows.quantization import quantized_values, row_scale
from pallasite_std.ops.rows.segments import MOST_PARTS, segment_kernel, segment_sizes


@functools.lru_cache(maxsize=512)
def forward(norm: Norm, rows: int, columns: int, dtype: np.dtype[Any]) -> Callable[..., Any]:
    """A function of x, residual?, weight?, bias?: two kernels, or three if it quantises.

    Returns:
      what :func:`norm_kernels.forward` returns, with what it saves.
    """
    inputs, vectors = 1 + norm.residual, norm.weight + norm.bias

    def loaded(chunk: Chunk, refs: list[Any]) -> Any:
        matrices = [refs.pop(0) for _ in range(inputs)]
        if not norm.residual:
            return chunk.load(matrices[0])
        # What is normalised is what others read: the rounded sum.
        return (chunk.load(matrices[0]) + chunk.load(matrices[1])).astype(dtype).astype(jnp.float32)

    def moments(block: Rows, chunk: Chunk, *refs: Any) -> tuple[Any, ...]:
        x = loaded(chunk, list(refs))
        if not norm.centered:
            return (jnp.sum(x * x),)
        mean = jnp.sum(x) / chunk.width
        return mean, jnp.sum(jnp.square(x - mean))

    def normalized(block: Rows, chunk: Chunk, refs: list[Any]) -> tuple[Any, Any, list[Any]]:
        """What is normalised, the result, and the row's factor and mean."""
        x = loaded(chunk, refs)
        parts = [refs.pop(0)[block.place] for _ in range(norm.moments)]
        scale, *mean = _factors(_combined(parts, columns), columns, norm.epsilon)
        value = (x - mean[0] if mean else x) * scale
        weight = refs.pop(0) if norm.weight else None
        value = affine(norm, chunk, value, weight, refs.pop(0) if norm.bias else None)
        return x, value, [scale, *mean]

    def magnitude(block: Rows, chunk: Chunk, *refs: Any) -> tuple[Any, ...]:
        return (jnp.max(abs(normalized(block, chunk, list(refs))[1])),)

    def store(block: Rows, chunk: Chunk, *refs: Any) -> None:
        rest = list(refs)
        x, value, of_row = normalized(block, chunk, rest)
        if norm.quantized is not None:
            step, inverse = row_scale(jnp.max(rest.pop(0)[block.place]), norm.quantized)
            value = quantized_values(value * inverse, norm.quantized)
            of_row = [step, *of_row]
        chunk.store(rest.pop(0), value)
        if norm.residual:
            chunk.store(rest.pop(0), x)

        def store_row() -> None:
            for ref, one in zip(rest, of_row, strict=True):
                ref[block.place] = one

        pl.when(chunk.first == 0)(store_row)

    matrix = functools.partial(jax.ShapeDtypeStruct, (rows, columns))
    out_types = [matrix(norm.quantized or norm.out_dtype), *([matrix(dtype)] * norm.residual)]
    each_row = norm.moments + (norm.quantized is not None)
    out_types += [jax.ShapeDtypeStruct((rows,), jnp.float32)] * each_row
    name = norm.name
    of_segments = segment_kernel(moments, rows, columns, norm.moments, f"{name}_moments")
    largest_of = segment_kernel(magnitude, rows, columns, 1, f"{name}_magnitudes")
    of_elements = elementwise_kernel(store, rows, columns, out_types, name)

    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        matrices, each = operands[:inputs], operands[inputs : inputs + vectors]
        parts = list(of_segments(*matrices))
        if parts[0].shape[1] > MOST_PARTS:
            parts = [one[:, None] for one in _combined(parts, columns)]
        largest: list[jax.Array] = []
        if norm.quantized is not None:
            (largest_of_segments,) = largest_of(*matrices, *parts, *each)
            largest = [largest_of_segments]
            if largest_of_segments.shape[1] > MOST_PARTS:
                largest = [jnp.max(largest_of_segments, axis=1, keepdims=True)]
        out, *rest = of_elements(*matrices, *parts, *each, *largest)
        summed = [rest.pop(0)] if norm.residual else []
        scales = [rest.pop(0)] if norm.quantized is not None else []
        return (out, *scales, *summed, *rest)

    return run


def _combined(parts: Sequence[Any], columns: int) -> list[Any]:
    """The sum of squares of each row, or its mean and the sum of squares relative to that, from
    those of parts along the last axis (Chan, Golub and LeVeque, 1979)."""
    if len(parts) == 1:
        return [jnp.sum(parts[0], axis=-1)]
    means, squares = parts
    sizes = segment_sizes(columns, means.shape)
    mean = jnp.sum(means * sizes, axis=-1) / columns
    apart = means - (mean[:, None] if means.ndim > 1 else mean)
    return [mean, jnp.sum(squares + sizes * apart * apart, axis=-1)]


def _factors(moments: Sequence[Any], columns: int, epsilon: float) -> list[Any]:
    """The factor that normalises a row, and its mean if there is one."""
    *mean, squares = moments
    return [lax.rsqrt(squares / columns + epsilon), *mean]
