"""The smallest kernel: a sum of two vectors.

The body runs once per block of the grid. ``x``, ``y`` and ``out`` are references to whole arrays in
global memory; indexing one reads into the registers of the block's 128 lanes, assigning writes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

BLOCK = 1024


def vector_add(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x + y`` for vectors whose length is a multiple of 1024."""

    def body(x_ref, y_ref, out_ref):
        window = pl.ds(jax.lax.axis_index("block") * BLOCK, BLOCK)
        out_ref[window] = x_ref[window] + y_ref[window]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.size // BLOCK,),
        grid_names=("block",),
        kernel_name="vector_add",
    )
    return kernel(x, y)


EXAMPLES = [
    Example(
        f"vector_add_{name}",
        vector_add,
        random_arrays(((2**16,), dtype), ((2**16,), dtype)),
        lambda x, y: x + y,
        tolerance,
    )
    for name, dtype, tolerance in (("f32", jnp.float32, 1e-6), ("i32", jnp.int32, 0.0))
]
