"""A matrix product whose left operand's rows are spread over devices: Hopper's kernel, and in each
of its blocks one more warpgroup, which writes this device's rows to the others meanwhile.

Blocks take the rows of this device first in each group of tiles that are side by side. Before a
tile of the rows of another device they wait until all blocks there have written their part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.kernel import Item, MatmulLoop
from pallasite_multigpu.ops import fused_choice
from pallasite_multigpu.ops.tiles import tiles_of
from pallasite_multigpu.rules.fences import acquire_for_copies
from pallasite_std.api import Epilogue, MatmulProblem

REGISTERS = {"fetch": 40, "send": 40, "compute": 216}
"""Of a lane of each kind of warpgroup; they all start with 128."""
CONFIG = MatmulConfig(tile_m=128, tile_n=256, tile_k=64, stages=4, group=16)
SENT = 1024
"""Elements that a block sends at a time. On two H200, whose product alone takes 84 us, the kernel
took 99 us with 1024, 101 with 2048, 110 with 8192; with copies through shared memory in place of
stores of lanes, 103 to 111."""


class _GatheredLoop(MatmulLoop):
    """The body of the kernel."""

    def __init__(
        self, problem: MatmulProblem, config: MatmulConfig, axis: Hashable, count: int, blocks: int
    ):
        super().__init__(problem, config, Epilogue())
        self.axis, self.count, self.blocks = axis, count, blocks
        self.shard = problem.m // count
        self.gathered: Any = None
        self.arrived: Any = None

    def first_row(self, m: Any) -> Any:
        """Tiles of the own rows come first, then those of the next device."""
        own = lax.axis_index(self.axis) * (self.shard // self.config.tile_m)
        return lax.rem(m + own, self.problem.m // self.config.tile_m) * self.config.tile_m

    def begin(self, item: Item) -> None:
        """Waits until the rows of a tile have arrived."""
        owner = lax.div(item.m, self.shard)

        @pl.when(owner != lax.axis_index(self.axis))  # type: ignore[untyped-decorator]
        def _() -> None:
            pl.semaphore_wait(self.arrived.at[owner], self.blocks, decrement=False)
            acquire_for_copies()

    def fetch_left(self, a: Any, item: Item, window: Any, smem: Any, full: Any, share: Any) -> None:
        """The own rows are where they were, the others where they have been sent to."""
        _, depth = window
        owner = lax.div(item.m, self.shard)
        rows = pl.ds(item.m - owner * self.shard, self.config.tile_m)

        def here() -> None:
            plgpu.copy_gmem_to_smem(a.at[rows, depth], smem, full, collective_axes=share)

        def arrived() -> None:
            source = self.gathered.at[pl.ds(item.m, self.config.tile_m), depth]
            plgpu.copy_gmem_to_smem(source, smem, full, collective_axes=share)

        lax.cond(owner == lax.axis_index(self.axis), here, arrived)

    def send(self, a: Any) -> None:
        """Writes this block's part of the own rows to all other devices, and says so."""
        own = lax.axis_index(self.axis)

        def move(rows: Any, columns: Any) -> None:
            tile = a[rows, columns]
            there = pl.ds(own * self.shard + rows.start, rows.size)
            for offset in range(1, self.count):
                peer = lax.rem(own + offset, self.count)
                plgpu.remote_ref(self.gathered, {self.axis: peer})[there, columns] = tile

        block = lax.axis_index("blocks") * self.config.cluster + lax.axis_index("cluster")
        tiles_of(self.shard, self.problem.k, SENT, self.blocks).each(move, block)
        plgpu.commit_smem()  # All lanes have written: it is also a barrier of the warpgroup.
        for offset in range(1, self.count):
            peer = lax.rem(own + offset, self.count)
            pl.semaphore_signal(self.arrived.at[own], 1, device_id={self.axis: peer})

    def body(
        self,
        a: Any,
        b: Any,
        out: Any,
        gathered: Any,
        *,
        a_smem: Any,
        b_smem: Any,
        out_smem: Any,
        full: Any,
        empty: Any,
    ) -> None:
        """The kernel's body."""
        self.gathered = gathered
        self.arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((self.count,)))
        warpgroups = self.config.warpgroups
        warpgroup = lax.axis_index("warpgroup")

        def fetch() -> None:
            plgpu.set_max_registers(REGISTERS["fetch"], action="decrease")
            self.fetch(a, b, a_smem, b_smem, full, empty)

        def send() -> None:
            plgpu.set_max_registers(REGISTERS["send"], action="decrease")
            self.send(a)

        def multiply() -> None:
            plgpu.set_max_registers(REGISTERS["compute"], action="increase")
            write = functools.partial(self.finish, warpgroup, (), out, out_smem, None)
            self.compute(warpgroup, a_smem, b_smem, full, empty, write)
            plgpu.wait_smem_to_gmem(0)

        branch = lax.max(warpgroup - warpgroups + 1, 0)
        lax.switch(branch, [multiply, fetch, send])


def usual(config: MatmulConfig, out_dtype: Any) -> MatmulConfig:
    """A configuration whose results take as much shared memory, whatever their type."""
    return dataclasses.replace(config, epilogue_n=64 * 2 // jnp.dtype(out_dtype).itemsize)


def is_plain(config: Any, out_dtype: Any) -> bool:
    """Whether kernels like these can have a configuration of Hopper's product, of 16-bit types."""
    return (
        isinstance(config, MatmulConfig)
        and config.fits(2, jnp.dtype(out_dtype).itemsize)
        and config.warpgroups == 2
        and config.split_k == config.parts == config.last_parts == 1
        and not config.swap
        and config.rest is None
    )


def has_whole_tiles(
    m: int, n: int, k: int, dtype: Any, out_dtype: Any, count: int, config: MatmulConfig
) -> bool:
    """Whether kernels like these can multiply (m, k) by (k, n), of ``m`` rows at a time."""
    return (
        jnp.dtype(dtype).name in ("bfloat16", "float16")
        and jnp.dtype(out_dtype).itemsize in (2, 4)
        and is_plain(config, out_dtype)
        and m % (config.tile_m * config.cluster) == 0
        and n % config.tile_n == 0
        and k % config.tile_k == 0
        and min(m, n, k) > 0
        and count > 1
    )


def problem_of(m: int, a: jax.Array, b: jax.Array, out_dtype: Any) -> MatmulProblem:
    """Hopper's product of ``m`` rows like those of ``a`` with ``b``, (k, n)."""
    k, n = b.shape
    return MatmulProblem(
        m=m,
        n=n,
        k=k,
        dtype_a=a.dtype,
        dtype_b=b.dtype,
        out_dtype=jnp.dtype(out_dtype),
        accumulator=jnp.dtype(jnp.float32),
        transpose_a=False,
        transpose_b=False,
    )


def fits(m: int, n: int, k: int, dtype: Any, out_dtype: Any, count: int, config: Any) -> bool:
    """Whether the kernel can multiply (m, k) on each of ``count`` devices by (k, n)."""
    whole = has_whole_tiles(m, n, k, dtype, out_dtype, count, config)
    return whole and config.cluster_along == "m"


def candidates(dtype: Any) -> list[MatmulConfig]:
    """Configurations of kernels like these, with results of a type, that are worth trying."""
    sizes = ((128, 256, 4), (128, 128, 5), (64, 256, 4))
    return [
        usual(MatmulConfig(tile_m=m, tile_n=n, stages=stages, group=group, cluster=cluster), dtype)
        for m, n, stages in sizes
        for cluster in (1, 2)
        for group in (4, 8, 16)
    ]


def default(m: int, n: int, k: int, dtype: Any, out_dtype: Any, count: int) -> MatmulConfig | None:
    """The configuration of the kernel; None where it does not fit, or two kernels are faster."""
    traffic = (count - 1) * m * k * jnp.dtype(dtype).itemsize
    found = fused_choice.fastest(
        fused_choice.exchange_of(count * m, n, k, dtype, out_dtype, traffic),
        usual(CONFIG, out_dtype),
        functools.partial(fits, m, n, k, dtype, out_dtype, count),
    )
    if found is None:
        return None
    # A group is at most the own rows: their tiles come before those that wait.
    return dataclasses.replace(found, group=min(found.group, m // found.tile_m))


def configs(m: int, n: int, k: int, dtype: Any, out_dtype: Any, count: int) -> list[MatmulConfig]:
    """Those of the :func:`candidates` that fit."""
    return [one for one in candidates(out_dtype) if fits(m, n, k, dtype, out_dtype, count, one)]


def gathered_product(
    a: jax.Array,
    b: jax.Array,
    axis: Hashable,
    count: int,
    out_dtype: Any,
    blocks: int,
    config: MatmulConfig,
) -> tuple[jax.Array, jax.Array]:
    """The product of all devices' rows with this device's columns.

    Args:
      a: (m, k), this device's rows.
      b: (k, n), this device's columns; see :func:`fits`.
      axis: of the mesh.
      count: devices along it.
      out_dtype: of the result.
      blocks: at most as many as run at the same time.
      config: of the product.

    Returns:
      (count * m, n), and the rows of the other devices, (count * m, k), in which this device's own
      are undefined.
    """
    m, n = a.shape[0], b.shape[1]
    problem = problem_of(count * m, a, b, out_dtype)
    items = (problem.m // config.tile_m) * (n // config.tile_n)
    blocks = min(blocks, items) // config.cluster * config.cluster
    return _build(problem, config, axis, count, blocks)(a, b)


@functools.lru_cache(maxsize=64)
def _build(
    problem: MatmulProblem, config: MatmulConfig, axis: Hashable, count: int, blocks: int
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    loop = _GatheredLoop(problem, config, axis, count, blocks)
    stages, warpgroups = config.stages, config.warpgroups
    staging = (warpgroups, config.epilogue_buffers, config.warpgroup_m, config.epilogue_n)
    made: Callable[..., tuple[jax.Array, jax.Array]] = plgpu.kernel(
        loop.body,
        out_type=[
            jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
            jax.ShapeDtypeStruct((problem.m, problem.k), problem.dtype_a),
        ],
        grid=(blocks // config.cluster,),
        grid_names=("blocks",),
        cluster=(1, config.cluster),
        cluster_names=("part", "cluster"),
        num_threads=warpgroups + 2,
        thread_name="warpgroup",
        scratch_types={
            "a_smem": plgpu.SMEM((stages, config.tile_m, config.tile_k), problem.dtype_a),
            "b_smem": plgpu.SMEM((stages, config.tile_k, config.tile_n), problem.dtype_b),
            "out_smem": plgpu.SMEM(staging, problem.out_dtype),
            "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
            if config.cluster == 1
            else plgpu.ClusterBarrier(
                collective_axes=("cluster",), num_arrivals=warpgroups, num_barriers=stages
            ),
        },
        kernel_name="all_gather_matmul",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            approx_math=True,
            plugin_options={"standard": {"partial_outputs": True}},  # Not the own rows.
        ),
    )
    return made
