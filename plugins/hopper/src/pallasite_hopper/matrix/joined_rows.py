"""Matrices in global memory of which several rows are seen as one.

The copy engine takes rows that begin at multiples of 16 bytes. Where a matrix has others, two, four
or eight of its rows together are such a multiple: of a matrix whose rows are these, the engine
copies parts that begin at multiples of 16 bytes, each a little before what is wanted of a row.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from pallasite.plugin import InvalidValueError, UnsupportedError, ViewRule
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import View
from pallasite.plugin.language import GMEM
from pallasite.plugin.layouts import row_major
from pallasite.plugin.lowering import RuleContext
from pallasite_std.api import MemoryReference, arguments

VECTOR = 16
"""Bytes that rows of what the copy engine reads are a multiple of."""


def rows_together(columns: int, size: int) -> int:
    """So many rows of elements of ``size`` bytes that together are a multiple of 16 bytes."""
    return VECTOR // math.gcd(VECTOR, columns * size)


@dataclasses.dataclass(frozen=True)
class JoinedRows(_jax.Transform):  # type: ignore[misc]
    """Of a matrix in global memory, ``count`` rows as one; those that are left over are no part of
    the view."""

    count: int

    def transform_type(self, x: Any) -> Any:
        """The type of the view."""
        if isinstance(x, _jax.AbstractRef):
            return x.update(inner_aval=self.transform_type(x.inner_aval))
        return x.update(shape=self.shape(x.shape))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Of the view of a matrix of a shape."""
        rows, columns = shape
        return rows // self.count, columns * self.count

    def undo(self, x: Any) -> Any:
        """There is no way back: rows may be missing."""
        del x
        raise InvalidValueError("the view of joined rows is undone")

    def pretty_print(self, context: Any) -> Any:
        """The view as it appears in a printed jaxpr."""
        del context
        return _jax.pretty_printer.text(f"{{{self.count} rows as one}}")


jax.tree_util.register_dataclass(JoinedRows, data_fields=(), meta_fields=("count",))


def joined_rows(ref: Any, count: int) -> Any:
    """The view of a matrix of which ``count`` rows are one; ``plgpu.copy_gmem_to_smem`` reads it.

    Element (i, j * columns + c) is (i * count + j, c) of the matrix. Rows beyond the last multiple
    of ``count`` are no part of it.

    Args:
      ref: the whole matrix in global memory, of at least ``count`` rows.
      count: rows that are seen as one.
    """
    whole = arguments.reference(ref, "ref", GMEM)
    if len(whole.shape) != 2 or whole.shape[0] < count or whole.transforms:
        raise InvalidValueError(
            "rows of what is no whole matrix are joined",
            got=f"shape {tuple(whole.shape)}",
            expected=f"two dimensions, and at least {count} rows",
        )
    return _jax.TransformedRef(whole.ref, (JoinedRows(count),))


def _lower(ctx: RuleContext, reference: MemoryReference, one: JoinedRows) -> MemoryReference:
    del ctx
    buffer = reference.buffer
    assert buffer is not None and reference.window is not None
    if len(buffer.shape) != 2:
        raise UnsupportedError(
            "rows of one of several matrices are joined",
            got=f"shape {buffer.shape}",
            expected="an array that is one matrix: others begin where none of its joined rows do",
        )
    shape = one.shape(buffer.shape)
    starts = zip(reference.window, shape, strict=True)
    return dataclasses.replace(
        reference,
        layout=row_major(shape, reference.element_bits),
        window=tuple(dataclasses.replace(start, size=size) for start, size in starts),
        buffer=dataclasses.replace(buffer, shape=shape),
        whole=buffer,
    )


def _infer(view: View, one: JoinedRows) -> None:
    window, shape = view.window, one.shape(view.layout.shape)
    assert window is not None
    view.change(row_major(shape, view.layout.element_bits))
    starts = zip(window, shape, strict=True)
    view.window = [dataclasses.replace(start, size=size) for start, size in starts]


VIEWS = (ViewRule(transform=JoinedRows, lower=_lower, infer=_infer),)
