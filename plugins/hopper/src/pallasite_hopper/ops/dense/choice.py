"""Which configurations a GEMM may have, and the best by the estimate."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError
from pallasite_hopper.ops.dense.config import MAXIMUM_STAGES, SHARED_MEMORY, MatmulConfig
from pallasite_hopper.ops.dense.cost import H200, Sizes, nanoseconds

_TILES = (  # tile_m, tile_n, consumer warpgroups, which extent they halve
    (192, 256, 2, "n"),
    (256, 192, 2, "m"),
    (128, 256, 2, "n"),
    (128, 192, 2, "m"),
    (192, 128, 2, "n"),
    (128, 128, 2, "m"),
    (128, 64, 2, "m"),
    (64, 256, 1, "m"),
    (64, 192, 1, "m"),
    (64, 128, 1, "m"),
    (64, 64, 1, "m"),
)
"""Multiples of 64 columns fill the swizzle where rows of ``b`` lie along n. Halves of 128 x 128
elements read less than those of 64 x 256."""

_LARGEST = 128 * 256
"""Elements of the tiles of the result at most of the transposed GEMM, and if the operands' elements
have not 16 bits: others have not been measured."""
_SWAPPED_TILES = (
    (64, 1, 1, 256, "m"),
    (128, 1, 1, 128, "m"),
    (128, 2, 1, 256, "m"),
    (192, 2, 48, 256, "n"),
    (256, 2, 48, 192, "m"),
)
"""tile_m, consumer warpgroups, least and most columns, which extent the warpgroups halve. Large
tiles of few columns have been no faster anywhere."""
_LEAST_COLUMNS, _MOST_COLUMNS = 24, 256
"""Of a tile of the transposed GEMM where several are needed."""
_SHARED_COLUMNS = 64
"""Of a tile at most, that two blocks share in the end: it takes shared memory for its sums."""
_IN_FLIGHT, _IN_FLIGHT_AT_ONCE = 128 << 10, 112 << 10
"""Bytes of the left operand that a block asks for ahead in the transposed GEMM, if all of its tiles
have the same columns, and where it has one tile: with more, blocks hinder each other at the memory
(measured on an H200)."""
_FEW_TILES = 16
"""If there are more of them along the rows, tiles are visited in groups."""
_LEAST_GAIN_BY_SWAP, _LEAST_GAIN_BY_COLUMNS, _MANY_COLUMNS = 0.03, 0.06, 192
"""What the transposed GEMM has to gain by the estimate where it has several tiles of columns, and
where they have many: then it takes 2.5 % more than estimated in the mean (measured on an H200)."""
_LEAST_GAIN_BY_SIZE = 0.055
"""What tiles of more than 128 x 256 elements have to: power limits them more than it estimates."""
_LEAST_GAIN_BY_ROWS = 0.02
"""What tiles of 128 rows have to where several rounds of tiles read a large operand once: those of
64 rows share it more equally."""
_DIVIDED = 6
"""So many of the best are considered with another configuration for the rest."""
_LEAST_GAIN = 0.05
"""What a second kernel has to gain by the estimate."""
_MOST_ROUNDS, _MOST_LEFT = 12, 0.7
"""Rounds of tiles, and share of the last one, for which it may."""
_LISTED = 24
"""So many are tried when tuning, besides other orders of tiles for the first."""


def default_config(sizes: Sizes) -> MatmulConfig:
    """The configuration that is used without tuning: the best by the estimate."""
    return _with_rest(sizes) or _by_estimate(sizes)[0]


@functools.lru_cache(maxsize=1024)
def _with_rest(sizes: Sizes) -> MatmulConfig | None:
    """Whole rounds of tiles, and another configuration for what is left; None if one kernel takes
    hardly more time."""
    ordered = _by_estimate(sizes)
    best, limit = None, nanoseconds(ordered[0], sizes) * (1 - _LEAST_GAIN)
    whole = (
        one
        for one in ordered
        if not one.swap and one.parts == one.split_k == 1 and one.tile_m * one.tile_n <= _LARGEST
    )
    for config in itertools.islice(whole, _DIVIDED):
        m_tiles, n_tiles = -(-sizes.m // config.step_m), -(-sizes.n // config.step_n)
        resident = H200.clusters[config.cluster]
        rounds, left = divmod(m_tiles * n_tiles, resident)
        if not rounds or rounds > _MOST_ROUNDS or left > _MOST_LEFT * resident or not left:
            continue
        for along, step, across, extent in (
            ("m", config.step_m, n_tiles, sizes.m),
            ("n", config.step_n, m_tiles, sizes.n),
        ):
            place = rounds * resident // across * step
            if not 0 < place < extent:
                continue
            if nanoseconds(config, sizes.part(along, place)) > limit:
                continue
            others = _by_estimate(sizes.part(along, extent - place))
            rest = next(one for one in others if one.parts == 1)
            both = dataclasses.replace(config, rest=rest, rest_from=place, rest_along=along)
            time = nanoseconds(both, sizes)
            if time < limit:
                best, limit = both, time
    return best


def matmul_configs(
    m: int,
    n: int,
    k: int,
    dtype: Any,
    out_dtype: Any = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> list[MatmulConfig]:
    """Candidate configurations of a GEMM, the default first.

    Args:
      m, n, k: extents of the GEMM.
      dtype: of the operands.
      out_dtype: of the result; by default ``dtype``.
      transpose_a, transpose_b: as for :func:`matmul`.
    """
    size = np.dtype(dtype).itemsize
    if size != 2:  # Read along k, whatever the order they come in.
        transpose_a, transpose_b = False, True
    out_size = np.dtype(out_dtype or dtype).itemsize
    sizes = Sizes(m, n, k, size, out_size, transpose_a, transpose_b)
    ordered = _by_estimate(sizes)
    found = [default_config(sizes), *ordered[:_LISTED]]
    if not ordered[0].swap:
        found += [
            dataclasses.replace(ordered[0], group=group, grid_minor=minor)
            for group, minor in itertools.product((4, 8, 16), ("m", "n"))
        ]
    return list(dict.fromkeys(found))


@functools.lru_cache(maxsize=1024)
def _by_estimate(sizes: Sizes) -> tuple[MatmulConfig, ...]:
    """All candidates, the best by the estimate first."""
    m, n, k, size, out_size = sizes.m, sizes.n, sizes.k, sizes.size, sizes.out_size
    found = list(_candidates(m, n, k, size, out_size))
    found += _swapped_candidates(m, n, k, size, out_size, sizes.transpose_a)
    found.sort(key=functools.partial(_rank, sizes))
    if not found:
        raise InvalidValueError(
            "no tile of this GEMM fits in shared memory",
            got=f"elements of {size} bytes, and of {out_size} bytes in the result",
            expected=f"at most {SHARED_MEMORY} bytes, see MatmulConfig.shared_bytes",
        )
    return tuple(found)


def _rank(sizes: Sizes, config: MatmulConfig) -> float:
    """The estimated time, and a little more where a configuration must be worth it."""
    several = config.swap and sizes.m > config.tile_n
    swap = _LEAST_GAIN_BY_COLUMNS if config.tile_n >= _MANY_COLUMNS else _LEAST_GAIN_BY_SWAP
    large = config.tile_m * config.tile_n > _LARGEST
    rounds = config.swap and config.tile_m > 64 and _reads_once_in_rounds(config, sizes.m, sizes.n)
    least = max(swap * several, _LEAST_GAIN_BY_SIZE * large, _LEAST_GAIN_BY_ROWS * rounds)
    return nanoseconds(config, sizes) * (1 + least)


def _reads_once_in_rounds(config: MatmulConfig, m: int, n: int) -> bool:
    """Whether the transposed GEMM reads a large operand once, in several rounds of tiles."""
    return (
        config.evict_first and m <= config.tile_n and -(-n // config.tile_m) > H200.multiprocessors
    )


def _candidates(m: int, n: int, k: int, size: int, out_size: int) -> Iterator[MatmulConfig]:
    for tile_m, tile_n, warpgroups, split in _TILES:
        if tile_m * tile_n > _LARGEST and size != 2:
            continue
        tile = MatmulConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=128 // size,
            stages=2,
            warpgroups=warpgroups,
            split=split,
            group=_group(tile_m, k * size),
            epilogue_n=8,
        )
        yield from _divided(tile, m, n, k, size, out_size)


def _swapped_candidates(
    m: int, n: int, k: int, size: int, out_size: int, transpose_a: bool
) -> Iterator[MatmulConfig]:
    for columns in _swapped_columns(m, 64 if transpose_a else 8):
        turned = -(-m // columns)
        # Of equals the first is taken: several rounds of tiles prefer deep steps.
        for (tile_m, warpgroups, least, most, split), shallow in itertools.product(
            _SWAPPED_TILES, (True, False)
        ):
            depth = 128 if shallow == (n <= tile_m * H200.multiprocessors) else 256
            if depth > 128 and columns > 32:
                continue
            across = columns if split == "m" else -(-columns // 16) * 16
            if not least <= across <= most or tile_m * across > _LARGEST:
                continue
            tile = MatmulConfig(
                swap=True,
                tile_m=tile_m,
                tile_n=across,
                tile_k=depth // size,
                stages=2,
                warpgroups=warpgroups,
                split=split,
                group=_group(tile_m, k * size) if turned > _FEW_TILES else 1,
                epilogue_n=8,
            )
            yield from _divided(tile, n, m, k, size, out_size)


def _group(tile_m: int, row: int) -> int:
    """Tiles that are visited before going on: of some 2000 rows, of fewer if these are short."""
    return (16 if row >= 8192 else 8) * 128 // max(tile_m, 128)


def _swapped_columns(m: int, multiple: int) -> list[int]:
    """Columns of the tiles of the transposed GEMM, such that hardly any are left over.

    Args:
      m: columns of all tiles together.
      multiple: what those of many tiles are multiples of, so that rows of ``a`` fill the swizzle.
    """
    needed = -(-m // 8) * 8
    found = {c for c in (needed, max(needed, 32), max(needed, 64)) if c <= 128}
    first = -(-m // _MOST_COLUMNS)
    for tiles in range(first, max(2 * first, 4) + 1):
        columns = -(-m // (multiple * tiles)) * multiple
        if _LEAST_COLUMNS <= columns < _MOST_COLUMNS:
            found.add(columns)
    return sorted(found)


def _divided(
    tile: MatmulConfig, m: int, n: int, k: int, size: int, out_size: int
) -> Iterator[MatmulConfig]:
    """A tiling with its ways to share operands or steps among blocks."""
    tiles = -(-m // tile.tile_m) * -(-n // tile.tile_n)
    k_steps = -(-k // tile.tile_k)
    multiprocessors = H200.multiprocessors
    ways: list[dict[str, Any]] = [{}]
    if tiles > 1 and not tile.swap:
        ways += [{"cluster": 2, "cluster_along": along} for along in ("m", "n")]
    if tile.swap and n > tile.tile_n:
        ways += [{"cluster": 2, "cluster_along": "n"}]
    most = min(k_steps, 2 * multiprocessors // tiles)
    ways += [{"split_k": split} for split in range(2, min(most, 8) + 1)]
    full = multiprocessors // tiles
    parts = {2, 3, 4, 5, 6, 8, full // 2, full, 2 * full}
    ways += [{"parts": part} for part in sorted(parts) if 1 < part <= min(k_steps, 2 * most)]
    left = tiles % multiprocessors
    if tile.swap and tile.tile_n <= _SHARED_COLUMNS and tiles > multiprocessors:
        ways += [{"last_parts": 2}] if 0 < 2 * left <= multiprocessors else []
    # What is read once, and is too large to stay in the cache anyway.
    once = n <= tile.tile_n and m * k * size > H200.cache
    once |= m <= tile.tile_m and n * k * size > H200.cache
    for way in ways:
        width = tile.warpgroup_n
        split, written = way.get("split_k", 1), 4 if "parts" in way else out_size
        most = min(64, 128 // written)
        fits = (e for e in (64, 32, 16, 8) if e <= most and width % (e * split) == 0)
        epilogue = min(width, most) if tile.swap and split == 1 else next(fits, None)
        if epilogue is None:
            continue
        config = dataclasses.replace(tile, epilogue_n=epilogue, evict_first=once, **way)
        config = with_most_stages(config, size, out_size)
        if tile.swap and n <= tile.tile_n:
            units = tiles * config.parts * config.split_k
            ahead = _IN_FLIGHT if units > multiprocessors else _IN_FLIGHT_AT_ONCE
            stages = max(4, ahead // (config.tile_m * config.tile_k * size))
            config = dataclasses.replace(config, stages=min(config.stages, stages))
        if config.stages >= 2:
            yield config


def with_most_stages(config: MatmulConfig, size: int, out_size: int) -> MatmulConfig:
    """A configuration with as many stages as fit shared memory; for sizes see its ``fits``."""
    stages = (SHARED_MEMORY - config.other_bytes(out_size)) // config.stage_bytes(size)
    return dataclasses.replace(config, stages=min(stages, MAXIMUM_STAGES))
