"""A chain of elementwise operations: bias, GELU, scale.

Values are converted to float32 in registers, so that the chain rounds once, at the end. Elementwise
operations keep the register layout of their operand, so nothing moves between lanes.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

BLOCK = 2048
SCALE = 0.5


def gelu(x: jax.Array, bias: jax.Array) -> jax.Array:
    """``SCALE * gelu(x + bias)`` with the tanh approximation; ``bias`` has one entry per column."""
    rows, columns = x.shape

    def body(x_ref, bias_ref, out_ref):
        row = jax.lax.axis_index("row")
        window = pl.ds(jax.lax.axis_index("column") * BLOCK, BLOCK)
        v = x_ref[row, window].astype(jnp.float32) + bias_ref[window].astype(jnp.float32)
        inner = math.sqrt(2 / math.pi) * (v + 0.044715 * v * v * v)
        out_ref[row, window] = (SCALE * 0.5 * v * (1 + jnp.tanh(inner))).astype(x.dtype)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(rows, columns // BLOCK),
        grid_names=("row", "column"),
        kernel_name="gelu",
    )
    return kernel(x, bias)


def reference(x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The same in NumPy."""
    v = x + bias
    return SCALE * 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


EXAMPLES = [
    Example(
        f"gelu_{name}",
        gelu,
        random_arrays(((64, 4096), dtype), ((4096,), dtype)),
        reference,
        tolerance,
    )
    for name, dtype, tolerance in (
        ("f32", jnp.float32, 5e-6),
        ("bf16", jnp.bfloat16, 4e-3),
        ("f16", jnp.float16, 1e-3),
    )
]
