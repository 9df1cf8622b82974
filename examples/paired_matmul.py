"""A GEMM on tensor memory, by pairs of blocks: each fetches half of what both multiply.

One warp of each block fetches tiles, one warp of the first block multiplies for both, and when the
sums of a tile are complete, all warps of each block write its rows. Barriers do all the waiting:
copies complete on the barrier of the first block, and products, when they are complete, free the
stage that they have read in both blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, COLUMNS, DEPTH = 256, 128, 64
"""Of the tile of a pair."""

STAGES = 3
FETCH, MULTIPLY = 0, 1
"""Numbers of warps."""


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` for matrices of 16-bit floats whose sizes are multiples of those of a tile."""
    (m, k), (_, n) = a.shape, b.shape
    steps = k // DEPTH

    def body(a_ref, b_ref, out_ref, a_tiles, b_tiles, result, acc, filled, free, done):
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)
        columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)
        block = lax.axis_index("pair")

        def fetch():
            def step(i, carry):
                stage = lax.rem(i, STAGES)
                pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(free.at[stage]))
                depth = pl.ds(i * DEPTH, DEPTH)
                for source, tiles, axis in (
                    (a_ref.at[rows, depth], a_tiles, 0),
                    (b_ref.at[depth, columns], b_tiles, 1),
                ):
                    plgpu.copy_gmem_to_smem(
                        source,
                        tiles.at[stage],
                        filled.at[stage],
                        collective_axes="pair",
                        leader_tracked=plgpu.CopyPartition.PARTITIONED(axis),
                    )
                return carry

            lax.fori_loop(0, steps, step, None)
            for i in range(max(0, steps - STAGES), steps):  # The last products.
                plgpu.barrier_wait(free.at[i % STAGES])

        def multiply():
            def step(i, carry):
                stage = lax.rem(i, STAGES)
                plgpu.barrier_wait(filled.at[stage])
                plgpu.tcgen05_mma(
                    acc,
                    a_tiles.at[stage],
                    b_tiles.at[stage],
                    free.at[stage],
                    accumulate=i > 0,
                    collective_axis="pair",
                )
                return carry

            lax.fori_loop(0, steps, step, None)
            plgpu.tcgen05_commit_arrive(done, collective_axis="pair")

        @plgpu.warp_map
        def per_warp(warp):
            pl.when(warp == FETCH)(fetch)
            pl.when((warp == MULTIPLY) & (block == 0))(multiply)

        plgpu.barrier_wait(done)
        result[...] = plgpu.async_load_tmem(acc).astype(out_ref.dtype)
        own = pl.ds(lax.axis_index("row") * ROWS + block * (ROWS // 2), ROWS // 2)
        plgpu.copy_smem_to_gmem(result, out_ref.at[own, columns])
        plgpu.wait_smem_to_gmem(0)

    tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        scratch_types=[
            plgpu.SMEM((STAGES, ROWS // 2, DEPTH), a.dtype, transforms=tiles),
            plgpu.SMEM((STAGES, DEPTH, COLUMNS // 2), b.dtype, transforms=tiles),
            plgpu.SMEM((ROWS // 2, COLUMNS), a.dtype),
            plgpu.TMEM((ROWS // 2, COLUMNS), jnp.float32, collective=True),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES, orders_tensor_core=True),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        grid=(m // ROWS, n // COLUMNS),
        grid_names=("row", "column"),
        cluster=(2,),
        cluster_names=("pair",),
        kernel_name="paired_matmul",
    )
    return kernel(a, b)


EXAMPLES = [
    Example(
        f"paired_matmul_{name}",
        matmul,
        random_arrays(((256, 320), dtype), ((320, 256), dtype)),
        lambda a, b: a @ b,
        tolerance=tolerance,
        needs=frozenset({"tcgen05", "cta_pair"}),
    )
    for name, dtype, tolerance in (("bf16", jnp.bfloat16, 4e-3), ("f16", jnp.float16, 1e-3))
]
