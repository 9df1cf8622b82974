"""Step 6: blocks that stay, and tiles in an order that suits the cache.

There are as many blocks as multiprocessors, and each works on one tile after the other, so the
copies for the next tile are under way while the last one is written. ``planar_snake`` walks through
the tiles in strips: what runs at the same time shares rows of ``a`` and columns of ``b``.
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
SLOTS = 4
COMPUTE = 2
STRIP = 16


def matmul(a: jax.Array, b: jax.Array, *, blocks: int = 132) -> jax.Array:
    """``a @ b`` for matrices of 16-bit floats whose sizes are multiples of those of a tile.

    ``blocks`` is the number of multiprocessors.
    """
    (m, k), (_, n) = a.shape, b.shape
    steps = k // DEPTH
    tiles = m // ROWS, n // COLUMNS

    def body(a_ref, b_ref, out_ref, a_tiles, b_tiles, full, empty):
        warpgroup = lax.axis_index("warpgroup")

        def over_tiles(work):
            """Calls ``work(row, column, first step)`` for each tile of this block."""

            @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="block")
            def _(turn):
                row, column = plgpu.planar_snake(turn.index[0], tiles, 0, STRIP)
                work(row * ROWS, column * COLUMNS, turn.local_index * steps)

        @pl.when(warpgroup == COMPUTE)
        def _fetch():
            plgpu.set_max_registers(40, action="decrease")

            @over_tiles
            def _(row, column, first):
                rows, columns = pl.ds(row, ROWS), pl.ds(column, COLUMNS)

                @pl.loop(0, steps)
                def _(step):
                    slot = lax.rem(first + step, SLOTS)

                    @pl.when(first + step >= SLOTS)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    depth = pl.ds(step * DEPTH, DEPTH)
                    plgpu.copy_gmem_to_smem(a_ref.at[rows, depth], a_tiles.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(
                        b_ref.at[depth, columns], b_tiles.at[slot], full.at[slot]
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
                        slot = lax.rem(first + step, SLOTS)
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, a_tiles.at[slot], b_tiles.at[slot, :, mine])
                        plgpu.wgmma_wait(1)  # All but the last product are done.

                        @pl.when(step > 0)
                        def _():
                            plgpu.barrier_arrive(empty.at[lax.rem(first + step - 1, SLOTS)])

                    sums = acc[...]  # Waits for the last product, too.
                    plgpu.barrier_arrive(empty.at[lax.rem(first + steps - 1, SLOTS)])
                    return sums

                sums = pl.run_scoped(multiply, plgpu.ACC((ROWS, HALF), jnp.float32))
                columns = pl.ds(column + warpgroup * HALF, HALF)
                out_ref[pl.ds(row, ROWS), columns] = sums.astype(out_ref.dtype)

    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        scratch_types=[
            plgpu.SMEM((SLOTS, ROWS, DEPTH), a.dtype, transforms=transforms),
            plgpu.SMEM((SLOTS, DEPTH, COLUMNS), b.dtype, transforms=transforms),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=SLOTS),
        ],
        grid=(min(blocks, tiles[0] * tiles[1]),),
        grid_names=("block",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        kernel_name="matmul_persistent",
    )
    return kernel(a, b)


EXAMPLES = [
    Example(
        "matmul_step6_persistent",
        functools.partial(matmul, blocks=2),
        random_arrays(((384, 192), jnp.bfloat16), ((192, 512), jnp.bfloat16)),
        lambda a, b: a @ b,
        tolerance=4e-3,
        needs=frozenset({"wgmma"}),
    )
]
