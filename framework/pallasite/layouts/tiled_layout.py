"""Register layouts written as tilings, for any shape that the tiles divide."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pallasite.layouts.construct import Replicated, Tiling, tiled
from pallasite.layouts.registers import RegisterLayout


@dataclasses.dataclass(frozen=True)
class TiledSpecification:
    """The parameters of :func:`~pallasite.layouts.construct.tiled` but for the shape."""

    tiling: Tiling
    warp_dims: tuple[int | Replicated, ...]
    lane_dims: tuple[int | Replicated, ...]
    vector_dim: int = -1

    def layout(self, shape: Sequence[int]) -> RegisterLayout:
        """The layout for a shape whose trailing extents are multiples of the first tile.

        Raises:
          InvalidValueError: the shape does not fit.
        """
        return tiled(shape, self.tiling, self.warp_dims, self.lane_dims, self.vector_dim)

    @property
    def base_tile(self) -> tuple[int, ...]:
        """The shape of which trailing extents must be multiples."""
        return self.tiling.tiles[0]


def tiled_specification(
    tiles: tuple[tuple[int, ...], ...],
    warp_dims: tuple[int | Replicated, ...],
    lane_dims: tuple[int | Replicated, ...],
    vector_dim: int = -1,
) -> TiledSpecification:
    """A specification whose tiling is given by its tiles, outermost first."""
    return TiledSpecification(Tiling(tiles), warp_dims, lane_dims, vector_dim)


def fragment_tiles(rows: int, columns: int, *minor: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The tiles of matrix fragments: ``rows`` / 4 rows for each warp, matrices of 8 rows."""
    return ((rows, columns), (rows // 4, columns), (8, columns), *minor)
