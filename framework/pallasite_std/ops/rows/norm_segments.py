"""RMSNorm and layer norm of few long rows: moments of segments, then each element by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite_std.ops.rows.elementwise import elementwise_kernel
from pallasite_std.ops.rows.kernel import Chunk, Rows
from pallasite_std.ops.rows.norm_body import Norm, affine
from pallasite_std.ops.rows.quantization import quantized_values, row_scale
from pallasite_std.ops.rows.segments import segment_kernel, segment_sizes


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

    def normalized(block: Rows, chunk: Chunk, refs: list[Any]) -> tuple[Any, Any]:
        """What is normalised, and the result."""
        x = loaded(chunk, refs)
        scale, *mean = (refs.pop(0)[block.place] for _ in range(norm.moments))
        value = (x - mean[0] if mean else x) * scale
        weight = refs.pop(0) if norm.weight else None
        return x, affine(norm, chunk, value, weight, refs.pop(0) if norm.bias else None)

    def magnitude(block: Rows, chunk: Chunk, *refs: Any) -> tuple[Any, ...]:
        return (jnp.max(abs(normalized(block, chunk, list(refs))[1])),)

    def store(block: Rows, chunk: Chunk, *refs: Any) -> None:
        rest = list(refs)
        x, value = normalized(block, chunk, rest)
        inverse = rest.pop(0) if norm.quantized is not None else None
        if inverse is not None:
            value = quantized_values(value * inverse[block.place], norm.quantized)
        chunk.store(rest.pop(0), value)
        if norm.residual:
            chunk.store(rest.pop(0), x)

    matrix = functools.partial(jax.ShapeDtypeStruct, (rows, columns))
    out_types = [matrix(norm.quantized or norm.out_dtype), *([matrix(dtype)] * norm.residual)]
    name = norm.name
    of_segments = segment_kernel(moments, rows, columns, norm.moments, f"{name}_moments")
    largest_of = segment_kernel(magnitude, rows, columns, 1, f"{name}_magnitudes")
    of_elements = elementwise_kernel(store, rows, columns, out_types, name)

    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        matrices, each = operands[:inputs], operands[inputs : inputs + vectors]
        parts = of_segments(*matrices)
        saved = _combined(parts, columns, norm.epsilon)
        scales: list[jax.Array] = []
        inverse: list[jax.Array] = []
        if norm.quantized is not None:
            (largest,) = largest_of(*matrices, *saved, *each)
            step, one = row_scale(jnp.max(largest, axis=1), norm.quantized)
            scales, inverse = [step], [one]
        out, *summed = of_elements(*matrices, *saved, *each, *inverse)
        return (out, *scales, *summed, *saved)

    return run


def _combined(parts: Any, columns: int, epsilon: float) -> list[jax.Array]:
    """The factor that normalises each row, and its mean if there is one, from the parts' means and
    sums of squares, relative to their own mean (Chan, Golub and LeVeque, 1979)."""
    if len(parts) == 1:
        return [jax.lax.rsqrt(jnp.sum(parts[0], axis=1) / columns + epsilon)]
    means, squares = parts
    sizes = segment_sizes(columns)
    mean = jnp.sum(means * sizes, axis=1) / columns
    squares = squares + sizes * jnp.square(means - mean[:, None])
    return [jax.lax.rsqrt(jnp.sum(squares, axis=1) / columns + epsilon), mean]
