"""The configurations among which a GEMM's is chosen."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator
from typing import Any

from pallasite_hopper.ops.dense.config import MAXIMUM_STAGES, MatmulConfig
from pallasite_hopper.ops.dense.cost import H200, SECTOR, Sizes, visited

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

_ALTERNATE_TILES = ((128, 192), (128, 128), (64, 256))
"""Of two warpgroups that take turns."""
_ALTERNATE_COLUMNS = {128: (96, 192), 192: (64, 112), 64: (192, 256)}
"""Columns of such tiles of the transposed GEMM, at least and at most, by their rows."""

LARGEST = 128 * 256
"""Elements of the tiles of the result at most of the transposed GEMM, and if the operands' elements
have not 16 bits: others have not been measured."""
_SWAPPED_TILES = (
    (64, 1, 1, 256, "m"),
    (128, 1, 1, 128, "m"),
    (128, 2, 1, 256, "m"),
    (192, 2, 48, 256, "n"),
    (256, 2, 48, 192, "m"),
    (192, 1, 32, 112, "m"),
)
"""tile_m, consumer warpgroups, least and most columns, which extent the warpgroups halve. Large
tiles of two warpgroups and few columns have been no faster anywhere."""
_ROWS = (64, 128, 192, 256)
"""That tiles of the transposed GEMM have."""
_LARGER_TILES = (
    (128, 264, 304, "n"),
    (192, 176, 208, "n"),
    (256, 136, 160, "m"),
    (320, 48, 128, "n"),
)
"""Rows of tiles of the transposed GEMM, of more than 128 x 256 elements or of more rows, least and
most columns, which extent the warpgroups halve."""
_LEAST_COLUMNS, _MOST_COLUMNS = 24, 256
"""Of a tile of the transposed GEMM where several are needed."""
_SHARED_COLUMNS = 64
"""Of a tile at most, that two blocks share in the end: it takes shared memory for its sums."""
_IN_FLIGHT, _IN_FLIGHT_AT_ONCE = 128 << 10, 112 << 10
"""Bytes of the left operand that a block asks for ahead in the transposed GEMM, if all of its tiles
have the same columns, and where it has one tile: with more, blocks hinder each other at the memory
(measured on an H200)."""
_ALL_IN_FLIGHT, _FEW_BYTES = 22e6, 32e6
"""Bytes of both operands that all blocks of small tiles ask for ahead, if each has one tile, that
do not delay each other on an H100, and of operands of which that matters: see ``asks_for_much``."""
_LEAST_UNITS, _LEAST_FILLINGS = 88, 3
"""Blocks, and times that a stage is filled, from which on that counts: fewer have not been
measured."""
_MOST_SHARED = 4
"""Blocks at most that share a tile and write sums where stages were."""
_FROM_WHICH_COLUMNS_WAIT = 128 * 128
"""Elements of a tile from which on its columns are better written one after the other, in shared
memory of their own (measured on an H200)."""
DEEPEST = 24
"""Stages at most of configurations that are measured to see whether more would be faster."""
_SMALL = 128 * 64
"""Elements of a tile at most whose sums leave registers for other blocks."""
_FEW_STAGES = 5
"""So few that a further one is worth more than columns of the epilogue at a time."""
_GROUPS = (1, 2, 4, 8, 16)
_FEW_TILES, _FEWER_READ = 16, 0.87
"""Where tiles are visited in whole lines of at most so many, that counts like fewer bytes read."""
_READ_MORE = 1.12
"""How much more may be read in common for larger groups, whose operands come from memory less often
(all measured on an H200: other orders of small tiles take up to half as much time more)."""


def candidates(sizes: Sizes) -> Iterator[MatmulConfig]:
    """The configurations that the estimate of the time has been fitted to, in no order."""
    for config in _with_most_depth(sizes):
        yield config
        if asks_for_much(config, sizes):
            yield _shallower(config, sizes)


def _with_most_depth(sizes: Sizes) -> Iterator[MatmulConfig]:
    """The same, with as many stages as a block may ask for."""
    for tile, across in _tiles(sizes):
        for config in _divided(tile, *across, sizes):
            if config.swap and sizes.size == 2 and config.stages <= _FEW_STAGES:
                yield from _with_narrow_epilogue(config, sizes)
            yield config
        yield from _shared(tile, *across, sizes)
    for tile, across in _alternate_tiles(sizes):
        for config in _alternate(tile, *across, sizes):
            yield from (*_with_narrow_epilogue(config, sizes), config)
    for tile, across in _larger_tiles(sizes):
        for config in _divided(tile, *across, sizes):
            ways = [*_with_narrow_epilogue(config, sizes), config]
            yield from ways
            there = _in_stages(max(ways, key=lambda way: way.stages), sizes)
            if sizes.m > tile.tile_n and there is not None:
                yield there


def further_candidates(sizes: Sizes) -> Iterator[MatmulConfig]:
    """Others, which only measuring can choose: how long they take is not known."""
    for tile, (m, n) in _tiles(sizes):
        m_tiles, n_tiles = -(-m // tile.tile_m), -(-n // tile.tile_n)
        for way in _larger_clusters(tile, m_tiles, n_tiles):
            config = _completed(tile, way, m, n, sizes)
            config = None if config is None else _with_stages(config, m_tiles * n_tiles, n, sizes)
            if config is not None:
                yield config
    yield from _several_resident(sizes)
    for tile, (m, n) in (*_alternate_tiles(sizes), *_larger_tiles(sizes)):
        tiles = -(-m // tile.tile_m) * -(-n // tile.tile_n)
        if not tile.swap or m <= tile.tile_m or (tile.alternate and tiles <= H200.multiprocessors):
            continue
        config = _completed(tile, {"cluster": 2, "cluster_along": "m"}, m, n, sizes)
        config = None if config is None else _with_stages(config, tiles, n, sizes)
        if config is not None:
            yield from (*_with_narrow_epilogue(config, sizes), config)


def _several_resident(sizes: Sizes) -> Iterator[MatmulConfig]:
    """Small tiles of blocks of which a multiprocessor has several at a time."""
    for tile, (m, n) in _tiles(sizes):
        tiles = -(-m // tile.tile_m) * -(-n // tile.tile_n)
        small = tile.warpgroups == 1 and tile.tile_m * tile.tile_n <= _SMALL
        for resident in (2, 3):
            if small and tiles > H200.multiprocessors and sizes.size == 2:
                config = _completed(tile, {"resident": resident}, m, n, sizes)
                config = None if config is None else _with_stages(config, tiles, n, sizes)
                if config is not None and config.stages > 2:
                    yield config


def deeper(config: MatmulConfig, sizes: Sizes) -> Iterator[MatmulConfig]:
    """A configuration with other numbers of stages, and with columns that are written where the
    stages were, if each block has one tile: none that is chosen without measuring."""
    m, n = (sizes.n, sizes.m) if config.swap else (sizes.m, sizes.n)
    tiles = -(-m // config.tile_m) * -(-n // config.tile_n)
    ways = [config.changed(epilogue_in_stages=False)]
    if _may_end_in_stages(config, sizes):
        ways += [config.changed(epilogue_in_stages=True)]
    for way in ways:
        for limited, most in ((True, MAXIMUM_STAGES), (True, DEEPEST), (False, DEEPEST)):
            found = with_most_stages(way, sizes.size, sizes.out_size, most=most)
            if limited:
                found = _limited(found, tiles, n, sizes)
            if found.stages >= 2 and found.fits(sizes.size, sizes.out_size):
                yield found


def _may_end_in_stages(config: MatmulConfig, sizes: Sizes) -> bool:
    """Whether each block has one tile, whose columns may be written where the stages were."""
    m, n = (sizes.n, sizes.m) if config.swap else (sizes.m, sizes.n)
    clusters = -(-m // config.step_m) * -(-n // config.step_n) * config.parts
    once = clusters <= H200.clusters[config.cluster_blocks * config.split_k]
    several = config.alternate or config.last_parts > 1 or config.rest is not None
    several |= sizes.batch > 1
    return once and not several and not config.sums_in_stages(sizes.size, sizes.out_size)


def _larger_clusters(tile: MatmulConfig, m_tiles: int, n_tiles: int) -> Iterator[dict[str, Any]]:
    """Ways to share operands among more blocks, or also by those that have parts of k."""
    ways = [(cluster, "m", 1) for cluster in (2, 4) if tile.swap]
    ways += [(4, "n", 1), (2, "m", 2), (4, "m", 2), (2, "m", 4)]
    for cluster, along, across in ways:
        along_m, along_n = (cluster, across) if along == "m" else (across, cluster)
        if not (m_tiles >= along_m and n_tiles >= along_n and tile.swap):
            continue
        tiles = -(-m_tiles // along_m) * -(-n_tiles // along_n)
        way = {"cluster": cluster, "cluster_along": along, "cluster_across": across}
        if max(cluster, across) == 2 or tiles <= H200.clusters[cluster * across]:
            yield way
    for along in ("m", "n"):
        several = (m_tiles if along == "m" else n_tiles) > 1
        tiles = (-(-m_tiles // 2) * n_tiles) if along == "m" else m_tiles * -(-n_tiles // 2)
        for parts in (2, 3, 4):
            if several and tiles * parts <= 2 * H200.clusters[2]:
                yield {"cluster": 2, "cluster_along": along, "parts": parts}


def _tiles(sizes: Sizes) -> Iterator[tuple[MatmulConfig, tuple[int, int]]]:
    """Tilings, and the extents of the GEMM along the tiles' rows and columns."""
    m, n, size = sizes.m, sizes.n, sizes.size
    for tile_m, tile_n, warpgroups, split in _TILES:
        if tile_m * tile_n > LARGEST and size != 2:
            continue
        tile = MatmulConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            tile_k=128 // size,
            stages=2,
            warpgroups=warpgroups,
            split=split,
            epilogue_n=8,
        )
        yield tile, (m, n)
    for columns, rows in _swapped_columns(sizes):
        # Of equals the first is taken: tiles of 64 rows prefer deep steps, several rounds of 128
        # too.
        for (tile_m, warpgroups, least, most, split), shallow in itertools.product(
            _SWAPPED_TILES, (True, False)
        ):
            deep = tile_m == 64 or (tile_m == 128 and n > tile_m * H200.multiprocessors)
            depth = 256 if shallow == deep else 128
            if tile_m not in rows or (depth > 128 and columns > 32):
                continue
            across = columns if split == "m" else -(-columns // 16) * 16
            if not least <= across <= most or tile_m * across > LARGEST:
                continue
            tile = MatmulConfig(
                swap=True,
                tile_m=tile_m,
                tile_n=across,
                tile_k=depth // size,
                stages=2,
                warpgroups=warpgroups,
                split=split,
                epilogue_n=8,
            )
            yield tile, (n, m)


def _larger_tiles(sizes: Sizes) -> Iterator[tuple[MatmulConfig, tuple[int, int]]]:
    """The same of the transposed GEMM, as large as registers allow; where rows of a lie along m, a
    multiple of 64 columns fills each half of a tile."""
    if sizes.size != 2:
        return
    m, n = sizes.m, sizes.n
    for tile_m, least, most, split in _LARGER_TILES:
        multiple = 16 if split == "n" else 8
        across = -(-n // tile_m)
        counts = {rounds * H200.multiprocessors // across for rounds in (1, 2, 3, 4)}
        counts |= {-(-m // most), -(-m // most) + 1, -(-m // least)}
        widths = {-(-m // (multiple * count)) * multiple for count in counts if count}
        if sizes.transpose_a:
            widths = {128 if split == "n" else 64}
        for columns in sorted(widths):
            if least <= columns <= most:
                tile = MatmulConfig(
                    swap=True, tile_m=tile_m, tile_n=columns, tile_k=64, stages=2, split=split,
                    epilogue_n=8,
                )  # fmt: skip
                yield tile, (n, m)


def _alternate_tiles(sizes: Sizes) -> Iterator[tuple[MatmulConfig, tuple[int, int]]]:
    """The same of two warpgroups that take turns."""
    m, n = sizes.m, sizes.n
    usual = MatmulConfig(
        tile_n=64, tile_k=128 // sizes.size, stages=2, alternate=True, epilogue_n=8
    )
    for tile_m, tile_n in _ALTERNATE_TILES:
        yield usual.changed(tile_m=tile_m, tile_n=tile_n), (m, n)
    for columns, rows in _swapped_columns(sizes):
        for tile_m, (least, most) in _ALTERNATE_COLUMNS.items():
            if tile_m in rows and least <= columns <= most:
                tile = usual.changed(swap=True, tile_m=tile_m, tile_n=columns)
                yield tile, (n, m)


def _group(tile: MatmulConfig, way: dict[str, Any], m: int, n: int) -> int:
    """So many tiles are visited before going on: multiprocessors near each other then have tiles
    that share operands."""
    across: int = way.get("cluster_across", 1)
    cluster = way.get("cluster", 1) * across
    along_m = cluster // across if way.get("cluster_along") == "m" else across
    step_m, step_n = tile.tile_m * along_m, tile.tile_n * cluster // along_m
    return _group_of(step_m, step_n, cluster * way.get("split_k", 1), m, n)


@functools.lru_cache(maxsize=1024)
def _group_of(step_m: int, step_n: int, blocks: int, m: int, n: int) -> int:
    """The same, of what a cluster computes at a time and of blocks that share it."""
    m_tiles, n_tiles = -(-m // step_m), -(-n // step_n)
    if n_tiles == 1:
        return 1
    near = max(1, min(H200.near // blocks, m_tiles * n_tiles))

    def read(group: int) -> float:
        rows, columns = visited(near, group, m_tiles, n_tiles)
        return float(rows * step_m + columns * step_n)

    each = {group: read(group) for group in _GROUPS}
    least = min(each.values())
    lines = [1] * (n_tiles <= _FEW_TILES) + [_FEW_TILES] * (m_tiles <= _FEW_TILES)
    line = min(lines, key=each.__getitem__, default=0)
    if line and each[line] * _FEWER_READ <= least:
        return line
    group = max(group for group in _GROUPS if each[group] <= _READ_MORE * least)
    # The last group has as many tiles as the others, or nearly: a narrow one reads much and
    # multiplies little (9 rows of tiles by 8 and 1 take 10 % more time than by 5 and 4).
    return -(-m_tiles // -(-m_tiles // group))


def _swapped_columns(sizes: Sizes) -> list[tuple[int, Collection[int]]]:
    """Columns of the tiles of the transposed GEMM, such that hardly any are left over, and the rows
    that such tiles may have."""
    filling = _filling_columns(sizes)
    every = {**filling, **dict.fromkeys(usual_columns(sizes), _ROWS)}
    return sorted(every.items())


@functools.lru_cache(maxsize=64)
def usual_columns(sizes: Sizes) -> frozenset[int]:
    """Those of few tiles: at most twice as many as there must be."""
    m, multiple = sizes.m, _columns_multiple(sizes)
    needed = -(-m // 8) * 8
    found = {c for c in (needed, max(needed, 32), max(needed, 64)) if c <= 128}
    first = -(-m // _MOST_COLUMNS)
    for tiles in range(first, max(2 * first, 4) + 1):
        columns = -(-m // (multiple * tiles)) * multiple
        if _LEAST_COLUMNS <= columns < _MOST_COLUMNS:
            found.add(columns)
    return frozenset(found)


def _filling_columns(sizes: Sizes) -> dict[int, set[int]]:
    """Those of as many tiles as fill one round or two, with the rows of which they do."""
    m, multiple = sizes.m, _columns_multiple(sizes)
    found: dict[int, set[int]] = {}
    for rows, rounds in itertools.product(_ROWS, (1, 2)):
        tiles = rounds * H200.multiprocessors // -(-sizes.n // rows)
        columns = -(-m // (multiple * max(tiles, 1))) * multiple
        if _LEAST_COLUMNS <= columns < _MOST_COLUMNS:
            found.setdefault(columns, set()).add(rows)
    return found


def _columns_multiple(sizes: Sizes) -> int:
    """Of many tiles, multiples of 64, so that rows of ``a`` that lie along m fill the swizzle."""
    return 64 if sizes.transpose_a else 8


def _divided(tile: MatmulConfig, m: int, n: int, sizes: Sizes) -> Iterator[MatmulConfig]:
    """A tiling with its ways to share operands or steps among blocks."""
    tiles = -(-m // tile.tile_m) * -(-n // tile.tile_n)
    k_steps = -(-sizes.k // tile.tile_k)
    multiprocessors = H200.multiprocessors
    most = min(k_steps, 2 * multiprocessors // tiles)
    ways: list[dict[str, Any]] = [{}, *_clusters(tile, tiles, m, n, sizes)]
    ways += [{"split_k": split} for split in range(2, min(most, 8) + 1)]
    full = multiprocessors // tiles
    parts = {2, 3, 4, 5, 6, 8, full // 2, full, 2 * full}
    ways += [{"parts": part} for part in sorted(parts) if 1 < part <= min(k_steps, 2 * most)]
    if tile.swap and tile.tile_n <= _SHARED_COLUMNS and _leaves_few(tiles):
        ways += [{"last_parts": 2}]
    for way in ways:
        config = _completed(tile, way, m, n, sizes)
        config = None if config is None else _with_stages(config, tiles, n, sizes)
        if config is not None:
            yield config


def _shared(tile: MatmulConfig, m: int, n: int, sizes: Sizes) -> Iterator[MatmulConfig]:
    """A tiling with ways to share steps whose sums come where the stages were, or of last tiles
    whose columns blocks share."""
    tiles = -(-m // tile.tile_m) * -(-n // tile.tile_n)
    most = min(-(-sizes.k // tile.tile_k), H200.multiprocessors // tiles, _MOST_SHARED)
    ways: list[dict[str, Any]] = [{"split_k": split} for split in range(2, most + 1)]
    if _leaves_few(tiles):
        ways += [{"last_parts": 2}]
    for way in ways:
        config = _completed(tile, way, m, n, sizes)
        if config is None or (config.last_parts > 1 and not config.exchanges_last):
            continue
        apart = _with_stages(config, tiles, n, sizes)
        if apart is not None and config.last_parts > 1:
            yield apart
        over = _with_stages(config, tiles, n, sizes, over_sums=True)
        if over is not None and (apart is None or over.stages > apart.stages):
            yield over


def _alternate(tile: MatmulConfig, m: int, n: int, sizes: Sizes) -> Iterator[MatmulConfig]:
    """A tiling of warpgroups that take turns, where each block has several tiles."""
    tiles = -(-m // tile.tile_m) * -(-n // tile.tile_n)
    if tiles <= H200.multiprocessors:
        return
    for way in [{}, *_clusters(tile, tiles, m, n, sizes)]:
        config = _completed(tile, way, m, n, sizes)
        config = None if config is None else _with_stages(config, tiles, n, sizes)
        if config is not None:
            yield config


def _clusters(tile: MatmulConfig, tiles: int, m: int, n: int, sizes: Sizes) -> list[dict[str, Any]]:
    """Ways to share operands."""
    if tiles > 1 and not tile.swap:
        return [{"cluster": 2, "cluster_along": along} for along in ("m", "n")]
    # Blocks along m share rows of a, which pays where the L2 cache reads them in more parts.
    parts = not sizes.transpose_a and sizes.k * sizes.size % SECTOR > 0
    along = "n" * (n > tile.tile_n) + "m" * (m > tile.tile_m and parts)
    return [{"cluster": 2, "cluster_along": one} for one in along if tile.swap]


def _leaves_few(tiles: int) -> bool:
    """Whether whole rounds leave tiles, at most half as many as there are multiprocessors."""
    left = tiles % H200.multiprocessors
    return tiles > H200.multiprocessors and 0 < 2 * left <= H200.multiprocessors


def _completed(
    tile: MatmulConfig, way: dict[str, Any], m: int, n: int, sizes: Sizes
) -> MatmulConfig | None:
    """A tiling with a way to share and its epilogue; None if no epilogue divides the columns."""
    # What is read once, and is too large to stay in the cache anyway.
    once = n <= tile.tile_n and m * sizes.k * sizes.size > H200.cache
    once |= m <= tile.tile_m and n * sizes.k * sizes.size > H200.cache
    width = tile.warpgroup_n
    split, written = way.get("split_k", 1), 4 if "parts" in way else sizes.out_size
    most = min(64, 128 // written)
    fits = (e for e in (64, 32, 16, 8) if e <= most and width % (e * split) == 0)
    epilogue = min(width, most) if tile.swap and split == 1 else next(fits, None)
    if epilogue is None:
        return None
    group = _group(tile, way, m, n)
    return tile.changed(epilogue_n=epilogue, evict_first=once, group=group, **way)


def _with_stages(
    config: MatmulConfig, tiles: int, n: int, sizes: Sizes, *, over_sums: bool = False
) -> MatmulConfig | None:
    """A configuration with as many stages as are of use; None if there is room for one only."""
    config = with_most_stages(config, sizes.size, sizes.out_size, over_sums=over_sums)
    config = _limited(config, tiles, n, sizes)
    if config.stages < 2:
        return None
    several = config.warpgroup_n > config.epilogue_n
    small = config.tile_m * config.tile_n < _FROM_WHICH_COLUMNS_WAIT and sizes.size == 2
    shared = config.cluster_blocks * config.split_k > 1
    if several and small and not shared and _may_end_in_stages(config, sizes):
        there = config.changed(epilogue_in_stages=True)
        return there if there.fits(sizes.size, sizes.out_size) else config
    return config


def _limited(config: MatmulConfig, tiles: int, n: int, sizes: Sizes) -> MatmulConfig:
    """A configuration with no more stages than memory can keep filled."""
    if config.swap and n <= config.tile_n:
        units = tiles * config.parts * config.split_k
        ahead = _IN_FLIGHT if units > H200.multiprocessors else _IN_FLIGHT_AT_ONCE
        stages = max(4, ahead // (config.tile_m * config.tile_k * sizes.size))
        if stages < config.stages:
            config = config.changed(stages=stages)
    return config


def asks_for_much(config: MatmulConfig, sizes: Sizes) -> bool:
    """Whether blocks of small tiles, which share small operands, ask for so many bytes ahead that
    requests delay each other on an H100, by up to a third (2026-11: tiles of 64 x 80 elements for
    449x1280x5120; some other shapes are not slower). An H200 gains nothing by fewer stages, nor
    were parts of k slower."""
    large = config.tile_m * config.tile_n > _FROM_WHICH_COLUMNS_WAIT
    shared = config.cluster * config.parts * config.split_k * sizes.batch > 1
    if not config.swap or large or shared or sizes.size != 2 or config.stages <= _FEW_STAGES:
        return False
    tiles = _swapped_tiles(config, sizes)
    short = -(-sizes.k // config.tile_k) < _LEAST_FILLINGS * config.stages
    short |= (sizes.m + sizes.n) * sizes.k * sizes.size > _FEW_BYTES
    once = _LEAST_UNITS <= tiles <= H200.multiprocessors
    in_flight = tiles * config.stages * config.stage_bytes(sizes.size)
    return once and not short and in_flight > _ALL_IN_FLIGHT


def _shallower(config: MatmulConfig, sizes: Sizes) -> MatmulConfig:
    """The same configuration with as many stages as do not."""
    step = _swapped_tiles(config, sizes) * config.stage_bytes(sizes.size)
    return config.changed(stages=max(_FEW_STAGES, int(_ALL_IN_FLIGHT / step)))


def _swapped_tiles(config: MatmulConfig, sizes: Sizes) -> int:
    """Tiles of the transposed GEMM."""
    return -(-sizes.n // config.tile_m) * -(-sizes.m // config.tile_n)


def _with_narrow_epilogue(config: MatmulConfig, sizes: Sizes) -> Iterator[MatmulConfig]:
    """The same with columns of the epilogue that leave room for a further stage, if they do; in the
    stages, where one tile of each block has all columns of the result."""
    there = None
    if config.swap and sizes.m <= config.tile_n and sizes.size == 2:
        there = _in_stages(config, sizes)
    if there is not None:
        yield there
        return
    for epilogue in (32, 16):
        if config.parts == config.split_k == 1 and epilogue < config.epilogue_n:
            narrow = config.changed(epilogue_n=epilogue)
            narrow = with_most_stages(narrow, sizes.size, sizes.out_size)
            if narrow.stages > config.stages:
                yield narrow
                return


def _in_stages(config: MatmulConfig, sizes: Sizes) -> MatmulConfig | None:
    """The same with columns that are written where the stages were, if that leaves room for a
    further stage."""
    shared = config.cluster_blocks * config.split_k * config.parts > 1
    if shared or not _may_end_in_stages(config, sizes):
        return None
    there = config.changed(epilogue_in_stages=True)
    there = with_most_stages(there, sizes.size, sizes.out_size)
    fits = there.stages > config.stages and there.fits(sizes.size, sizes.out_size)
    return there if fits else None


def with_most_stages(
    config: MatmulConfig,
    size: int,
    out_size: int,
    *,
    over_sums: bool = False,
    most: int = MAXIMUM_STAGES,
) -> MatmulConfig:
    """A configuration with as many stages as fit shared memory; for sizes see its ``fits``.

    Args:
      over_sums: whether the sums of other blocks may come where the stages were.
      most: stages at most.
    """
    free = config.shared_limit - config.staging_bytes(out_size)
    if not over_sums:
        free -= config.sums_bytes
    stages = min(free // config.stage_bytes(size), most)
    if over_sums and stages * config.stage_bytes(size) < config.sums_bytes:
        stages = 0
    return config.changed(stages=stages)
