"""Configurations of GEMM: of shapes drawn by a seed, many are measured against XLA and PyTorch.

It shows how good the library's choice is, and what its estimate is to be fitted to. What is chosen
without options comes first, then the best by the estimate and the best of each kind, also of those
that only tuning takes. ``gemm_times.py`` measures them.

    python benchmarks/gemm_configs.py --seed 1 --seconds 90 --json configurations.json
    python benchmarks/gemm_configs.py --shapes 2048x1024x4096 2048x1024x8192
    python benchmarks/gemm_configs.py --within 129-400x1-99999x10000-99999 --count 20 --clusters
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import gemm_shapes
import shapes
import side_by_side
from gemm_times import Case, Shape, Times

from pallasite_hopper.ops import MatmulConfig
from pallasite_hopper.ops.dense import candidates, choice
from pallasite_hopper.ops.dense.cost import Sizes

MOST_FLOPS = 2e12
NEAR = 1.5
"""Of a kind, the best is measured if it takes at most so many times the least by the estimate."""
BEST = 4
"""So many are measured of whatever kind."""
NEAR_WAYS = 1.25
"""The same of ways to share operands."""
LEAST_AHEAD = 40 << 10
"""Bytes of the left operand that a block asks for ahead at least, where fewer stages are tried."""
TILES = 3
"""The best of so many are measured with every way to share operands, the best of all in other
orders too."""


def listed(
    sizes: Sizes,
    most: int,
    clusters: bool = False,
    stages: bool = False,
    fewer: bool = False,
    resident: bool = False,
) -> list[MatmulConfig]:
    """What is measured of a shape besides the default.

    Args:
      clusters: whether that is every way to share operands of some tiles, above all.
      stages: whether that is the best tiles with several numbers of stages.
      fewer: whether that is the best tiles with fewer stages.
      resident: whether that is tiles of blocks of which a multiprocessor has several.
    """
    if resident:
        return _resident(sizes, most)
    if fewer:
        return _fewer_stages(sizes, candidates.candidates(sizes))[:most]
    if stages:
        return _stages(sizes)[:most]
    every = [*candidates.candidates(sizes), *candidates.further_candidates(sizes)]
    ordered = sorted(every, key=lambda one: _rank(sizes, one))
    kinds: dict[Any, MatmulConfig] = {}
    for one in ordered:
        ways = (one.split_k, one.parts, one.cluster, one.last_parts)
        over = one.sums_in_stages(sizes.size, sizes.out_size)
        several = tuple(way > 1 for way in ways)
        area = one.tile_m * one.tile_n
        kinds.setdefault((one.swap, area >= 128 * 192, several, one.alternate, over), one)
        kinds.setdefault((one.swap, one.tile_m, one.tile_n > 128, several[0]), one)
    limit = NEAR * _rank(sizes, ordered[0])
    near = [one for one in kinds.values() if _rank(sizes, one) < limit]
    near.sort(key=lambda one: _rank(sizes, one))
    chip = choice.this_chip()
    rest = [choice._with_rest(sizes, chip), choice._by_estimate(sizes, chip)[0]]
    found = [*(one for one in rest if one), *ordered[:BEST]]
    if clusters:
        found += [*_ways(ordered, sizes), *near[: most // 4], *_tilings(ordered)]
    found += near
    return list(dict.fromkeys(found))[:most]


def _rank(sizes: Sizes, config: MatmulConfig) -> float:
    """What configurations are compared by on this machine."""
    return choice._rank(sizes, config, choice.this_chip())


def _ways(ordered: Sequence[MatmulConfig], sizes: Sizes) -> list[MatmulConfig]:
    """Ways to share operands of a few tiles, stages given back early, and other orders of the
    first."""

    def tile(one: MatmulConfig) -> Any:
        return one.swap, one.tile_m, one.tile_n, one.tile_k, one.warpgroups, one.alternate

    single = [one for one in ordered if one.cluster == one.split_k == one.last_parts == 1]
    tiles = list(dict.fromkeys((one.swap, one.tile_m, one.tile_n) for one in single))[:TILES]
    best = [next(o for o in single if (o.swap, o.tile_m, o.tile_n) == one) for one in tiles]
    wanted = set(map(tile, best))
    limit = NEAR_WAYS * _rank(sizes, ordered[0])
    ways: dict[Any, MatmulConfig] = {}
    for one in ordered:
        if tile(one) in wanted and one.split_k == one.last_parts == 1:
            way = (one.cluster, one.cluster_along, one.cluster_across, one.parts)
            if one.cluster > 1 and _rank(sizes, one) < limit:
                ways.setdefault((tile(one), way), one)
    first = best[0]
    several = (sizes.m if first.swap else sizes.n) > first.tile_n
    orders = [dataclasses.replace(first, group=group) for group in (1, 4, 16) if several]
    early = [*best, *ways.values()][: 2 * TILES]
    early = [dataclasses.replace(one, in_flight=0) for one in early if not one.alternate]
    return [*best, *early, *ways.values(), *orders]


def _stages(sizes: Sizes) -> list[MatmulConfig]:
    """The best tiles, and the same with more stages and with columns that are written where the
    stages were, and not; of the first two, with operands that stay in the cache. The best first."""

    def best(found: Iterable[MatmulConfig]) -> list[list[MatmulConfig]]:
        kinds: dict[Any, MatmulConfig] = {}
        for one in sorted(found, key=lambda one: _rank(sizes, one)):
            shared = (one.cluster, one.cluster_along, one.cluster_across)
            kinds.setdefault((one.swap, one.tile_m, one.tile_n, one.parts > 1, shared), one)
        groups = [[one, *candidates.deeper(one, sizes)] for one in kinds.values()]
        return [one for one in groups if len(set(one)) > 1]

    usual, others = best(candidates.candidates(sizes)), best(candidates.further_candidates(sizes))
    for group in usual[:2]:
        if group[-1].evict_first:
            group.append(dataclasses.replace(group[-1], evict_first=False))
    groups = usual[:TILES] + others[:1] + usual[TILES:]
    return list(dict.fromkeys(one for group in groups for one in group))


def _fewer_stages(sizes: Sizes, found: Iterable[MatmulConfig]) -> list[MatmulConfig]:
    """The best tiles, and the same with fewer stages."""
    kinds: dict[Any, MatmulConfig] = {}
    for one in sorted(found, key=lambda one: _rank(sizes, one)):
        if one.cluster_blocks == one.split_k == one.last_parts == 1 or not kinds:
            tile = (one.swap, one.tile_m, one.tile_n, one.tile_k, one.parts > 1, one.resident)
            kinds.setdefault(tile, one)
    listed = []
    for one in list(kinds.values())[:TILES]:
        least = max(3, -(-LEAST_AHEAD // one.resident // (one.tile_m * one.tile_k * sizes.size)))
        step = 1 + (one.stages > 8)
        fewer = range(one.stages - step, least - 1, -step)
        listed += [one, *(dataclasses.replace(one, stages=stages) for stages in fewer)]
    return listed


def _resident(sizes: Sizes, most: int) -> list[MatmulConfig]:
    """The best tiles, and those of blocks of which a multiprocessor has several."""
    every = [*candidates.candidates(sizes), *candidates.further_candidates(sizes)]
    usual = sorted(candidates.candidates(sizes), key=lambda one: _rank(sizes, one))[:BEST]
    several: list[MatmulConfig] = []
    for resident in (2, 3):
        found = (one for one in every if one.resident == resident)
        several += _fewer_stages(sizes, found)[: (most - len(usual)) // 2]
    return [*several, *usual]


def _tilings(ordered: Sequence[MatmulConfig]) -> list[MatmulConfig]:
    """The best of each tile and its way to share, whatever its warpgroups and stages are."""
    found: dict[Any, MatmulConfig] = {}
    for one in ordered:
        way = (one.swap, one.alternate, one.split_k, one.parts, one.cluster, one.last_parts)
        found.setdefault((one.tile_m, one.tile_n, way), one)
    return list(found.values())


def print_table(rows: Sequence[Times]) -> dict[str, Any]:
    """Prints how good the choice is, and how good it could be."""
    shapes.print_table(rows)
    found = {
        "default": shapes.summary(rows, lambda row: row.default),
        "best": shapes.summary(rows, lambda row: row.best),
    }
    print(found)
    return found


def main(argv: Sequence[str]) -> int:
    """Measures, prints and writes JSON; 1 if a shape failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=200, seconds=90.0, processes=6)
    parser.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--few", action="store_true", help="shapes of few tiles and long k")
    parser.add_argument("--shapes", nargs="*", help="these, as MxNxK, rather than drawn ones")
    parser.add_argument(
        "--within", nargs="*", type=gemm_shapes.box, help="drawn ones within these, as M-MxN-NxK-K"
    )
    parser.add_argument(
        "--clusters", action="store_true", help="every way to share operands of the best tiles"
    )
    parser.add_argument(
        "--stages", action="store_true", help="several numbers of stages of the best tiles"
    )
    parser.add_argument("--fewer", action="store_true", help="fewer stages of the best tiles")
    parser.add_argument(
        "--resident", action="store_true", help="several blocks of a multiprocessor, above all"
    )
    parser.add_argument("--most", type=int, default=16, help="configurations of a shape")
    parser.add_argument("--search", action="store_true", help="let XLA search among its kernels")
    side_by_side.hold_option(parser)
    arguments = parser.parse_args(argv)
    seed, count = arguments.seed, arguments.count
    if arguments.shapes:
        wanted = [_parsed(one) for one in arguments.shapes]
    elif arguments.within:
        wanted = gemm_shapes.draw_within(seed, count, arguments.within, MOST_FLOPS)
    elif arguments.few:
        wanted = gemm_shapes.draw_few_tiles(seed, count)
    else:
        drawn = gemm_shapes.draw(seed, count, MOST_FLOPS)
        # Others are copied first, left to XLA, or have a kernel without a choice.
        wanted = [(m, n, k) for m, n, k in drawn if n % 8 == 0 and k % 8 == 0]
    if arguments.dtype == "fp8":
        wanted = [(m, -(-n // 16) * 16, -(-k // 16) * 16) for m, n, k in wanted]
    cases = []
    for shape in dict.fromkeys(wanted):
        sizes = Case(shape, arguments.dtype, ()).sizes
        names = ("clusters", "stages", "fewer", "resident")
        ways = {name: getattr(arguments, name) for name in names}
        configurations = (None, *listed(sizes, arguments.most, **ways))
        cases.append(Case(shape, arguments.dtype, configurations, arguments.search))
    return shapes.run(cases, arguments, "gemm_configs", print_table)


def _parsed(text: str) -> Shape:
    m, n, k = map(int, text.split("x"))
    return m, n, k


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
