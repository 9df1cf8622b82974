"""Where a register layout puts single elements, and how an array is laid out as a matrix."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from pallasite.layouts.digits import LANES, WARPS, Digit, Owner, unravel
from pallasite.layouts.registers import RegisterLayout


@dataclasses.dataclass(frozen=True)
class Place:
    """Who holds an element: all of these warps and lanes, in the same register."""

    warps: tuple[int, ...]
    lanes: tuple[int, ...]
    register: int
    vector: int


class Places:
    """Finds the place of an element, the inverse of :meth:`RegisterLayout.element_at`."""

    def __init__(self, layout: RegisterLayout):
        self.layout = layout
        self._warps = functools.cache(lambda first: _alike(layout.digits, Owner.WARP, WARPS, first))
        self._lanes = functools.cache(lambda first: _alike(layout.digits, Owner.LANE, LANES, first))

    def same_lanes(self, lane: int) -> tuple[int, ...]:
        """The lanes that hold the same elements as one."""
        return self._lanes(lane)

    def find(self, index: Sequence[int]) -> Place:
        """The place of the element with a logical multi-index."""
        layout = self.layout
        coordinates = (ravel(index, layout.shape),) if layout.flat else index
        numbers = dict.fromkeys(Owner, 0)
        for coordinate, dim in zip(coordinates, layout.weighted_dims, strict=True):
            for digit, weight in dim:
                numbers[digit.owner] += coordinate // weight % digit.size * digit.stride
        return Place(
            self._warps(numbers[Owner.WARP]),
            self._lanes(numbers[Owner.LANE]),
            numbers[Owner.REGISTER],
            numbers[Owner.VECTOR],
        )


def _alike(digits: Sequence[Digit], owner: Owner, total: int, first: int) -> tuple[int, ...]:
    """The threads whose digits all equal those of one."""
    own = [digit for digit in digits if digit.owner is owner]
    return tuple(
        other for other in range(total) if all(d.value(other) == d.value(first) for d in own)
    )


def ravel(index: Sequence[int], shape: Sequence[int]) -> int:
    """The row-major linear index of a multi-index."""
    result = 0
    for i, extent in zip(index, shape, strict=True):
        result = result * extent + i
    return result


@dataclasses.dataclass(frozen=True)
class Matrix:
    """An array as a matrix: the dimensions but the last are joined, a single one is folded.

    Attributes:
      shape: shape of the array.
      columns: the last extent; for one dimension, how many elements a row takes.
    """

    shape: tuple[int, ...]
    columns: int

    @staticmethod
    def of(shape: Sequence[int], fold: int) -> Matrix:
        """The matrix of an array; rows of one dimension have ``fold`` elements."""
        shape = tuple(shape)
        if not shape:
            return Matrix(shape, 1)
        return Matrix(shape, min(shape[-1], fold) if len(shape) == 1 else shape[-1])

    @property
    def rows(self) -> int:
        """The number of rows; the last may be incomplete for one dimension."""
        return -(-math.prod(self.shape) // self.columns)

    def index(self, row: int, column: int) -> tuple[int, ...] | None:
        """The multi-index at a place of the matrix; None if there is no element."""
        if not self.shape:
            return ()
        if len(self.shape) == 1:
            linear = row * self.columns + column
            return (linear,) if linear < self.shape[0] else None
        return (*unravel(row, self.shape[:-1]), column)

    def row_label(self, row: int) -> str:
        """What stands to the left of a row."""
        first = self.index(row, 0) or ()
        return ", ".join(map(str, first[:1] if len(first) < 2 else first[:-1]))


def periods(layout: RegisterLayout, matrix: Matrix) -> tuple[int, int]:
    """After how many rows and columns the lanes repeat, and only the registers count on."""
    extents = [_period(dim) for dim in layout.dims]
    if layout.flat or len(layout.shape) < 2:
        return -(-math.prod(extents) // matrix.columns), matrix.columns
    rows = 1
    for dim, extent in enumerate(extents[:-1]):
        if extent > 1:
            rows = extent * math.prod(layout.shape[dim + 1 : -1])
            break
    return rows, extents[-1]


def _period(digits: Sequence[Digit]) -> int:
    """The extent of a dimension without its major register digits."""
    kept = list(digits)
    while kept and kept[0].owner is Owner.REGISTER:
        del kept[0]
    return math.prod(digit.size for digit in kept)


def formulas(layout: RegisterLayout) -> list[str]:
    """Each index of an element in terms of its place, as Python expressions."""
    if layout.flat or len(layout.shape) == 1:
        names = ["index"] if len(layout.shape) == 1 else ["row-major index"]
    elif len(layout.shape) == 2:
        names = ["row", "column"]
    else:
        names = [f"index {dim}" for dim in range(len(layout.shape))]
    totals = {
        Owner.WARP: WARPS,
        Owner.LANE: LANES,
        Owner.REGISTER: layout.registers,
        Owner.VECTOR: layout.vector_length,
    }
    return [
        f"{name} = {' + '.join(_term(d, weight, totals[d.owner]) for d, weight in dim) or '0'}"
        for name, dim in zip(names, layout.weighted_dims, strict=True)
    ]


def _term(digit: Digit, weight: int, total: int) -> str:
    text = digit.owner.value
    if digit.stride > 1:
        text += f" // {digit.stride}"
    if digit.stride * digit.size < total:
        text += f" % {digit.size}"
    if weight == 1:
        return text
    return f"{weight} * ({text})" if " " in text else f"{weight} * {text}"
