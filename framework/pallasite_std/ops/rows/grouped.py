"""Tiles of flattened matrices whose elements are of any rows, in groups of at most two rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.rows.kernel import Chunk, Rows
from pallasite_std.ops.rows.tiling import LANES, VECTOR_BYTES, RowTiling, size_of


class GroupRows(Rows):
    """The rows of a tile of a flattened matrix, of which each group of consecutive elements is of
    one row or of two.

    What all elements of a group have in common is computed for each, and by the compiler once.

    Attributes:
      groups: the first element of each element's group.
      row: the row of that.
    """

    def __init__(self, tiling: RowTiling, first: Any, rows: int, size: int) -> None:
        """``first`` is the first element, ``size`` that of a group."""
        shape = (tiling.chunk // size, size)
        self.groups = first + size * lax.broadcasted_iota(jnp.int32, shape, 0)
        self.row = lax.div(self.groups, jnp.full_like(self.groups, tiling.columns))
        self.last = rows - 1
        super().__init__(tiling, self.row, 0)

    def row_values(
        self, compute: Callable[..., tuple[Any, ...]], chunk: Chunk, *refs: Any
    ) -> tuple[Any, ...]:
        """See the base class."""
        later = cast(GroupChunk, chunk).later
        following = lax.min(self.row + 1, jnp.full_like(self.row, self.last))
        values = compute(*(ref[self.row] for ref in refs))
        others = compute(*(ref[following] for ref in refs))
        return tuple(
            jnp.where(later, two, one).reshape(chunk.width)
            for one, two in zip(values, others, strict=True)
        )


class FlattenedChunk(Chunk):
    """Consecutive elements of a flattened matrix.

    Attributes:
      first: the first element.
      width: elements.
    """

    def __init__(self, rows: Rows, first: Any, width: int) -> None:
        super().__init__(rows, first, width, kept=True)

    def load_again(self, ref: Any) -> Any:
        """See the base class; of a flattened matrix."""
        return ref[pl.ds(self.first, self.width)].astype(jnp.float32)

    def store(self, ref: Any, value: Any) -> None:
        """See the base class; to a flattened matrix."""
        ref[pl.ds(self.first, self.width)] = value.astype(ref.dtype)


def flattened_kernel(
    body: Callable[..., None],
    rows: int,
    columns: int,
    width: int,
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    params: Any,
    matrices: int,
) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel with a block for each ``width`` elements of flattened matrices, whose operands and
    results are the matrices; for the other arguments see :func:`.elementwise_kernel`."""
    size = rows * columns
    kernel: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((size,), one.dtype) for one in out_types),
        grid=(-(-size // width),),
        grid_names=("tile",),
        kernel_name=name,
        compiler_params=params,
    )

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        flat = [one.reshape(-1) for one in operands[:matrices]]
        results = kernel(*flat, *operands[matrices:])
        return tuple(one.reshape(rows, columns) for one in results)

    return call


class GroupChunk(FlattenedChunk):
    """Consecutive elements of a flattened matrix, in groups.

    Attributes:
      later: which elements are of a group's second row: (groups, size).
    """

    def __init__(self, rows: GroupRows, first: Any, width: int) -> None:
        super().__init__(rows, first, width)
        columns = rows.tiling.columns
        within = lax.broadcasted_iota(jnp.int32, rows.groups.shape, 1)
        self._columns = rows.groups - rows.row * columns + within
        self.later = self._columns >= columns

    def columns(self) -> Any:
        """See the base class."""
        found = jnp.where(self.later, self._columns - self.rows.tiling.columns, self._columns)
        return found.reshape(self.width)


def grouped_kernel(
    work: Callable[..., None],
    rows: int,
    columns: int,
    out_types: Sequence[jax.ShapeDtypeStruct],
    name: str,
    params: Any,
    matrices: int,
) -> Callable[..., tuple[jax.Array, ...]]:
    """:func:`.elementwise_kernel` by tiles of flattened matrices, which begin at whole vectors.

    Rows have at least as many elements as a vector has bytes.
    """
    group = VECTOR_BYTES // max(size_of(one.dtype) for one in out_types)
    # A group for each lane, which so computes what it needs.
    size, width = rows * columns, LANES * group
    full, rest = divmod(size, width)

    def body(*refs: Any) -> None:
        number = lax.axis_index("tile")
        first = pl.multiple_of(number * width, width)

        def part(first: Any, wide: int, size: int) -> None:
            place = GroupRows(RowTiling(1, 1, wide, columns), first, rows, size)
            work(place, GroupChunk(place, first, wide), *refs)

        def whole() -> None:
            part(first, width, group)

        if not rest:
            whole()
            return
        if full:
            pl.when(number < full)(whole)

        def last() -> None:
            left = rest % group
            if rest > left:
                part(first, rest - left, group)
            if left:
                part(first + (rest - left), left, 1)

        pl.when(number == full)(last)

    return flattened_kernel(body, rows, columns, width, out_types, name, params, matrices)
