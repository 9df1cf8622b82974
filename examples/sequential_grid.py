"""A ``pl.pallas_call`` kernel: block specs instead of copies, and a sequential grid dimension.

The grid has two dimensions. The parallel one becomes the grid of blocks; the sequential one becomes
a pipeline inside each block. The output's block index does not change along it, so the block stays
in shared memory, can be accumulated into, and is written to memory once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, COLUMNS = 64, 128


def sum_slabs(x: jax.Array) -> jax.Array:
    """``x.sum(axis=0)`` for ``x`` of shape (slabs, rows, columns)."""
    slabs, rows, columns = x.shape

    def body(x_ref, out_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)

        out_ref[...] += x_ref[...]

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        grid=(rows // ROWS, columns // COLUMNS, slabs),
        in_specs=[pl.BlockSpec((None, ROWS, COLUMNS), lambda i, j, slab: (slab, i, j))],
        out_specs=pl.BlockSpec((ROWS, COLUMNS), lambda i, j, slab: (i, j)),
        compiler_params=plgpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "sequential"), max_concurrent_steps=2
        ),
        name="sum_slabs",
    )(x)


EXAMPLES = [
    Example(
        f"sequential_grid_{name}",
        sum_slabs,
        random_arrays(((8, 256, 512), dtype)),
        lambda x: x.sum(axis=0),
        tolerance,
    )
    for name, dtype, tolerance in (("f32", jnp.float32, 5e-6), ("i32", jnp.int32, 0.0))
]
