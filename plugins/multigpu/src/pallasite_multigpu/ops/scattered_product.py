"""A matrix product whose sums over devices are scattered: Hopper's kernel, which copies each tile
of its result to the device that owns the rows.

Blocks compute the rows of other devices first, whose tiles travel while those of the own rows are
computed. To these is added what has arrived, before they are written.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.kernel import REGISTERS, Item, MatmulLoop
from pallasite_multigpu.ops.gathered_product import candidates, has_whole_tiles, problem_of, usual
from pallasite_std.api import Epilogue, MatmulProblem

CONFIG = MatmulConfig(tile_m=128, tile_n=256, tile_k=64, stages=4, epilogue_buffers=1)
"""A stage more is worth more than room for a whole tile besides the stages: 132 and 138 us of a
product of 2048 x 4096 x 4096 on two H200."""


class _ScatteredLoop(MatmulLoop):
    """The body of the kernel."""

    def __init__(self, problem: MatmulProblem, config: MatmulConfig, axis: Hashable, count: int):
        super().__init__(problem, config, Epilogue())
        self.axis, self.count = axis, count
        self.shard = problem.m // count
        self.first_own = (count - 1) * (self.shard // config.tile_m) * self.n_tiles
        self.index: Any = None

    def first_row(self, m: Any) -> Any:
        """Tiles of the next device's rows come first, the own ones last."""
        following = (lax.axis_index(self.axis) + 1) * (self.shard // self.config.tile_m)
        return lax.rem(m + following, self.problem.m // self.config.tile_m) * self.config.tile_m

    def _over_items(self, body: Callable[[Item, Any], Any], carry: Any) -> Any:
        def noted(item: Item, carry: Any) -> Any:
            self.index = item.index
            return body(item, carry)

        return super()._over_items(noted, carry)

    def body(
        self,
        a: Any,
        b: Any,
        out: Any,
        parts: Any,
        *,
        a_smem: Any,
        b_smem: Any,
        out_smem: Any,
        full: Any,
        empty: Any,
    ) -> None:
        """The kernel's body; ``parts`` has what other devices make of the own rows."""
        compute = self.config.warpgroups
        memory_registers, compute_registers = REGISTERS[compute]
        warpgroup, own = lax.axis_index("warpgroup"), lax.axis_index(self.axis)
        block, blocks = lax.axis_index("blocks"), jax.lax.axis_size("blocks")
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        others = [lax.rem(own + offset, self.count) for offset in range(1, self.count)]

        def fetch() -> None:
            plgpu.set_max_registers(memory_registers, action="decrease")
            self.fetch(a, b, a_smem, b_smem, full, empty)

        def tell() -> None:
            """This warpgroup has sent all that it sends."""
            plgpu.wait_smem_to_gmem(0)
            for one in others:
                pl.semaphore_signal(arrived, device_id={self.axis: one})

        def write(part: Any, sums: Any, m: Any, n: Any) -> None:
            owner = lax.div(m, self.shard)
            row = m - owner * self.shard

            def send() -> None:
                there = plgpu.remote_ref(parts, {self.axis: owner})
                place = row + own * self.shard
                self.finish(warpgroup, (), there, out_smem, None, part, sums, place, n)

            def add_up() -> None:
                pl.when(self.index < self.first_own + blocks)(tell)  # The first own tile.
                signals = compute * blocks * (self.count - 1)
                pl.semaphore_wait(arrived, signals, decrement=False)
                places = [row + other * self.shard for other in others]
                self.finish_sum(warpgroup, out, parts, places, out_smem, sums, row, n)

            lax.cond(owner == own, add_up, send)

        def multiply() -> None:
            plgpu.set_max_registers(compute_registers, action="increase")
            self.compute(warpgroup, a_smem, b_smem, full, empty, write)
            last = block + lax.div(self.items - 1 - block, jnp.int32(blocks)) * blocks
            pl.when(last < self.first_own)(tell)  # It has no own tile.
            plgpu.wait_smem_to_gmem(0)

        lax.cond(warpgroup == compute, fetch, multiply)

    def finish_sum(
        self,
        warpgroup: Any,
        out: Any,
        parts: Any,
        places: list[Any],
        out_smem: Any,
        sums: Any,
        m: Any,
        n: Any,
    ) -> None:
        """Writes a warpgroup's part of an own tile, with what other devices have for it.

        Args:
          warpgroup: which one.
          out: the result.
          parts: what has arrived.
          places: in which rows of it, for each other device.
          out_smem: staging memory.
          sums: of this device.
          m, n: first row and column.
        """
        config = self.config
        height, width = config.warpgroup_m, config.epilogue_n
        buffers, steps = config.epilogue_buffers, sums.shape[1] // width

        def arrived(step: int) -> list[Any]:
            columns = pl.ds(n + step * width, width)
            return [parts[pl.ds(place, height), columns] for place in places]

        found = arrived(0)
        for step in range(steps):
            # What is needed next is on its way meanwhile.
            following = arrived(step + 1) if step + 1 < steps else []
            staging = out_smem.at[warpgroup, step % buffers]
            in_flight = 0 if step == 0 else buffers - 1
            plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
            total = sums[:, step * width : (step + 1) * width]
            for one in found:
                total = total + one.astype(total.dtype)
            staging[...] = total.astype(out.dtype)
            plgpu.commit_smem()
            columns = pl.ds(n + step * width, width)
            plgpu.copy_smem_to_gmem(staging, out.at[pl.ds(m, height), columns])
            found = following


def fits(
    m: int, n: int, k: int, dtype: Any, out_dtype: Any, count: int, config: Any = None
) -> bool:
    """Whether the kernel can multiply (m, k) by (k, n) and give each device its share of rows."""
    config = config or usual(CONFIG, out_dtype)
    whole = m % count == 0 and has_whole_tiles(m // count, n, k, dtype, out_dtype, count, config)
    return whole and config.cluster == 1


def configs(m: int, n: int, k: int, dtype: Any, out_dtype: Any, count: int) -> list[MatmulConfig]:
    """Those of the candidates that fit."""
    return [one for one in candidates(out_dtype) if fits(m, n, k, dtype, out_dtype, count, one)]


def scattered_product(
    a: jax.Array,
    b: jax.Array,
    axis: Hashable,
    count: int,
    out_dtype: Any,
    blocks: int,
    config: Any = None,
) -> jax.Array:
    """This device's rows of the sum of all devices' products.

    Args:
      a: (m, k), this device's columns of the left operand; see :func:`fits`.
      b: (k, n), this device's rows of the right one.
      axis: of the mesh.
      count: devices along it.
      out_dtype: of the result, and of what devices send.
      blocks: at most as many as run at the same time.
      config: of the product, a ``MatmulConfig``; by default :data:`CONFIG`. Tiles are visited along
        the rows, in groups that divide those of a device.

    Returns:
      (m / count, n). Sums are made in float32.
    """
    m, n = a.shape[0], b.shape[1]
    problem = problem_of(m, a, b, out_dtype)
    chosen = config or usual(CONFIG, out_dtype)
    # All tiles of a device's rows come before those of the next one.
    rows = m // count // chosen.tile_m
    group = math.gcd(chosen.group, rows) if config else rows
    chosen = dataclasses.replace(chosen, group=group, grid_minor="m")
    items = (m // chosen.tile_m) * (n // chosen.tile_n)
    made, _ = _build(problem, chosen, axis, count, min(blocks, items))(a, b)
    return made


@functools.lru_cache(maxsize=64)
def _build(
    problem: MatmulProblem, config: MatmulConfig, axis: Hashable, count: int, blocks: int
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    stages, warpgroups, own = config.stages, config.warpgroups, problem.m // count
    staging = (warpgroups, config.epilogue_buffers, config.warpgroup_m, config.epilogue_n)
    made: Callable[..., tuple[jax.Array, jax.Array]] = plgpu.kernel(
        _ScatteredLoop(problem, config, axis, count).body,
        out_type=[
            jax.ShapeDtypeStruct((rows, problem.n), problem.out_dtype) for rows in (own, problem.m)
        ],
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
        },
        kernel_name="matmul_reduce_scatter",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            approx_math=True,
            plugin_options={"standard": {"partial_outputs": True}},  # Of what others write.
        ),
    )
    return made
