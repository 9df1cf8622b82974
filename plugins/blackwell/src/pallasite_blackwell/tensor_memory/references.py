"""References to tensor memory while a kernel is lowered, and views of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.language import MemorySpace, transforms
from pallasite.plugin.lowering import RegisterArray, RuleContext
from pallasite_blackwell.tensor_memory.layouts import TensorMemoryLayout
from pallasite_blackwell.tensor_memory.views import check_slices
from pallasite_std.api import known_divisor


@dataclasses.dataclass(frozen=True, eq=False)
class TensorMemoryReference:
    """Matrices in tensor memory, of one allocation.

    Attributes:
      space: tensor memory.
      base: the address that the kernel's columns begin at (i32).
      offset: the first column from there, as far as it is known.
      dynamic: what is added to that while the kernel runs (i32).
      shape: batch dimensions, rows and columns.
      steps: columns from one matrix to the next along each batch dimension.
      dtype: of the elements.
      layout: of each matrix.
      collective: whether the blocks of a pair allocate it together.
    """

    space: MemorySpace
    base: ir.Value
    offset: int
    dynamic: tuple[ir.Value, ...]
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: TensorMemoryLayout
    collective: bool

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of a matrix."""
        return self.shape[-2], self.shape[-1]

    def address(self, columns: int = 0, lanes: int = 0) -> ir.Value:
        """The address of the first matrix, or so many columns and lanes further on."""
        result = self.base
        for value in self.dynamic:
            result = ops.add(result, value)
        return ops.add(result, self.offset + columns + (lanes << 16))

    def matrices(self) -> list[tuple[tuple[int, ...], int]]:
        """The indices of all matrices, and their columns from the first."""
        batch = self.shape[:-2]
        return [
            (index, sum(i * step for i, step in zip(index, self.steps, strict=True)))
            for index in np.ndindex(*batch)
        ]


def reference(
    space: MemorySpace,
    base: ir.Value,
    offset: int,
    shape: Sequence[int],
    dtype: Any,
    layout: TensorMemoryLayout,
    collective: bool,
) -> TensorMemoryReference:
    """The reference to a whole allocation, or to a member of a union."""
    *batch, rows, columns = shape
    step = layout.width((rows, columns))
    steps = tuple(step * math.prod(batch[i + 1 :]) for i in range(len(batch)))
    return TensorMemoryReference(
        space, base, offset, (), tuple(shape), steps, np.dtype(dtype), layout, collective
    )


def resolve_tensor_memory(ctx: RuleContext, value: Any, what: str) -> TensorMemoryReference:
    """The tensor memory behind a reference and its views.

    Raises:
      InvalidTypeError: it is no tensor memory.
      InvalidValueError, UnsupportedError: a view that tensor memory does not have.
    """
    views: Sequence[Any] = ()
    if isinstance(value, _jax.TransformedRef):
        value, views = value.ref, value.transforms
    if not isinstance(value, TensorMemoryReference):
        raise InvalidTypeError(
            f"{what} is not in tensor memory",
            got=type(value).__name__,
            expected="a reference allocated as plgpu.TMEM(shape, dtype)",
        )
    memory: TensorMemoryReference = value
    for one in views:
        memory = view(ctx, memory, one)
    return memory


def one_matrix(memory: TensorMemoryReference, what: str) -> TensorMemoryReference:
    """The same without batch dimensions, which must be of extent 1."""
    if math.prod(memory.shape[:-2]) != 1:
        raise InvalidValueError(
            f"{what} is more than one matrix",
            got=f"shape {list(memory.shape)}",
            expected="(rows, columns)",
            hint="index the batch dimensions",
        )
    return dataclasses.replace(memory, shape=memory.matrix, steps=())


def view(ctx: RuleContext, memory: TensorMemoryReference, transform: Any) -> TensorMemoryReference:
    """One view of tensor memory."""
    del ctx
    if isinstance(transform, transforms.ExtractAliasedRef):
        layout, collective = transform.layout
        return dataclasses.replace(
            reference(
                memory.space,
                memory.base,
                memory.offset + transform.offset,
                transform.shape,
                transform.dtype,
                layout,
                collective,
            ),
            dynamic=memory.dynamic,
        )
    if not isinstance(transform, _jax.NDIndexer):
        raise UnsupportedError(
            f"a view of tensor memory made by {type(transform).__name__}",
            expected="matrices of a batch, and slices of columns",
        )
    return _indexed(memory, transform.indices)


def _indexed(memory: TensorMemoryReference, indices: Sequence[Any]) -> TensorMemoryReference:
    *batch, row, column = indices
    offset, dynamic = memory.offset, list(memory.dynamic)

    def move(start: Any, step: int) -> None:
        nonlocal offset
        known = _known(start)
        if known is not None:
            offset += known * step
        else:
            dynamic.append(ops.multiply(_scalar(start), step))

    matrix = memory.matrix
    check_slices(memory.layout, matrix, batch, row, column, _known, _divisor)
    shape, steps = [], []
    for index, step in zip(batch, memory.steps, strict=True):
        if isinstance(index, _jax.Slice):
            shape.append(index.size)
            steps.append(step)
            move(index.start, step)
        else:
            move(index, step)
    rows, columns = matrix
    tile_rows, tile_columns = memory.layout.tile(rows)
    if row.size != rows or _known(row.start) != 0:
        move(_divided(row.start, tile_rows), memory.layout.width((tile_rows, columns)))
    if column.size != columns or _known(column.start) != 0:
        move(_divided(column.start, tile_columns), memory.layout.width((rows, tile_columns)))
    return dataclasses.replace(
        memory,
        offset=offset,
        dynamic=tuple(dynamic),
        shape=(*shape, row.size, column.size),
        steps=tuple(steps),
    )


def _divisor(value: Any) -> int:
    return int(known_divisor(_scalar(value)))


def _known(value: Any) -> int | None:
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, RegisterArray):
        owner = value.scalar.owner
        if not isinstance(owner, ir.Block) and owner.name == "arith.constant":
            return int(ir.IntegerAttr(owner.attributes["value"]).value)
        return None
    if hasattr(value, "item") and np.ndim(value) == 0:
        return int(value)
    return None


def _scalar(value: Any) -> ir.Value:
    if isinstance(value, ir.Value):
        return value
    return ops.cast_integer(value.scalar, ops.i32())


def _divided(value: Any, tile: int) -> Any:
    known = _known(value)
    if known is not None:
        return known // tile
    quotient = ops.divide_exactly(_scalar(value), tile)
    return RegisterArray.splat(quotient, np.int32)
