"""Grouped (ragged) GEMMs drawn by a seed, by tilings, against cuBLAS for each group.

The rival is a program of XLA that knows the sizes of groups: a product for each of them, whose
operands were taken apart before the clock starts. Sizes are cut at random places. ``gemm_times.py``
says how it is timed; every result is compared with the rival's first.

    python benchmarks/ragged_shapes.py --seed 1 --count 8 --seconds 30 --json ragged.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gemm_shapes
import gemm_times
import harness
import jax
import jax.numpy as jnp
import numpy as np
import side_by_side
import timing

from pallasite_hopper.ops import RaggedConfig, ragged_matmul
from pallasite_hopper.ops.ragged.config import default_config

LARGEST_ERROR = 1e-2
MOST_FLOPS = 8e11
LEAST_ROWS, MOST_ELEMENTS = 2048, 1 << 30
TILES = (  # tile_m, tile_n, split, epilogue_buffers
    (128, 256, "m", 2),
    (128, 256, "n", 1),
    (128, 256, "m", 1),
    (256, 128, "m", 1),
)
BANDS = (8, 16)
HALVES = (False, True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of groups of rows with (groups, k, n) matrices."""

    rows: int
    n: int
    k: int
    groups: int

    def sizes(self) -> list[int]:
        """Of the groups: rows are cut at random places."""
        generator = np.random.default_rng(self.rows + self.n + self.k)
        cuts = np.sort(generator.integers(0, self.rows, self.groups - 1))
        return [int(size) for size in np.diff(cuts, prepend=0, append=self.rows)]


@dataclasses.dataclass
class Measured:
    """Median microseconds of all ways, by name."""

    case: Case
    times: dict[str, float]
    failed: dict[str, str]

    @property
    def ratio(self) -> float:
        """The rival's time over ours."""
        return self.times["each group by XLA"] / self.times["as chosen"]


def named(shape: str) -> Case:
    """A case as it is given on the command line: rows x n x k x groups."""
    return Case(*map(int, shape.split("x")))


def drawn(seed: int, count: int) -> list[Case]:
    """The sample."""
    shapes = gemm_shapes.draw(seed, 40 * count, MOST_FLOPS)
    generator = np.random.default_rng(seed)
    found = []
    for m, n, k in dict.fromkeys(shapes):
        groups = int(generator.choice([4, 8, 16, 32]))
        fits = m >= LEAST_ROWS and n % 128 == k % 128 == 0 and groups * n * k <= MOST_ELEMENTS
        if fits:
            found.append(Case(m, n, k, groups))
    return found[:count]


def listed(case: Case) -> list[RaggedConfig]:
    """What is measured besides the library's choice."""
    default = default_config(-(-case.rows // case.groups), case.n, 2)
    every = [
        RaggedConfig(
            tile_m=m, tile_n=n, split=split, epilogue_buffers=buffers, band=band, halves=halves
        ).filled(2)
        for m, n, split, buffers in TILES
        for band in BANDS
        for halves in HALVES
    ]
    return [one for one in dict.fromkeys(every) if one != default]


def ready(case: Case) -> Callable[[], Measured]:
    """Compiles all programs; returns what measures them."""
    sizes = case.sizes()
    a = jax.ShapeDtypeStruct((case.rows, case.k), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((case.groups, case.k, case.n), jnp.bfloat16)
    counts = jax.ShapeDtypeStruct((case.groups,), jnp.int32)
    out = jax.ShapeDtypeStruct((case.rows, case.n), jnp.bfloat16)
    programs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, config in {"as chosen": None, **{describe(one): one for one in listed(case)}}.items():
        try:
            function = jax.jit(functools.partial(ragged_matmul, config=config))
            programs[name] = function.lower(a, b, counts).compile()
        except Exception as error:
            failed[name] = str(error)[:300]

    def draw(key: Any) -> Any:
        one, other = jax.random.split(key)
        return jax.random.normal(one, a.shape, a.dtype), jax.random.normal(other, b.shape, b.dtype)

    def error(wanted: Any, got: Any) -> Any:
        wanted, got = wanted.astype(jnp.float32), got.astype(jnp.float32)
        return jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)

    drawn_by = jax.jit(draw).lower(jax.random.key(0)).compile()
    error_of = jax.jit(error).lower(out, out).compile()
    between = jax.ShapeDtypeStruct((gemm_times.READ_BETWEEN,), jnp.float32)
    clear = jax.jit(gemm_times.read).lower(between).compile()

    def measured() -> Measured:
        from jax.experimental.mosaic.gpu import profiler

        left, right = drawn_by(jax.random.key(case.rows))
        ends = np.cumsum(sizes)
        # Groups without rows are no products.
        parts = [
            (left[end - size : end], right[g])
            for g, (size, end) in enumerate(zip(sizes, ends, strict=True))
            if size
        ]
        options = gemm_times.CUBLAS_ONLY if jax.default_backend() == "gpu" else {}
        rival = jax.jit(lambda parts: [a @ b for a, b in parts], compiler_options=options)
        theirs = rival.lower(parts).compile()
        wanted = jnp.concatenate(theirs(parts))
        numbers = jnp.asarray(sizes, jnp.int32)
        large = jnp.zeros(between.shape, between.dtype)
        calls: dict[Any, Callable[[], Any]] = {"each group by XLA": lambda: theirs(parts)}
        for name, program in programs.items():
            worst = float(error_of(wanted, program(left, right, numbers)))
            if not worst < LARGEST_ERROR:
                raise ValueError(f"wrong result of {name}, relative error {worst}")
            calls[name] = lambda run=program: run(left, right, numbers)
        timer = timing.CuptiTimer(profiler.mosaic_gpu_lib._mosaic_gpu_ext)
        contenders = gemm_times.Contenders("jax", lambda: clear(large), calls)
        found, _ = gemm_times.in_random_order(timer, [contenders], case.rows + case.n + case.k)
        times = {name: statistics.median(each) for name, each in found.items()}
        return Measured(case, times, failed)

    return measured


def describe(config: RaggedConfig) -> str:
    """Of what differs among those that are listed."""
    found = f"{config.tile_m}x{config.tile_n} halved along {config.split}, bands of {config.band}"
    found += f", {config.stages} stages, {config.epilogue_buffers} buffers"
    return found + (", halves" if config.halves else "")


def show(case: Case, row: Measured) -> str:
    """A line about a case."""
    times = ", ".join(f"{name} {time:.1f}" for name, time in row.times.items())
    shape = f"{case.rows}x{case.n}x{case.k} in {case.groups} groups"
    return f"{shape}: {times}; {row.ratio:.3f} {row.failed or ''}"


def main(argv: Sequence[str]) -> int:
    """Measures, prints and writes JSON; 1 if a case failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=8, seconds=60.0, processes=4)
    side_by_side.hold_option(parser)
    parser.add_argument(
        "--shapes", nargs="+", help="these, such as 8192x4096x4096x8, before those drawn"
    )
    arguments = parser.parse_args(argv)
    print(harness.machine(), flush=True)
    outcomes = side_by_side.prepared(
        ready,
        [*map(named, arguments.shapes or ()), *drawn(arguments.seed, arguments.count)],
        arguments.processes,
        arguments.seconds,
        arguments.hold,
    )
    rows, failed = side_by_side.collected(outcomes, str, show)
    with contextlib.suppress(ValueError):
        mean = harness.geometric_mean([row.ratio for row in rows])
        print(f"XLA's product of each group over ours: {mean:.3f} of {len(rows)}")
    harness.write_json(arguments.json, "ragged_shapes", [dataclasses.asdict(row) for row in rows])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
