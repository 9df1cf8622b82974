"""Softmax over rows of up to 32768 elements, read once and written once.

One block per row; a row of more than 16 KiB is shared by several warpgroups (see ``rows.py``): two
exchanges, one for the maximum and one for the sum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from examples.catalog import Example, random_arrays
from examples.rows import row_kernel


def softmax(x: jax.Array) -> jax.Array:
    """``exp(x) / sum(exp(x), axis=1)``, computed in float32 with the maximum subtracted."""

    def body(row, x_ref, out_ref):
        v = x_ref[row.index, row.window].astype(jnp.float32)
        e = jnp.exp(v - row.reduce(jnp.max, v))
        total = row.reduce(jnp.sum, e)
        out_ref[row.index, row.window] = (e * (1 / total)).astype(x.dtype)

    return row_kernel(body, x, "softmax", exchanges=2)(x)


def reference(x: np.ndarray) -> np.ndarray:
    """The same in NumPy."""
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


EXAMPLES = [
    Example(
        f"softmax_{name}_{length}",
        softmax,
        random_arrays(((64, length), dtype)),
        reference,
        tolerance,
    )
    for name, dtype, length, tolerance in (
        ("f32", jnp.float32, 1024, 1e-5),
        ("f32", jnp.float32, 8192, 1e-5),
        ("f16", jnp.float16, 8192, 1e-3),
        ("bf16", jnp.bfloat16, 16384, 4e-3),
        ("bf16", jnp.bfloat16, 32768, 4e-3),
    )
]
