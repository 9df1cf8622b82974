"""Step 8: clusters of two blocks that multicast shared operands.

The two blocks of a cluster compute vertically adjacent tiles, which need the same part of ``b``:
each fetches half of it and TMA multicasts it into the shared memory of both. A stage may be
refilled when the consumer warpgroups of both blocks have released it.
"""

from __future__ import annotations

import functools

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
PAIR = 2
STRIP = 8
WIDTH = 64


def matmul(a: jax.Array, b: jax.Array, *, blocks: int = 132) -> jax.Array:
    """``a @ b`` for matrices of 16-bit floats whose sizes are multiples of those of a tile.

    ``blocks`` is the number of multiprocessors.
    """
    (m, k), (_, n) = a.shape, b.shape
    steps = k // DEPTH
    tiles = m // (PAIR * ROWS), n // COLUMNS  # Those of a pair of blocks.
    pairs = min(blocks // PAIR, tiles[0] * tiles[1])

    def body(a_ref, b_ref, out_ref, a_tiles, b_tiles, staging, full, empty):
        member = lax.axis_index("member")
        warpgroup = lax.axis_index("warpgroup")

        def over_tiles(work):
            """Calls ``work(row, column, first step)`` for each tile of this block."""

            @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="pair")
            def _(info):
                row, column = plgpu.planar_snake(info.index[0], tiles, 0, STRIP)
                work((row * PAIR + member) * ROWS, column * COLUMNS, info.local_index * steps)

        @pl.when(warpgroup == COMPUTE)
        def _fetch():
            plgpu.set_max_registers(40, action="decrease")

            @over_tiles
            def _(row, column, first):
                rows, columns = pl.ds(row, ROWS), pl.ds(column, COLUMNS)

                @pl.loop(0, steps)
                def _(step):
                    stage = lax.rem(first + step, STAGES)

                    @pl.when(first + step >= STAGES)
                    def _():
                        plgpu.barrier_wait(empty.at[stage])

                    depth = pl.ds(step * DEPTH, DEPTH)
                    plgpu.copy_gmem_to_smem(
                        a_ref.at[rows, depth], a_tiles.at[stage], full.at[stage]
                    )
                    plgpu.copy_gmem_to_smem(  # Half by this block, half by the other one.
                        b_ref.at[depth, columns],
                        b_tiles.at[stage],
                        full.at[stage],
                        collective_axes="member",
                    )

        @pl.when(warpgroup < COMPUTE)
        def _multiply():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(warpgroup * HALF, HALF)

            @over_tiles
            def _(row, column, first):
                def multiply(acc):
                    @pl.loop(0, steps)
                    def _(step):
                        stage = lax.rem(first + step, STAGES)
                        plgpu.barrier_wait(full.at[stage])
                        plgpu.wgmma(acc, a_tiles.at[stage], b_tiles.at[stage, :, mine])
                        plgpu.wgmma_wait(1)  # All but the last wgmma have completed.

                        @pl.when(step > 0)
                        def _():
                            plgpu.barrier_arrive(empty.at[lax.rem(first + step - 1, STAGES)])

                    sums = acc[...]  # Waits for the last wgmma, too.
                    plgpu.barrier_arrive(empty.at[lax.rem(first + steps - 1, STAGES)])
                    return sums

                sums = pl.run_scoped(multiply, plgpu.ACC((ROWS, HALF), jnp.float32))
                start = column + warpgroup * HALF
                for part in range(HALF // WIDTH):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # The previous store has read.
                    values = sums[:, part * WIDTH : (part + 1) * WIDTH]
                    staging[warpgroup] = values.astype(out_ref.dtype)
                    plgpu.commit_smem()
                    columns = pl.ds(start + part * WIDTH, WIDTH)
                    plgpu.copy_smem_to_gmem(
                        staging.at[warpgroup], out_ref.at[pl.ds(row, ROWS), columns]
                    )

            plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        scratch_types=[
            plgpu.SMEM((STAGES, ROWS, DEPTH), a.dtype, transforms=transforms),
            plgpu.SMEM((STAGES, DEPTH, COLUMNS), b.dtype, transforms=transforms),
            plgpu.SMEM((COMPUTE, ROWS, WIDTH), a.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.ClusterBarrier(
                collective_axes=("member",), num_arrivals=COMPUTE, num_barriers=STAGES
            ),
        ],
        grid=(pairs,),
        grid_names=("pair",),
        cluster=(PAIR,),
        cluster_names=("member",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        kernel_name="matmul_clusters",
    )
    return kernel(a, b)


EXAMPLES = [
    Example(
        "matmul_step8_clusters",
        functools.partial(matmul, blocks=4),
        random_arrays(((512, 192), jnp.bfloat16), ((192, 768), jnp.bfloat16)),
        lambda a, b: a @ b,
        tolerance=4e-3,
        needs=frozenset({"wgmma"}),
    )
]
