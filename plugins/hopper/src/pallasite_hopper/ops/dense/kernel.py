"""The kernel: persistent blocks, a producer and one or two consumer warpgroups.

Blocks go through tiles of the result, or through parts of the K extent of tiles (split-K). The
producer warpgroup keeps a circular buffer of stages in shared memory filled with the next steps
along K, of this tile and of those to come; the consumer warpgroups each keep one MMA in flight
while they wait for the next stage, and write the finished tile through shared memory while the next
one's operands arrive.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite.plugin import InvalidValueError
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.exchange import Received, collect, exchange, steps_of
from pallasite_std.api import Epilogue, MatmulProblem

_RESIDENT = {4: 30, 8: 14}
"""Clusters that run at once, by their number of blocks, where these are fewer than there are
multiprocessors for: each cluster is within a GPC, and those have 16 or 18 multiprocessors."""

REGISTERS = {1: (40, 216), 2: (40, 232)}
"""Registers of a lane of producer and consumer warpgroups, by the number of the latter: the
255 or 168 that all of them start with, reallocated."""


def build(
    problem: MatmulProblem,
    config: MatmulConfig,
    epilogue: Epilogue,
    multiprocessors: int,
    loop: MatmulLoop | None = None,
    name: str = "matmul",
    region: Region | None = None,
) -> Callable[..., jax.Array]:
    """The kernel as a function of its operands.

    Args:
      problem: what to multiply; of the transposed matmul if ``config.swap``.
      config: how.
      epilogue: what to do with the sums.
      multiprocessors: of the GPU.
      loop: the body, if it is not the matmul's.
      name: of the kernel.
      region: what of the result is computed, if not all of it.

    Returns:
      A function of the left and the right operand and those of the epilogue; for a region that does
      not begin at the first element, then of the result, whose other elements stay.
    """
    loop = loop or MatmulLoop(problem, config, epilogue, region)
    compute, stages, split = config.warpgroups, config.stages, config.split_k
    # Where blocks of a cluster split k, it has one tile: the buffers for sums are used once.
    clusters = loop.items
    if split == 1:
        clusters = min(resident_clusters(config.cluster_blocks, multiprocessors), loop.items)
    if config.last_parts > 1:
        clusters = multiprocessors // config.last_parts
    if config.resident > 1:
        clusters = loop.items
    if config.epilogue_in_stages and clusters < loop.items:
        raise InvalidValueError(
            "MatmulConfig.epilogue_in_stages is for blocks that have one tile each",
            got=f"{loop.items} tiles for {clusters} clusters of blocks",
            expected="larger tiles, or epilogue_in_stages = False",
        )
    rows, columns = config.warpgroup_m, config.epilogue_n
    staging = (columns, loop.part_rows) if config.swap else (loop.part_rows, columns)
    out_shape = loop.out_shape(*_turned((problem.m, problem.n), config.swap))
    out_dtype = problem.accumulator if config.parts > 1 else problem.out_dtype
    a_shape = (config.tile_m, config.tile_k)
    b_shape = (config.tile_k, config.tile_n)
    scratch: dict[str, Any] = {
        "a_smem": plgpu.SMEM((stages, *_turned(a_shape, problem.transpose_a)), problem.dtype_a),
        "b_smem": plgpu.SMEM((stages, *_turned(b_shape, problem.transpose_b)), problem.dtype_b),
        "out_smem": plgpu.SMEM((compute, config.staging_buffers, *staging), out_dtype),
        "full": plgpu.Barrier(num_arrivals=loop.copies, num_barriers=stages * loop.turns),
        "empty": plgpu.Barrier(num_arrivals=compute // loop.turns, num_barriers=stages)
        if config.cluster == 1
        else plgpu.ClusterBarrier(
            collective_axes=("cluster", "across") if config.cluster_across > 1 else ("cluster",),
            num_arrivals=compute // loop.turns,
            num_barriers=stages,
        ),
    }
    loop.arrange(scratch)
    if split > 1:
        shape = (compute, split - 1, rows, config.warpgroup_n // split)
        scratch["sums_smem"] = plgpu.SMEM(shape, problem.accumulator)
        scratch["summed"] = plgpu.Barrier(num_arrivals=split - 1, num_barriers=compute)
    elif config.last_parts > 1:
        width = config.warpgroup_n // (config.last_parts if config.exchanges_last else 1)
        shape = (compute, config.last_parts - 1, rows, width)
        scratch["sums_smem"] = plgpu.SMEM(shape, problem.accumulator)
        scratch["summed"] = plgpu.Barrier(num_arrivals=config.last_parts - 1, num_barriers=compute)
    if config.sums_in_stages(problem.size, problem.out_dtype.itemsize):
        operands = scratch.pop("a_smem"), scratch.pop("b_smem")
        scratch["stages"] = plgpu.RefUnion(operands, scratch.pop("sums_smem"))
        scratch["unused"] = plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=compute)
    elif config.epilogue_in_stages:
        operands = scratch.pop("a_smem"), scratch.pop("b_smem")
        scratch["stages"] = plgpu.RefUnion(operands, scratch.pop("out_smem"))
        if compute > 1:
            scratch["multiplied"] = plgpu.Barrier(num_arrivals=compute)
    if epilogue.residual:
        scratch["residual_full"] = plgpu.Barrier(num_barriers=compute * config.staging_buffers)
    across = (config.cluster_across,) if config.cluster_across > 1 else ()
    options: dict[str, Any] = {}
    if region is not None:
        # The other kernel writes what this one does not.
        options["plugin_options"] = {"standard": {"partial_outputs": True}}
    kernel: Callable[..., jax.Array] = plgpu.kernel(
        loop.run,
        out_type=jax.ShapeDtypeStruct(out_shape, out_dtype),
        grid=(clusters,),
        grid_names=("blocks",),
        cluster=(max(split, config.last_parts), config.cluster, *across),
        cluster_names=("part", "cluster", "across")[: 2 + len(across)],
        num_threads=compute + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name=name,
        input_output_aliases={2 + epilogue.count: 0} if loop.continues else {},
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,
            approx_math=True,
            min_blocks=config.resident,
            **options,
        ),
    )
    return kernel


def resident_clusters(blocks: int, multiprocessors: int) -> int:
    """How many clusters run at once: further ones would begin when others have ended."""
    several = _RESIDENT.get(blocks, multiprocessors) if blocks > 2 else multiprocessors
    return min(several, multiprocessors // blocks)


def _turned(shape: tuple[int, int], transposed: bool) -> tuple[int, int]:
    return (shape[1], shape[0]) if transposed else shape


@dataclasses.dataclass(frozen=True)
class Item:
    """A unit of work.

    Attributes:
      part: of the k extent, or of several products the one that the tile belongs to.
      m, n: first row and column of the tile.
      first, steps: along k.
      index: its tile's place in the order of all tiles.
      shared: whether blocks of a cluster have a part of the steps each; None if that is the same of
        all tiles.
      turn: the warpgroup that computes it, if they take turns.
    """

    part: Any
    m: Any
    n: Any
    first: Any
    steps: Any
    index: Any
    shared: Any = None
    turn: Any = 0


@dataclasses.dataclass(frozen=True)
class Region:
    """Rows [m, m_end) and columns [n, n_end) of a result."""

    m: int
    m_end: int
    n: int
    n_end: int

    def swapped(self) -> Region:
        """The same of the transposed result."""
        return Region(self.n, self.n_end, self.m, self.m_end)


class MatmulLoop:
    """The body of the kernel for one problem and configuration."""

    def __init__(
        self,
        problem: MatmulProblem,
        config: MatmulConfig,
        epilogue: Epilogue,
        region: Region | None = None,
    ):
        self.problem, self.config, self.epilogue = problem, config, epilogue
        self.region = Region(0, problem.m, 0, problem.n) if region is None else region
        self.continues = bool(self.region.m or self.region.n)
        rows, columns = self.region.m_end - self.region.m, self.region.n_end - self.region.n
        self.m_tiles = -(-rows // (self.tile_rows * config.cluster_m))
        self.n_tiles = -(-columns // (self.tile_columns * config.cluster_n))
        self.k_steps = -(-problem.k // (config.tile_k))

    @property
    def copies(self) -> int:
        """That fill a stage."""
        return 2

    @property
    def part_rows(self) -> int:
        """Rows of the result that a warpgroup writes of a tile; there may be fewer than of the
        accumulator, as of all that follow."""
        return self.config.warpgroup_m

    @property
    def part_columns(self) -> int:
        """Columns of the result that a warpgroup writes of a tile."""
        return self.config.warpgroup_n

    @property
    def tile_rows(self) -> int:
        """Rows of the result of a tile."""
        return self.part_rows * (self.config.tile_m // self.config.warpgroup_m)

    @property
    def tile_columns(self) -> int:
        """Columns of the result of a tile."""
        return self.part_columns * (self.config.tile_n // self.config.warpgroup_n)

    @property
    def turns(self) -> int:
        """Warpgroups that take turns. Each has barriers of its own for filled stages."""
        return self.config.warpgroups if self.config.alternate else 1

    @property
    def tiles(self) -> int:
        """Tiles of the result that a cluster computes at a time."""
        return self.m_tiles * self.n_tiles

    @property
    def several(self) -> tuple[int, ...]:
        """Dimensions of the result before its rows: parts along k, if there are several."""
        return (self.config.parts,) if self.config.parts > 1 else ()

    def out_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the kernel's result; these are its matrix's."""
        return (*self.several, rows, columns)

    @property
    def items(self) -> int:
        """Units of work: tiles, or parts of them along k."""
        return self.tiles * math.prod(self.several)

    def run(
        self,
        a: Any,
        b: Any,
        *refs: Any,
        full: Any,
        empty: Any,
        out_smem: Any = None,
        a_smem: Any = None,
        b_smem: Any = None,
        residual_full: Any = None,
        sums_smem: Any = None,
        summed: Any = None,
        stages: Any = None,
        unused: Any = None,
        multiplied: Any = None,
    ) -> None:
        """The kernel's body."""
        if self.config.epilogue_in_stages:
            (a_smem, b_smem), out_smem = stages
        elif stages is not None:
            (a_smem, b_smem), sums_smem = stages
        *operands, out = refs
        if self.continues:
            operands.pop()  # The result once more.
        compute = self.config.warpgroups
        memory_registers, compute_registers = REGISTERS[compute]
        warpgroup = lax.axis_index("warpgroup")

        # Where a multiprocessor has several blocks, few columns need no more than an equal share.
        divides = self.config.resident == 1

        def fetch() -> None:
            if divides:
                plgpu.set_max_registers(memory_registers, action="decrease")
            self.fetch(a, b, a_smem, b_smem, full, empty)

        def multiply() -> None:
            if divides:
                plgpu.set_max_registers(compute_registers, action="increase")
            write = functools.partial(
                self.finish, warpgroup, operands, out, out_smem, residual_full
            )
            received = Received(sums_smem, summed, unused)
            if self.config.split_k > 1:
                write = functools.partial(self._add_parts, warpgroup, received, write)
            elif self.config.last_parts > 1:
                write = functools.partial(self._add_if_shared, warpgroup, received, write)
            if multiplied is not None:
                write = functools.partial(self._write_when_multiplied, multiplied, write)
            self.compute(warpgroup, a_smem, b_smem, full, empty, write)
            # The kernel does not end before its writes.
            plgpu.wait_smem_to_gmem(0, wait_read_only=self.config.epilogue_in_stages)

        lax.cond(warpgroup == compute, fetch, multiply)

    def arrange(self, scratch: dict[str, Any]) -> None:
        """Called with the kernel's memory; other arrangements of it can be defined."""

    # Which tiles --------------------------------------------------------------------------------

    def _over_items(self, body: Callable[[Item, Any], Any], carry: Any, turn: Any = None) -> Any:
        """``carry = body(item, carry)`` for each of this block's units of work.

        Args:
          turn: if it is given, those of this turn only.
        """
        config = self.config
        block, blocks = lax.axis_index("blocks"), jnp.int32(jax.lax.axis_size("blocks"))
        if config.last_parts > 1:
            return self._over_shared_items(body, carry)
        count = lax.div(self.items - 1 - block, blocks) + 1
        if turn is not None:
            count = lax.div(count + (self.turns - 1) - turn, self.turns)

        def one(step: Any, carry: Any) -> Any:
            if turn is not None:
                step = step * self.turns + turn
            index = block + step * blocks
            part = jnp.int32(0)
            if self.several:
                part, index = lax.div(index, self.tiles), lax.rem(index, self.tiles)
            m, n = self._place(index)
            m = self._member(m, config.cluster_m, "m")
            n = self._member(n, config.cluster_n, "n")
            first, steps = self._steps(part)
            item = Item(part, self.first_row(m), n * self.tile_columns, first, steps, index)
            if self.turns > 1:
                item = dataclasses.replace(item, turn=lax.rem(step, jnp.int32(self.turns)))
            if self.continues:
                row, column = item.m + self.region.m, item.n + self.region.n
                item = dataclasses.replace(item, m=row, n=column)
            return body(item, carry)

        return lax.fori_loop(0, count, one, carry)

    def _axis(self, along: str) -> str | None:
        """The axis of the blocks of a cluster along m or n; None if it has one."""
        if self.config.cluster_along == along:
            return "cluster" if self.config.cluster > 1 else None
        return "across" if self.config.cluster_across > 1 else None

    def _member(self, index: Any, blocks: int, along: str) -> Any:
        """This block's tile of those of its cluster, in tiles."""
        axis = self._axis(along)
        return index if axis is None else index * blocks + lax.axis_index(axis)

    def _place(self, index: Any) -> Any:
        """The place of the tile that comes ``index``-th, in tiles."""
        minor = 0 if self.config.grid_minor == "m" else 1
        return plgpu.planar_snake(index, (self.m_tiles, self.n_tiles), minor, self.config.group)

    def _over_shared_items(self, body: Callable[[Item, Any], Any], carry: Any) -> Any:
        """The same where the blocks of a cluster share a last tile: whole rounds come before."""
        parts, clusters = self.config.last_parts, jax.lax.axis_size("blocks")
        cluster, part = lax.axis_index("blocks"), lax.axis_index("part")
        rounds, left = self.rounds_before_shared(clusters)

        def one(step: Any, carry: Any) -> Any:
            shared = step == rounds
            own = (step * clusters + cluster) * parts + part
            index = lax.select(shared, rounds * clusters * parts + cluster, own)
            m, n = self._place(index)
            first, steps = self._steps(part)
            first = lax.select(shared, first, jnp.int32(0))
            steps = lax.select(shared, steps, jnp.int32(self.k_steps))
            m, n = self.first_row(m), n * self.tile_columns
            item = Item(jnp.int32(0), m, n, first, steps, index, shared)
            return body(item, carry)

        return lax.fori_loop(0, rounds + (cluster < left).astype(jnp.int32), one, carry)

    def rounds_before_shared(self, clusters: int) -> tuple[int, int]:
        """Whole rounds, and the tiles that are left; ``config.last_parts`` blocks share each."""
        return divmod(self.tiles, clusters * self.config.last_parts)

    def first_row(self, m: Any) -> Any:
        """The first row of the tile that comes ``m``-th; other orders can be defined."""
        return m * self.tile_rows

    def _steps(self, part: Any) -> tuple[Any, Any]:
        """The first step along k of a part, or of this block, and the number of its steps."""
        config = self.config
        parts = config.parts * config.split_k * config.last_parts
        if parts == 1:
            return 0, self.k_steps
        if config.split_k > 1:
            part = lax.axis_index("part")
        return steps_of(part, parts, self.k_steps)

    def _next(self, stage: Any) -> Any:
        following = stage + 1
        return lax.select(following == self.config.stages, jnp.int32(0), following)

    def _full(self, turn: Any, stage: Any) -> Any:
        """The number of the barrier of a filled stage."""
        return stage if self.turns == 1 else turn * self.config.stages + stage

    def _after(self, stage: Any, steps: int) -> Any:
        """The stage that comes so many steps later."""
        following = stage + steps % self.config.stages
        return lax.select(
            following >= self.config.stages, following - self.config.stages, following
        )

    # The producer warpgroup ---------------------------------------------------------------------

    def begin(self, item: Item) -> None:
        """Called by the producer before it fetches the operands of a tile."""

    def fetch_left(self, a: Any, item: Item, window: Any, smem: Any, full: Any, share: Any) -> None:
        """Starts the copy of a part of the left operand; other sources can be defined."""
        del item
        first = self.config.evict_first and self.n_tiles == 1
        plgpu.copy_gmem_to_smem(a.at[window], smem, full, collective_axes=share, evict_first=first)

    def fetch_right(self, b: Any, item: Item, depth: Any, smem: Any, full: Any, share: Any) -> None:
        """Starts the copy of a part of the right operand; others can be defined."""
        columns = pl.ds(item.n, self.config.tile_n)
        window = (columns, depth) if self.problem.transpose_b else (depth, columns)
        first = self.config.evict_first and self.m_tiles == 1
        window = self.right_window(item, window)
        plgpu.copy_gmem_to_smem(b.at[window], smem, full, collective_axes=share, evict_first=first)

    def right_window(self, item: Item, window: tuple[Any, Any]) -> tuple[Any, ...]:
        """What of the right operand's array is a part of the matrix; there can be several."""
        del item
        return window

    def fetch(self, a: Any, b: Any, a_smem: Any, b_smem: Any, full: Any, empty: Any) -> None:
        """The producer: keeps the stages filled."""
        config, problem = self.config, self.problem
        share_a, share_b = self._axis("n"), self._axis("m")

        def tile(item: Item, carry: Any) -> Any:
            rows = pl.ds(item.m, config.tile_m)
            self.begin(item)

            def step(index: Any, carry: Any) -> Any:
                stage, filled = carry

                # The first time round the stages are free.
                lax.cond(
                    filled >= config.stages,
                    lambda: plgpu.barrier_wait(empty.at[stage]),
                    lambda: None,
                )
                depth = pl.ds(index * config.tile_k, config.tile_k)
                a_window = (depth, rows) if problem.transpose_a else (rows, depth)
                filled_by = full.at[self._full(item.turn, stage)]
                self.fetch_left(a, item, a_window, a_smem.at[stage], filled_by, share_a)
                self.fetch_right(b, item, depth, b_smem.at[stage], filled_by, share_b)
                return self._next(stage), filled + 1

            return lax.fori_loop(item.first, item.first + item.steps, step, carry)

        self._over_items(tile, (jnp.int32(0), jnp.int32(0)))

    # The consumer warpgroups -------------------------------------------------------------------

    def compute(
        self,
        warpgroup: Any,
        a_smem: Any,
        b_smem: Any,
        full: Any,
        empty: Any,
        write: Callable[[Any, Any, Any, Any], None],
    ) -> None:
        """A consumer: multiplies what is in the stages, and writes the sums of each tile."""
        config, problem = self.config, self.problem
        wm = config.warpgroup_m
        own = config.alternate  # Each warpgroup has tiles of its own.
        by_rows = warpgroup if config.split == "m" and not own else jnp.int32(0)
        by_columns = warpgroup if config.split == "n" and not own else jnp.int32(0)
        row, out_row = by_rows * wm, by_rows * self.part_rows

        def left(stage: Any) -> Any:
            rows = pl.ds(row, wm)
            if problem.transpose_a:
                return plgpu.transpose_ref(a_smem.at[stage, :, rows], (1, 0))
            return a_smem.at[stage, rows]

        def right(stage: Any, wn: int) -> Any:
            columns = pl.ds(by_columns * wn, wn)
            if problem.transpose_b:
                return plgpu.transpose_ref(b_smem.at[stage, columns], (1, 0))
            return b_smem.at[stage, :, columns]

        def release(stage: Any) -> None:
            # Few rows: the sooner memory is asked for more, the better. Else matmuls set the pace.
            plgpu.barrier_arrive(empty.at[stage], by="lanes" if config.swap else "warps")

        def tile(item: Item, stage: Any) -> Any:
            return self.by_width(item, functools.partial(product, item, stage))

        def product(item: Item, stage: Any, wn: int) -> Any:
            out_column = by_columns * (wn * self.part_columns // config.warpgroup_n)

            def scope(acc: Any) -> Any:
                plgpu.barrier_wait(full.at[self._full(warpgroup, stage)])
                plgpu.wgmma(acc, left(stage), right(stage, wn), accumulate=False)

                def step(_: Any, previous: Any) -> Any:
                    current = self._next(previous)
                    if config.in_flight == 0:
                        plgpu.wgmma_wait(0)
                        release(previous)
                    plgpu.barrier_wait(full.at[self._full(warpgroup, current)])
                    plgpu.wgmma(acc, left(current), right(current, wn))
                    if config.in_flight:
                        plgpu.wgmma_wait(1)
                        release(previous)
                    return current

                last = lax.fori_loop(1, item.steps, step, stage)
                sums = acc[...]
                release(last)
                which = item.part if item.shared is None else item.shared
                write(which, sums, item.m + out_row, item.n + out_column)
                following = self._next(last)
                return self._after(following, (self.turns - 1) * self.k_steps) if own else following

            return pl.run_scoped(scope, plgpu.ACC((wm, wn), problem.accumulator))

        if own:
            first = lax.rem(warpgroup * self.k_steps, jnp.int32(config.stages))
            self._over_items(tile, first, turn=warpgroup)
        else:
            self._over_items(tile, jnp.int32(0))

    def by_width(self, item: Item, body: Callable[[int], Any]) -> Any:
        """``body(columns)`` with the columns that a warpgroup multiplies of a tile; some tiles can
        be defined to be narrower."""
        del item
        return body(self.config.warpgroup_n)

    def _add_parts(
        self,
        warpgroup: Any,
        received: Received,
        write: Callable[[Any, Any, Any, Any], None],
        part: Any,
        sums: Any,
        m: Any,
        n: Any,
    ) -> None:
        """Adds up what the blocks of a cluster have for one tile; each writes a part of it."""
        parts = max(self.config.split_k, self.config.last_parts)
        exchange(
            parts, warpgroup, received, sums, lambda total, first: write(part, total, m, n + first)
        )

    def _add_if_shared(
        self,
        warpgroup: Any,
        received: Received,
        write: Callable[[Any, Any, Any, Any], None],
        shared: Any,
        sums: Any,
        m: Any,
        n: Any,
    ) -> None:
        """Writes a tile. One that is shared is written by the first block, to which the others send
        their sums, or each block writes a part of it."""
        parts = self.config.last_parts
        add = exchange if self.config.exchanges_last else collect

        def write_from(total: Any, first: int) -> None:
            write(jnp.int32(0), total, m, n + first)

        lax.cond(
            shared,
            lambda: add(parts, warpgroup, received, sums, write_from),
            lambda: write_from(sums, 0),
        )

    def _write_when_multiplied(
        self,
        multiplied: Any,
        write: Callable[[Any, Any, Any, Any], None],
        part: Any,
        sums: Any,
        m: Any,
        n: Any,
    ) -> None:
        """Writes a tile when no warpgroup reads the stages any more, where its columns come."""
        plgpu.barrier_arrive(multiplied)
        plgpu.barrier_wait(multiplied)
        write(part, sums, m, n)

    def columns_of(self, sums: Any) -> int:
        """Columns of the result that come of a warpgroup's sums."""
        return int(sums.shape[1])

    def joined(self, sums: Any, first: int, columns: int) -> Any:
        """So many of these columns, from the given one on, before the epilogue."""
        return sums[:, first : first + columns]

    def out_window(self, item_part: Any, window: tuple[Any, Any]) -> tuple[Any, ...]:
        """What of the kernel's result is a part of the matrix."""
        return (item_part, *window) if self.several else window

    def epilogue_operands(self, operands: Any, item_part: Any) -> Any:
        """The operands of a tile's epilogue; of several products, each can have its own."""
        del item_part
        return operands

    def finish(
        self,
        warpgroup: Any,
        operands: Any,
        out: Any,
        out_smem: Any,
        residual_full: Any,
        item_part: Any,
        sums: Any,
        m: Any,
        n: Any,
    ) -> None:
        """Writes a warpgroup's part of a finished tile, or of its sums over a part of k."""
        config = self.config
        height, width = self.part_rows, config.epilogue_n
        count = self.columns_of(sums)
        operands = self.epilogue_operands(operands, item_part)
        buffers = config.staging_buffers
        # If buffers do not take turns from tile to tile, the last one is the first one's.
        uneven = -(-count // width) % buffers != 0
        for part, first in enumerate(range(0, count, width)):
            # The last may be narrower in the transposed GEMM.
            written = min(width, count - first)
            rows, columns = pl.ds(m, height), pl.ds(n + first, written)
            stage = part % buffers
            staging = out_smem.at[warpgroup, stage]
            if written < width:
                staging = staging.at[pl.ds(0, written)]
            view = plgpu.transpose_ref(staging, (1, 0)) if config.swap else staging
            window = (columns, rows) if config.swap else (rows, columns)
            in_flight = 0 if uneven and part == 0 else buffers - 1
            # Buffers of their own are free; where they are, other warps may still multiply.
            if not config.epilogue_in_stages or (part == 0 and config.warpgroups == 1):
                plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
            residual = None
            if self.epilogue.residual:
                barrier = residual_full.at[warpgroup * buffers + stage]
                plgpu.copy_gmem_to_smem(operands[-1].at[window], staging, barrier)
                plgpu.barrier_wait(barrier)
                residual = view[...]
            values = self.joined(sums, first, written)
            values = self.epilogue.apply(
                values, operands, rows, columns, residual, swapped=config.swap
            )
            view[...] = values.astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, out.at[self.out_window(item_part, window)])
