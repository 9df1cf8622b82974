"""Step 1: one tile of the result for each block, one step along K at a time.

Each step copies a tile of both operands into shared memory, waits for them, multiplies them, and
waits for the product. Nothing overlaps. The tensor cores read the operands in core matrices of 8
rows of 16 bytes; here each of these is contiguous in shared memory, without swizzle.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, COLUMNS, DEPTH = 128, 128, 64


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` for matrices of 16-bit floats whose sizes are multiples of those of a tile."""
    (m, k), (_, n) = a.shape, b.shape

    def body(a_ref, b_ref, out_ref, a_tile, b_tile, loaded):
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)
        columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)

        def multiply(acc):
            @pl.loop(0, k // DEPTH)
            def _(step):
                depth = pl.ds(step * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(a_ref.at[rows, depth], a_tile, loaded)
                plgpu.copy_gmem_to_smem(b_ref.at[depth, columns], b_tile, loaded)
                plgpu.barrier_wait(loaded)  # Both tiles have arrived.
                plgpu.wgmma(acc, a_tile, b_tile)  # Issues acc += a_tile @ b_tile.
                plgpu.wgmma_wait(0)  # Completed: the tiles can be overwritten.

            return acc[...]

        sums = pl.run_scoped(multiply, plgpu.ACC((ROWS, COLUMNS), jnp.float32))
        out_ref[rows, columns] = sums.astype(out_ref.dtype)

    # Core matrices of 8 rows x 16 bytes, one after the other.
    transforms = (plgpu.TilingTransform((8, 8)),)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        scratch_types=[
            plgpu.SMEM((ROWS, DEPTH), a.dtype, transforms=transforms),
            plgpu.SMEM((DEPTH, COLUMNS), b.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(m // ROWS, n // COLUMNS),
        grid_names=("row", "column"),
        kernel_name="matmul_tile",
    )
    return kernel(a, b)


EXAMPLES = [
    Example(
        "matmul_step1_tile",
        matmul,
        random_arrays(((256, 192), jnp.bfloat16), ((192, 256), jnp.bfloat16)),
        lambda a, b: a @ b,
        tolerance=4e-3,
        needs=frozenset({"wgmma"}),
    )
]
