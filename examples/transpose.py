"""A transpose through shared memory, with TMA both ways.

``transpose_ref`` is a view of a tile with its dimensions swapped. Reading through it walks down the
columns of the tile, and in a row-major tile the lanes of a warp would all access one bank. The
compiler swizzles both tiles and chooses a register layout without bank conflicts; ``plgpu.load``
checks that and would raise an error that states how many times slower the read is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

TILE = 64


def transpose(x: jax.Array) -> jax.Array:
    """``x.T`` for a matrix whose sizes are multiples of 64."""
    rows, columns = x.shape

    def body(x_ref, out_ref, tile, transposed, loaded):
        row = pl.ds(jax.lax.axis_index("row") * TILE, TILE)
        column = pl.ds(jax.lax.axis_index("column") * TILE, TILE)
        plgpu.copy_gmem_to_smem(x_ref.at[row, column], tile, loaded)
        plgpu.barrier_wait(loaded)
        view = plgpu.transpose_ref(tile, (1, 0))
        transposed[...] = plgpu.load(view)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(transposed, out_ref.at[column, row])
        plgpu.wait_smem_to_gmem(0)

    shared = plgpu.SMEM((TILE, TILE), x.dtype)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((columns, rows), x.dtype),
        scratch_types=[shared, shared, plgpu.Barrier()],
        grid=(rows // TILE, columns // TILE),
        grid_names=("row", "column"),
        kernel_name="transpose",
    )
    return kernel(x)


EXAMPLES = [
    Example(
        f"transpose_{name}",
        transpose,
        random_arrays(((512, 1024), dtype)),
        lambda x: x.T,
    )
    for name, dtype in (("f32", jnp.float32), ("bf16", jnp.bfloat16))
]
