"""How matrices lie in tensor memory.

Tensor memory has 128 lanes (rows) and 512 columns of cells of 32 bits; each warp of a warpgroup
reaches a quarter of the lanes (PTX ISA, "Tensor Memory" and "tcgen05 Data Path Layout
Organization"). A layout says in which lane and column the elements of a matrix lie, and which bits
of the cell they take.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError
from pallasite.plugin.language import checks

ROWS = 128
"""Lanes of tensor memory."""

CELL_BITS = 32
"""Bits of one lane of one column."""

_QUARTER = 32
_MOST_PACKED = 8

type Cells = np.ndarray[Any, np.dtype[np.int64]]
"""For each lane, column and position in the cell, the row-major number of the element there; -1
where there is none."""


class Kind(enum.Enum):
    """The forms of layouts.

    DEFAULT: a row for each lane; further tiles of 128 rows in further columns.
    HALF_LANE: 64 rows, 16 in each quarter; the right half of the columns lies below the left.
    M64_COLLECTIVE: 64 rows in the first two quarters, the right half of the columns in the others.
    SCALES: 8-bit scale factors, 4 in a cell, 128 rows in 32 lanes of 4 columns, in all quarters.
    SCALES_M64_COLLECTIVE: those of b for pairs of blocks with 64 rows each.
    SPARSE_METADATA: which elements of a sparse operand there are, in an order of its own.
    """

    DEFAULT = "TMEM_DEFAULT"
    HALF_LANE = "TMEM_HALF_LANE"
    M64_COLLECTIVE = "TMEM_M64_COLLECTIVE"
    SCALES = "TMEM_SCALES"
    SCALES_M64_COLLECTIVE = "TMEM_SCALES_M64_COLLECTIVE"
    SPARSE_METADATA = "TMEM_SPARSE_METADATA"

    __hash__ = object.__hash__


@dataclasses.dataclass(frozen=True)
class TensorMemoryLayout:
    """A layout of matrices: the last two dimensions of an allocation.

    Attributes:
      kind: its form.
      packing: elements in a cell.
      columns: of the matrix, for forms that fold the columns; 0 for others.
    """

    kind: Kind
    packing: int = 1
    columns: int = 0

    def __str__(self) -> str:
        if self.kind is Kind.DEFAULT:
            return f"TMEM_DEFAULT(packing={self.packing})"
        if self.columns:
            return f"{self.kind.value}({self.columns}, packing={self.packing})"
        return str(self.kind.value)

    @property
    def is_folded(self) -> bool:
        """Whether the right half of the columns lies in other lanes than the left."""
        return self.kind in (Kind.HALF_LANE, Kind.M64_COLLECTIVE)

    @property
    def is_opaque(self) -> bool:
        """Whether loads and stores do not know where elements lie."""
        return self.kind is Kind.SPARSE_METADATA

    def tile(self, rows: int) -> tuple[int, int]:
        """Rows and columns of the smallest part that takes whole columns of tensor memory and
        begins at a multiple of them, of a matrix with so many rows."""
        match self.kind:
            case Kind.DEFAULT:
                return ROWS, self.packing
            case Kind.HALF_LANE | Kind.M64_COLLECTIVE:
                return 64, self.columns
            case Kind.SCALES | Kind.SCALES_M64_COLLECTIVE:
                return rows, 4
            case _:
                return ROWS, 16

    def check(self, shape: Sequence[int], bits: int) -> None:
        """Raises InvalidValueError unless a matrix of elements of ``bits`` bits has this layout."""
        rows, columns = shape
        full = CELL_BITS // bits if bits <= CELL_BITS else 0
        if self.packing not in (1, full):
            raise checks.value_error(
                f"{self} has cells of {self.packing} elements",
                got=f"elements of {bits} bits",
                expected=f"elements of {CELL_BITS // self.packing} bits for this layout",
            )
        multiples = {Kind.SCALES: ROWS, Kind.SCALES_M64_COLLECTIVE: 2 * ROWS}
        tile_rows, tile_columns = self.tile(multiples.get(self.kind, rows))
        if rows % tile_rows or columns % tile_columns or not rows or not columns:
            raise checks.value_error(
                f"a matrix of shape {tuple(shape)} does not fit {self}",
                expected=f"multiples of {tile_rows} rows and {tile_columns} columns, at least one"
                " of each",
            )
        if self.is_folded and rows != 64:
            raise checks.value_error(f"{self} is for 64 rows", got=f"shape {tuple(shape)}")
        if self.kind is Kind.SCALES_M64_COLLECTIVE and rows != 2 * ROWS:
            raise checks.value_error(f"{self} is for {2 * ROWS} rows", got=f"shape {tuple(shape)}")

    def width(self, shape: Sequence[int]) -> int:
        """Columns of tensor memory that a matrix takes."""
        rows, columns = shape
        match self.kind:
            case Kind.DEFAULT:
                return rows // ROWS * columns // self.packing
            case Kind.HALF_LANE | Kind.M64_COLLECTIVE:
                return columns // 2 // self.packing
            case Kind.SCALES:
                return rows * columns // ROWS
            case Kind.SCALES_M64_COLLECTIVE:
                return columns
            case _:
                return rows // ROWS * columns // 16

    def cells(self, shape: Sequence[int]) -> Cells:
        """Where the elements of a matrix lie.

        Raises:
          InvalidValueError: the layout is opaque.
        """
        return _cells(self, tuple(shape))


@functools.lru_cache(maxsize=256)
def _cells(layout: TensorMemoryLayout, shape: tuple[int, int]) -> Cells:
    if layout.is_opaque:
        raise InvalidValueError(f"where elements of {layout} lie depends on the operand")
    rows, columns = shape
    row, column = np.indices(shape)
    packing = layout.packing
    half, folded = np.divmod(column, max(1, columns // 2))
    copies = range(1)
    match layout.kind:
        case Kind.DEFAULT:
            lane = row % ROWS
            place = row // ROWS * (columns // packing) + column // packing
        case Kind.HALF_LANE:
            lane = row // 16 * _QUARTER + half * 16 + row % 16
            place = folded // packing
        case Kind.M64_COLLECTIVE:
            lane = 64 * half + row
            place = folded // packing
        case Kind.SCALES:
            lane = row % _QUARTER
            place = column // 4 * (rows // _QUARTER) + row // _QUARTER
            copies = range(0, ROWS, _QUARTER)
        case _:
            lane = row % _QUARTER + row // ROWS * _QUARTER
            place = column // 4 * 4 + row % ROWS // _QUARTER
            copies = range(0, ROWS, 2 * _QUARTER)
    cells = np.full((ROWS, layout.width(shape), packing), -1, np.int64)
    for first in copies:
        cells[lane + first, place, column % packing] = row * columns + column
    cells.setflags(write=False)
    return cells


# Making layouts -----------------------------------------------------------------------------------


def default(packing: int = 1) -> TensorMemoryLayout:
    """A row for each lane: products of 128 rows for each block."""
    return TensorMemoryLayout(Kind.DEFAULT, _packing(packing))


def half_lane(columns: int, packing: int = 1) -> TensorMemoryLayout:
    """64 rows, of products of one block."""
    if _packing(packing) > columns // 2:
        raise checks.value_error(
            "more elements in a cell than columns in a lane", got=f"packing {packing}"
        )
    return TensorMemoryLayout(Kind.HALF_LANE, packing, _folded(columns))


def m64_collective(columns: int, packing: int = 1) -> TensorMemoryLayout:
    """64 rows of each block, of products of pairs of blocks."""
    return TensorMemoryLayout(Kind.M64_COLLECTIVE, _packing(packing), _folded(columns))


SCALES = TensorMemoryLayout(Kind.SCALES, 4)
SCALES_M64_COLLECTIVE = TensorMemoryLayout(Kind.SCALES_M64_COLLECTIVE, 4)
SPARSE_METADATA = TensorMemoryLayout(Kind.SPARSE_METADATA, 16)


def inferred(shape: Sequence[int], *, collective: bool, packing: int) -> TensorMemoryLayout:
    """The layout of a matrix as products have it.

    Raises:
      InvalidValueError: tensor memory holds no such matrix.
    """
    rows, columns = shape
    _packing(packing)
    if columns % packing:
        raise checks.value_error(
            f"{columns} columns do not fill cells of {packing} elements",
            got=f"shape {tuple(shape)}",
            expected=f"a multiple of {packing} columns, or packed=False",
        )
    if rows == 64:
        return m64_collective(columns, packing) if collective else half_lane(columns, packing)
    if rows % ROWS or not rows:
        raise checks.value_error(
            f"tensor memory holds no matrix of {rows} rows",
            got=f"shape {tuple(shape)}",
            expected=f"64 rows, or a multiple of {ROWS}",
            hint="say how it lies: layout=plgpu.TMEMLayout...",
        )
    return default(packing)


def _packing(packing: Any) -> int:
    if packing not in (1, 2, 4, _MOST_PACKED):
        raise checks.value_error(
            "no cell has so many elements", got=f"packing {packing}", expected="1, 2, 4 or 8"
        )
    return int(packing)


def _folded(columns: Any) -> int:
    if not checks.is_integer(columns) or columns < 16 or columns % 16:
        raise checks.value_error(
            "columns that are folded over the lanes",
            got=f"{columns} columns",
            expected="a multiple of 16",
        )
    return int(columns)
