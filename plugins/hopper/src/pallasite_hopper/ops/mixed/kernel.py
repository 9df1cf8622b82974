"""The kernel: the transposed matmul, with weights that are converted in registers.

Only the left operand of the tensor cores may come from registers, so a block computes tiles of the
transposed result, weights (n, k) times activations (k, m). A producer warpgroup keeps a circular
buffer of stages filled; each of one or two consumer warpgroups reads its rows of the weights,
converts them piece by piece, and keeps one matmul in flight meanwhile. Pieces alternate between two
sets of registers, since a matmul reads its own until it is done.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.exchange import Received, collect, exchange, steps_of
from pallasite_hopper.ops.mixed.config import MixedConfig
from pallasite_std.api import MixedProblem

REGISTERS = {1: (40, 216), 2: (40, 232)}
"""Registers of a lane of producer and compute warpgroups, by the number of the latter: the 255 or
168 that all of them start with, reallocated."""


def build(
    problem: MixedProblem, config: MixedConfig, multiprocessors: int
) -> Callable[..., jax.Array]:
    """The kernel as a function of the activations, the weights and the scales."""
    loop = _Loop(problem, config)
    if config.last_parts > 1 and not loop.shares_last(multiprocessors):
        config = dataclasses.replace(config, last_parts=1)
        loop = _Loop(problem, config)
    out_dtype = np.dtype(problem.out_dtype)
    split, compute = config.parts, config.warpgroups
    # Where k is split, each cluster has one tile, so that the buffers for sums are used once.
    clusters = multiprocessors // (config.cluster * config.last_parts)
    if config.last_parts == 1:
        clusters = loop.tiles if config.split_k > 1 else min(clusters, loop.tiles)
    weights = (
        (config.tile_n, config.tile_k) if problem.transposed else (config.tile_k, config.tile_n)
    )
    part = config.warpgroup_n
    scratch = {
        "a_smem": plgpu.SMEM((config.stages, config.tile_m, config.tile_k), problem.dtype),
        "w_smem": plgpu.SMEM((config.stages, *weights), problem.weights),
        "out_smem": plgpu.SMEM((compute * 2, config.epilogue_m, part), out_dtype),
        "full": plgpu.Barrier(num_arrivals=loop.copies, num_barriers=config.stages),
        "empty": plgpu.Barrier(num_arrivals=compute, num_barriers=config.stages)
        if config.cluster == 1
        else plgpu.ClusterBarrier(
            collective_axes=("side",), num_arrivals=compute, num_barriers=config.stages
        ),
    }
    if split > 1:
        width = config.tile_m // (split if config.exchanges else 1)
        scratch["sums_smem"] = plgpu.SMEM((compute, split - 1, part, width), jnp.float32)
        scratch["summed"] = plgpu.Barrier(num_arrivals=split - 1, num_barriers=compute)
    if problem.group:
        scratch["scale_smem"] = plgpu.SMEM(
            (config.stages, loop.scale_rows, config.tile_n), problem.dtype
        )
    kernel: Callable[..., jax.Array] = plgpu.kernel(
        loop.run,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), out_dtype),
        grid=(clusters,),
        grid_names=("blocks",),
        cluster=(split, config.cluster),
        cluster_names=("part", "side"),
        num_threads=compute + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="mixed_matmul",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            approx_math=True,
        ),
    )
    return kernel


_DENOMINATOR = 128.0
"""Of weights of 8 bits that are fractions."""


def _fractions(weights: Any) -> Any:
    """Weights of 8 bits over 128 in bfloat16, exactly.

    Without a sign and alone in 16 bits, they are a bfloat16 of that many units of its least normal
    and subnormal numbers, 2**-133: 8 bits of fraction that need no splitting.
    """
    units = lax.bitcast_convert_type(weights, jnp.uint8).astype(jnp.uint16)
    signed = weights.dtype == jnp.int8
    if signed:
        units = units ^ jnp.uint16(0x80)  # 128 more.
    found = lax.bitcast_convert_type(units, jnp.bfloat16) * jnp.bfloat16(2**133 / _DENOMINATOR)
    return found - jnp.bfloat16(1) if signed else found


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of the result.

    Attributes:
      m, n: its first row and column.
      first, steps: a block's steps along k.
      shared: whether the blocks of a cluster have a part of the steps each; None if that is the
        same of all tiles.
    """

    m: Any
    n: Any
    first: Any
    steps: Any
    shared: Any = None


class _Loop:
    """The body of the kernel for one problem and configuration."""

    def __init__(self, problem: MixedProblem, config: MixedConfig):
        self.problem, self.config = problem, config
        self.m_tiles = -(-problem.m // config.tile_m)
        self.n_tiles = -(-problem.n // (config.tile_n * config.cluster))
        self.k_steps = -(-problem.k // config.tile_k)
        self.depth = config.tile_k // config.pieces
        self.scale_rows = config.scale_rows(problem.group)
        self.copies = 3 if problem.group else 2
        bytes_ = np.dtype(problem.weights) in (np.int8, np.uint8)
        self.fractions = config.fractions and bytes_ and np.dtype(problem.dtype) == jnp.bfloat16

    @property
    def tiles(self) -> int:
        """Tiles of the result, those that a cluster shares counted as one."""
        return self.m_tiles * self.n_tiles

    def shares_last(self, multiprocessors: int) -> bool:
        """Whether whole rounds leave tiles, no more than there are clusters to share them."""
        clusters = multiprocessors // self.config.last_parts
        left = self.tiles % (clusters * self.config.last_parts)
        return 0 < left <= clusters and self.k_steps >= self.config.last_parts

    def run(
        self,
        a: Any,
        w: Any,
        *refs: Any,
        a_smem: Any,
        w_smem: Any,
        out_smem: Any,
        full: Any,
        empty: Any,
        scale_smem: Any = None,
        sums_smem: Any = None,
        summed: Any = None,
    ) -> None:
        """The kernel's body."""
        *scales, out = refs
        compute_warpgroups = self.config.warpgroups
        memory_registers, compute_registers = REGISTERS[compute_warpgroups]
        warpgroup = lax.axis_index("warpgroup")

        def memory() -> None:
            plgpu.set_max_registers(memory_registers, action="decrease")
            self._fetch(a, w, scales, a_smem, w_smem, scale_smem, full, empty)

        def compute() -> None:
            plgpu.set_max_registers(compute_registers, action="increase")
            received = Received(sums_smem, summed)
            finish = functools.partial(self._finish, warpgroup, scales, out, out_smem, received)
            self._compute(warpgroup, finish, a_smem, w_smem, scale_smem, full, empty)
            plgpu.wait_smem_to_gmem(0)

        pl.when(warpgroup == compute_warpgroups)(memory)
        pl.when(warpgroup < compute_warpgroups)(compute)

    def _over_tiles(self, body: Callable[[_Tile, Any], Any], carry: Any) -> Any:
        """``carry = body(tile, carry)`` for each of this block's tiles, one if k is split."""
        config = self.config
        block, blocks = lax.axis_index("blocks"), jnp.int32(jax.lax.axis_size("blocks"))
        if config.last_parts > 1:
            return self._over_shared_tiles(body, carry)
        count = lax.div(self.tiles - 1 - block, blocks) + 1
        first, steps = self._range()

        def one(step: Any, carry: Any) -> Any:
            m, n = self._place(block + step * blocks)
            return body(_Tile(m, n, first, steps), carry)

        return lax.fori_loop(0, count, one, carry)

    def _over_shared_tiles(self, body: Callable[[_Tile, Any], Any], carry: Any) -> Any:
        """The same where the blocks of a cluster share a last tile: whole rounds come before."""
        parts, clusters = self.config.last_parts, jax.lax.axis_size("blocks")
        cluster, part = lax.axis_index("blocks"), lax.axis_index("part")
        rounds, left = divmod(self.tiles, clusters * parts)
        some_first, some_steps = self._range()

        def one(step: Any, carry: Any) -> Any:
            shared = step == rounds
            own = (step * clusters + cluster) * parts + part
            index = lax.select(shared, rounds * clusters * parts + cluster, own)
            m, n = self._place(index)
            first = lax.select(shared, some_first, jnp.int32(0))
            steps = lax.select(shared, some_steps, jnp.int32(self.k_steps))
            return body(_Tile(m, n, first, steps, shared), carry)

        return lax.fori_loop(0, rounds + (cluster < left).astype(jnp.int32), one, carry)

    def _place(self, index: Any) -> tuple[Any, Any]:
        """The first row and column of a block's tile of those that come ``index``-th."""
        config = self.config
        minor = 0 if config.grid_minor == "m" else 1
        m, n = plgpu.planar_snake(index, (self.m_tiles, self.n_tiles), minor, config.group)
        if config.cluster > 1:
            n = n * config.cluster + lax.axis_index("side")
        return m * config.tile_m, n * config.tile_n

    def _range(self) -> tuple[Any, Any]:
        """The first step along k of this block of those that share a tile, and the number of its
        steps (1 at least: zeros beyond the end)."""
        if self.config.parts == 1:
            return jnp.int32(0), self.k_steps
        return steps_of(lax.axis_index("part"), self.config.parts, self.k_steps)

    def _next(self, stage: Any) -> Any:
        following = stage + 1
        return lax.select(following == self.config.stages, jnp.int32(0), following)

    # The producer warpgroup -----------------------------------------------------------------------

    def _fetch(
        self,
        a: Any,
        w: Any,
        scales: Any,
        a_smem: Any,
        w_smem: Any,
        scale_smem: Any,
        full: Any,
        empty: Any,
    ) -> None:
        config, problem = self.config, self.problem

        def tile(place: _Tile, carry: Any) -> Any:
            rows, columns = pl.ds(place.m, config.tile_m), pl.ds(place.n, config.tile_n)

            def step(index: Any, carry: Any) -> Any:
                stage, filled = carry

                # The first time round the stages are free.
                pl.when(filled >= config.stages)(lambda: plgpu.barrier_wait(empty.at[stage]))

                first = (place.first + index) * config.tile_k
                depth = pl.ds(first, config.tile_k)
                window = w.at[columns, depth] if problem.transposed else w.at[depth, columns]
                plgpu.copy_gmem_to_smem(window, w_smem.at[stage], full.at[stage])
                plgpu.copy_gmem_to_smem(
                    a.at[rows, depth],
                    a_smem.at[stage],
                    full.at[stage],
                    collective_axes="side" if config.cluster > 1 else None,
                )
                if problem.group:
                    groups = pl.ds(lax.div(first, problem.group), self.scale_rows)
                    plgpu.copy_gmem_to_smem(
                        scales[0].at[groups, columns], scale_smem.at[stage], full.at[stage]
                    )
                return self._next(stage), filled + 1

            return lax.fori_loop(0, place.steps, step, carry)

        self._over_tiles(tile, (jnp.int32(0), jnp.int32(0)))

    # The consumer warpgroups ---------------------------------------------------------------------

    def _compute(
        self,
        warpgroup: Any,
        finish: Callable[[Any, _Tile, Any], None],
        a_smem: Any,
        w_smem: Any,
        scale_smem: Any,
        full: Any,
        empty: Any,
    ) -> None:
        config, problem = self.config, self.problem
        part = config.warpgroup_n
        column = warpgroup * part
        rows = pl.ds(column, part)

        def loaded(stage: Any) -> Any:
            """A warpgroup's weights of one step; all loads are issued at once."""
            window = w_smem.at[stage, rows] if problem.transposed else w_smem.at[stage, :, rows]
            if not problem.transposed:
                window = plgpu.transpose_ref(window, (1, 0))
            return window[...]

        def scaled(left: Any, start: int, stage: Any) -> Any:
            """Weights times the factors of their groups, from a place in the step on."""
            group = min(problem.group, self.depth)
            parts = []
            for place in range(0, self.depth, group):
                row = (start + place) // problem.group % self.scale_rows
                part = left[:, place : place + group]
                factors = scale_smem[stage, row, rows]
                parts.append(part * lax.broadcast_in_dim(factors, part.shape, (0,)))
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

        def multiply(acc: Any, weights: Any, stage: Any, piece: int, accumulate: bool) -> None:
            start = piece * self.depth
            left = weights[:, start : start + self.depth]
            left = _fractions(left) if self.fractions else left.astype(problem.dtype)
            if problem.group:
                left = scaled(left, start, stage)
            right = plgpu.transpose_ref(a_smem.at[stage, :, pl.ds(start, self.depth)], (1, 0))
            plgpu.wgmma(acc, left, right, accumulate=accumulate)

        def tile(place: _Tile, stage: Any) -> Any:
            def scope(acc: Any) -> Any:
                plgpu.barrier_wait(full.at[stage])
                weights = loaded(stage)
                for piece in range(config.pieces):
                    multiply(acc, weights, stage, piece, accumulate=piece > 0)
                    if piece:
                        plgpu.wgmma_wait(1)

                def step(_: Any, previous: Any) -> Any:
                    current = self._next(previous)
                    plgpu.barrier_wait(full.at[current])
                    weights = loaded(current)
                    for piece in range(config.pieces):
                        multiply(acc, weights, current, piece, accumulate=True)
                        plgpu.wgmma_wait(1)
                        if piece == 0:
                            plgpu.barrier_arrive(empty.at[previous])
                    return current

                last = lax.fori_loop(1, place.steps, step, stage)
                sums = acc[...]
                plgpu.barrier_arrive(empty.at[last])
                finish(sums, place, column)
                return self._next(last)

            shape = (part, config.tile_m)
            return pl.run_scoped(scope, plgpu.ACC(shape, jnp.float32))

        self._over_tiles(tile, jnp.int32(0))

    def _finish(
        self,
        warpgroup: Any,
        scales: Any,
        out: Any,
        out_smem: Any,
        received: Received,
        sums: Any,
        place: _Tile,
        column: Any,
    ) -> None:
        """Writes a warpgroup's part of a finished tile, where blocks share it after adding up."""

        def write(total: Any, first: int) -> None:
            m, n = place.m + first, place.n + column
            self._write(warpgroup, scales, out, out_smem, total, m, n)

        if self.config.parts == 1:
            write(sums, 0)
            return
        add = exchange if self.config.exchanges else collect
        shared = functools.partial(add, self.config.parts, warpgroup, received, sums, write)
        if place.shared is None:
            shared()
            return
        lax.cond(place.shared, shared, lambda: write(sums, 0))

    def _write(
        self, warpgroup: Any, scales: Any, out: Any, out_smem: Any, sums: Any, m: Any, n: Any
    ) -> None:
        """Writes a warpgroup's part of a finished tile, transposed: some rows of the result."""
        part_n, count = sums.shape
        width = min(self.config.epilogue_m, count)
        columns = pl.ds(n, part_n)
        factors = None
        if self.problem.column_scale:
            factors = scales[0][columns]
            if self.fractions:
                factors = factors * _DENOMINATOR
        parts = -(-count // width)
        # Nor do they if a shared tile, of which fewer rows are written, comes after another one.
        uneven = parts % 2 != 0 or self.config.last_parts > 1
        for part in range(parts):
            written = min(width, count - part * width)
            staging = out_smem.at[warpgroup * 2 + part % 2]
            if written < self.config.epilogue_m:
                staging = staging.at[pl.ds(0, written)]
            # If buffers do not take turns from tile to tile, the last one is the first one's.
            in_flight = 0 if uneven and part == 0 else 1
            plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
            values = sums[:, part * width : part * width + written]
            if factors is not None:
                values = values * lax.broadcast_in_dim(factors, values.shape, (0,))
            elif self.fractions:
                values = values * _DENOMINATOR
            transposed = plgpu.transpose_ref(staging, (1, 0))
            transposed[...] = values.astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, out.at[pl.ds(m + part * width, written), columns])
