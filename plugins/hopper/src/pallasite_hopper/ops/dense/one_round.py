"""Skinny GEMMs, a few rows by a large matrix: one round of tiles, and a limit to loads in flight.

Such a GEMM takes as long as memory takes to deliver the matrix. That is least if all blocks have
one tile each, so that they begin and end together, and if all stages together have some 7 to 11
million bytes of the matrix in flight: with less, latency shows; with more, requests delay each
other. Measured on H100s (2026-11): some 40 matrices of 52 to 1850 MB, each with up to 26
configurations; for H200s see ``_OF_CHIP``.
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
      tiles: so many of them at least and at most, for one round of them.
    """

    rows: int
    in_flight: float
    least: int
    most: int = 8
    tiles: tuple[int, int] = (0, H200.multiprocessors)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of a chip.

    Attributes:
      short: where tiles of 128 rows are too few; up to ``_FEW_COLUMNS`` rows of the other operand.
      few: the others up to so many rows of it.
      more: those beyond.
      most_columns: rows of the other operand: with more, other configurations are faster.
      several_rounds: whether they are used where no tile makes one round.
    """

    short: _Tile
    few: tuple[_Tile, ...]
    more: tuple[_Tile, ...]
    most_columns: int
    several_rounds: bool


_H100 = _Tiles(
    short=_Tile(64, 7.3e6, 4, 10, (70, 2 * H200.multiprocessors)),
    few=(_Tile(128, 7.5e6, 4), _Tile(256, 10e6, 3), _Tile(384, 10e6, 3), _Tile(512, 10e6, 2)),
    more=(
        _Tile(128, 9e6, 5, tiles=(85, H200.multiprocessors)),
        _Tile(192, 9e6, 4),
        _Tile(256, 9e6, 4),
        _Tile(320, 9e6, 3),
        _Tile(384, 9e6, 3),
        _Tile(512, 9e6, 2),
    ),
    most_columns=256,
    several_rounds=True,
)
_H200 = _Tiles(
    short=_Tile(64, 8.2e6, 4, 10, (75, 115)),
    few=(_Tile(128, 9e6, 4, tiles=(70, 110)), _Tile(256, 11e6, 4)),
    more=(
        _Tile(128, 9e6, 5, tiles=(85, H200.multiprocessors)),
        _Tile(192, 11e6, 4),
        _Tile(256, 11e6, 4),
    ),
    most_columns=128,
    several_rounds=False,
)
_OF_CHIP = {"H100": _H100, "H200": _H200}
"""Measured on H200s (2026-11): 15 matrices of 134 to 940 MB, each with up to 20 numbers of stages,
and 130 more with these tiles and the configuration that is chosen otherwise. Where there are none,
others were as fast or faster."""
_FEW_COLUMNS = 64
_HALF_COLUMNS, _STAGES_BEYOND = 32, 4
"""With more rows of the other operand than that, tiles of 256 rows need another stage."""
_LARGEST = 128 * 320
"""Elements of a tile at most: so many sums fill the registers of two warpgroups."""
_LEAST_TILES = 70
"""Where there are fewer of 128 rows, tiles are shorter; if these are few, too, blocks have to share
the steps along k."""
_FILLED = 0.93
"""The share of several rounds that the tiles have to fill beyond ``_FEW_COLUMNS``."""
_SUFFICIENT = 4
"""Stages that suffice with these, where there is no room for those that they should have."""
_PIECE = 32
"""Columns of the epilogue at a time at most with them: more would take a stage's room."""


def one_round_config(sizes: Sizes, chip: str) -> MatmulConfig | None:
    """The configuration of few rows by a matrix that is larger than the L2 cache; None for other
    GEMMs, and where the matrix has so few columns that one round of tiles is too short.

    Args:
      sizes: of the GEMM.
      chip: ``"H100"`` or ``"H200"``.
    """
    tiles = _OF_CHIP[chip]
    large = sizes.n * sizes.k * sizes.size > H200.cache
    plain = sizes.size == 2 and not (sizes.transpose_a or sizes.transpose_b)
    if not (plain and large and 0 < sizes.m <= tiles.most_columns):
        return None
    few = sizes.m <= _FEW_COLUMNS
    tile = _few(sizes, tiles) if few else _more(sizes, tiles)
    if tile is None:
        return None
    rows, columns = tile.rows, _columns(sizes, tile)
    epilogue = min(columns, 128 // sizes.out_size)
    resident = 2 if _tiles(sizes, tile) > H200.multiprocessors and tile is tiles.short else 1
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


def _few(sizes: Sizes, tiles: _Tiles) -> _Tile | None:
    """The tile for few rows of the other operand."""
    if _tiles(sizes, tiles.few[0]) < _LEAST_TILES:
        return _if_as_many(tiles.short, sizes)
    found = _of_one_round(tiles.few, sizes)
    if found is not None or not tiles.several_rounds:
        return _if_as_many(found, sizes)
    largest = (tile for tile in tiles.few if tile.rows in (256, 512))
    return max(largest, key=lambda tile: _filled(sizes, tile))


def _more(sizes: Sizes, tiles: _Tiles) -> _Tile | None:
    """The same for more of them; None where no tile that registers hold fills its rounds."""
    held = [tile for tile in tiles.more if tile.rows * _columns(sizes, tile) <= _LARGEST]
    found = _of_one_round(tiles.more, sizes)
    if found is None and tiles.several_rounds:
        several = (tile for tile in reversed(held) if _filled(sizes, tile) >= _FILLED)
        return next(several, None)
    return _if_as_many(found, sizes) if found in held else None


def _of_one_round(tiles: tuple[_Tile, ...], sizes: Sizes) -> _Tile | None:
    """The smallest tile of which all are resident at once."""
    return next((tile for tile in tiles if _tiles(sizes, tile) <= H200.multiprocessors), None)


def _if_as_many(tile: _Tile | None, sizes: Sizes) -> _Tile | None:
    if tile is None:
        return None
    least, most = tile.tiles
    return tile if least <= _tiles(sizes, tile) <= most else None


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
