"""A matrix product for every target: warps multiply tiles that TMA brings into a ring of slots.

``plgpu.mma`` is the matrix instruction that all targets have. It takes its operands from registers
and is done when it returns, so a slot can be filled again as soon as all lanes have read it. The
kernel need not say so: under warpgroup semantics the compiler adds the barrier before the copy that
overwrites a slot. It also chooses how tiles are swizzled, so that no access has bank conflicts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from examples.catalog import Example, random_arrays
from pallasite import gpu as plgpu

ROWS, COLUMNS, DEPTH = 128, 64, 64
SLOTS = 3


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` for matrices of 16-bit floats whose sizes are multiples of those of a tile."""
    (m, k), (_, n) = a.shape, b.shape
    steps = k // DEPTH

    def body(a_ref, b_ref, out_ref, a_tiles, b_tiles, result, loaded):
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)
        columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)

        def fetch(step):
            slot = lax.rem(step, SLOTS)
            depth = pl.ds(step * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(a_ref.at[rows, depth], a_tiles.at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(b_ref.at[depth, columns], b_tiles.at[slot], loaded.at[slot])

        for step in range(min(SLOTS - 1, steps)):
            fetch(step)

        def multiply(step, acc):
            slot = lax.rem(step, SLOTS)
            plgpu.barrier_wait(loaded.at[slot])

            # The slot of the previous step is free: its product is done.
            @pl.when(step + SLOTS - 1 < steps)
            def _():
                fetch(step + SLOTS - 1)

            return plgpu.mma(acc, a_tiles[slot], b_tiles[slot])

        acc = lax.fori_loop(0, steps, multiply, jnp.zeros((ROWS, COLUMNS), jnp.float32))
        result[...] = acc.astype(out_ref.dtype)
        plgpu.copy_smem_to_gmem(result, out_ref.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), a.dtype),
        scratch_types=[
            plgpu.SMEM((SLOTS, ROWS, DEPTH), a.dtype),
            plgpu.SMEM((SLOTS, DEPTH, COLUMNS), b.dtype),
            plgpu.SMEM((ROWS, COLUMNS), a.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
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
