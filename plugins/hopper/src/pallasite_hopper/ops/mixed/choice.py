"""Which configuration a mixed-precision GEMM has: that with the least time by an estimate.

A tile takes as long as multiplying, or as converting weights if its rows are few; blocks that share
its steps have to exchange their sums. Found by the times of 240 kernels of 19 shapes with 37 to 382
rows, and of 28 shapes with more, on an H200 (2026-11, ``benchmarks/mixed_shapes.py``): what it
chooses of the former takes 0.1 % more time than the fastest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

from pallasite_hopper.ops.dense.cost import H200
from pallasite_hopper.ops.mixed.config import SHARED_MEMORY, MixedConfig

_ROW = 0.038
"""Nanoseconds that two warpgroups take for a row of activations, 128 weights and one step of k."""
_FLAT_ROWS, _FLAT_STEP, _BIT = 0.4, 53.0, 3.0
"""Rows that a step counts as at least: for each of its rows, for any, and for each bit of a
weight: conversion takes longer than multiplying few rows."""
_ROW_ALONE, _FLAT_ROW_ALONE, _FLAT_ALONE = 0.0225, 0.0165, 1.05
"""The same of one warpgroup and 64 weights, in nanoseconds: for each row; at least for each row,
and for any."""
_SMALLER, _MOST_SMALLER = 0.02, 0.06
"""What a tile of half of the 256 rows takes more, since it reads more, and the most of that."""
_LAUNCH, _TILE = 1300.0, 1200.0
"""Nanoseconds of a kernel and of each tile besides its steps."""
_EXCHANGE, _EXCHANGED, _COLLECTED = 1000.0, 16.0, 12.0
"""Nanoseconds of adding up sums, and bytes of them in a nanosecond: those that a block gets if each
adds up a part, and if the first one gets all."""
_AGAIN = 1500.0
"""Nanoseconds more of each further round of clusters: their blocks have one tile each."""
_MEMORY, _OVERLAP = 4300.0, 6.0
"""Bytes that memory delivers in a nanosecond, and the exponent of the norm that joins times."""

_FEW_M_TILES, _FLAT = 8, 160
"""Where few tiles along m have so few rows, each line along m is visited as a whole; else 16 tiles
along n are visited together."""
_ROUNDS_OF_PAIRS = 4
"""Rounds of tiles of 256 rows from which two blocks fetch activations together, with weights of 4
bits: 1 % less time; with 8 bits it is the same."""
_STAGES, _SPLIT_STAGES = 3, 4
"""Stages at least; where blocks share the steps of a tile they take up to a fourth more with 3, and
tiles of one warpgroup have not been measured with so few."""
_SLOW_ROWS, _SLOW = 144, 0.06
"""Rows below which tiles with steps of 64, whose last ones blocks share, take that share more."""
_FEW_ROWS = 128
_LEAST_STEPS = 2
"""Steps of a block at least where several share those of a tile."""
_WRITTEN = (64, 32, 16)
"""Rows that are written at a time: the more the better, if they leave room for as many stages, or
for ``_SPLIT_STAGES`` with the largest tiles, of which writing takes long."""


@functools.lru_cache(maxsize=1024)
def default_config(
    m: int, n: int, k: int, weight_bits: int, out_size: int, group: int = 0
) -> MixedConfig:
    """The configuration that is used without tuning.

    Args:
      m, n, k: extents of the GEMM.
      weight_bits: of one weight.
      out_size: bytes of an element of the result.
      group: elements along k that share a factor, or 0.
    """

    def rank(config: MixedConfig) -> tuple[float, int, int]:
        time = nanoseconds(config, m, n, k, weight_bits)
        if config.last_parts > 1 and config.tile_k == 64 and config.tile_m < _SLOW_ROWS:
            time *= 1 + _SLOW
        return time, -config.tile_m, config.split_k

    # Tiles of fewer rows, and of one warpgroup, have not been measured where scales take time, too.
    least = 128 if group and m > _FEW_ROWS else 8
    most = min(256, -(-m // 8) * 8 if m > least else least)
    found = []
    for tile_m, warpgroups in itertools.product(
        range(least, most + 8, 8), (2,) if group else (2, 1)
    ):
        for split in range(1, 9):
            config = _with_steps(tile_m, warpgroups, split, m, k, weight_bits, out_size, group)
            if config is not None:
                found.append(config)
                found += _sharing_last(config, m, n, weight_bits, out_size, group)
    if not found:  # No steps fit the groups; what is called with it says so.
        return default_config(m, n, k, weight_bits, out_size)
    best = min(found, key=rank)
    rounds = -(-_tiles(best, m, n) * best.split_k // H200.multiprocessors)
    shared = weight_bits == 4 and best.tile_m == 256 and n % 256 == 0 and not group
    if shared and rounds >= _ROUNDS_OF_PAIRS and best.parts == 1:
        best = dataclasses.replace(best, cluster=2).filled(weight_bits, out_size, group)
    return _with_epilogue(best, weight_bits, out_size, group)


def _with_steps(
    tile_m: int,
    warpgroups: int,
    split: int,
    m: int,
    k: int,
    weight_bits: int,
    out_size: int,
    group: int,
) -> MixedConfig | None:
    """A tiling with the deeper steps, which wait less often, if there is room for several of them;
    None if there is room for no steps."""
    few = -(-m // tile_m) <= _FEW_M_TILES and tile_m <= _FLAT and m > _FEW_ROWS
    order = ("m", _FEW_M_TILES) if few else ("n", 16 if m > _FEW_ROWS else 8)
    for tile_k in (128, 64):
        if split > 1 and k < _LEAST_STEPS * tile_k * split:
            continue
        config = MixedConfig(
            tile_m=tile_m,
            tile_n=64 * warpgroups,
            warpgroups=warpgroups,
            tile_k=tile_k,
            split_k=split,
            group=order[1],
            grid_minor=order[0],
            epilogue_m=min(tile_m, _WRITTEN[-1] if m <= _FEW_ROWS else _WRITTEN[1]),
        ).filled(weight_bits, out_size, group)
        if config.shared_bytes(weight_bits, out_size, group) > SHARED_MEMORY:
            continue
        plain = split == 1 and warpgroups == 2
        several = config.stages >= (_STAGES if plain else _SPLIT_STAGES)
        if group and not config.fits_group(group):
            continue
        if several or (tile_k == 64 and split == 1):
            return config
    return None


def _sharing_last(
    config: MixedConfig, m: int, n: int, weight_bits: int, out_size: int, group: int
) -> list[MixedConfig]:
    """The same with blocks that share the tiles that whole rounds leave, if there are some, and if
    there is room."""
    left = _tiles(config, m, n) % H200.multiprocessors
    several = config.warpgroups == 2 and config.split_k == 1 and not group
    if not several or not 0 < left <= H200.clusters[2]:
        return []
    found = []
    for tile_k in (128, 64):
        one = dataclasses.replace(config, last_parts=2, tile_k=tile_k)
        found.append(one.filled(weight_bits, out_size, group))
    return [one for one in found if one.stages >= _SPLIT_STAGES][:1]


def _with_epilogue(config: MixedConfig, weight_bits: int, out_size: int, group: int) -> MixedConfig:
    """The same with as many rows written at a time as leave room for stages."""
    for rows in _WRITTEN:
        if config.epilogue_m < rows <= config.tile_m // config.parts:
            more = dataclasses.replace(config, epilogue_m=rows).filled(weight_bits, out_size, group)
            least = _SPLIT_STAGES if config.tile_m == 256 else config.stages
            if more.stages >= min(config.stages, least):
                return more
    return config


def _tiles(config: MixedConfig, m: int, n: int) -> int:
    return -(-m // config.tile_m) * -(-n // (config.tile_n * config.cluster))


def nanoseconds(config: MixedConfig, m: int, n: int, k: int, weight_bits: int) -> float:
    """The estimated time."""
    rows, parts = config.tile_m, config.parts
    if config.warpgroups == 2:
        flat = _FLAT_ROWS * rows + _FLAT_STEP + _BIT * weight_bits
        step = _ROW * max(rows, flat)
    else:
        step = max(_ROW_ALONE * rows, _FLAT_ALONE + _FLAT_ROW_ALONE * rows)
    step *= config.tile_n / (64 * config.warpgroups)
    step *= 1 + min(_SMALLER * (256 / rows - 1), _MOST_SMALLER)
    rounds, shared = -(-_tiles(config, m, n) // H200.clusters[config.split_k * config.cluster]), 0
    if config.last_parts > 1:
        rounds, shared = rounds - 1, 1
    elif parts > 1:
        rounds, shared = 0, rounds
    steps = math.ceil(k / config.tile_k)
    busy = rounds * (steps * config.tile_k * step + _TILE)
    if parts > 1:
        sums = rows * config.tile_n * 4 * (parts - 1)
        exchanged = sums / parts / _EXCHANGED if config.exchanges else sums / _COLLECTED
        part = math.ceil(steps / parts) * config.tile_k * step + _TILE
        busy += shared * (part + _EXCHANGE + exchanged) + (shared - 1) * _AGAIN
    moved = (n * k * weight_bits / 8 + (n + k) * m * 2) / _MEMORY
    longer, shorter = max(busy, moved), min(busy, moved)
    return _LAUNCH + longer * math.pow(1 + math.pow(shorter / longer, _OVERLAP), 1 / _OVERLAP)


def mixed_configs(
    m: int, n: int, k: int, weight_bits: int = 8, out_size: int = 2, group: int = 0
) -> list[MixedConfig]:
    """Candidate configurations of a GEMM, the default first.

    Args:
      m, n, k: extents of the GEMM.
      weight_bits: of one weight: 8 or 4.
      out_size: bytes of an element of the result.
      group: elements along k that share a factor, or 0.
    """
    default = default_config(m, n, k, weight_bits, out_size, group=group)
    found = [default]
    if m <= 128:
        for tile_k, pieces in ((128, 2), (128, 4), (256, 4), (256, 2), (64, 2)):
            for split, cluster in itertools.product((1, 2, 4, 8), (1, 2)):
                if split * cluster > 8 or (cluster == 2 and default.tile_m % 16):
                    continue
                config = dataclasses.replace(
                    default,
                    tile_k=tile_k,
                    pieces=pieces,
                    split_k=split,
                    cluster=cluster,
                    last_parts=default.last_parts if split == cluster == 1 else 1,
                ).filled(weight_bits, out_size, group)
                if k >= tile_k * split and config.stages >= 3:
                    found.append(config)
        found = [one for one in found if not group or one.fits_group(group)]
        return list(dict.fromkeys(found))
    for tile_m, tile_n, tile_k, epilogue_m in (
        (256, 128, 64, 32),
        (192, 128, 64, 32),
        (128, 256, 64, 16),
        (128, 128, 64, 32),
        (128, 128, 128, 32),
        (256, 128, 128, 16),
    ):
        for order, minor, cluster in itertools.product((4, 8, 16), ("n", "m"), (1, 2)):
            config = MixedConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                tile_k=tile_k,
                cluster=cluster,
                group=order,
                grid_minor=minor,
                epilogue_m=epilogue_m,
            )
            found.append(config.filled(weight_bits, out_size, group))
    found = [one for one in found if not group or one.fits_group(group)]
    return list(dict.fromkeys(found))
