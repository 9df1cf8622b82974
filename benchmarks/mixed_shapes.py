"""GEMMs of activations with narrow weights, of many rows, drawn by a seed, by tiles, against XLA.

The rival is XLA's product of bfloat16 with weights that were converted before the clock starts,
which is the least time that a kernel that converts them can hope for; XLA's product that converts
them is timed too. The shapes are projections of ``gemm_shapes.py`` with more rows than a tile has.
Of each, the library's choice is measured and others: the tiles whose rounds have the fewest rows,
or what ``--ways`` says. ``gemm_times.py`` says how it is timed; every result is compared with a
product in float32 first.

    python benchmarks/mixed_shapes.py --seed 1 --count 20 --seconds 60 --json mixed.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gemm_shapes
import gemm_times
import harness
import jax
import jax.numpy as jnp
import side_by_side
import timing

from pallasite_hopper.ops import MixedConfig, mixed_matmul
from pallasite_hopper.ops.mixed.choice import default_config

LARGEST_ERROR = 1e-2
MOST_FLOPS = 2e12
LEAST_ROWS = 257
MOST_PARTS = 12
OTHERS = 5
"""Tiles of a shape besides the default's."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A product.

    Attributes:
      weights: ``"int8"`` or ``"int4"``, given as (n, k).
    """

    m: int
    n: int
    k: int
    weights: str

    @property
    def bits(self) -> int:
        """Of a weight."""
        return int(self.weights.removeprefix("int"))


@dataclasses.dataclass
class Measured:
    """Median microseconds of all ways, by name."""

    case: Case
    times: dict[str, float]
    failed: dict[str, str]

    @property
    def ratio(self) -> float:
        """XLA's time with converted weights over ours."""
        return self.times["converted before"] / self.times["as chosen"]


def drawn(seed: int, count: int) -> list[Case]:
    """The sample."""
    shapes = gemm_shapes.draw(seed, 20 * count, MOST_FLOPS)
    fitting = [one for one in shapes if one[0] >= LEAST_ROWS and one[1] % 128 == one[2] % 128 == 0]
    kinds = ("int8", "int4")
    return [Case(*one, kinds[i % 2]) for i, one in enumerate(dict.fromkeys(fitting))][:count]


def drawn_within(seed: int, count: int, boxes: Sequence[Sequence[range]]) -> list[Case]:
    """A sample of shapes within boxes, of columns and depths in multiples of 128."""
    shapes = gemm_shapes.draw_within(seed, 4 * count, boxes, MOST_FLOPS)
    rounded = [(m, -(-n // 128) * 128, -(-k // 128) * 128) for m, n, k in shapes]
    kinds = ("int8", "int4")
    return [Case(*one, kinds[i % 2]) for i, one in enumerate(dict.fromkeys(rounded))][:count]


def named(shape: str) -> Case:
    """A case as it is given on the command line."""
    weights, extents = shape.split(":")
    return Case(*map(int, extents.split("x")), weights)


def _alone(config: MixedConfig) -> MixedConfig:
    """A configuration whose blocks share nothing."""
    return dataclasses.replace(config, split_k=1, last_parts=1, cluster=1)


def _by_rows(case: Case, default: MixedConfig) -> list[MixedConfig]:
    """Other tiles, those first whose rounds have the fewest rows."""

    def rows(tile_m: int) -> int:
        tiles = -(-case.m // tile_m) * -(-case.n // default.tile_n)
        return -(-tiles // 132) * (tile_m + 8)

    tiles = sorted(range(64, 257, 8), key=lambda tile_m: (rows(tile_m), -tile_m))
    tiles = [tile_m for tile_m in tiles if tile_m != default.tile_m][:OTHERS]
    found = []
    for tile_m in tiles:
        deep = dataclasses.replace(_alone(default), tile_m=tile_m, tile_k=128)
        several = deep.filled(case.bits, 2).stages > 2
        found.append(deep if several else dataclasses.replace(deep, tile_k=64))
    return found


def _by_conversion(case: Case, default: MixedConfig) -> list[MixedConfig]:
    """The other way to convert weights of 8 bits."""
    if case.bits != 8:
        return []
    return [dataclasses.replace(default, fractions=not default.fractions)]


def _by_depth(case: Case, default: MixedConfig) -> list[MixedConfig]:
    """The other depth of steps, if need be with less room for results."""
    if default.tile_k != 64:
        return [dataclasses.replace(default, tile_k=64)]
    deep = [dataclasses.replace(default, tile_k=128, epilogue_m=rows) for rows in (32, 16)]
    return [one for one in deep if one.filled(case.bits, 2).stages > 2][:1]


def _by_columns(case: Case, default: MixedConfig) -> list[MixedConfig]:
    """Tiles of twice as many weights and fewer rows, which read less."""

    def rows(tile_m: int) -> int:
        tiles = -(-case.m // tile_m) * -(-case.n // 256)
        return -(-tiles // 132) * (tile_m + 16)

    best = sorted(range(64, 161, 8), key=lambda tile_m: (rows(tile_m), -tile_m))[:2]
    wide = dataclasses.replace(_alone(default), tile_n=256, tile_k=64)
    return [dataclasses.replace(wide, tile_m=tile_m) for tile_m in best]


def _by_cluster(case: Case, default: MixedConfig) -> list[MixedConfig]:
    """Two blocks that fetch activations together."""
    del case
    fits = default.parts == 1 and default.tile_m % 16 == 0
    return [dataclasses.replace(default, cluster=2)] if fits else []


def _by_parts(case: Case, default: MixedConfig) -> list[MixedConfig]:
    """Tiles whose steps several blocks share, by one warpgroup or two, with the least rows that any
    block multiplies."""
    found = []
    for warpgroups, tiles, parts in itertools.product((1, 2), range(1, 7), range(1, 7)):
        multiple = 8 * parts
        tile_m = -(-case.m // (tiles * multiple)) * multiple
        if tile_m > 256 or case.k < 128 * parts:
            continue
        rounds = -(-case.m // tile_m) * -(-case.n // (64 * warpgroups)) * parts / 132
        step = max(tile_m, 0.4 * tile_m + 53 + 3 * case.bits) * warpgroups / 2
        rows = math.ceil(rounds) * (step / parts + 32e3 / case.k) + 4e4 / case.k * (parts > 1)
        for tile_k in (128, 64):
            config = dataclasses.replace(
                _alone(default), tile_m=tile_m, tile_n=64 * warpgroups, warpgroups=warpgroups,
                tile_k=tile_k, split_k=parts, epilogue_m=min(32, tile_m),
            ).filled(case.bits, 2)  # fmt: skip
            if config.stages > 3:
                found.append((rows, config))
                break
    found.sort(key=lambda one: one[0])
    return [config for _, config in found if config != default][:MOST_PARTS]


def _by_epilogue(case: Case, default: MixedConfig) -> list[MixedConfig]:
    """Other numbers of rows that are written at a time."""
    fitting = [rows for rows in (16, 32, 64) if rows <= default.tile_m // default.parts]
    others = [rows for rows in fitting if rows != default.epilogue_m]
    listed = [dataclasses.replace(default, epilogue_m=rows) for rows in others]
    return [one for one in listed if one.filled(case.bits, 2).stages > 2]


def _by_order(case: Case, default: MixedConfig) -> list[MixedConfig]:
    """Other orders of tiles."""
    del case
    orders = ((4, "m"), (8, "m"), (8, "n"), (16, "n"))
    listed = [dataclasses.replace(default, group=g, grid_minor=minor) for g, minor in orders]
    return [one for one in listed if one != default]


WAYS = {
    "tiles": _by_rows,
    "conversion": _by_conversion,
    "columns": _by_columns,
    "cluster": _by_cluster,
    "depth": _by_depth,
    "order": _by_order,
    "parts": _by_parts,
    "epilogue": _by_epilogue,
}
"""What else is measured: each lists configurations, given the case and the library's choice."""


def listed(case: Case, ways: Sequence[str] = ("tiles",)) -> list[MixedConfig]:
    """What is measured besides the library's choice."""
    default = default_config(case.m, case.n, case.k, case.bits, 2)
    changed = [one for way in ways for one in WAYS[way](case, default)]
    return [one.filled(case.bits, 2) for one in dict.fromkeys(changed)]


def ready(case: Case, ways: Sequence[str] = ("tiles",)) -> Callable[[], Measured]:
    """Compiles all programs; returns what measures them."""
    a = jax.ShapeDtypeStruct((case.m, case.k), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((case.n, case.k), case.weights)
    wide = jax.ShapeDtypeStruct(w.shape, jnp.bfloat16)
    ours = functools.partial(mixed_matmul, transpose_b=True)
    programs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    each = {"as chosen": None, **{describe(one): one for one in listed(case, ways)}}
    for name, config in each.items():
        try:
            function = jax.jit(functools.partial(ours, config=config))
            programs[name] = function.lower(a, w).compile()
        except Exception as error:
            failed[name] = str(error)[:300]

    def product(a: Any, w: Any) -> Any:
        return a @ w.astype(jnp.bfloat16).T

    def draw(key: Any) -> Any:
        one, other = jax.random.split(key)
        half = 1 << (case.bits - 1)
        weights = jax.random.randint(other, w.shape, -half, half, jnp.int8).astype(w.dtype)
        return jax.random.normal(one, a.shape, a.dtype), weights

    # XLA's products of weights of 4 bits are wrong where it converts them in the same program.
    def error(a: Any, wide: Any, got: Any) -> Any:
        wanted = jnp.matmul(a, wide.T, preferred_element_type=jnp.float32)
        return jnp.linalg.norm(got.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)

    out = jax.ShapeDtypeStruct((case.m, case.n), jnp.bfloat16)
    error_of = jax.jit(error, **timing.reference_options()).lower(a, wide, out).compile()
    between = jax.ShapeDtypeStruct((gemm_times.READ_BETWEEN,), jnp.float32)
    clear = jax.jit(gemm_times.read).lower(between).compile()
    drawn_by = jax.jit(draw).lower(jax.random.key(0)).compile()

    def measured() -> Measured:
        from jax.experimental.mosaic.gpu import profiler

        options = gemm_times.CUBLAS_ONLY if jax.default_backend() == "gpu" else {}
        xla = jax.jit(product, compiler_options=options)
        programs["converted before"] = xla.lower(a, wide).compile()
        programs["converted by XLA"] = xla.lower(a, w).compile()
        left, right = drawn_by(jax.random.key(case.m + case.n))
        converted, large = right.astype(jnp.bfloat16), jnp.zeros(between.shape, between.dtype)
        calls: dict[Any, Callable[[], Any]] = {}
        for name, program in programs.items():
            weights = converted if name == "converted before" else right
            worst = float(error_of(left, converted, program(left, weights)))
            if not worst < LARGEST_ERROR:
                if name != "converted by XLA":
                    raise ValueError(f"wrong result of {name}, relative error {worst}")
                failed[name] = f"relative error {worst}"
                continue
            calls[name] = lambda run=program, weights=weights: run(left, weights)
        timer = timing.CuptiTimer(profiler.mosaic_gpu_lib._mosaic_gpu_ext)
        contenders = gemm_times.Contenders("jax", lambda: clear(large), calls)
        found, _ = gemm_times.in_random_order(timer, [contenders], case.m + case.n + case.k)
        times = {name: statistics.median(each) for name, each in found.items()}
        return Measured(case, times, failed)

    return measured


def describe(config: MixedConfig) -> str:
    """Of what differs among those that are listed."""
    found = f"{config.tile_m} rows, {config.stages} stages of {config.tile_k}"
    found += f", groups of {config.group} along {config.grid_minor}"
    if config.tile_n != 128:
        found += f", {config.tile_n} columns"
    if config.cluster > 1:
        found += f", clusters of {config.cluster}"
    if config.warpgroups == 1:
        found += ", one warpgroup"
    if config.epilogue_m != 32:
        found += f", {config.epilogue_m} written"
    if config.split_k > 1:
        found += f", {config.split_k} parts"
    return found + ("" if config.fractions else ", whole numbers")


def show(case: Case, row: Measured) -> str:
    """A line about a case."""
    times = ", ".join(f"{name} {time:.1f}" for name, time in row.times.items())
    return f"{case.weights} {case.m}x{case.n}x{case.k}: {times}; {row.ratio:.3f} {row.failed or ''}"


def main(argv: Sequence[str]) -> int:
    """Measures, prints and writes JSON; 1 if a case failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=40, seconds=90.0, processes=4)
    side_by_side.hold_option(parser)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["tiles"], help="what to vary")
    parser.add_argument(
        "--within",
        nargs="+",
        type=gemm_shapes.box,
        help="drawn ones within these, as M-MxN-NxK-K",
    )
    parser.add_argument(
        "--shapes", nargs="+", help="these, such as int8:4096x8192x8192, before those drawn"
    )
    arguments = parser.parse_args(argv)
    print(harness.machine(), flush=True)
    seed, count = arguments.seed, arguments.count
    if arguments.within:
        sample = drawn_within(seed, count, arguments.within)
    else:
        sample = drawn(seed, count)
    outcomes = side_by_side.prepared(
        functools.partial(ready, ways=arguments.ways),
        [*map(named, arguments.shapes or ()), *sample],
        arguments.processes,
        arguments.seconds,
        arguments.hold,
    )
    rows, failed = side_by_side.collected(outcomes, str, show)
    with contextlib.suppress(ValueError):
        mean = harness.geometric_mean([row.ratio for row in rows])
        print(f"XLA's product of converted weights over ours: {mean:.3f} of {len(rows)}")
    harness.write_json(arguments.json, "mixed_shapes", [dataclasses.asdict(row) for row in rows])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
