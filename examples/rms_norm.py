"""RMSNorm: each row divided by its root mean square, times a weight per column.

One block per row; a row of more than 16 KiB is shared by several warpgroups (see ``rows.py``).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from examples.catalog import Example, random_arrays
from examples.rows import row_kernel

EPSILON = 1e-6


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """``x / sqrt(mean(x**2, axis=1) + EPSILON) * weight``, computed in float32."""

    def body(row, x_ref, weight_ref, out_ref):
        v = x_ref[row.index, row.window].astype(jnp.float32)
        mean_square = row.reduce(jnp.sum, v * v) / x.shape[1]
        w = weight_ref[row.window].astype(jnp.float32)
        normalized = v * jax.lax.rsqrt(mean_square + EPSILON) * w
        out_ref[row.index, row.window] = normalized.astype(x.dtype)

    return row_kernel(body, x, "rms_norm", exchanges=1)(x, weight)


def reference(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The same in NumPy."""
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPSILON) * weight


EXAMPLES = [
    Example(
        f"rms_norm_{name}_{length}",
        rms_norm,
        random_arrays(((64, length), dtype), ((length,), dtype)),
        reference,
        tolerance,
    )
    for name, dtype, length, tolerance in (
        ("f32", jnp.float32, 4096, 1e-5),
        ("bf16", jnp.bfloat16, 8192, 4e-3),
        ("bf16", jnp.bfloat16, 16384, 4e-3),
    )
]
