"""Skinny GEMMs, a few rows by a large matrix: one round of tiles, and a limit to loads in flight.

Such a GEMM takes as long as memory takes to deliver the matrix. That is least if all blocks have
one tile each, so that they begin and end together, and if all stages together have about
``IN_FLIGHT`` bytes in flight: with less, latency shows; with more, requests delay each other.
"""

from __future__ import annotations

import dataclasses
import math

from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.cost import H200, Sizes

IN_FLIGHT = 10e6
"""Bytes of the matrix that all blocks together have in flight. Measured on an H100 (2026-11): of 12
matrices of 117 to 1850 MB, each with up to six numbers of stages, the best had 8 to 15 million."""

_ROWS = (128, 256, 384, 512)
"""Rows of the tiles of the matrix."""
_LEAST_TILES = 70
"""Where there are fewer of 128 rows, blocks have to share the steps along k."""
_LEAST_STAGES = {128: 4, 256: 3, 384: 3, 512: 2}
"""By the rows of the tiles."""
_MOST_STAGES = 8
_MOST_COLUMNS = 64
"""Rows of the other operand at most: with more, multiplying takes as long as reading."""
_FEW_COLUMNS, _STAGES_BEYOND = 32, 4
"""With more rows of the other operand than that, tiles of 128 rows are no faster than others, and
those of 256 rows need another stage."""


def one_round_config(sizes: Sizes) -> MatmulConfig | None:
    """The configuration of few rows by a matrix that is larger than the L2 cache; None for other
    GEMMs, and where the matrix has so few columns that one round of tiles is too short."""
    across = -(-sizes.n // _ROWS[0])
    large = sizes.n * sizes.k * sizes.size > H200.cache
    plain = sizes.size == 2 and not (sizes.transpose_a or sizes.transpose_b)
    if not (plain and large and 0 < sizes.m <= _MOST_COLUMNS and across >= _LEAST_TILES):
        return None
    rows = next((one for one in _ROWS if _tiles(sizes, one) <= H200.multiprocessors), None)
    if rows is None:
        rows = max((256, 512), key=lambda one: _filled(_tiles(sizes, one)))
    if sizes.m > _FEW_COLUMNS and rows == _ROWS[0]:
        return None
    columns = -(-sizes.m // 8) * 8
    config = MatmulConfig(
        swap=True,
        tile_m=rows,
        tile_n=columns,
        tile_k=128 // sizes.size,
        stages=2,
        split="m",
        group=1,
        warpgroups=1 if rows == _ROWS[0] else 2,
        epilogue_n=min(columns, 128 // sizes.out_size),
        evict_first=True,
    )
    blocks = min(_tiles(sizes, rows), H200.multiprocessors)
    wanted = round(IN_FLIGHT / (blocks * rows * config.tile_k * sizes.size))
    room = (config.shared_limit - config.staging_bytes(sizes.out_size)) // config.stage_bytes(
        sizes.size
    )
    least = _LEAST_STAGES[rows]
    if sizes.m > _FEW_COLUMNS and rows == 256:
        least = _STAGES_BEYOND
    stages = min(max(wanted, least), _MOST_STAGES, room)
    return dataclasses.replace(config, stages=stages) if stages >= 2 else None


def _tiles(sizes: Sizes, rows: int) -> int:
    return -(-sizes.n // rows)


def _filled(tiles: int) -> float:
    """The share of its rounds that so many tiles fill."""
    rounds = math.ceil(tiles / H200.multiprocessors)
    return tiles / (rounds * H200.multiprocessors)
