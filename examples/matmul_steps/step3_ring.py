"""Step 3: a circular buffer of stages, so that copies and wgmma overlap.

Copies run up to three steps ahead of ``wgmma``, each stage with its own barrier. One ``wgmma``
stays in flight: a stage is refilled once the ``wgmma`` after the one that read it has been
issued.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, COLUMNS, DEPTH = 128, 128, 64
STAGES = 4


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` for matrices of 16-bit floats whose sizes are multiples of those of a tile."""
    (m, k), (_, n) = a.shape, b.shape
    steps = k // DEPTH

    def body(a_ref, b_ref, out_ref, a_tiles, b_tiles, loaded):
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)
        columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)

        def fetch(step):
            stage = lax.rem(step, STAGES)
            depth = pl.ds(step * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(a_ref.at[rows, depth], a_tiles.at[stage], loaded.at[stage])
            plgpu.copy_gmem_to_smem(b_ref.at[depth, columns], b_tiles.at[stage], loaded.at[stage])

        for step in range(min(STAGES - 1, steps)):
            fetch(step)

        def multiply(acc):
            @pl.loop(0, steps)
            def _(step):
                stage = lax.rem(step, STAGES)
                plgpu.barrier_wait(loaded.at[stage])
                plgpu.wgmma(acc, a_tiles.at[stage], b_tiles.at[stage])
                plgpu.wgmma_wait(1)  # All but the last wgmma have completed.

                @pl.when(step + STAGES - 1 < steps)
                def _():
                    fetch(step + STAGES - 1)  # Into the stage that the previous wgmma read.

            return acc[...]

        sums = pl.run_scoped(multiply, plgpu.ACC((ROWS, COLUMNS), jnp.float32))
        out_ref[rows, columns] = sums.astype(out_ref.dtype)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        scratch_types=[
            plgpu.SMEM((STAGES, ROWS, DEPTH), a.dtype, transforms=transforms),
            plgpu.SMEM((STAGES, DEPTH, COLUMNS), b.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
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
