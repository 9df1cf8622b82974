"""The part of an array that a picture of memory shows, in rows and columns of pieces."""

from __future__ import annotations

import dataclasses

from pallasite.drawing.extents import Cut, cut, index_text
from pallasite.drawing.pieces import CHUNK, LINE, Piece, Pieces

_ACROSS, _ALONG = 16, 8
"""Pieces that are drawn across the contiguous dimension, and along it if they are chunks."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A piece and its place in the grid."""

    row: int
    column: int
    piece: Piece


class Grid:
    """The first rows and columns of the last two dimensions, in pieces; a single one is folded.

    Attributes:
      cells: what is drawn.
      rows, columns: how much that is, in pieces.
      chosen: the cells across the contiguous dimension that one access can take.
    """

    def __init__(self, pieces: Pieces):
        self.pieces = pieces
        self.rank = len(pieces.counts)
        along = _ALONG if pieces.size == CHUNK else _ACROSS
        vertical = pieces.along is not None and pieces.along == self.rank - 2
        if self.rank < 2:
            count = pieces.counts[0] if self.rank else 1
            self.width = min(count, along, LINE // pieces.size)
            self.rows = cut(-(-count // self.width), _ACROSS)
            self.columns = Cut(self.width, self.width)
        else:
            limits = (along, _ACROSS) if vertical else (_ACROSS, along)
            self.rows, self.columns = (
                cut(pieces.counts[dim], limit, self._tile(dim, limit))
                for dim, limit in zip((self.rank - 2, self.rank - 1), limits, strict=True)
            )
        self.cells = [
            cell
            for row in range(self.rows.shown)
            for column in range(self.columns.shown)
            if (cell := self._cell(row, column)) is not None
        ]
        self.chosen = self._choose(vertical)

    def _tile(self, dim: int, limit: int) -> int:
        """Pieces in the largest tile along a dimension that fits."""
        best, reach = 1, 1
        for extent in reversed(self.pieces.layout.dims[dim]):
            reach *= extent.size
            count = reach // self.pieces.shape[dim]
            if count <= limit and reach % self.pieces.shape[dim] == 0:
                best = max(best, count)
        return best

    def _cell(self, row: int, column: int) -> Cell | None:
        if self.rank < 2:
            linear = row * self.width + column
            if self.rank == 1 and linear >= self.pieces.counts[0]:
                return None
            position: tuple[int, ...] = (linear,) if self.rank else ()
        else:
            position = (*(0,) * (self.rank - 2), row, column)
        return Cell(row, column, self.pieces.at(position))

    def _choose(self, vertical: bool) -> list[Cell]:
        if self.rank < 2:
            return []
        limit = LINE // max(4, self.pieces.size)
        if vertical:
            cells = [cell for cell in self.cells if cell.row == 0 and cell.column < limit]
        else:
            cells = [cell for cell in self.cells if cell.column == 0 and cell.row < limit]
        return cells if len(cells) > 1 else []

    def boundary(self, one: Cell, other: Cell) -> bool:
        """Whether a tile or a period of the swizzle ends between two neighbours."""
        layout = self.pieces.layout
        if layout.swizzle != CHUNK:
            atom = layout.atom_bytes
            if one.piece.address // atom != other.piece.address // atom:
                return True
        for dim, extents in enumerate(layout.dims):
            index = other.piece.index[dim]
            reach = 1
            for extent in reversed(extents[1:]):
                reach *= extent.size
                if index != one.piece.index[dim] and index % reach == 0:
                    return True
        return False

    def notes(self) -> str:
        """What is left out."""
        shape = self.pieces.shape
        if self.rank < 2:
            total = self.pieces.layout.size
            shown = min(total, self.rows.shown * self.width * max(shape, default=1))
            return f"{shown} of {total} elements" if shown < total else ""
        parts = [
            f"{part.shown * unit} of {part.total * unit} {what}"
            for part, unit, what in (
                (self.rows, shape[-2], "rows"),
                (self.columns, shape[-1], "columns"),
            )
            if part.is_cut
        ]
        if any(extent > 1 for extent in self.pieces.layout.shape[:-2]):
            parts.insert(0, f"index {index_text((0,) * (self.rank - 2))} of the leading dimensions")
        return " and ".join(parts)
