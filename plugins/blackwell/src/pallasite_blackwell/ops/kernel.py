"""The kernel: persistent blocks with a warp that fetches, one that multiplies, four that write.

The products of one tile go to one half of tensor memory while the warpgroup that writes empties the
other. With pairs of blocks, the first of the two multiplies for both, each reads its rows of a and
its columns of b, and both write their rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_blackwell.ops.config import ROW, MatmulConfig, depth
from pallasite_std.api import Epilogue, MatmulProblem

_FETCH, _MULTIPLY = 0, 1
"""Warps of the first warpgroup."""


def build(
    problem: MatmulProblem, config: MatmulConfig, epilogue: Epilogue, multiprocessors: int
) -> Callable[..., jax.Array]:
    """The kernel as a function of its operands.

    Args:
      problem: what to multiply.
      config: how.
      epilogue: what to do with the sums.
      multiprocessors: of the GPU.

    Returns:
      A function of the left and the right operand and those of the epilogue.
    """
    loop = _Loop(problem, config, epilogue)
    stages, width = config.stages, config.epilogue_n
    columns = config.tile_n // config.blocks
    a_shape, b_shape = (config.tile_m, loop.depth), (loop.depth, columns)
    scratch: dict[str, Any] = {
        "a_smem": _operand(stages, a_shape, problem.dtype_a, problem.transpose_a),
        "b_smem": _operand(stages, b_shape, problem.dtype_b, problem.transpose_b),
        "out_smem": plgpu.SMEM((2, config.tile_m, width), problem.out_dtype),
        "acc": plgpu.TMEM(
            (config.tile_m, 2 * config.tile_n),
            problem.accumulator,
            packed=False,
            collective=config.pair,
        ),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "empty": plgpu.Barrier(num_barriers=stages, orders_tensor_core=True),
        "summed": plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
        "written": plgpu.ClusterBarrier(
            collective_axes=("pair",), num_barriers=2, orders_tensor_core=True
        )
        if config.pair
        else plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
    }
    if epilogue.residual:
        scratch["residual_full"] = plgpu.Barrier(num_barriers=2)
    kernel: Callable[..., jax.Array] = plgpu.kernel(
        loop.run,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        grid=(min(multiprocessors // config.blocks, loop.tiles),),
        grid_names=("blocks",),
        cluster=(config.blocks,),
        cluster_names=("pair",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="matmul",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            approx_math=True,
        ),
    )
    return kernel


def _operand(stages: int, shape: tuple[int, int], dtype: Any, transposed: bool) -> Any:
    """Stages of an operand, with the widest swizzle that its rows allow."""
    rows, columns = (shape[1], shape[0]) if transposed else shape
    size = np.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(math.gcd(columns * size, ROW) * 8)
    return plgpu.SMEM(
        (stages, rows, columns),
        dtype,
        transforms=(
            plgpu.TilingTransform((8, swizzle // size)),
            plgpu.SwizzleTransform(swizzle),
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Refs:
    """What the roles of a block share."""

    a_smem: Any
    b_smem: Any
    out_smem: Any
    acc: Any
    full: Any
    empty: Any
    summed: Any
    written: Any
    residual_full: Any = None


class _Loop:
    """The body of the kernel for one problem and configuration."""

    def __init__(self, problem: MatmulProblem, config: MatmulConfig, epilogue: Epilogue):
        self.problem, self.config, self.epilogue = problem, config, epilogue
        self.depth = depth(problem.dtype_a)
        self.rows = config.tile_m * config.blocks
        self.m_tiles = -(-problem.m // self.rows)
        self.n_tiles = -(-problem.n // config.tile_n)
        self.steps = -(-problem.k // self.depth)

    @property
    def tiles(self) -> int:
        """Of the result, each of one block or of a pair."""
        return self.m_tiles * self.n_tiles

    def run(self, a: Any, b: Any, *refs: Any, **scratch: Any) -> None:
        """The kernel's body."""
        *operands, out = refs
        shared = _Refs(**scratch)

        def produce() -> None:
            def per_warp(warp: Any) -> None:
                pl.when(warp == _FETCH)(lambda: self._fetch(a, b, shared))
                leads = jnp.logical_and(warp == _MULTIPLY, lax.axis_index("pair") == 0)
                pl.when(leads)(lambda: self._multiply(shared))

            plgpu.warp_map(per_warp)

        lax.cond(
            lax.axis_index("warpgroup") == 0,
            produce,
            lambda: self._write(operands, out, shared),
        )

    def _over_tiles(self, body: Callable[[Any, Any, Any, Any], Any], carry: Any) -> Any:
        """``carry = body(number, m, n, carry)`` for each of this block's tiles."""
        config = self.config
        block, blocks = lax.axis_index("blocks"), jnp.int32(jax.lax.axis_size("blocks"))
        count = lax.div(self.tiles - 1 - block, blocks) + 1

        def one(number: Any, carry: Any) -> Any:
            m, n = plgpu.planar_snake(
                block + number * blocks,
                (self.m_tiles, self.n_tiles),
                0 if config.grid_minor == "m" else 1,
                config.group,
            )
            return body(number, m * self.rows, n * config.tile_n, carry)

        return lax.fori_loop(0, count, one, carry)

    def _next(self, stage: Any) -> Any:
        following = stage + 1
        return lax.select(following == self.config.stages, jnp.int32(0), following)

    # The warp that fetches ------------------------------------------------------------------------

    def _fetch(self, a: Any, b: Any, refs: _Refs) -> None:
        config, problem = self.config, self.problem

        def copy(source: Any, target: Any, stage: Any, axis: int) -> None:
            shared: dict[str, Any] = {}
            if config.pair:
                shared["collective_axes"] = "pair"
                shared["leader_tracked"] = plgpu.CopyPartition.PARTITIONED(axis)
            plgpu.copy_gmem_to_smem(source, target.at[stage], refs.full.at[stage], **shared)

        def tile(number: Any, m: Any, n: Any, carry: Any) -> Any:
            rows, columns = pl.ds(m, self.rows), pl.ds(n, config.tile_n)

            def step(index: Any, carry: Any) -> Any:
                stage, filled = carry
                # The first time round the stages are free.
                pl.when(filled >= config.stages)(lambda: plgpu.barrier_wait(refs.empty.at[stage]))
                along = pl.ds(index * self.depth, self.depth)
                a_window = a.at[along, rows] if problem.transpose_a else a.at[rows, along]
                b_window = b.at[columns, along] if problem.transpose_b else b.at[along, columns]
                copy(a_window, refs.a_smem, stage, 1 if problem.transpose_a else 0)
                copy(b_window, refs.b_smem, stage, 0 if problem.transpose_b else 1)
                return self._next(stage), filled + 1

            return lax.fori_loop(0, self.steps, step, carry)

        stage, filled = self._over_tiles(tile, (jnp.int32(0), jnp.int32(0)))

        def drain(_: Any, stage: Any) -> Any:
            plgpu.barrier_wait(refs.empty.at[stage])
            return self._next(stage)

        # A block does not end before the products that read its memory.
        used = lax.min(filled, jnp.int32(config.stages))
        first = lax.select(filled < config.stages, jnp.int32(0), stage)
        lax.fori_loop(0, used, drain, first)

    # The warp that multiplies ---------------------------------------------------------------------

    def _multiply(self, refs: _Refs) -> None:
        config, problem = self.config, self.problem
        axis = "pair" if config.pair else None

        def tile(number: Any, m: Any, n: Any, stage: Any) -> Any:
            half = lax.rem(number, jnp.int32(2))
            pl.when(number >= 2)(lambda: plgpu.barrier_wait(refs.written.at[half]))
            acc = refs.acc.at[:, pl.ds(half * config.tile_n, config.tile_n)]

            def step(index: Any, stage: Any) -> Any:
                plgpu.barrier_wait(refs.full.at[stage])
                a, b = refs.a_smem.at[stage], refs.b_smem.at[stage]
                plgpu.tcgen05_mma(
                    acc,
                    plgpu.transpose_ref(a, (1, 0)) if problem.transpose_a else a,
                    plgpu.transpose_ref(b, (1, 0)) if problem.transpose_b else b,
                    refs.empty.at[stage],
                    accumulate=index > 0,
                    collective_axis=axis,
                )
                return self._next(stage)

            stage = lax.fori_loop(0, self.steps, step, stage)
            plgpu.tcgen05_commit_arrive(refs.summed.at[half], collective_axis=axis)
            return stage

        self._over_tiles(tile, jnp.int32(0))

    # The warpgroup that writes --------------------------------------------------------------------

    def _write(self, operands: Any, out: Any, refs: _Refs) -> None:
        config = self.config
        width = config.epilogue_n
        own = lax.axis_index("pair") * config.tile_m

        def tile(number: Any, m: Any, n: Any, carry: Any) -> Any:
            half = lax.rem(number, jnp.int32(2))
            plgpu.barrier_wait(refs.summed.at[half])
            rows = pl.ds(m + own, config.tile_m)
            parts = config.tile_n // width
            for part in range(parts):
                columns = pl.ds(n + part * width, width)
                staging = refs.out_smem.at[part % 2]
                source = pl.ds(half * config.tile_n + part * width, width)
                sums = plgpu.async_load_tmem(refs.acc.at[:, source])
                if part == parts - 1:
                    plgpu.wait_load_tmem()
                    plgpu.barrier_arrive(refs.written.at[half])
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                residual = None
                if self.epilogue.residual:
                    barrier = refs.residual_full.at[part % 2]
                    plgpu.copy_gmem_to_smem(operands[-1].at[rows, columns], staging, barrier)
                    plgpu.barrier_wait(barrier)
                    residual = staging[...]
                values = self.epilogue.apply(sums, operands, rows, columns, residual, swapped=False)
                staging[...] = values.astype(out.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staging, out.at[rows, columns])
            return carry

        self._over_tiles(tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)
