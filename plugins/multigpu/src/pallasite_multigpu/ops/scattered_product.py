"""A matrix product whose sums over devices are scattered: Hopper's kernel, and in each of its
blocks one more warpgroup, which writes tiles of the result to the devices that own the rows.

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
from pallasite_hopper.ops.dense.kernel import MatmulLoop
from pallasite_multigpu.ops import fused_choice
from pallasite_multigpu.ops.gathered_product import (
    REGISTERS,
    candidates,
    has_whole_tiles,
    problem_of,
    usual,
)
from pallasite_multigpu.ops.tiles import LANES
from pallasite_std.api import Epilogue, MatmulProblem

CONFIG = MatmulConfig(tile_m=128, tile_n=256, tile_k=64, stages=4, epilogue_buffers=1)


SENT = 1024
"""Bytes that a block sends at a time, about. On two H200, where this kernel takes 95 us if it sends
nothing, it took 100 us with 1 KiB, 103 with 2, 108 with 4, and 113 with 8; with copies of a tile's
parts from shared memory, which all blocks make at the same time, 117."""


class _ScatteredLoop(MatmulLoop):
    """The body of the kernel."""

    def __init__(self, problem: MatmulProblem, config: MatmulConfig, axis: Hashable, count: int):
        super().__init__(problem, config, Epilogue())
        self.axis, self.count = axis, count
        self.shard = problem.m // count
        self.first_own = (count - 1) * (self.shard // config.tile_m) * self.n_tiles

    def first_row(self, m: Any) -> Any:
        """Tiles of the next device's rows come first, the own ones last."""
        following = (lax.axis_index(self.axis) + 1) * (self.shard // self.config.tile_m)
        return lax.rem(m + following, self.problem.m // self.config.tile_m) * self.config.tile_m

    def body(
        self,
        a: Any,
        b: Any,
        out: Any,
        parts: Any,
        made: Any,
        *,
        a_smem: Any,
        b_smem: Any,
        out_smem: Any,
        full: Any,
        empty: Any,
        ready: Any,
    ) -> None:
        """The kernel's body; ``parts`` has what other devices make of the own rows, ``made`` what
        this device makes of theirs."""
        compute = self.config.warpgroups
        warpgroup, own = lax.axis_index("warpgroup"), lax.axis_index(self.axis)
        blocks = jax.lax.axis_size("blocks")
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        others = [lax.rem(own + offset, self.count) for offset in range(1, self.count)]

        def fetch() -> None:
            plgpu.set_max_registers(REGISTERS["fetch"], action="decrease")
            self.fetch(a, b, a_smem, b_smem, full, empty)

        def send() -> None:
            plgpu.set_max_registers(REGISTERS["send"], action="decrease")
            self.send(made, parts, ready)
            for one in others:
                pl.semaphore_signal(arrived, device_id={self.axis: one})

        def write(part: Any, sums: Any, m: Any, n: Any) -> None:
            owner = lax.div(m, self.shard)

            def hand_over() -> None:
                self.finish(warpgroup, (), made, out_smem, None, part, sums, m, n)
                plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(ready, memory_scope="gpu")

            def add_up() -> None:
                row = m - owner * self.shard
                pl.semaphore_wait(arrived, blocks * (self.count - 1), decrement=False)
                places = [row + other * self.shard for other in others]
                self.finish_sum(warpgroup, out, parts, places, out_smem, sums, row, n)

            lax.cond(owner == own, add_up, hand_over)

        def multiply() -> None:
            plgpu.set_max_registers(REGISTERS["compute"], action="increase")
            self.compute(warpgroup, a_smem, b_smem, full, empty, write)
            plgpu.wait_smem_to_gmem(0)

        branch = lax.max(warpgroup - compute + 1, 0)
        lax.switch(branch, [multiply, fetch, send])

    def send(self, made: Any, parts: Any, ready: Any) -> None:
        """Writes this block's tiles of other devices' rows to these, as soon as they are made.

        By lanes, a little at a time: that leaves the way of the operands free.
        """
        config, own = self.config, lax.axis_index(self.axis)
        block, blocks = lax.axis_index("blocks"), jnp.int32(jax.lax.axis_size("blocks"))
        height = _sent_rows(config.tile_n, made.dtype)

        def tile(step: Any, _: Any) -> None:
            m, n = self._place(block + step * blocks)
            first = self.first_row(m)
            owner = lax.div(first, self.shard)
            moved = (own - owner) * self.shard
            columns = pl.ds(n * config.tile_n, config.tile_n)
            there = plgpu.remote_ref(parts, {self.axis: owner})
            plgpu.semaphore_wait(ready, config.warpgroups, memory_scope="gpu")

            def piece(index: Any, _: Any) -> None:
                row = first + index * height
                there[pl.ds(row + moved, height), columns] = made[pl.ds(row, height), columns]

            lax.fori_loop(0, config.tile_m // height, piece, None)

        tiles = lax.div(lax.max(self.first_own - block, jnp.int32(0)) + blocks - 1, blocks)
        lax.fori_loop(0, tiles, tile, None)
        plgpu.commit_smem()  # All lanes have written: it is also a barrier of the warpgroup.

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


def _sent_rows(columns: int, dtype: Any) -> int:
    """Rows of a tile that a block sends at a time: a power of two, as many elements as all lanes
    of a warpgroup have."""
    rows = 1
    while rows * columns * jnp.dtype(dtype).itemsize < SENT or rows * columns % LANES:
        rows *= 2
    return rows


def fits(m: int, n: int, k: int, dtype: Any, out_dtype: Any, count: int, config: Any) -> bool:
    """Whether the kernel can multiply (m, k) by (k, n) and give each device its share of rows."""
    whole = m % count == 0 and has_whole_tiles(m // count, n, k, dtype, out_dtype, count, config)
    return whole and config.cluster == 1


def default(m: int, n: int, k: int, dtype: Any, out_dtype: Any, count: int) -> MatmulConfig | None:
    """The configuration of the kernel; None where it does not fit, or two kernels are faster."""
    traffic = (count - 1) * (m // count) * n * jnp.dtype(out_dtype).itemsize
    found = fused_choice.fastest(
        fused_choice.exchange_of(m, n, k, dtype, out_dtype, traffic),
        usual(CONFIG, out_dtype),
        functools.partial(fits, m, n, k, dtype, out_dtype, count),
    )
    # All tiles of a device's rows come before those of the next one.
    return found and dataclasses.replace(found, group=m // count // found.tile_m)


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
    config: MatmulConfig,
) -> jax.Array:
    """This device's rows of the sum of all devices' products.

    Args:
      a: (m, k), this device's columns of the left operand; see :func:`fits`.
      b: (k, n), this device's rows of the right one.
      axis: of the mesh.
      count: devices along it.
      out_dtype: of the result, and of what devices send.
      blocks: at most as many as run at the same time.
      config: of the product. Tiles are visited along the rows, in groups that divide those of a
        device.

    Returns:
      (m / count, n). Sums are made in float32.
    """
    m, n = a.shape[0], b.shape[1]
    problem = problem_of(m, a, b, out_dtype)
    group = math.gcd(config.group, m // count // config.tile_m)
    chosen = dataclasses.replace(config, group=group, grid_minor="m")
    items = (m // chosen.tile_m) * (n // chosen.tile_n)
    made, *_ = _build(problem, chosen, axis, count, min(blocks, items))(a, b)
    return made


@functools.lru_cache(maxsize=64)
def _build(
    problem: MatmulProblem, config: MatmulConfig, axis: Hashable, count: int, blocks: int
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    stages, warpgroups, own = config.stages, config.warpgroups, problem.m // count
    staging = (warpgroups, config.epilogue_buffers, config.warpgroup_m, config.epilogue_n)
    made: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] = plgpu.kernel(
        _ScatteredLoop(problem, config, axis, count).body,
        out_type=[
            jax.ShapeDtypeStruct((rows, problem.n), problem.out_dtype)
            for rows in (own, problem.m, problem.m)
        ],
        grid=(blocks,),
        grid_names=("blocks",),
        num_threads=warpgroups + 2,
        thread_name="warpgroup",
        scratch_types={
            "a_smem": plgpu.SMEM((stages, config.tile_m, config.tile_k), problem.dtype_a),
            "b_smem": plgpu.SMEM((stages, config.tile_k, config.tile_n), problem.dtype_b),
            "out_smem": plgpu.SMEM(staging, problem.out_dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            "ready": plgpu.SemaphoreType.REGULAR,
        },
        kernel_name="matmul_reduce_scatter",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            approx_math=True,
            plugin_options={"standard": {"partial_outputs": True}},  # Not all rows.
        ),
    )
    return made
