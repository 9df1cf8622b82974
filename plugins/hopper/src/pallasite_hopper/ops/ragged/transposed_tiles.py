"""``ragged_matmul`` by the kernel of the transposed GEMM: tiles of any multiple of 8 rows.

Rows of a group are columns of the tensor cores' result there, of which there may be any multiple of
8, so that a group leaves few of them over; and warpgroups can take turns. The last tiles of groups
are narrower. They come in the order of all tiles, so that others read the same of a matrix at the
same time; or after all others, so that blocks end at about the same time.
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
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.kernel import Item, MatmulLoop
from pallasite_hopper.ops.dense.kernel import build as build_gemm
from pallasite_hopper.ops.dense.run import useful
from pallasite_hopper.ops.ragged.common import group_rows
from pallasite_hopper.ops.ragged.config import RaggedConfig
from pallasite_hopper.ops.ragged.kernel import Problem
from pallasite_std.api import Epilogue, MatmulProblem

_BLOCK = 8
"""Rows of a result that are written at a time; fewer are written one by one, since the launcher
passes two boxes for an array."""


def build(problem: Problem, config: RaggedConfig, multiprocessors: int) -> Callable[..., jax.Array]:
    """The kernel as a function of the matrices, the rows and the groups' sizes."""
    assert config.transposed is not None
    gemm = MatmulProblem(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        dtype_a=np.dtype(problem.dtype),
        dtype_b=np.dtype(problem.dtype),
        out_dtype=np.dtype(problem.out_dtype),
        accumulator=np.dtype(np.float32),
        transpose_a=False,
        transpose_b=problem.transposed,
    ).swapped()
    make = functools.partial(_GroupedLoop, gemm, problem.groups, config)
    tiles = useful(make, config.transposed)
    return build_gemm(gemm, tiles, Epilogue(), multiprocessors, make(tiles), "ragged_matmul")


def widths_of(config: MatmulConfig, count: int) -> list[int]:
    """Columns that a warpgroup multiplies of tiles of each width, the widest first."""
    whole = config.warpgroup_n
    return sorted({-(-whole * part // (8 * count)) * 8 for part in range(1, count + 1)})[::-1]


@dataclasses.dataclass(frozen=True)
class _GroupItem(Item):
    """A tile of a group; ``part`` is the row after the group's last one.

    Attributes:
      group: its number.
      width: the number of its width.
    """

    group: Any = None
    width: Any = None


class _GroupedLoop(MatmulLoop):
    """The transposed GEMM's loop over the tiles of groups."""

    def __init__(
        self, problem: MatmulProblem, groups: int, ragged: RaggedConfig, config: MatmulConfig
    ):
        super().__init__(problem, config, Epilogue())
        self.groups = groups
        self.widths = widths_of(config, ragged.widths)
        self.last = ragged.last and len(self.widths) > 1
        self.across = config.tile_n // config.warpgroup_n
        self.sizes: Any = None

    @property
    def tiles(self) -> int:
        """There are never more tiles than this, those of zeros included."""
        return self.m_tiles * (self.n_tiles + self.groups)

    def run(self, a: Any, b: Any, *refs: Any, **scratch: Any) -> None:
        """The kernel's body; matrices, rows, the groups' sizes and the result."""
        self.sizes, *rest = refs
        super().run(a, b, *rest, **scratch)

    # Which tiles --------------------------------------------------------------------------------

    def _size_of(self, group: Any) -> Any:
        return group_rows(self.sizes[group], self.problem.n)

    def _first(self, size: Any) -> Any:
        """Tiles along the rows of a group that do not come last: those of full width, or all."""
        tile = self.config.tile_n
        # If more rows are left than the next width has, a tile has full width.
        narrow = self.widths[1] * self.across if self.last else 0
        return lax.div(size + (tile - 1 - narrow), tile)

    def _in_part(self, part: Any, size: Any) -> Any:
        """Tiles of a group in a part of the order: those that do not come last, or that which
        does."""
        first = self._first(size)
        left = (size > first * self.config.tile_n).astype(jnp.int32)
        return lax.select(part < self.groups, first, left) * self.m_tiles

    def _over_items(self, body: Callable[[Item, Any], Any], carry: Any, turn: Any = None) -> Any:
        """See the GEMM's loop. The order has a part for each group, and then one for what is left
        of each, if that comes last."""
        blocks = jnp.int32(jax.lax.axis_size("blocks"))
        first, stride = lax.axis_index("blocks"), blocks
        if turn is not None:
            first, stride = first + turn * blocks, blocks * self.turns
        parts = 2 * self.groups if self.last else self.groups

        def group_of(part: Any) -> Any:
            return lax.select(part >= self.groups, part - self.groups, part)

        def passed(place: Any) -> Any:
            index, part, _, size = place
            return (part < parts) & (index >= self._in_part(part, size))

        def advance(place: Any) -> Any:
            index, part, row, size = place
            following = part + 1
            left = index - self._in_part(part, size)
            begin = lax.select(following == self.groups, jnp.int32(0), row + size)
            group = group_of(jnp.minimum(following, parts - 1))
            return left, following, begin, self._size_of(group)

        def one(state: Any) -> Any:
            number, (index, part, row, size), carry = state
            item = self._item(index, part, group_of(part), row, size)
            item = dataclasses.replace(item, turn=lax.rem(number, jnp.int32(self.turns)))
            carry = body(item, carry)
            following = (index + stride, part, row, size)
            return number + 1, lax.while_loop(passed, advance, following), carry

        zero = jnp.int32(0)
        place = lax.while_loop(passed, advance, (first, zero, zero, self._size_of(zero)))
        state = (zero, place, carry)
        return lax.while_loop(lambda state: state[1][1] < parts, one, state)[2]

    def _item(self, index: Any, part: Any, group: Any, row: Any, size: Any) -> _GroupItem:
        """A tile by its number in a part: bands of rows, along columns, there and back."""
        config = self.config
        count = self._first(size)
        band = lax.div(index, config.group * self.m_tiles)
        inside = index - band * (config.group * self.m_tiles)
        height = jnp.clip(count - band * config.group, 1, config.group)
        m = lax.div(inside, height)
        n = band * config.group + inside - m * height
        m = lax.select(lax.bitwise_and(band, 1) == 1, self.m_tiles - 1 - m, m)
        comes_last = part >= self.groups
        m, n = lax.select(comes_last, index, m), lax.select(comes_last, count, n)
        m = self._member(m, config.cluster_m, "m")
        start = n * config.tile_n
        rows = size - start
        width = jnp.int32(0)
        for number, columns in enumerate(self.widths[1:], 1):
            width = lax.select(rows <= columns * self.across, jnp.int32(number), width)
        return _GroupItem(
            part=row + size,
            m=self.first_row(m),
            n=row + start,
            first=0,
            steps=self.k_steps,
            index=index,
            group=group,
            width=width,
        )

    def by_width(self, item: Item, body: Callable[[int], Any]) -> Any:
        """Tiles are as wide as their rows need."""
        assert isinstance(item, _GroupItem)
        if len(self.widths) == 1:
            return body(self.widths[0])
        return lax.switch(item.width, [functools.partial(body, width) for width in self.widths])

    # Operands and results -----------------------------------------------------------------------

    def fetch_left(self, a: Any, item: Item, window: Any, smem: Any, full: Any, share: Any) -> None:
        """Of the group's matrix."""
        assert isinstance(item, _GroupItem)
        super().fetch_left(a.at[item.group], item, window, smem, full, share)

    def fetch_right(self, b: Any, item: Item, depth: Any, smem: Any, full: Any, share: Any) -> None:
        """As many rows as are multiplied."""

        def copy(width: int) -> None:
            count = width * self.across
            window = (pl.ds(item.n, count), depth)
            there = smem.at[pl.ds(0, count)]
            plgpu.copy_gmem_to_smem(b.at[window], there, full, collective_axes=share)

        self.by_width(item, copy)

    def compute(
        self,
        warpgroup: Any,
        a_smem: Any,
        b_smem: Any,
        full: Any,
        empty: Any,
        write: Callable[[Any, Any, Any, Any], None],
    ) -> None:
        """A consumer; rows of no group become zeros, in the blocks that have had the fewest
        tiles."""
        config = self.config
        super().compute(warpgroup, a_smem, b_smem, full, empty, write)
        zero = jnp.int32(0)
        end = lax.fori_loop(0, self.groups, lambda group, row: row + self._size_of(group), zero)
        rows = jnp.maximum(self.problem.n - end, 0)
        count = lax.div(rows + (config.warpgroup_n - 1), config.warpgroup_n)
        parts = self.m_tiles * (config.tile_m // config.warpgroup_m)
        blocks = jnp.int32(jax.lax.axis_size("blocks"))
        stride = blocks * config.warpgroups
        if config.cluster > 1:
            parts = parts * config.cluster

        def clear(index: Any) -> Any:
            n = lax.div(index, parts)
            row, column = n * config.warpgroup_n, (index - n * parts) * config.warpgroup_m
            zeros = jnp.zeros((config.warpgroup_m, config.warpgroup_n), self.problem.accumulator)
            write(jnp.int32(self.problem.n), zeros, column, end + row)
            return index + stride

        first = (blocks - 1 - lax.axis_index("blocks")) * config.warpgroups + warpgroup
        total = jnp.where(self._leads(), count * parts, 0)
        lax.while_loop(lambda index: index < total, clear, first)

    def _leads(self) -> Any:
        """Whether this block is the first one of its cluster."""
        axis = self._axis("m")
        return jnp.bool_(True) if axis is None else lax.axis_index(axis) == 0

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
        """Writes a warpgroup's part of a finished tile: the rows that are of its group."""
        config = self.config
        height, width = self.part_rows, config.epilogue_n
        count, buffers = int(sums.shape[1]), config.epilogue_buffers
        columns = pl.ds(m, height)
        own = item_part - n
        for part, first in enumerate(range(0, count, width)):
            written = min(width, count - first)
            staging = out_smem.at[warpgroup, part % buffers]
            if written < width:
                staging = staging.at[pl.ds(0, written)]
            plgpu.wait_smem_to_gmem(buffers - 1 if part else 0, wait_read_only=True)
            view = plgpu.transpose_ref(staging, (1, 0))
            view[...] = sums[:, first : first + written].astype(out.dtype)
            plgpu.commit_smem()
            rows = jnp.clip(own - first, 0, written)
            self._copy_rows(staging, out, n + first, columns, rows)
            plgpu.commit_smem_to_gmem_group()

    def _copy_rows(self, staging: Any, out: Any, first: Any, columns: Any, rows: Any) -> None:
        """Starts copies of some rows of a buffer to the result, from its row ``first`` on."""

        def copy(start: Any, count: int) -> None:
            there = out.at[pl.ds(first + start, count), columns]
            source = staging.at[pl.ds(start, count)]
            plgpu.copy_smem_to_gmem(source, there, commit_group=False)

        def block(index: Any, carry: Any) -> Any:
            copy(index * _BLOCK, _BLOCK)
            return carry

        def single(row: Any, carry: Any) -> Any:
            copy(row, 1)
            return carry

        lax.fori_loop(0, lax.div(rows, jnp.int32(_BLOCK)), block, jnp.int32(0))
        lax.fori_loop(lax.bitwise_and(rows, -_BLOCK), rows, single, jnp.int32(0))
