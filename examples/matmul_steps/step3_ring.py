"""Step 3: a ring of slots, so that copies and products overlap.

Copies run up to three steps ahead of the product, each slot with a barrier of its own. One product
stays in flight: a slot is filled again once the product that follows the one that read it has been
started.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, COLUMNS, DEPTH = 128, 128, 64
SLOTS = 4


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` for matrices of 16-bit floats whose sizes are multiples of those of a tile."""
    (m, k), (_, n) = a.shape, b.shape
    steps = k // DEPTH

    def body(a_ref, b_ref, out_ref, a_tiles, b_tiles, loaded):
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)
        columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)

        def fetch(step):
            slot = lax.rem(step, SLOTS)
            depth = pl.ds(step * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(a_ref.at[rows, depth], a_tiles.at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(b_ref.at[depth, columns], b_tiles.at[slot], loaded.at[slot])

        for step in range(min(SLOTS - 1, steps)):
            fetch(step)

        def multiply(acc):
            @pl.loop(0, steps)
            def _(step):
                slot = lax.rem(step, SLOTS)
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.wgmma(acc, a_tiles.at[slot], b_tiles.at[slot])
                plgpu.wgmma_wait(1)  # All but the last product are done.

                @pl.when(step + SLOTS - 1 < steps)
                def _():
                    fetch(step + SLOTS - 1)  # Into the slot that the product before read.

            return acc[...]

        sums = pl.run_scoped(multiply, plgpu.ACC((ROWS, COLUMNS), jnp.float32))
        out_ref[rows, columns] = sums.astype(out_ref.dtype)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        scratch_types=[
            plgpu.SMEM((SLOTS, ROWS, DEPTH), a.dtype, transforms=transforms),
            plgpu.SMEM((SLOTS, DEPTH, COLUMNS), b.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        ],
        grid=(m // ROWS, n // COLUMNS),
        grid_names=("row", "column"),
        kernel_name="matmul_ring",
    )
    return kernel(a, b)


EXAMPLES = [
    Example(
        "matmul_step3_ring",
        matmul,
        random_arrays(((256, 384), jnp.bfloat16), ((384, 256), jnp.bfloat16)),
        lambda a, b: a @ b,
        tolerance=4e-3,
        needs=frozenset({"wgmma"}),
    )
]
