"""``ragged_matmul``'s kernel: each group of rows times its own matrix.

Blocks go through the tiles of one group after the other, and read the groups' sizes as they go
along. Tiles begin at a group's first row, so only the last one of a group has rows that are not
written: those of the next group, which other tiles compute.

If configured so, such a tile is half as high where its rows allow, and two of them are a unit of
work, so that the blocks' times stay about equal. They come first in a group.

When only few tiles are left for the last round, several blocks share the columns of each: a round
that keeps a quarter of the blocks busy would take as long as any other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_hopper.ops.ragged.common import (
    COMPUTE,
    PARAMS,
    Stages,
    columns_of,
    group_rows,
    roles,
    staging,
    write,
)
from pallasite_hopper.ops.ragged.config import RaggedConfig


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is multiplied.

    Attributes:
      m, n, k: extents; m of all groups together.
      groups: their number.
      dtype: of the operands.
      out_dtype: of the result.
      transposed: matrices are given as (n, k).
    """

    m: int
    n: int
    k: int
    groups: int
    dtype: Any
    out_dtype: Any
    transposed: bool


def build(problem: Problem, config: RaggedConfig, multiprocessors: int) -> Callable[..., jax.Array]:
    """The kernel as a function of the rows, the matrices and the groups' sizes."""
    loop = _Loop(problem, config)

    def right(width: int) -> Any:
        shape = (width, config.tile_k) if problem.transposed else (config.tile_k, width)
        return plgpu.SMEM((config.stages, config.tile_n // width, *shape), problem.dtype)

    scratch = {
        "left_smem": plgpu.SMEM((config.stages, config.tile_m, config.tile_k), problem.dtype),
        # A step of fewer columns lies at the beginning of its stage, in tiles of its own.
        "right_smem": plgpu.RefUnion(*map(right, loop.widths)),
        "out_smem": staging(config, problem.out_dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
        "empty": plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=config.stages)
        if config.cluster == 1
        else plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=COMPUTE, num_barriers=config.stages
        ),
    }
    most_parts = MOST_PARTS if loop.streams else max(loop.shares, default=1)
    clusters = min(multiprocessors // config.cluster, loop.most_tiles * most_parts)
    out_type: Any = jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype)
    params = PARAMS
    if loop.streams:
        sums = (clusters * config.cluster, COMPUTE, config.warpgroup_m, config.warpgroup_n)
        out_type = (out_type, jax.ShapeDtypeStruct(sums, jnp.float32))
        # Which sums are left depends on the sizes.
        options = {"standard": {"partial_outputs": True}}
        params = dataclasses.replace(PARAMS, plugin_options=options)
    kernel: Callable[..., Any] = plgpu.kernel(
        loop.run,
        out_type=out_type,
        grid=(clusters,),
        grid_names=("blocks",),
        **(
            {"cluster": (config.cluster,), "cluster_names": ("cluster",)}
            if config.cluster > 1
            else {}
        ),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="ragged_matmul",
        compiler_params=params,
    )
    return (lambda *operands: kernel(*operands)[0]) if loop.streams else kernel


MOST_GROUPS = 32
"""With more groups, adding up their tiles in advance would take longer than it saves."""

MOST_PARTS = 4
"""A block that shares a tile of the last round has no fewer of its steps than this part: more
partial sums take longer to add up."""


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of a group.

    Attributes:
      group: its number.
      row: the first row, in all rows.
      column: the first column.
      rows: of the group, from the first row.
      width: columns.
      half: whether it is half as high.
      count: so many tiles beside each other are a unit of work.
      height: rows.
      first, steps: along k.
      begin: if blocks may share the steps, the one that has the first of them; else None.
      ends: whether this block has the last of them.
    """

    group: Any
    row: Any
    column: Any
    rows: Any
    width: int
    half: Any
    count: Any
    height: int
    first: Any = 0
    steps: Any = 0
    begin: Any = None
    ends: Any = True


class _Loop:
    """The body of the kernel for one problem and configuration."""

    def __init__(self, problem: Problem, config: RaggedConfig):
        self.problem, self.config = problem, config
        self.step_n = config.tile_n * config.cluster
        self.n_tiles = -(-problem.n // self.step_n)
        self.k_steps = -(-problem.k // config.tile_k)

    @property
    def most_tiles(self) -> int:
        """There are never more tiles than this, those of zeros included."""
        tiles = -(-self.problem.m // self.config.tile_m) + self.problem.groups
        return tiles * self.n_tiles

    def run(
        self,
        left: Any,
        right: Any,
        sizes: Any,
        out: Any,
        partial: Any = None,
        *,
        left_smem: Any,
        right_smem: Any,
        out_smem: Any,
        full: Any,
        empty: Any,
    ) -> None:
        """The kernel's body."""
        if partial is not None:
            count = partial.shape[0] * COMPUTE
            partial = partial, pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))
        stages = Stages(self.config.stages, full, empty)
        roles(
            lambda: self._fetch(left, right, sizes, left_smem, right_smem, stages),
            lambda warpgroup: self._compute(
                warpgroup, sizes, out, partial, left_smem, right_smem, out_smem, stages
            ),
        )

    # Which tiles ----------------------------------------------------------------------------------

    def _row_tiles(self, size: Any) -> Any:
        """Tiles along the rows of a group."""
        return lax.div(size + (self.config.tile_m - 1), self.config.tile_m)

    def _pairs(self, size: Any) -> tuple[Any, Any]:
        """Whole tiles along the rows of a group, and units of two tiles that are half as high."""
        tile_m = self.config.tile_m
        if not self.config.halves:
            return self._row_tiles(size), jnp.int32(0)
        whole = lax.div(size + (tile_m // 2 - 1), tile_m)
        return whole, (self._row_tiles(size) - whole) * -(-self.n_tiles // 2)

    def _units_of(self, size: Any) -> Any:
        """Units of work of a group."""
        whole, pairs = self._pairs(size)
        return whole * self.n_tiles + pairs

    def _totals(self, sizes: Any) -> tuple[Any, Any]:
        """Units of work and rows of all groups."""
        units, rows = jnp.int32(0), jnp.int32(0)
        for group in range(self.problem.groups):  # All loads are on their way at once.
            size = group_rows(sizes[group], self.problem.m)
            units, rows = units + self._units_of(size), rows + size
        return units, rows

    @property
    def widths(self) -> list[int]:
        """Columns of tiles: of whole ones, and of those that blocks share."""
        return [self.config.tile_n // share for share in (1, *self.shares)]

    @property
    def streams(self) -> bool:
        """Whether blocks share the steps of what is left for the last round."""
        return self.config.stream and self.problem.groups <= MOST_GROUPS and self.k_steps > 1

    @property
    def shares(self) -> list[int]:
        """How many blocks may share a tile of the last round, in ascending order."""
        config = self.config
        if self.problem.groups > MOST_GROUPS or config.stream:
            return []
        least = config.epilogue_n * (COMPUTE if config.split == "n" else 1)
        fitting = (one for one in (2, 4) if one <= config.share)
        return [share for share in fitting if config.tile_n % (share * max(least, 64)) == 0]

    def _over_tiles(
        self,
        sizes: Any,
        body: Callable[[_Tile, Any], Any],
        carry: Any,
        by_height: bool = False,
    ) -> Any:
        """``carry = body(tile, carry)`` for each of this block's tiles.

        Args:
          sizes: of the groups.
          body: see above.
          carry: its first value.
          by_height: whether tiles that are half as high are called so.

        Returns the first row after all groups.
        """
        block, blocks = lax.axis_index("blocks"), jnp.int32(jax.lax.axis_size("blocks"))
        groups = self.problem.groups

        def size_of(group: Any) -> Any:
            return group_rows(sizes[jnp.minimum(group, groups - 1)], self.problem.m)

        def passed(place: Any) -> Any:
            index, group, _, size = place
            return (group < groups) & (index >= self._units_of(size))

        def advance(place: Any) -> Any:
            index, group, row, size = place
            following = group + 1
            left = index - self._units_of(size)
            return left, following, row + size, size_of(following)

        def find(index: Any) -> Any:
            first = (index, jnp.int32(0), jnp.int32(0), size_of(jnp.int32(0)))
            return lax.while_loop(passed, advance, first)

        def one(state: Any) -> Any:
            number, (index, group, row, size), carry = state
            tile = self._tile(index, group, row, size)
            carry = self._each(body, tile, carry, by_height)
            place = lax.while_loop(passed, advance, (index + blocks, group, row, size))
            return number + blocks, place, carry

        if self.streams:
            total, end = self._totals(sizes)
            rest = lax.rem(total, blocks)
            start = block, find(block), carry
            _, _, carry = lax.while_loop(lambda state: state[0] < total - rest, one, start)
            self._over_parts(
                rest, lambda index: self._tile(*find(total - rest + index)), body, carry
            )
            return end

        if not self.shares:
            start = block, find(block), carry
            _, place, _ = lax.while_loop(lambda state: state[1][1] < groups, one, start)
            return place[2]

        total, end = self._totals(sizes)
        rest = lax.rem(total, blocks)
        share, whole = jnp.int32(1), total
        for some in self.shares:
            enough = rest * some <= blocks
            share = lax.select(enough, jnp.int32(some), share)
            whole = lax.select(enough, total - rest, whole)
        start = block, find(block), carry
        _, _, carry = lax.while_loop(lambda state: state[0] < whole, one, start)

        def part(some: int, carry: Any) -> Any:
            tile = self._tile(*find(whole + lax.div(block, some)))
            width = self.config.tile_n // some
            column = tile.column + lax.rem(block, some) * width * self.config.cluster
            column = column - self._own(self.config.tile_n - width)
            return self._each(body, dataclasses.replace(tile, column=column, width=width), carry)

        for some in self.shares:
            carry = lax.cond(
                (share == some) & (block < rest * some),
                functools.partial(part, some),
                lambda carry: carry,
                carry,
            )
        return end

    def _over_parts(
        self,
        rest: Any,
        tile_of: Callable[[Any], _Tile],
        body: Callable[[_Tile, Any], Any],
        carry: Any,
    ) -> None:
        """``carry = body(tile, carry)`` for this block's parts of the last tiles, so many of them.

        Blocks have equal ranges of all steps of these tiles, one after the other. A range has the
        end of a tile, or the beginning of another one, or both; what others need comes first. Who
        has the end of a tile adds up all of it: blocks wait only for those that began before them.
        """
        block, blocks = lax.axis_index("blocks"), jnp.int32(jax.lax.axis_size("blocks"))
        steps = self.k_steps
        share = lax.div(rest * steps + (blocks - 1), blocks)
        share = jnp.maximum(share, -(-steps // MOST_PARTS))
        start = jnp.minimum(block * share, rest * steps)
        stop = jnp.minimum(start + share, rest * steps)
        latest = lax.div(stop - 1, steps)
        count = lax.select(start < stop, latest - lax.div(start, steps) + 1, jnp.int32(0))

        def part(number: Any, carry: Any) -> Any:
            index = latest - number
            first = jnp.maximum(start - index * steps, 0)
            last = jnp.minimum(stop - index * steps, steps)
            tile = dataclasses.replace(
                tile_of(index),
                first=first,
                steps=last - first,
                begin=lax.div(index * steps, share),
                ends=last == steps,
            )
            return body(tile, carry)

        lax.fori_loop(0, count, part, carry)

    def _each(
        self,
        body: Callable[[_Tile, Any], Any],
        tile: _Tile,
        carry: Any,
        by_height: bool = False,
    ) -> Any:
        """``carry = body(tile, carry)`` for each tile of a unit of work."""
        if not self.config.halves:
            return body(tile, carry)

        def all_of(tile: _Tile, carry: Any) -> Any:
            def one(index: Any, carry: Any) -> Any:
                column = tile.column + index * self.config.tile_n
                return body(dataclasses.replace(tile, column=column), carry)

            return lax.fori_loop(0, tile.count, one, carry)

        if not by_height:
            return all_of(tile, carry)
        flat = dataclasses.replace(tile, height=tile.height // 2)
        return lax.cond(
            tile.half, lambda carry: all_of(flat, carry), lambda carry: body(tile, carry), carry
        )

    def _tile(self, index: Any, group: Any, row: Any, size: Any) -> _Tile:
        """A unit of work by its number in the group: bands of rows, along columns, there and back;
        before them, if there are any, two tiles each that are half as high."""
        config = self.config
        whole, pairs = self._pairs(size)
        pair, index = index, index - pairs
        if config.halves:
            index = jnp.maximum(index, 0)
        band = lax.div(index, config.band * self.n_tiles)
        inside = index - band * (config.band * self.n_tiles)
        height = jnp.minimum(config.band, whole - band * config.band)
        if config.halves:
            height = jnp.maximum(height, 1)
        n = lax.div(inside, height)
        m = band * config.band + inside - n * height
        n = lax.select(lax.bitwise_and(band, 1) == 1, self.n_tiles - 1 - n, n)
        half, count = jnp.bool_(False), jnp.int32(1)
        if config.halves:
            half = pair < pairs
            m, n = lax.select(half, whole, m), lax.select(half, 2 * pair, n)
            count = lax.select(half, jnp.minimum(self.n_tiles - n, 2), count)
        start = m * config.tile_m
        return _Tile(
            group,
            row + start,
            n * self.step_n + self._own(config.tile_n),
            size - start,
            config.tile_n,
            half,
            count,
            config.tile_m,
            steps=self.k_steps,
        )

    def _own(self, width: int) -> Any:
        """The first column of this block's tile of those of its cluster."""
        return lax.axis_index("cluster") * width if self.config.cluster > 1 else 0

    # The producer warpgroup -----------------------------------------------------------------------

    def _fetch(
        self, left: Any, right: Any, sizes: Any, left_smem: Any, right_smem: Any, stages: Stages
    ) -> None:
        config = self.config

        def tile(place: _Tile, carry: Any) -> Any:
            rows, columns = pl.ds(place.row, config.tile_m), pl.ds(place.column, place.width)
            own = right.at[place.group]

            def step(index: Any, carry: Any) -> Any:
                stage, filled = carry
                stages.wait_empty(stage, filled)
                depth = pl.ds(index * config.tile_k, config.tile_k)
                window = (
                    own.at[columns, depth] if self.problem.transposed else own.at[depth, columns]
                )
                full = stages.full.at[stage]
                shared = "cluster" if config.cluster > 1 else None
                plgpu.copy_gmem_to_smem(
                    left.at[rows, depth], left_smem.at[stage], full, collective_axes=shared
                )
                destination = right_smem[self.widths.index(place.width)].at[stage, 0]
                plgpu.copy_gmem_to_smem(window, destination, full)
                return stages.next(stage), filled + 1

            return lax.fori_loop(place.first, place.first + place.steps, step, carry)

        self._over_tiles(sizes, tile, (jnp.int32(0), jnp.int32(0)))

    # The consumer warpgroups ---------------------------------------------------------------------

    def _compute(
        self,
        warpgroup: Any,
        sizes: Any,
        out: Any,
        partial: Any,
        left_smem: Any,
        right_smem: Any,
        out_smem: Any,
        stages: Stages,
    ) -> None:
        config, problem = self.config, self.problem
        count = config.epilogue_buffers
        buffers = out_smem.at[pl.ds(warpgroup * count, count)]

        def own(height: int, width: int) -> tuple[Any, Any, int, int]:
            """A warpgroup's part of a tile: its first row and column, its rows and columns."""
            if config.split == "n" or height < config.tile_m:
                wn = width // COMPUTE
                return jnp.int32(0), warpgroup * wn, height, wn
            wm = height // COMPUTE
            return warpgroup * wm, jnp.int32(0), wm, width

        def multiply(acc: Any, stage: Any, place: _Tile, accumulate: bool = True) -> None:
            row, column, wm, wn = own(place.height, place.width)
            member, columns = self.widths.index(place.width), pl.ds(column, wn)
            if problem.transposed:
                right = plgpu.transpose_ref(right_smem[member].at[stage, 0, columns], (1, 0))
            else:
                right = right_smem[member].at[stage, 0, :, columns]
            plgpu.wgmma(acc, left_smem.at[stage, pl.ds(row, wm)], right, accumulate=accumulate)

        def window(first_row: Any, first_column: Any) -> Callable[..., Any]:
            return lambda part, columns, start, rows: out.at[
                pl.ds(first_row + start, rows), pl.ds(first_column + part, columns)
            ]

        def tile(place: _Tile, stage: Any) -> Any:
            row = own(place.height, place.width)[0]
            multiplied = functools.partial(product, place)
            if not config.skip:
                return multiplied(stage)
            skip = functools.partial(skipped, place)
            return lax.cond(place.rows > row, multiplied, skip, stage)

        def skipped(place: _Tile, stage: Any) -> Any:
            def step(_: Any, stage: Any) -> Any:
                plgpu.barrier_wait(stages.full.at[stage])
                plgpu.barrier_arrive(stages.empty.at[stage], by="warps")
                return stages.next(stage)

            return lax.fori_loop(0, place.steps, step, stage)

        def product(place: _Tile, stage: Any) -> Any:
            row, column, wm, wn = own(place.height, place.width)

            def scope(acc: Any) -> Any:
                plgpu.barrier_wait(stages.full.at[stage])
                multiply(acc, stage, place, accumulate=False)

                def step(_: Any, previous: Any) -> Any:
                    current = stages.next(previous)
                    plgpu.barrier_wait(stages.full.at[current])
                    multiply(acc, current, place)
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(stages.empty.at[previous], by="warps")
                    return current

                last = lax.fori_loop(1, place.steps, step, stage)
                sums = acc[...]
                plgpu.barrier_arrive(stages.empty.at[last], by="warps")
                destination = window(place.row + row, place.column + column)
                rows = jnp.clip(place.rows - row, 0, wm)
                parts = columns_of(sums, config)

                def finish(parts: Sequence[Any]) -> None:
                    write(parts, buffers, destination, config, rows)

                if place.begin is None:
                    finish(parts)
                else:
                    self._add_up(partial, warpgroup, place, parts, finish)
                return stages.next(last)

            return pl.run_scoped(scope, plgpu.ACC((wm, wn), jnp.float32))

        end = self._over_tiles(sizes, tile, jnp.int32(0), by_height=True)

        # Rows of no group are zeros. The last blocks have had the fewest tiles.
        zero_tiles = self._row_tiles(jnp.maximum(problem.m - end, 0)) * self.n_tiles
        blocks = jnp.int32(jax.lax.axis_size("blocks"))

        def clear(index: Any) -> Any:
            m = lax.div(index, self.n_tiles)
            n = index - m * self.n_tiles
            row, column, wm, wn = own(config.tile_m, config.tile_n)
            column = column + n * self.step_n + self._own(config.tile_n)
            destination = window(end + m * config.tile_m + row, column)
            zeros = jnp.zeros((wm, wn), problem.out_dtype)
            write(columns_of(zeros, config), buffers, destination, config, jnp.int32(wm))
            return index + blocks

        start = blocks - 1 - lax.axis_index("blocks")
        lax.while_loop(lambda index: index < zero_tiles, clear, start)

    def _add_up(
        self,
        partial: tuple[Any, Any],
        warpgroup: Any,
        place: _Tile,
        parts: Sequence[Any],
        finish: Callable[[Sequence[Any]], None],
    ) -> None:
        """Leaves a warpgroup's sums of some steps, or adds those that others have left."""
        sums, left = partial
        block, width = lax.axis_index("blocks"), self.config.epilogue_n

        def own(block: Any) -> Any:
            if self.config.cluster > 1:
                block = block * self.config.cluster + lax.axis_index("cluster")
            return block

        def columns(block: Any, number: int) -> Any:
            return sums.at[own(block), warpgroup, :, pl.ds(number * width, width)]

        def leave() -> None:
            for number, part in enumerate(parts):
                columns(block, number)[...] = part
            plgpu.commit_smem()  # All lanes have written.
            pl.semaphore_signal(left.at[own(block) * COMPUTE + warpgroup])

        def add(other: Any, parts: Sequence[Any]) -> Sequence[Any]:
            pl.semaphore_wait(left.at[own(other) * COMPUTE + warpgroup])
            return [part + columns(other, number)[...] for number, part in enumerate(parts)]

        def complete() -> None:
            finish(lax.fori_loop(place.begin, block, add, parts))

        lax.cond(place.ends, complete, leave)
