"""The kernel: persistent blocks, a warpgroup that fetches, two that compute.

Blocks go through tiles of the result. The memory warpgroup keeps a ring of slots in shared memory
filled with the next steps along K, of this tile and of those to come; the compute warpgroups each
keep one product in flight while they wait for the next slot, and write the finished tile through
shared memory while the next one's operands arrive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.matmul.config import MatmulConfig
from pallasite_hopper.ops.matmul.epilogue import Epilogue

COMPUTE = 2
"""Compute warpgroups."""

MEMORY_REGISTERS, COMPUTE_REGISTERS = 40, 232
"""Registers of a lane after reallocation: 168 for each of 384 lanes, dealt out anew."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is multiplied.

    Attributes:
      m, n, k: extents.
      dtype_a, dtype_b: of the operands.
      out_dtype: of the result.
      accumulator: dtype in which products are summed up.
      transpose_a: a is given as (k, m).
      transpose_b: b is given as (n, k).
    """

    m: int
    n: int
    k: int
    dtype_a: Any
    dtype_b: Any
    out_dtype: Any
    accumulator: Any
    transpose_a: bool
    transpose_b: bool

    @property
    def size(self) -> int:
        """Bytes of an element of the operands."""
        return int(np.dtype(self.dtype_a).itemsize)


def _operand(rows: int, columns: int, stages: int, dtype: Any) -> Any:
    """A ring of row-major matrices, in the widest swizzle that fits."""
    size = np.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    transforms = (
        plgpu.TilingTransform((8, swizzle // size)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM((stages, rows, columns), dtype, transforms=transforms)


def build(
    problem: Problem, config: MatmulConfig, epilogue: Epilogue, multiprocessors: int
) -> Callable[..., jax.Array]:
    """The kernel as a function of a, b and the epilogue's operands."""
    loop = _Loop(problem, config, epilogue)
    clusters = min(multiprocessors // config.cluster, loop.tiles)
    wm, en = config.warpgroup_m, config.epilogue_n
    out_swizzle = plgpu.find_swizzle(en * np.dtype(problem.out_dtype).itemsize * 8)
    out_transforms = (
        plgpu.TilingTransform((8, out_swizzle // np.dtype(problem.out_dtype).itemsize)),
        plgpu.SwizzleTransform(out_swizzle),
    )
    a_shape = (
        (config.tile_k, config.tile_m) if problem.transpose_a else (config.tile_m, config.tile_k)
    )
    b_shape = (
        (config.tile_n, config.tile_k) if problem.transpose_b else (config.tile_k, config.tile_n)
    )
    scratch = {
        "a_smem": _operand(*a_shape, config.stages, problem.dtype_a),
        "b_smem": _operand(*b_shape, config.stages, problem.dtype_b),
        "out_smem": plgpu.SMEM(
            (COMPUTE, config.slots, wm, en), problem.out_dtype, transforms=out_transforms
        ),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
        "empty": plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=config.stages)
        if config.cluster == 1
        else plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=COMPUTE, num_barriers=config.stages
        ),
    }
    if epilogue.residual:
        scratch["residual_full"] = plgpu.Barrier(num_barriers=COMPUTE * config.slots)
    return plgpu.kernel(
        loop.run,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        grid=(clusters,),
        grid_names=("blocks",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="matmul",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
    )


class _Loop:
    """The body of the kernel for one problem and configuration."""

    def __init__(self, problem: Problem, config: MatmulConfig, epilogue: Epilogue):
        self.problem, self.config, self.epilogue = problem, config, epilogue
        along_m = config.cluster if config.cluster_along == "m" else 1
        along_n = config.cluster if config.cluster_along == "n" else 1
        self.m_tiles = -(-problem.m // (config.tile_m * along_m))
        self.n_tiles = -(-problem.n // (config.tile_n * along_n))
        self.k_steps = -(-problem.k // (config.tile_k))

    @property
    def tiles(self) -> int:
        """Tiles of the result that a cluster computes at a time."""
        return self.m_tiles * self.n_tiles

    def run(
        self,
        a: Any,
        b: Any,
        *refs: Any,
        a_smem: Any,
        b_smem: Any,
        out_smem: Any,
        full: Any,
        empty: Any,
        residual_full: Any = None,
    ) -> None:
        """The kernel's body."""
        *operands, out = refs
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == COMPUTE)
        def _memory() -> None:
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
            self._fetch(a, b, a_smem, b_smem, full, empty)

        @pl.when(warpgroup < COMPUTE)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            self._compute(
                warpgroup, operands, out, a_smem, b_smem, out_smem, full, empty, residual_full
            )
            plgpu.wait_smem_to_gmem(0)

    # Which tiles --------------------------------------------------------------------------------

    def _over_tiles(self, body: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """``carry = body(m, n, carry)`` for each of this block's tiles."""
        config = self.config
        block, blocks = lax.axis_index("blocks"), jnp.int32(jax.lax.axis_size("blocks"))
        count = lax.div(self.tiles - 1 - block, blocks) + 1

        def one(step: Any, carry: Any) -> Any:
            index = block + step * blocks
            m, n = plgpu.planar_snake(
                index,
                (self.m_tiles, self.n_tiles),
                0 if config.grid_minor == "m" else 1,
                config.group,
            )
            if config.cluster > 1:
                member = lax.axis_index("cluster")
                if config.cluster_along == "m":
                    m = m * config.cluster + member
                else:
                    n = n * config.cluster + member
            return body(m * config.tile_m, n * config.tile_n, carry)

        return lax.fori_loop(0, count, one, carry)

    def _next(self, slot: Any) -> Any:
        following = slot + 1
        return lax.select(following == self.config.stages, jnp.int32(0), following)

    # The memory warpgroup -----------------------------------------------------------------------

    def _fetch(self, a: Any, b: Any, a_smem: Any, b_smem: Any, full: Any, empty: Any) -> None:
        config, problem = self.config, self.problem
        share_a = "cluster" if config.cluster > 1 and config.cluster_along == "n" else None
        share_b = "cluster" if config.cluster > 1 and config.cluster_along == "m" else None

        def tile(m: Any, n: Any, carry: Any) -> Any:
            rows, columns = pl.ds(m, config.tile_m), pl.ds(n, config.tile_n)

            def step(index: Any, carry: Any) -> Any:
                slot, filled = carry

                # The first time round the slots are free.
                @pl.when(filled >= config.stages)
                def _wait() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                depth = pl.ds(index * config.tile_k, config.tile_k)
                a_window = a.at[depth, rows] if problem.transpose_a else a.at[rows, depth]
                b_window = b.at[columns, depth] if problem.transpose_b else b.at[depth, columns]
                plgpu.copy_gmem_to_smem(
                    a_window, a_smem.at[slot], full.at[slot], collective_axes=share_a
                )
                plgpu.copy_gmem_to_smem(
                    b_window, b_smem.at[slot], full.at[slot], collective_axes=share_b
                )
                return self._next(slot), filled + 1

            return lax.fori_loop(0, self.k_steps, step, carry)

        _, filled = self._over_tiles(tile, (jnp.int32(0), jnp.int32(0)))
        del filled

    # The compute warpgroups ---------------------------------------------------------------------

    def _compute(
        self,
        warpgroup: Any,
        operands: Any,
        out: Any,
        a_smem: Any,
        b_smem: Any,
        out_smem: Any,
        full: Any,
        empty: Any,
        residual_full: Any,
    ) -> None:
        config, problem = self.config, self.problem
        wm, wn = config.warpgroup_m, config.warpgroup_n
        row = warpgroup * wm if config.split == "m" else jnp.int32(0)
        column = warpgroup * wn if config.split == "n" else jnp.int32(0)

        def left(slot: Any) -> Any:
            rows = pl.ds(row, wm)
            if problem.transpose_a:
                return plgpu.transpose_ref(a_smem.at[slot, :, rows], (1, 0))
            return a_smem.at[slot, rows]

        def right(slot: Any) -> Any:
            columns = pl.ds(column, wn)
            if problem.transpose_b:
                return plgpu.transpose_ref(b_smem.at[slot, columns], (1, 0))
            return b_smem.at[slot, :, columns]

        def tile(m: Any, n: Any, slot: Any) -> Any:
            def scope(acc: Any) -> Any:
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, left(slot), right(slot), accumulate=False)

                def step(_: Any, previous: Any) -> Any:
                    current = self._next(previous)
                    plgpu.barrier_wait(full.at[current])
                    plgpu.wgmma(acc, left(current), right(current))
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(empty.at[previous])
                    return current

                last = lax.fori_loop(1, self.k_steps, step, slot)
                sums = acc[...]
                plgpu.barrier_arrive(empty.at[last])
                self._finish(
                    sums, m + row, n + column, warpgroup, operands, out, out_smem, residual_full
                )
                return self._next(last)

            return pl.run_scoped(scope, plgpu.ACC((wm, wn), problem.accumulator))

        self._over_tiles(tile, jnp.int32(0))

    def _finish(
        self,
        sums: Any,
        m: Any,
        n: Any,
        warpgroup: Any,
        operands: Any,
        out: Any,
        out_smem: Any,
        residual_full: Any,
    ) -> None:
        """Writes a warpgroup's part of a finished tile."""
        config = self.config
        rows, width = pl.ds(m, config.warpgroup_m), config.epilogue_n
        for part in range(config.warpgroup_n // width):
            columns = pl.ds(n + part * width, width)
            slot = part % config.slots
            staging = out_smem.at[warpgroup, slot]
            plgpu.wait_smem_to_gmem(config.slots - 1, wait_read_only=True)
            residual = None
            if self.epilogue.residual:
                barrier = residual_full.at[warpgroup * config.slots + slot]
                plgpu.copy_gmem_to_smem(operands[-1].at[rows, columns], staging, barrier)
                plgpu.barrier_wait(barrier)
                residual = plgpu.load(staging, layout=plgpu.Layout.WGMMA)
            values = sums[:, part * width : (part + 1) * width]
            values = self.epilogue.apply(values, operands, rows, columns, residual)
            staging[...] = values.astype(self.problem.out_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, out.at[rows, columns])
