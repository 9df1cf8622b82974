"""``transposed_ragged_matmul``'s kernel: matmuls that sum over the rows of each group.

Blocks go through the tiles of one group's result after the other. Steps take the group's rows from
its first one on; in the last step the rows of the next group are made zeros in shared memory, in
both operands, since they may not be finite.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
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
      m: rows of all groups together, which are summed over.
      n, k: columns of the right and of the left operand.
      groups: their number.
      dtype: of the operands.
      out_dtype: of the result.
    """

    m: int
    n: int
    k: int
    groups: int
    dtype: Any
    out_dtype: Any


def build(problem: Problem, config: RaggedConfig, multiprocessors: int) -> Callable[..., jax.Array]:
    """The kernel as a function of both operands and the groups' sizes."""
    loop = _Loop(problem, config)
    scratch = {
        "left_smem": plgpu.SMEM((config.stages, config.tile_k, config.tile_m), problem.dtype),
        "right_smem": plgpu.SMEM((config.stages, config.tile_k, config.tile_n), problem.dtype),
        "out_smem": staging(config, problem.out_dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages * loop.turns),
        "empty": plgpu.Barrier(num_arrivals=loop.sharing, num_barriers=config.stages),
        "cut": plgpu.Barrier(num_arrivals=loop.sharing, num_barriers=loop.turns),
    }
    kernel: Callable[..., jax.Array] = plgpu.kernel(
        loop.run,
        out_type=jax.ShapeDtypeStruct((problem.groups, problem.k, problem.n), problem.out_dtype),
        grid=(min(multiprocessors, loop.tiles * problem.groups),),
        grid_names=("blocks",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="transposed_ragged_matmul",
        compiler_params=PARAMS,
    )
    return kernel


_STRIP = 64
"""Columns that are cleared at a time, so that they fit the registers."""


def _clear(matrix: Any, strip: Any, limit: Any) -> None:
    window = matrix.at[:, pl.ds(strip * _STRIP, _STRIP)]
    values = window[...]
    row = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    window[...] = jnp.where(row < limit, values, jnp.zeros((), values.dtype))


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of a group's result.

    Attributes:
      group: its number.
      row, column: of its first element.
      start: the group's first row in the operands.
      size: the group's rows.
      steps: along them.
      turn: the warpgroup that computes it, if they take turns.
    """

    group: Any
    row: Any
    column: Any
    start: Any
    size: Any
    steps: Any
    turn: Any


class _Loop:
    """The body of the kernel for one problem and configuration."""

    def __init__(self, problem: Problem, config: RaggedConfig):
        self.problem, self.config = problem, config
        self.row_tiles = -(-problem.k // config.tile_m)
        self.column_tiles = -(-problem.n // config.tile_n)

    @property
    def tiles(self) -> int:
        """Of each group."""
        return self.row_tiles * self.column_tiles

    @property
    def turns(self) -> int:
        """Warpgroups that take turns. Each has barriers of its own for filled stages, whose phases
        it can only follow if it waits for all of them."""
        return COMPUTE if self.config.alternate else 1

    @property
    def sharing(self) -> int:
        """Warpgroups that share a tile."""
        return COMPUTE // self.turns

    def _full(self, stages: Stages, turn: Any, stage: Any) -> Any:
        """The barrier of a filled stage."""
        return stages.full.at[stage if self.turns == 1 else turn * self.config.stages + stage]

    def run(
        self,
        left: Any,
        right: Any,
        sizes: Any,
        out: Any,
        *,
        left_smem: Any,
        right_smem: Any,
        out_smem: Any,
        full: Any,
        empty: Any,
        cut: Any,
    ) -> None:
        """The kernel's body."""
        stages = Stages(self.config.stages, full, empty)
        roles(
            lambda: self._fetch(left, right, sizes, left_smem, right_smem, stages),
            lambda warpgroup: self._compute(
                warpgroup, sizes, out, left_smem, right_smem, out_smem, stages, cut
            ),
        )

    def _over_tiles(self, sizes: Any, body: Callable[[_Tile, Any], Any], carry: Any) -> Any:
        """``carry = body(tile, carry)`` for each of this block's tiles."""
        config = self.config
        block, blocks = lax.axis_index("blocks"), jnp.int32(jax.lax.axis_size("blocks"))
        count = lax.div(self.tiles * self.problem.groups - 1 - block, blocks) + 1

        def size_of(group: Any) -> Any:
            return group_rows(sizes[group], self.problem.m)

        def one(number: Any, state: Any) -> Any:
            group, start, carry = state
            index = block + number * blocks
            target = lax.div(index, self.tiles)
            start = lax.fori_loop(group, target, lambda g, start: start + size_of(g), start)
            row, column = plgpu.planar_snake(
                index - target * self.tiles,
                (self.row_tiles, self.column_tiles),
                0,
                config.band,
            )
            size = size_of(target)
            steps = lax.div(size + (config.tile_k - 1), config.tile_k)
            turn = lax.rem(number, jnp.int32(self.turns))
            row, column = row * config.tile_m, column * config.tile_n
            tile = _Tile(target, row, column, start, size, steps, turn)
            return target, start, body(tile, carry)

        state = (jnp.int32(0), jnp.int32(0), carry)
        return lax.fori_loop(0, count, one, state)[2]

    # The producer warpgroup -----------------------------------------------------------------------

    def _fetch(
        self, left: Any, right: Any, sizes: Any, left_smem: Any, right_smem: Any, stages: Stages
    ) -> None:
        config = self.config

        def tile(place: _Tile, carry: Any) -> Any:
            def step(index: Any, carry: Any) -> Any:
                stage, filled = carry
                stages.wait_empty(stage, filled)
                rows = pl.ds(place.start + index * config.tile_k, config.tile_k)
                full = self._full(stages, place.turn, stage)
                for source, first, matrix in (
                    (left, place.row, left_smem.at[stage]),
                    (right, place.column, right_smem.at[stage]),
                ):
                    window = source.at[rows, pl.ds(first, matrix.shape[1])]
                    plgpu.copy_gmem_to_smem(window, matrix, full)
                return stages.next(stage), filled + 1

            return lax.fori_loop(0, place.steps, step, carry)

        self._over_tiles(sizes, tile, (jnp.int32(0), jnp.int32(0)))

    # The consumer warpgroups ---------------------------------------------------------------------

    def _compute(
        self,
        warpgroup: Any,
        sizes: Any,
        out: Any,
        left_smem: Any,
        right_smem: Any,
        out_smem: Any,
        stages: Stages,
        cut: Any,
    ) -> None:
        config = self.config
        wm, wn = config.warpgroup_m, config.warpgroup_n
        turns = self.turns > 1
        row = warpgroup * wm if config.split == "m" and not turns else jnp.int32(0)
        column = warpgroup * wn if config.split == "n" and not turns else jnp.int32(0)
        member = jnp.int32(0) if turns else warpgroup
        both = cut.at[warpgroup if turns else 0]
        count = config.epilogue_buffers
        buffers = out_smem.at[pl.ds(warpgroup * count, count)]

        def clear(stage: Any, limit: Any) -> None:
            """Zeros from the row ``limit`` on; those that share a tile take strips round-robin."""
            for ref in (left_smem, right_smem):
                matrix, count = ref.at[stage], ref.shape[2] // _STRIP
                sharing = self.sharing
                for first in range(0, count - sharing + 1, sharing):
                    _clear(matrix, first + member, limit)
                if count % sharing:
                    last = functools.partial(_clear, matrix, count - 1, limit)
                    pl.when(member == 0)(last)
            plgpu.commit_smem()
            plgpu.barrier_arrive(both)
            plgpu.barrier_wait(both)

        def multiply(acc: Any, stage: Any) -> None:
            left = plgpu.transpose_ref(left_smem.at[stage, :, pl.ds(row, wm)], (1, 0))
            plgpu.wgmma(acc, left, right_smem.at[stage, :, pl.ds(column, wn)])

        def tile(place: _Tile, stage: Any) -> Any:
            def scope(acc: Any) -> Any:
                def step(index: Any, state: Any) -> Any:
                    previous, current = state
                    plgpu.barrier_wait(self._full(stages, warpgroup, current))
                    limit = place.size - index * config.tile_k
                    pl.when(limit < config.tile_k)(lambda: clear(current, limit))
                    multiply(acc, current)
                    plgpu.wgmma_wait(1)
                    pl.when(index > 0)(lambda: plgpu.barrier_arrive(stages.empty.at[previous]))
                    return current, stages.next(current)

                last, following = lax.fori_loop(0, place.steps, step, (stage, stage))
                sums = acc[...]
                pl.when(place.steps > 0)(lambda: plgpu.barrier_arrive(stages.empty.at[last]))
                result = out.at[place.group]

                def destination(part: int, columns: int, start: Any, rows: int) -> Any:
                    return result.at[
                        pl.ds(place.row + row + start, rows),
                        pl.ds(place.column + column + part, columns),
                    ]

                write(columns_of(sums, config), buffers, destination, config)
                return following

            return pl.run_scoped(scope, plgpu.ACC((wm, wn), jnp.float32))

        def own(place: _Tile, stage: Any) -> Any:
            after = lax.rem(stage + place.steps, jnp.int32(config.stages))
            return lax.cond(
                place.turn == warpgroup, functools.partial(tile, place), lambda _: after, stage
            )

        self._over_tiles(sizes, own if turns else tile, jnp.int32(0))
