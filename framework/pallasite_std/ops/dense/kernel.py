"""The portable kernel: blocks of one warpgroup, each with a tile of the result.

TMA brings the tiles of both operands along k into a circular buffer of stages; warp-level MMA
take them from there through registers. What lies beyond the arrays is read as zero and not written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.dense.config import STEP_BYTES, MatmulConfig
from pallasite_std.ops.dense.epilogue import Epilogue
from pallasite_std.ops.dense.problem import MatmulProblem
from pallasite_std.ops.rings import PARAMS, over_steps


@dataclasses.dataclass(frozen=True)
class Weights:
    """Right operands that are converted to the dtype of the left ones in registers.

    Attributes:
      depth: of a step, in elements.
      group: elements along k that share a factor for each column, a multiple of the depth; or 0.
    """

    depth: int
    group: int


def build(
    problem: MatmulProblem,
    config: MatmulConfig,
    epilogue: Epilogue,
    weights: Weights | None = None,
) -> Callable[..., jax.Array]:
    """The kernel as a function of its operands.

    Args:
      problem: what to multiply.
      config: how.
      epilogue: what to do with the sums.
      weights: how the right operand is converted, if it is.

    Returns:
      A function of a, b, the factors of groups, (groups, n), if there are any, and the operands of
      the epilogue.
    """
    tile_m, tile_n, stages = config.tile_m, config.tile_n, config.stages
    tile_k = weights.depth if weights else STEP_BYTES // problem.size
    grouped = weights.group if weights else 0
    width = config.epilogue_n(problem.out_dtype.itemsize)
    m_tiles, n_tiles = -(-problem.m // tile_m), -(-problem.n // tile_n)
    steps = -(-problem.k // tile_k)
    sums_dtype = jnp.int32 if jnp.issubdtype(problem.dtype_a, jnp.integer) else jnp.float32

    def body(
        a: Any,
        b: Any,
        *refs: Any,
        a_smem: Any,
        b_smem: Any,
        out_smem: Any,
        loaded: Any,
        residual_loaded: Any = None,
    ) -> None:
        *operands, out = refs
        factors = operands.pop(0) if grouped else None
        m, n = plgpu.planar_snake(lax.axis_index("tile"), (m_tiles, n_tiles), 0, config.group)
        rows, columns = pl.ds(m * tile_m, tile_m), pl.ds(n * tile_n, tile_n)

        def fetch(step: Any, stage: Any) -> None:
            depth = pl.ds(step * tile_k, tile_k)
            a_window = a.at[depth, rows] if problem.transpose_a else a.at[rows, depth]
            b_window = b.at[columns, depth] if problem.transpose_b else b.at[depth, columns]
            plgpu.copy_gmem_to_smem(a_window, a_smem.at[stage], loaded.at[stage])
            plgpu.copy_gmem_to_smem(b_window, b_smem.at[stage], loaded.at[stage])

        def multiply(step: Any, stage: Any, sums: Any) -> Any:
            left, right = a_smem[stage], b_smem[stage]
            left = left.T if problem.transpose_a else left
            right = right.T if problem.transpose_b else right
            if weights:
                right = right.astype(problem.dtype_a)
            if factors is not None:
                row = factors[lax.div(step * tile_k, grouped), columns]
                right = right * lax.broadcast_in_dim(row, right.shape, (1,))
            return plgpu.mma(sums, left, right)

        zero = jnp.zeros((tile_m, tile_n), sums_dtype)
        sums = over_steps(steps, stages, loaded, fetch, multiply, zero)
        if problem.accumulator != sums_dtype:
            sums = sums.astype(problem.accumulator)
        for start in range(0, tile_n, width):
            part = pl.ds(n * tile_n + start, width)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            residual = None
            if epilogue.residual:
                plgpu.copy_gmem_to_smem(operands[-1].at[rows, part], out_smem, residual_loaded)
                plgpu.barrier_wait(residual_loaded)
                residual = out_smem[...]
            values = sums[:, start : start + width]
            values = epilogue.apply(values, operands, rows, part, residual, swapped=False)
            out_smem[...] = values.astype(problem.out_dtype)
            plgpu.copy_smem_to_gmem(out_smem, out.at[rows, part])
        plgpu.wait_smem_to_gmem(0)

    a_shape = (tile_k, tile_m) if problem.transpose_a else (tile_m, tile_k)
    b_shape = (tile_n, tile_k) if problem.transpose_b else (tile_k, tile_n)
    scratch: dict[str, Any] = {
        "a_smem": plgpu.SMEM((stages, *a_shape), problem.dtype_a),
        "b_smem": plgpu.SMEM((stages, *b_shape), problem.dtype_b),
        "out_smem": plgpu.SMEM((tile_m, width), problem.out_dtype),
        "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }
    if epilogue.residual:
        scratch["residual_loaded"] = plgpu.Barrier()
    kernel: Callable[..., jax.Array] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        grid=(m_tiles * n_tiles,),
        grid_names=("tile",),
        scratch_types=scratch,
        kernel_name="warp_matmul",
        compiler_params=PARAMS,
    )
    return kernel
