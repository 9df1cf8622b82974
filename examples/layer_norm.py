"""LayerNorm: each row shifted and scaled to mean 0 and variance 1, then an affine map per column.

The row stays in registers between the two passes over it, so the variance is computed from the
differences to the mean, which is exact enough even when the mean is large.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from examples.catalog import Example, random_arrays
from examples.rows import row_kernel

EPSILON = 1e-5


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """``(x - mean) / sqrt(variance + EPSILON) * weight + bias``, computed in float32."""

    def body(row, x_ref, weight_ref, bias_ref, out_ref):
        v = x_ref[row.index, row.window].astype(jnp.float32)
        centered = v - row.reduce(jnp.sum, v) / x.shape[1]
        variance = row.reduce(jnp.sum, centered * centered) / x.shape[1]
        w = weight_ref[row.window].astype(jnp.float32)
        b = bias_ref[row.window].astype(jnp.float32)
        result = centered * jax.lax.rsqrt(variance + EPSILON) * w + b
        out_ref[row.index, row.window] = result.astype(x.dtype)

    return row_kernel(body, x, "layer_norm", exchanges=2)(x, weight, bias)


def reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The same in NumPy."""
    centered = x - x.mean(axis=1, keepdims=True)
    variance = (centered * centered).mean(axis=1, keepdims=True)
    return centered / np.sqrt(variance + EPSILON) * weight + bias


EXAMPLES = [
    Example(
        f"layer_norm_{name}_{length}",
        layer_norm,
        random_arrays(((64, length), dtype), ((length,), dtype), ((length,), dtype)),
        reference,
        tolerance,
    )
    for name, dtype, length, tolerance in (
        ("f32", jnp.float32, 8192, 1e-5),
        ("f16", jnp.float16, 4096, 1e-3),
    )
]
