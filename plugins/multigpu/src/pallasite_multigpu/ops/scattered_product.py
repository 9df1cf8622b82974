"""A matrix product whose sums over devices are scattered: Hopper's kernel, which copies each tile
of its result to the device that owns the rows.

Blocks compute the rows of other devices first, whose tiles travel while those of the own rows are
computed. What arrives is added up by whoever calls this.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.kernel import REGISTERS, MatmulLoop
from pallasite_multigpu.ops.gathered_product import has_whole_tiles, problem_of, usual
from pallasite_std.api import Epilogue, MatmulProblem

CONFIG = MatmulConfig(tile_m=128, tile_n=256, tile_k=64, stages=4)


class _ScatteredLoop(MatmulLoop):
    """The body of the kernel."""

    def __init__(self, problem: MatmulProblem, config: MatmulConfig, axis: Hashable, count: int):
        super().__init__(problem, config, Epilogue())
        self.axis, self.count = axis, count
        self.shard = problem.m // count

    def first_row(self, m: Any) -> Any:
        """Tiles of the next device's rows come first, the own ones last."""
        following = (lax.axis_index(self.axis) + 1) * (self.shard // self.config.tile_m)
        return lax.rem(m + following, self.problem.m // self.config.tile_m) * self.config.tile_m

    def body(
        self,
        a: Any,
        b: Any,
        parts: Any,
        *,
        a_smem: Any,
        b_smem: Any,
        out_smem: Any,
        full: Any,
        empty: Any,
        arrived: Any,
    ) -> None:
        """The kernel's body; ``parts`` has what each device makes of the own rows."""
        compute = self.config.warpgroups
        memory_registers, compute_registers = REGISTERS[compute]
        warpgroup, own = lax.axis_index("warpgroup"), lax.axis_index(self.axis)

        def fetch() -> None:
            plgpu.set_max_registers(memory_registers, action="decrease")
            self.fetch(a, b, a_smem, b_smem, full, empty)

        def write(part: Any, sums: Any, m: Any, n: Any) -> None:
            owner = lax.div(m, self.shard)
            there = plgpu.remote_ref(parts, {self.axis: owner})
            row = m + (own - owner) * self.shard
            self.finish(warpgroup, (), there, out_smem, None, part, sums, row, n)

        def multiply() -> None:
            plgpu.set_max_registers(compute_registers, action="increase")
            self.compute(warpgroup, a_smem, b_smem, full, empty, write)
            plgpu.wait_smem_to_gmem(0)
            others = [lax.rem(own + offset, self.count) for offset in range(1, self.count)]
            plgpu.semaphore_signal_parallel(
                *[plgpu.SemaphoreSignal(arrived, device_id={self.axis: one}) for one in others]
            )

            def wait() -> None:
                pl.semaphore_wait(arrived, compute * (self.count - 1))

            pl.when(warpgroup == 0)(wait)

        lax.cond(warpgroup == compute, fetch, multiply)


def fits(
    m: int, n: int, k: int, dtype: Any, out_dtype: Any, count: int, config: Any = None
) -> bool:
    """Whether the kernel can multiply (m, k) by (k, n) and give each device its share of rows."""
    config = config or usual(CONFIG, out_dtype)
    whole = m % count == 0 and has_whole_tiles(m // count, n, k, dtype, out_dtype, count, config)
    return whole and config.cluster == 1


def scattered_product(
    a: jax.Array,
    b: jax.Array,
    axis: Hashable,
    count: int,
    out_dtype: Any,
    blocks: int,
    config: Any = None,
) -> jax.Array:
    """What each device's product has for the rows of this one.

    Args:
      a: (m, k), this device's columns of the left operand; see :func:`fits`.
      b: (k, n), this device's rows of the right one.
      axis: of the mesh.
      count: devices along it.
      out_dtype: of the result.
      blocks: at most as many as run at the same time.
      config: of the product, a ``MatmulConfig``; by default :data:`CONFIG`.

    Returns:
      (count, m / count, n), in the order of the devices.
    """
    m, n = a.shape[0], b.shape[1]
    problem = problem_of(m, a, b, out_dtype)
    if config is None:
        # All tiles of a device's rows come before those of the next one.
        group = m // count // CONFIG.tile_m
        config = dataclasses.replace(usual(CONFIG, out_dtype), group=group)
    items = (m // config.tile_m) * (n // config.tile_n)
    made = _build(problem, config, axis, count, min(blocks, items))(a, b)
    return made.reshape(count, m // count, n)


@functools.lru_cache(maxsize=64)
def _build(
    problem: MatmulProblem, config: MatmulConfig, axis: Hashable, count: int, blocks: int
) -> Callable[..., jax.Array]:
    stages, warpgroups = config.stages, config.warpgroups
    staging = (warpgroups, config.epilogue_buffers, config.warpgroup_m, config.epilogue_n)
    made: Callable[..., jax.Array] = plgpu.kernel(
        _ScatteredLoop(problem, config, axis, count).body,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        grid=(blocks,),
        grid_names=("blocks",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types={
            "a_smem": plgpu.SMEM((stages, config.tile_m, config.tile_k), problem.dtype_a),
            "b_smem": plgpu.SMEM((stages, config.tile_k, config.tile_n), problem.dtype_b),
            "out_smem": plgpu.SMEM(staging, problem.out_dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            "arrived": plgpu.SemaphoreType.REGULAR,
        },
        kernel_name="matmul_reduce_scatter",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            approx_math=True,
            plugin_options={"standard": {"partial_outputs": True}},  # Others write the rest.
        ),
    )
    return made
