"""Skinny GEMMs, a few rows by a large matrix: one round of tiles, and a limit to loads in flight.

Such a GEMM takes as long as memory takes to deliver the matrix. That is least if all blocks have
one tile each, so that they begin and end together, and if all stages together have some 7 to 11
million bytes of the matrix in flight: with less, latency shows; with more, requests delay each
other. Measured on H100s (2026-11): some 40 matrices of 52 to 1850 MB, each with up to 26
configurations.
"""

from __future__ import annotations

import dataclasses
import math

from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.cost import H200, Sizes


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A tile of the matrix.

    Attributes:
      rows: of the tile; all rows of the other operand are its columns.
      in_flight: bytes of the matrix that all blocks together have in flight.
      least, most: stages.
    """

    rows: int
    in_flight: float
    least: int
    most: int = 8


_FEW_COLUMNS = 64
"""Rows of the other operand up to which ``_FEW`` are the tiles, beyond it ``_MORE``."""
_FEW = (
    _Tile(128, 7.5e6, 4),
    _Tile(256, 10e6, 3),
    _Tile(384, 10e6, 3),
    _Tile(512, 10e6, 2),
)
_HALF_COLUMNS, _STAGES_BEYOND = 32, 4
"""With more rows of the other operand than that, tiles of 256 rows need another stage."""
_SHORT = _Tile(64, 7.3e6, 4, 10)
"""Where tiles of 128 rows are too few."""
_MORE = (
    _Tile(128, 9e6, 5),
    _Tile(192, 9e6, 4),
    _Tile(256, 9e6, 4),
    _Tile(320, 9e6, 3),
    _Tile(384, 9e6, 3),
    _Tile(512, 9e6, 2),
)
_MOST_COLUMNS = 256
"""Rows of the other operand: with more, multiplying takes as long as reading."""
_LARGEST = 128 * 320
"""Elements of a tile at most: so many sums fill the registers of two warpgroups."""
_LEAST_TILES = 70
"""Where there are fewer of the smallest ones, blocks have to share the steps along k."""
_MANY_COLUMNS, _MANY_LEAST_TILES = 128, 85
"""With more rows of the other operand than that, fewer tiles take longer to multiply."""
_FILLED = 0.93
"""The share of several rounds that the tiles of ``_MORE`` have to fill."""
_SUFFICIENT = 4
"""Stages that suffice with these, where there is no room for those that they should have."""
_PIECE = 32
"""Columns of the epilogue at a time at most with them: more would take a stage's room."""


def one_round_config(sizes: Sizes) -> MatmulConfig | None:
    """The configuration of few rows by a matrix that is larger than the L2 cache; None for other
    GEMMs, and where the matrix has so few columns that one round of tiles is too short."""
    large = sizes.n * sizes.k * sizes.size > H200.cache
    plain = sizes.size == 2 and not (sizes.transpose_a or sizes.transpose_b)
    if not (plain and large and 0 < sizes.m <= _MOST_COLUMNS):
        return None
    few = sizes.m <= _FEW_COLUMNS
    tile = _few(sizes) if few else _more(sizes)
    if tile is None:
        return None
    rows, columns = tile.rows, _columns(sizes, tile)
    epilogue = min(columns, 128 // sizes.out_size)
    resident = 2 if _tiles(sizes, tile) > H200.multiprocessors and tile is _SHORT else 1
    config = MatmulConfig(
        swap=True,
        tile_m=rows,
        tile_n=columns,
        tile_k=128 // sizes.size,
        stages=2,
        split="n" if _halves_columns(tile) else "m",
        group=1,
        warpgroups=1 if rows <= 128 and rows * columns <= 128 * 128 else 2,
        epilogue_n=epilogue if few else min(epilogue, _PIECE),
        resident=resident,
        evict_first=True,
    )
    blocks = min(_tiles(sizes, tile), H200.multiprocessors * resident)
    wanted = round(tile.in_flight / (blocks * rows * config.tile_k * sizes.size))
    least = tile.least
    if few and sizes.m > _HALF_COLUMNS and rows == 256:
        least = _STAGES_BEYOND
    room = config.shared_limit - config.staging_bytes(sizes.out_size)
    stages = min(max(wanted, least), tile.most, room // config.stage_bytes(sizes.size))
    if stages < (2 if few else min(least, _SUFFICIENT)):
        return None
    return dataclasses.replace(config, stages=stages)


def _few(sizes: Sizes) -> _Tile | None:
    """The tile for few rows of the other operand."""
    if _tiles(sizes, _FEW[0]) < _LEAST_TILES:
        return _SHORT if _tiles(sizes, _SHORT) >= _LEAST_TILES else None
    one = (tile for tile in _FEW if _tiles(sizes, tile) <= H200.multiprocessors)
    largest = (tile for tile in _FEW if tile.rows in (256, 512))
    return next(one, None) or max(largest, key=lambda tile: _filled(sizes, tile))


def _more(sizes: Sizes) -> _Tile | None:
    """The same for more of them; None where no tile that registers hold fills its rounds."""
    least = _LEAST_TILES if sizes.m <= _MANY_COLUMNS else _MANY_LEAST_TILES
    held = [tile for tile in _MORE if tile.rows * _columns(sizes, tile) <= _LARGEST]
    one = (tile for tile in _MORE if _tiles(sizes, tile) <= H200.multiprocessors)
    found = next(one, None)
    if found is not None and _tiles(sizes, found) < least:
        return None
    if found is None:
        several = (tile for tile in reversed(held) if _filled(sizes, tile) >= _FILLED)
        found = next(several, None)
    return found if found in held else None


def _halves_columns(tile: _Tile) -> bool:
    """Whether two warpgroups halve the columns of a tile, since they cannot halve its rows."""
    return tile.rows > 128 and tile.rows % 128 != 0


def _columns(sizes: Sizes, tile: _Tile) -> int:
    multiple = 16 if _halves_columns(tile) else 8
    return -(-sizes.m // multiple) * multiple


def _tiles(sizes: Sizes, tile: _Tile) -> int:
    return -(-sizes.n // tile.rows)


def _filled(sizes: Sizes, tile: _Tile) -> float:
    """The share of their rounds that tiles fill."""
    tiles = _tiles(sizes, tile)
    rounds = math.ceil(tiles / H200.multiprocessors)
    return tiles / (rounds * H200.multiprocessors)
