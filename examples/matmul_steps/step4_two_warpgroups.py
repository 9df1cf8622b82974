"""Step 4: two warpgroups share a tile of 128 x 256.

Each holds half of the columns in its registers. A larger tile has a higher arithmetic intensity:
every byte fetched of ``a`` is used for twice as many columns. Since both warpgroups read a stage,
both arrive on a second array of barriers, ``used``, to release it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, COLUMNS, DEPTH = 128, 256, 64
HALF = COLUMNS // 2
STAGES = 4


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` for matrices of 16-bit floats whose sizes are multiples of those of a tile."""
    (m, k), (_, n) = a.shape, b.shape
    steps = k // DEPTH

    def body(a_ref, b_ref, out_ref, a_tiles, b_tiles, loaded, used):
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)
        column = lax.axis_index("column") * COLUMNS
        warpgroup = lax.axis_index("warpgroup")
        mine = pl.ds(warpgroup * HALF, HALF)

        def fetch(step):
            stage = lax.rem(step, STAGES)
            depth, columns = pl.ds(step * DEPTH, DEPTH), pl.ds(column, COLUMNS)
            plgpu.copy_gmem_to_smem(a_ref.at[rows, depth], a_tiles.at[stage], loaded.at[stage])
            plgpu.copy_gmem_to_smem(b_ref.at[depth, columns], b_tiles.at[stage], loaded.at[stage])

        @pl.when(warpgroup == 0)
        def _():
            for step in range(min(STAGES - 1, steps)):
                fetch(step)

        def multiply(acc):
            @pl.loop(0, steps)
            def _(step):
                stage = lax.rem(step, STAGES)
                plgpu.barrier_wait(loaded.at[stage])
                plgpu.wgmma(acc, a_tiles.at[stage], b_tiles.at[stage, :, mine])
                plgpu.wgmma_wait(1)  # All but the last wgmma have completed.
                ahead = step + STAGES - 1  # Goes into the stage that the previous wgmma read.
                free = lax.rem(ahead, STAGES)
                plgpu.barrier_arrive(used.at[free])

                @pl.when(warpgroup == 0)
                def _():
                    plgpu.barrier_wait(used.at[free])  # Both warpgroups have released it.

                    @pl.when(ahead < steps)
                    def _():
                        fetch(ahead)

            return acc[...]

        sums = pl.run_scoped(multiply, plgpu.ACC((ROWS, HALF), jnp.float32))
        columns = pl.ds(column + warpgroup * HALF, HALF)
        out_ref[rows, columns] = sums.astype(out_ref.dtype)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        scratch_types=[
            plgpu.SMEM((STAGES, ROWS, DEPTH), a.dtype, transforms=transforms),
            plgpu.SMEM((STAGES, DEPTH, COLUMNS), b.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ],
        grid=(m // ROWS, n // COLUMNS),
        grid_names=("row", "column"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="matmul_two_warpgroups",
    )
    return kernel(a, b)


EXAMPLES = [
    Example(
        "matmul_step4_two_warpgroups",
        matmul,
        random_arrays(((256, 384), jnp.bfloat16), ((384, 256), jnp.bfloat16)),
        lambda a, b: a @ b,
        tolerance=4e-3,
        needs=frozenset({"wgmma"}),
    )
]
