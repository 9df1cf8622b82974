"""A GEMM on Hopper's tensor cores, one tile of the result per block.

TMA copies the tiles of both operands into a circular buffer of stages, and ``wgmma`` reads them
from shared memory, in swizzled tiles that the compiler chooses. ``wgmma`` is asynchronous: while it
reads one stage, the copies into the others are in flight, and after ``wgmma_wait(1)`` the previous
stage is free. The accumulator stays in registers throughout.
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

    def body(a_ref, b_ref, out_ref, a_tiles, b_tiles, result, loaded):
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
                # All but the last wgmma have completed: their operands can be overwritten.
                plgpu.wgmma_wait(1)

                @pl.when(step + STAGES - 1 < steps)
                def _():
                    fetch(step + STAGES - 1)

            return acc[...]

        product = pl.run_scoped(multiply, plgpu.ACC((ROWS, COLUMNS), jnp.float32))
        result[...] = product.astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(result, out_ref.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        scratch_types=[
            plgpu.SMEM((STAGES, ROWS, DEPTH), a.dtype),
            plgpu.SMEM((STAGES, DEPTH, COLUMNS), b.dtype),
            plgpu.SMEM((ROWS, COLUMNS), a.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ],
        grid=(m // ROWS, n // COLUMNS),
        grid_names=("row", "column"),
        kernel_name="matmul_tile",
    )
    return kernel(a, b)


EXAMPLES = [
    Example(
        f"matmul_tile_{name}",
        matmul,
        random_arrays(((256, 384), dtype), ((384, 256), dtype)),
        lambda a, b: a @ b,
        tolerance=tolerance,
        needs=frozenset({"wgmma"}),
    )
    for name, dtype, tolerance in (("bf16", jnp.bfloat16, 4e-3), ("f16", jnp.float16, 1e-3))
]
