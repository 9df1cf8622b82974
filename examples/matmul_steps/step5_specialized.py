"""Step 5: producer and consumer warpgroups.

The third warpgroup of the block, the producer, only issues copies. It needs few registers and
releases the rest to the two consumers. These no longer wait for one another: each waits for a full
stage, and arrives on ``empty`` when it has used it.
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
COMPUTE = 2


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` for matrices of 16-bit floats whose sizes are multiples of those of a tile."""
    (m, k), (_, n) = a.shape, b.shape
    steps = k // DEPTH

    def body(a_ref, b_ref, out_ref, a_tiles, b_tiles, full, empty):
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)
        column = lax.axis_index("column") * COLUMNS
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == COMPUTE)
        def _fetch():
            plgpu.set_max_registers(40, action="decrease")
            columns = pl.ds(column, COLUMNS)

            @pl.loop(0, steps)
            def _(step):
                stage = lax.rem(step, STAGES)

                @pl.when(step >= STAGES)
                def _():
                    plgpu.barrier_wait(empty.at[stage])

                depth = pl.ds(step * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(a_ref.at[rows, depth], a_tiles.at[stage], full.at[stage])
                plgpu.copy_gmem_to_smem(b_ref.at[depth, columns], b_tiles.at[stage], full.at[stage])

        @pl.when(warpgroup < COMPUTE)
        def _multiply():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(warpgroup * HALF, HALF)

            def multiply(acc):
                @pl.loop(0, steps)
                def _(step):
                    stage = lax.rem(step, STAGES)
                    plgpu.barrier_wait(full.at[stage])
                    plgpu.wgmma(acc, a_tiles.at[stage], b_tiles.at[stage, :, mine])
                    plgpu.wgmma_wait(1)  # All but the last wgmma have completed.

                    @pl.when(step > 0)
                    def _():
                        plgpu.barrier_arrive(empty.at[lax.rem(step - 1, STAGES)])

                return acc[...]

            sums = pl.run_scoped(multiply, plgpu.ACC((ROWS, HALF), jnp.float32))
            out_ref[rows, pl.ds(column + warpgroup * HALF, HALF)] = sums.astype(out_ref.dtype)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        scratch_types=[
            plgpu.SMEM((STAGES, ROWS, DEPTH), a.dtype, transforms=transforms),
            plgpu.SMEM((STAGES, DEPTH, COLUMNS), b.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=STAGES),
        ],
        grid=(m // ROWS, n // COLUMNS),
        grid_names=("row", "column"),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        kernel_name="matmul_specialized",
    )
    return kernel(a, b)


EXAMPLES = [
    Example(
        "matmul_step5_specialized",
        matmul,
        random_arrays(((256, 384), jnp.bfloat16), ((384, 256), jnp.bfloat16)),
        lambda a, b: a @ b,
        tolerance=4e-3,
        needs=frozenset({"wgmma"}),
    )
]
