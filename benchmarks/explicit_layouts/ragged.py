"""``ragged_matmul``'s kernel: each group of rows times its own matrix.

Blocks go through the tiles of one group after the other, and read the groups' sizes as they go
along. Tiles begin at a group's first row, so only the last one of a group has rows that are not
written: those of the next group, which other tiles compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from explicit_layouts.ragged_common import (
    COMPUTE,
    PARAMS,
    STAGING,
    Slots,
    matrix,
    ring,
    roles,
    strips_ring,
    write,
)
from pallasite import gpu as plgpu
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
    right = (config.tile_n, config.tile_k) if problem.transposed else (config.tile_k, config.tile_n)
    scratch = {
        "left_smem": strips_ring(config.stages, config.tile_m, config.tile_k, problem.dtype),
        "right_smem": ring(config.stages, *right, problem.dtype),
        "out_smem": ring(
            COMPUTE * STAGING, config.warpgroup_m, config.epilogue_n, problem.out_dtype
        ),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
        "empty": plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=config.stages),
    }
    kernel: Callable[..., jax.Array] = plgpu.kernel(
        loop.run,
        out_type=jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype),
        grid=(min(multiprocessors, loop.most_tiles),),
        grid_names=("blocks",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="ragged_matmul",
        compiler_params=PARAMS,
    )
    return kernel


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of a group.

    Attributes:
      group: its number.
      row: the first row, in all rows.
      column: the first column.
      rows: of the group, from the first row.
    """

    group: Any
    row: Any
    column: Any
    rows: Any


class _Loop:
    """The body of the kernel for one problem and configuration."""

    def __init__(self, problem: Problem, config: RaggedConfig):
        self.problem, self.config = problem, config
        self.n_tiles = -(-problem.n // config.tile_n)
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
        *,
        left_smem: Any,
        right_smem: Any,
        out_smem: Any,
        full: Any,
        empty: Any,
    ) -> None:
        """The kernel's body."""
        slots = Slots(self.config.stages, full, empty)
        roles(
            lambda: self._fetch(left, right, sizes, left_smem, right_smem, slots),
            lambda warpgroup: self._compute(
                warpgroup, sizes, out, left_smem, right_smem, out_smem, slots
            ),
        )

    # Which tiles ----------------------------------------------------------------------------------

    def _tiles_of(self, size: Any) -> Any:
        return lax.div(size + (self.config.tile_m - 1), self.config.tile_m)

    def _over_tiles(
        self, sizes: Any, body: Callable[[_Tile, Any], Any], carry: Any
    ) -> tuple[Any, Any, Any]:
        """``carry = body(tile, carry)`` for each of this block's tiles.

        Returns (the first row after all groups, the block's next tile counted from there, carry).
        """
        blocks, groups = jnp.int32(jax.lax.axis_size("blocks")), self.problem.groups

        def size_of(group: Any) -> Any:
            return sizes[jnp.minimum(group, groups - 1)]

        def passed(place: Any) -> Any:
            index, group, _, size = place
            return (group < groups) & (index >= self._tiles_of(size) * self.n_tiles)

        def advance(place: Any) -> Any:
            index, group, row, size = place
            following = group + 1
            left = index - self._tiles_of(size) * self.n_tiles
            return left, following, row + size, size_of(following)

        def one(state: Any) -> Any:
            (index, group, row, size), carry = state
            carry = body(self._tile(index, group, row, size), carry)
            return lax.while_loop(passed, advance, (index + blocks, group, row, size)), carry

        first = (lax.axis_index("blocks"), jnp.int32(0), jnp.int32(0), size_of(jnp.int32(0)))
        start = lax.while_loop(passed, advance, first)
        state = lax.while_loop(lambda state: state[0][1] < groups, one, (start, carry))
        (index, _, row, _), carry = state
        return row, index, carry

    def _tile(self, index: Any, group: Any, row: Any, size: Any) -> _Tile:
        """A tile by its number in the group: bands of rows, along columns, there and back."""
        config = self.config
        band = lax.div(index, config.band * self.n_tiles)
        inside = index - band * (config.band * self.n_tiles)
        height = jnp.minimum(config.band, self._tiles_of(size) - band * config.band)
        n = lax.div(inside, height)
        m = band * config.band + inside - n * height
        n = lax.select(lax.bitwise_and(band, 1) == 1, self.n_tiles - 1 - n, n)
        start = m * config.tile_m
        return _Tile(group, row + start, n * config.tile_n, size - start)

    # The memory warpgroup -------------------------------------------------------------------------

    def _fetch(
        self, left: Any, right: Any, sizes: Any, left_smem: Any, right_smem: Any, slots: Slots
    ) -> None:
        config = self.config

        def tile(place: _Tile, carry: Any) -> Any:
            rows, columns = pl.ds(place.row, config.tile_m), pl.ds(place.column, config.tile_n)
            own = right.at[place.group]

            def step(index: Any, carry: Any) -> Any:
                slot, filled = carry
                slots.wait_empty(slot, filled)
                depth = pl.ds(index * config.tile_k, config.tile_k)
                window = (
                    own.at[columns, depth] if self.problem.transposed else own.at[depth, columns]
                )
                full = slots.full.at[slot]
                plgpu.copy_gmem_to_smem(left.at[rows, depth], matrix(left_smem.at[slot]), full)
                plgpu.copy_gmem_to_smem(window, right_smem.at[slot], full)
                return slots.next(slot), filled + 1

            return lax.fori_loop(0, self.k_steps, step, carry)

        self._over_tiles(sizes, tile, (jnp.int32(0), jnp.int32(0)))

    # The compute warpgroups -----------------------------------------------------------------------

    def _compute(
        self,
        warpgroup: Any,
        sizes: Any,
        out: Any,
        left_smem: Any,
        right_smem: Any,
        out_smem: Any,
        slots: Slots,
    ) -> None:
        config, problem = self.config, self.problem
        wm, wn = config.warpgroup_m, config.warpgroup_n
        row = warpgroup * wm if config.split == "m" else jnp.int32(0)
        column = warpgroup * wn if config.split == "n" else jnp.int32(0)
        staging = out_smem.at[pl.ds(warpgroup * STAGING, STAGING)]

        def multiply(acc: Any, slot: Any, accumulate: bool = True) -> None:
            if problem.transposed:
                right = plgpu.transpose_ref(right_smem.at[slot, pl.ds(column, wn)], (1, 0))
            else:
                right = right_smem.at[slot, :, pl.ds(column, wn)]
            left = matrix(left_smem.at[slot, :, pl.ds(row, wm)])
            plgpu.wgmma(acc, left, right, accumulate=accumulate)

        def window(first_row: Any, first_column: Any) -> Callable[..., Any]:
            return lambda part, columns, start, rows: out.at[
                pl.ds(first_row + start, rows), pl.ds(first_column + part, columns)
            ]

        def tile(place: _Tile, slot: Any) -> Any:
            def scope(acc: Any) -> Any:
                plgpu.barrier_wait(slots.full.at[slot])
                multiply(acc, slot, accumulate=False)

                def step(_: Any, previous: Any) -> Any:
                    current = slots.next(previous)
                    plgpu.barrier_wait(slots.full.at[current])
                    multiply(acc, current)
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(slots.empty.at[previous])
                    return current

                last = lax.fori_loop(1, self.k_steps, step, slot)
                sums = acc[...]
                plgpu.barrier_arrive(slots.empty.at[last])
                destination = window(place.row + row, place.column + column)
                rows = jnp.clip(place.rows - row, 0, wm)
                write(sums, staging, destination, config, rows)
                return slots.next(last)

            return pl.run_scoped(scope, plgpu.ACC((wm, wn), jnp.float32))

        end, index, _ = self._over_tiles(sizes, tile, jnp.int32(0))

        # Rows of no group are zeros.
        zero_tiles = self._tiles_of(jnp.maximum(problem.m - end, 0)) * self.n_tiles

        def clear(index: Any) -> Any:
            m = lax.div(index, self.n_tiles)
            n = index - m * self.n_tiles
            destination = window(end + m * config.tile_m + row, n * config.tile_n + column)
            zeros = jnp.zeros((wm, wn), problem.out_dtype)
            write(zeros, staging, destination, config, jnp.int32(wm))
            return index + jnp.int32(jax.lax.axis_size("blocks"))

        lax.while_loop(lambda index: index < zero_tiles, clear, index)
