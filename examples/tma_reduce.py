"""Adding tiles in global memory with TMA: many blocks accumulate into one small output.

``copy_smem_to_gmem(..., reduction_op="add")`` adds each element of the tile to memory, atomically
and without a read by the block. The output starts as the operand that is aliased to it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, COLUMNS = 64, 128


def add_slabs(x: jax.Array, start: jax.Array) -> jax.Array:
    """``start + x.sum(axis=0)`` for ``x`` of shape (slabs, rows, columns)."""
    slabs, rows, columns = x.shape

    def body(x_ref, start_ref, out_ref, tile, loaded):
        del start_ref  # The output holds its data.
        slab, row, column = (jax.lax.axis_index(name) for name in ("slab", "row", "column"))
        window = (pl.ds(row * ROWS, ROWS), pl.ds(column * COLUMNS, COLUMNS))
        plgpu.copy_gmem_to_smem(x_ref.at[slab, *window], tile, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(tile, out_ref.at[window], reduction_op="add")
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        scratch_types=[plgpu.SMEM((ROWS, COLUMNS), x.dtype), plgpu.Barrier()],
        grid=(slabs, rows // ROWS, columns // COLUMNS),
        grid_names=("slab", "row", "column"),
        input_output_aliases={1: 0},
        kernel_name="add_slabs",
    )
    return kernel(x, start)


EXAMPLES = [
    Example(
        f"tma_reduce_{name}",
        add_slabs,
        random_arrays(((16, 128, 256), dtype), ((128, 256), dtype)),
        lambda x, start: start + x.sum(axis=0),
        tolerance,
    )
    for name, dtype, tolerance in (
        ("f32", jnp.float32, 5e-6),
        ("i32", jnp.int32, 0.0),
        ("f16", jnp.float16, 1e-2),
    )
]
