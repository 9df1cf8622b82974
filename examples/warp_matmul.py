"""A GEMM for every target: warp-level MMA on tiles that TMA copies into a circular buffer.

``plgpu.mma`` is the matrix instruction that all targets have. It takes its operands from registers
and is done when it returns, so a stage can be refilled as soon as all lanes have read it. Under
warpgroup semantics the compiler inserts the barrier before the copy that overwrites a stage. It
also chooses how tiles are swizzled, so that no access has bank conflicts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, COLUMNS, DEPTH = 128, 64, 64
STAGES = 3


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

        def multiply(step, acc):
            stage = lax.rem(step, STAGES)
            plgpu.barrier_wait(loaded.at[stage])

            # The stage of the previous step is free: its mma has completed.
            @pl.when(step + STAGES - 1 < steps)
            def _():
                fetch(step + STAGES - 1)

            return plgpu.mma(acc, a_tiles[stage], b_tiles[stage])

        acc = lax.fori_loop(0, steps, multiply, jnp.zeros((ROWS, COLUMNS), jnp.float32))
        result[...] = acc.astype(out_ref.dtype)
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
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        kernel_name="warp_matmul",
    )
    return kernel(a, b)


EXAMPLES = [
    Example(
        f"warp_matmul_{name}",
        matmul,
        random_arrays(((256, 256), dtype), ((256, 128), dtype)),
        lambda a, b: a @ b,
        tolerance=tolerance,
    )
    for name, dtype, tolerance in (("bf16", jnp.bfloat16, 4e-3), ("f16", jnp.float16, 1e-3))
]
