"""Which configuration ``ragged_matmul`` has: that with the least time by an estimate.

The host does not know the sizes of groups. So the time is the mean of that with equal sizes, of
those of rows that choose their groups at random, and of those that are cut at random places. The
time of given sizes is that of the block
with the most work, as long as the GEMM's estimate says for a round of tiles, and that of memory.
For 17 shapes with up to ten configurations each (an H200, 2026-11, ``benchmarks/ragged_shapes.py``)
its standard deviation is 5 %; what it chooses for known sizes takes 1 % more than the fastest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallasite_hopper.ops.dense.choice import estimated, memory_rate, this_chip
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.cost import H200, Sizes
from pallasite_hopper.ops.ragged.config import RaggedConfig, default_config
from pallasite_hopper.ops.ragged.transposed_tiles import widths_of

_EQUAL, _ROUTED, _CUTS = 2, 2, 4
"""How often equal sizes count, and how many of the others there are."""

_KINDS = (  # rows of the tile, warpgroups, least and most columns, what is halved, alternate
    (64, 1, 16, 256, "m", False),
    (128, 1, 16, 128, "m", False),
    (128, 2, 64, 256, "m", False),
    (256, 2, 48, 160, "m", False),
    (128, 2, 256, 304, "n", False),
    (192, 2, 112, 208, "n", False),
    (128, 2, 96, 192, "n", True),
    (64, 2, 192, 256, "n", True),
)
_WIDTHS = (16, 32, 48, 64, 96, 128, 144, 160, 176, 192, 208, 224, 240, 256, 288, 304)
"""Columns of tiles, besides those that divide a group of the mean size."""
_MOST_PARTS = 8

_FLAT = 0.8
"""Of the time of a whole tile, that of one with fewer rows if it is bound by what it reads: that
share of what it reads."""
_SHARED = 1.1
"""The same of a tile whose columns blocks share."""
_MEMORY, _OVERLAP = 0.91, 4.0
"""The share of the memory's rate that is reached, and the exponent of the norm that joins its time
and that of the blocks."""
_REFINED = 16
"""So many of the best by their mean work are compared by the block that has most of it, besides
those that are not of the transposed GEMM."""
_LEAST_GAIN, _MANY_TILES, _BY_MEMORY = 0.08, 4, 0.6
"""What tiles of the transposed GEMM have to gain by the estimate: of 18 shapes with groups cut at
random or equal, five that should have gained 1 to 7 % took 2 to 17 % more, one that should have
gained 2 % took 14 % less. Not if warpgroups take turns and a group has so many tiles that few are
narrow (8192x4096x4096 in 8 groups: 373 and 389 µs), nor if reading the matrices takes that share of
the time (2987x8192x8192 in 16: 609 and 730)."""
_IN_ORDER = 0.03
"""What narrow tiles in the order of all tiles have to gain, which were timed with equal sizes."""
_TURNS = ((256, False), (192, True), (128, True))
"""Columns of tiles of 128 rows, and whether warpgroups take turns: groups have few steps, so that
writing takes a tenth of the time. 384 rather than 394 µs with 192 columns by turns for 8192 rows in
8 groups and results of 4096 x 4096, 246 rather than 263 for 4096 in 16 and 2048 x 7168; with 128,
22.6 rather than 25.4 for 4096 in 8 and 1024 x 1024; but 500.6 and 495.9 for 16384 in 4 and 2048 x
5632 (an H200, 2026-11)."""
_ROUNDS = (8, 16)
"""Rounds of tiles whose difference is the time of a round."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """Products of groups of rows.

    Attributes:
      m, n, k: extents; m of all groups together.
      count: of groups.
      out_size: bytes of an element of the result.
      transpose_b: whether matrices are given as (n, k).
    """

    m: int
    n: int
    k: int
    count: int
    out_size: int
    transpose_b: bool


def chosen_config(groups: Groups, chip: str | None = None) -> RaggedConfig:
    """The configuration that is used without tuning."""
    return _chosen(groups, chip or this_chip())


@functools.lru_cache(maxsize=1024)
def _chosen(groups: Groups, chip: str) -> RaggedConfig:
    return ordered_configs(groups, chip)[0]


def best_configs(groups: Groups) -> list[RaggedConfig]:
    """What is tried when tuning: the best of each kind of tile."""
    kinds: dict[object, RaggedConfig] = {}
    for config in ordered_configs(groups, this_chip()):
        tiles = config.transposed
        if tiles is None:
            kinds.setdefault((config.tile_m, config.tile_n, config.split), config)
        else:
            kinds.setdefault((tiles.tile_m, tiles.warpgroups, tiles.split, tiles.alternate), config)
    return list(kinds.values())


@functools.lru_cache(maxsize=1024)
def chosen_transposed_config(
    rows: int, columns: int, mean: int, count: int, out_size: int, chip: str | None = None
) -> RaggedConfig:
    """The configuration of ``transposed_ragged_matmul`` that is used without tuning.

    It is the best of the tiles of ``_TURNS`` by the estimate of as many GEMMs, with as many steps
    as groups have in the mean: the fastest for four shapes of five that were timed (an H200,
    2026-11); for groups of 31 rows it takes 125 µs, and 128 x 128 by turns 114.

    Args:
      rows, columns: of a group's result.
      mean: rows of a group that are summed over.
      count: of groups.
      out_size: bytes of an element of the result.
      chip: by default that of the device.
    """
    usual = default_config(rows, columns, out_size)
    if (usual.tile_m, usual.tile_n) != (128, 256):
        return usual
    sizes = Sizes(rows, columns, max(1, mean), 2, out_size, transpose_a=True, batch=count)
    where = chip or this_chip()
    found = [
        RaggedConfig(tile_n=tile_n, split="n", alternate=alternate, epilogue_buffers=1).filled(
            out_size
        )
        for tile_n, alternate in _TURNS
    ]
    return min(found, key=lambda config: estimated(as_gemm(config), sizes, where))


def ordered_configs(groups: Groups, chip: str) -> list[RaggedConfig]:
    """Configurations, that with the least time by the estimate first."""
    mean = functools.partial(_nanoseconds, groups=groups, chip=chip, exact=False)
    roughly = sorted(dict.fromkeys(_configs(groups)), key=mean)
    near = set(roughly[:_REFINED]) | {config for config in roughly if config.transposed is None}
    first = [config for config in roughly if config in near]
    rest = [config for config in roughly if config not in near]
    return sorted(first, key=lambda config: _rank(config, groups, chip)) + rest


def _rank(config: RaggedConfig, groups: Groups, chip: str) -> float:
    time, tiles = nanoseconds(config, groups, chip), config.transposed
    if tiles is None:
        return time
    many = groups.m >= _MANY_TILES * groups.count * tiles.tile_n
    many &= tiles.alternate and config.last
    matrices = groups.n * groups.k * groups.count * 2 / memory_rate(Sizes(1, 1, 1, 2, 2), chip)
    if matrices > _BY_MEMORY * time:
        return time
    return time * (1 + _LEAST_GAIN * (not many) + _IN_ORDER * (not config.last))


def _configs(groups: Groups) -> Iterator[RaggedConfig]:
    mean = max(1, -(-groups.m // groups.count))
    usual = default_config(mean, groups.n, groups.out_size)
    yield usual
    for tile_m, tile_n, split in ((128, 128, "m"), (64, 256, "n")):
        if tile_n <= groups.n:
            plain = RaggedConfig(tile_m=tile_m, tile_n=tile_n, split=split, epilogue_buffers=1)
            yield plain.filled(groups.out_size)
    fitting = {-(-mean // (8 * parts)) * 8 for parts in range(1, _MOST_PARTS + 1)}
    for tile_m, warpgroups, least, most, split, alternate in _KINDS:
        multiple = 16 if split == "n" and not alternate else 8
        widths = {-(-width // multiple) * multiple for width in (*_WIDTHS, *fitting)}
        for width in sorted(widths):
            if least <= width <= most:
                tiles = MatmulConfig(
                    swap=True,
                    tile_m=tile_m,
                    tile_n=width,
                    stages=2,
                    warpgroups=warpgroups,
                    split=split,
                    alternate=alternate,
                    group=min(8, -(-mean // width)),
                    epilogue_n=min(32, width),
                )
                for last in (False, True):
                    config = RaggedConfig(transposed=tiles, last=last).filled(groups.out_size)
                    assert config.transposed is not None
                    if config.transposed.stages > 2:
                        yield config


@functools.lru_cache(maxsize=256)
def _spreads(rows: int, count: int) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Sizes of groups, and how often each of them counts."""
    equal = tuple((rows + group) // count for group in range(count))
    generator = np.random.default_rng(0)
    found = [(equal, _EQUAL)]
    for _ in range(_ROUTED):
        found.append((tuple(generator.multinomial(rows, [1 / count] * count).tolist()), 1))
    for _ in range(_CUTS):
        cuts = np.sort(generator.integers(0, rows + 1, count - 1))
        found.append((tuple(map(int, np.diff(cuts, prepend=0, append=rows))), 1))
    return tuple(found)


def nanoseconds(config: RaggedConfig, groups: Groups, chip: str) -> float:
    """The mean time of a configuration."""
    return _nanoseconds(config, groups, chip, exact=True)


def _nanoseconds(config: RaggedConfig, groups: Groups, chip: str, exact: bool) -> float:
    time = functools.partial(nanoseconds_of, config, groups, chip=chip, exact=exact)
    times = [(time(sizes), weight) for sizes, weight in _spreads(groups.m, groups.count)]
    return sum(time * weight for time, weight in times) / sum(weight for _, weight in times)


def nanoseconds_of(
    config: RaggedConfig,
    groups: Groups,
    sizes: tuple[int, ...],
    chip: str,
    exact: bool = True,
) -> float:
    """The time with groups of these sizes; if it need not be exact, as if all blocks had the same
    work."""
    tiles = as_gemm(config)
    each, besides = _round(tiles, groups.k, groups.out_size, groups.transpose_b, chip)
    work, again = work_of(config, groups.n, np.array(sizes), exact=exact)
    matrices = sum(size > 0 for size in sizes) + again
    read = (groups.m + groups.n * matrices) * groups.k * 2
    moved = read + groups.m * groups.n * groups.out_size
    rate = memory_rate(Sizes(1, 1, 1, 2, 2), chip) * _MEMORY
    busy, memory = each * work + besides, moved / rate
    longer, shorter = max(busy, memory), min(busy, memory)
    return longer * math.pow(1 + math.pow(shorter / longer, _OVERLAP), 1 / _OVERLAP)


@functools.lru_cache(maxsize=4096)
def _round(
    tiles: MatmulConfig, k: int, out_size: int, transpose_b: bool, chip: str
) -> tuple[float, float]:
    """Nanoseconds of a round of tiles, and of the kernel besides."""
    along, across = (tiles.tile_n, tiles.tile_m) if tiles.swap else (tiles.tile_m, tiles.tile_n)
    columns = across * H200.multiprocessors
    few, many = (
        estimated(
            tiles, Sizes(along * rounds, columns, k, 2, out_size, transpose_b=transpose_b), chip
        )
        for rounds in _ROUNDS
    )
    each = (many - few) / (_ROUNDS[1] - _ROUNDS[0])
    return each, max(0.0, few - _ROUNDS[0] * each)


def work_of(
    config: RaggedConfig,
    n: int,
    sizes: Any,
    *,
    exact: bool = True,
    blocks: int = H200.multiprocessors,
) -> tuple[float, int]:
    """The work of the block that has most of it, or the mean, in whole tiles, and how many matrices
    are read once more."""
    tiles = config.transposed
    if tiles is None:
        count = int((-(-sizes // config.tile_m)).sum()) * -(-n // config.tile_n)
        whole, left = divmod(count, blocks)
        return whole + (_last(config, left) if left else 0.0), 0
    across = tiles.tile_n // tiles.warpgroup_n
    widths = np.array(widths_of(tiles, config.widths)[::-1]) * across
    columns, full = -(-n // tiles.tile_m), sizes // tiles.tile_n
    left = sizes - full * tiles.tile_n
    fitting = widths[np.searchsorted(widths, left)]
    read = (tiles.tile_m + fitting) / (tiles.tile_m + tiles.tile_n)
    costs = np.where(left > 0, np.maximum(fitting / tiles.tile_n, _FLAT * read), 0.0)
    narrow = (left > 0) & (fitting < tiles.tile_n)
    again = int((narrow & (full > 0)).sum()) if config.last else 0
    if not exact:
        return max(1.0, float((full + costs).sum()) * columns / blocks), again
    if config.last:
        first = int((full + ((left > 0) & ~narrow)).sum()) * columns
        order = np.concatenate([np.ones(first), np.repeat(costs[narrow], columns)])
    else:
        order = np.concatenate(
            [
                _in_bands(int(count), float(cost), tiles.group, columns)
                for count, cost in zip(full, costs, strict=True)
            ]
        )
    block = np.arange(order.size) % blocks
    return float(np.bincount(block, order, blocks).max()), again


def _in_bands(full: int, cost: float, group: int, columns: int) -> Any:
    """The costs of a group's tiles in their order: so many whole ones along the rows, and one of
    this cost if it is not 0."""
    rows = np.array([1.0] * full + [cost] * (cost > 0))
    bands = [rows[start : start + group] for start in range(0, rows.size, group)]
    return np.concatenate([np.tile(band, columns) for band in bands] or [rows])


def _last(config: RaggedConfig, left: int) -> float:
    """What a block does in the last round, if so many tiles are left for it, in whole tiles."""
    shares = (
        share
        for share in (4, 2)
        if share <= config.share
        and left * share <= H200.multiprocessors
        and config.tile_n % (64 * share) == 0
    )
    share = next(shares, 1)
    if share == 1:
        return 1.0
    read = (config.tile_m + config.tile_n / share) / (config.tile_m + config.tile_n)
    return max(1 / share, _SHARED * read)


def as_gemm(config: RaggedConfig) -> MatmulConfig:
    """The GEMM's configuration with the same tiles."""
    if config.transposed is not None:
        return config.transposed
    return MatmulConfig(
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        tile_k=config.tile_k,
        stages=config.stages,
        split=config.split,
        alternate=config.alternate,
        group=config.band,
        cluster=config.cluster,
        cluster_along="n",
        epilogue_n=config.epilogue_n,
        epilogue_buffers=config.epilogue_buffers,
    )
