"""Which parts of tensor memory can be viewed: matrices of a batch, whole tiles of a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import checks, transforms
from pallasite_blackwell.tensor_memory.layouts import Kind, TensorMemoryLayout

type Known = Callable[[Any], int | None]
"""The number that a start is, or None if it is computed in the kernel."""

type Divisor = Callable[[Any], int]
"""What a start that is computed in the kernel is known to be a multiple of; 0 if not yet."""


def known_while_tracing(start: Any) -> int | None:
    """A start that is a number in the program."""
    if isinstance(start, int | np.integer):
        return int(start)
    if isinstance(start, np.ndarray) and start.shape == ():
        return int(start)
    return None


def check_views(reference: Any, what: str) -> None:
    """Raises where a primitive is called, if a reference has views that tensor memory does not.

    Starts that are computed in the kernel are checked when it is lowered.

    Args:
      reference: a TransformedRef to tensor memory.
      what: what messages call it.
    """
    aval = _jax.typeof(reference.ref)
    layout: Any = getattr(aval, "layout", None)
    for transform in reference.transforms:
        if isinstance(transform, transforms.ExtractAliasedRef):
            layout = transform.layout[0]
        elif isinstance(transform, _jax.NDIndexer):
            *batch, row, column = transform.indices
            matrix = (transform.shape[-2], transform.shape[-1])
            with checks.errors_at(_jax.current_user_location):
                check_slices(layout, matrix, batch, row, column, known_while_tracing, lambda _: 0)
        else:
            raise checks.unsupported(
                f"{what} is a view of tensor memory made by {type(transform).__name__}",
                expected="matrices of a batch, and slices of columns",
            )


def check_slices(
    layout: TensorMemoryLayout,
    matrix: tuple[int, int],
    batch: Sequence[Any],
    row: Any,
    column: Any,
    known: Known,
    divisor: Divisor,
) -> None:
    """Raises unless indices select matrices of a batch and whole tiles of them.

    Args:
      layout: of the matrices.
      matrix: rows and columns of each.
      batch, row, column: the indices.
      known, divisor: what is known of starts.

    Raises:
      InvalidValueError, UnsupportedError: with what could be selected.
    """
    rows, columns = matrix
    for index in (row, column):
        if not isinstance(index, _jax.Slice):
            raise InvalidValueError(
                "a row or a column of tensor memory is selected",
                expected="slices: products, loads and stores are of whole tiles",
                hint="ref.at[:, pl.ds(start, size)]",
            )
    for index in (*batch, row, column):
        if isinstance(index, _jax.Slice) and index.stride not in (None, 1):
            raise UnsupportedError(
                "a slice of tensor memory with a stride", got=f"stride {index.stride}"
            )
    tile_rows, tile_columns = layout.tile(rows)
    text = f"[{_text(row, known)}, {_text(column, known)}]"
    if row.size != rows or known(row.start) != 0:
        if layout.kind is not Kind.DEFAULT or rows == tile_rows or column.size != columns:
            raise UnsupportedError(
                "rows of tensor memory are sliced", got=text, expected=f"all {rows} rows"
            )
        _check_multiple(row, tile_rows, "rows", text, known, divisor)
    if column.size != columns or known(column.start) != 0:
        if rows != tile_rows:
            raise UnsupportedError(
                "columns of several tiles of rows are sliced",
                got=text,
                expected=f"{tile_rows} rows",
                hint=f"slice the rows first, in multiples of {tile_rows}",
            )
        _check_multiple(column, tile_columns, "columns", text, known, divisor)


def _check_multiple(
    index: Any, tile: int, what: str, text: str, known: Known, divisor: Divisor
) -> None:
    start = known(index.start)
    multiple = divisor(index.start) if start is None else start
    if math.gcd(multiple, index.size) % tile:
        raise InvalidValueError(
            f"{what} of tensor memory are cut within a tile",
            got=text,
            expected=f"a start and a size that are multiples of {tile}",
            hint=f"if it is one, say so: pl.multiple_of(start, {tile})" if start is None else None,
        )


def _text(index: Any, known: Known) -> str:
    start = known(index.start)
    return f"pl.ds(..., {index.size})" if start is None else f"{start}:{start + index.size}"
