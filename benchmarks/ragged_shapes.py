"""Grouped (ragged) GEMMs drawn by a seed, by tilings, against cuBLAS for each group.

The rivals are a program of XLA that knows the sizes of groups: a product for each of them, whose
operands were taken apart before the clock starts; and PyTorch's product of one after the other,
which writes a part of the result. Sizes are cut at random places, or equal, or each is half of the
one before, in random order. ``gemm_times.py`` says how it is timed; every result is compared with
XLA's first.

    python benchmarks/ragged_shapes.py --seed 1 --count 8 --seconds 30 --json ragged.json
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gemm_shapes
import gemm_times
import harness
import jax
import jax.numpy as jnp
import numpy as np
import operands
import side_by_side
import timing

from pallasite_hopper.ops import RaggedConfig, ragged_matmul
from pallasite_hopper.ops.ragged.choice import Groups, best_configs

LARGEST_ERROR = 1e-2
MOST_FLOPS = 8e11
LEAST_ROWS, MOST_ELEMENTS = 2048, 1 << 30
RIVALS = ("each group by XLA", "each group by PyTorch")
SPREADS = ("cut", "equal", "halves")
WAYS: dict[str, Mapping[str, Any] | None] = {
    "as chosen": None,
    "usual": {},
    "columns halved": {"split": "n", "epilogue_buffers": 1},
    "columns halved, bands of 16": {"split": "n", "epilogue_buffers": 1, "band": 16},
    "bands of 16": {"band": 16},
    "last tiles shared by two": {"share": 2},
    "last tiles shared by none": {"share": 1},
    "clusters, last tiles shared by two": {"cluster": 2, "share": 2},
    "half as high": {"halves": True, "band": 16},
    "rows skipped": {"skip": True},
    "clusters": {"cluster": 2},
    "clusters, rows skipped": {"cluster": 2, "skip": True},
    "clusters, columns halved": {"cluster": 2, "split": "n", "epilogue_buffers": 1},
    "last steps shared": {"stream": True},
    "last steps shared, columns halved": {"stream": True, "split": "n", "epilogue_buffers": 1},
    "last steps shared, rows skipped": {"stream": True, "skip": True},
    "last steps shared, clusters": {"stream": True, "cluster": 2},
    "256 x 128": {"tile_m": 256, "tile_n": 128, "epilogue_buffers": 1},
    "192 x 256": {"tile_m": 192, "split": "n", "epilogue_buffers": 1},
}
"""Attributes of the configuration; None is what is chosen."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A product of groups of rows with (groups, k, n) matrices."""

    rows: int
    n: int
    k: int
    groups: int
    spread: str = "cut"

    def __str__(self) -> str:
        return f"{self.rows}x{self.n}x{self.k} in {self.groups} groups ({self.spread})"

    def sizes(self) -> list[int]:
        """Of the groups."""
        generator = np.random.default_rng(self.rows + self.n + self.k)
        if self.spread == "equal":
            return [(self.rows + group) // self.groups for group in range(self.groups)]
        if self.spread == "halves":
            parts = [self.rows // 2 ** min(group + 1, 30) for group in range(self.groups)]
            parts[0] += self.rows - sum(parts)
            return [int(size) for size in generator.permutation(parts)]
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
        """The fastest rival's time over ours."""
        return min(self.times[one] for one in RIVALS if one in self.times) / self.times["as chosen"]


def named(shape: str) -> Case:
    """A case as it is given on the command line: rows x n x k x groups, and perhaps x spread."""
    rows, n, k, groups, *spread = shape.split("x")
    return Case(int(rows), int(n), int(k), int(groups), *spread)


def drawn(seed: int, count: int) -> list[Case]:
    """The sample."""
    shapes = gemm_shapes.draw(seed, 40 * count, MOST_FLOPS)
    generator = np.random.default_rng(seed)
    found = []
    for m, n, k in dict.fromkeys(shapes):
        groups = int(generator.choice([4, 8, 16, 32]))
        fits = m >= LEAST_ROWS and n % 128 == k % 128 == 0 and groups * n * k <= MOST_ELEMENTS
        if fits:
            found.append(Case(m, n, k, groups, str(generator.choice(SPREADS))))
    return found[:count]


def kinds(case: Case, count: int) -> dict[str, RaggedConfig]:
    """The best of each kind of tile by the estimate."""
    groups = Groups(case.rows, case.n, case.k, case.groups, 2, False)
    return {describe(one): one for one in best_configs(groups)[:count]}


def describe(config: RaggedConfig) -> str:
    """Of what differs among them."""
    tiles = config.transposed
    if tiles is None:
        return f"{config.tile_m}x{config.tile_n}, {config.split} halved, {config.stages} stages"
    found = f"transposed {tiles.tile_m}x{tiles.tile_n}, {tiles.stages} stages"
    found += f", {tiles.split} halved" if tiles.warpgroups == 2 and not tiles.alternate else ""
    found += ", turns" if tiles.alternate else ""
    return found + (", narrow ones last" if config.last else "")


def ready(names: Sequence[str], count: int, case: Case) -> Callable[[], Measured]:
    """Compiles all programs; returns what measures them."""
    if operands.torch_is_there() and jax.default_backend() == "gpu":
        importlib.import_module("torch")  # before CUPTI comes into the process
    sizes = case.sizes()
    a = jax.ShapeDtypeStruct((case.rows, case.k), jnp.bfloat16)
    b = jax.ShapeDtypeStruct((case.groups, case.k, case.n), jnp.bfloat16)
    counts = jax.ShapeDtypeStruct((case.groups,), jnp.int32)
    out = jax.ShapeDtypeStruct((case.rows, case.n), jnp.bfloat16)
    programs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    configs: dict[str, RaggedConfig | None] = {}
    for name in names:
        way = WAYS[name]
        configs[name] = None if way is None else RaggedConfig(**way).filled(2)
    for name, config in (configs | kinds(case, count)).items():
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
        calls: dict[Any, Callable[[], Any]] = {RIVALS[0]: lambda: theirs(parts)}
        for name, program in programs.items():
            worst = float(error_of(wanted, program(left, right, numbers)))
            if not worst < LARGEST_ERROR:
                raise ValueError(f"wrong result of {name}, relative error {worst}")
            calls[name] = lambda run=program: run(left, right, numbers)
        timer = timing.CuptiTimer(profiler.mosaic_gpu_lib._mosaic_gpu_ext)
        contenders = [gemm_times.Contenders("jax", lambda: clear(large), calls)]
        if operands.torch_is_there() and jax.default_backend() == "gpu":
            contenders.append(by_torch(left, right, sizes))
        found, _ = gemm_times.in_random_order(timer, contenders, case.rows + case.n + case.k)
        times = {name: statistics.median(each) for name, each in found.items()}
        return Measured(case, times, failed)

    return measured


def by_torch(left: jax.Array, right: jax.Array, sizes: Sequence[int]) -> gemm_times.Contenders:
    """PyTorch's product of each group."""
    import torch

    a, b = operands.to_torch(left, right)
    out = a.new_empty(a.shape[0], b.shape[2])
    ends = list(itertools.accumulate(sizes))
    parts = [
        (a[end - size : end], b[group], out[end - size : end])
        for group, (size, end) in enumerate(zip(sizes, ends, strict=True))
        if size
    ]

    def product() -> Any:
        for rows, matrix, result in parts:
            torch.mm(rows, matrix, out=result)
        return out

    large = torch.zeros(gemm_times.READ_BETWEEN, device="cuda")
    product()
    return gemm_times.Contenders("torch", lambda: gemm_times.read(large), {RIVALS[1]: product})


def show(case: Case, row: Measured) -> str:
    """A line about a case."""
    times = ", ".join(f"{name} {time:.1f}" for name, time in row.times.items())
    return f"{case}: {times}; {row.ratio:.3f} {row.failed or ''}"


def main(argv: Sequence[str]) -> int:
    """Measures, prints and writes JSON; 1 if a case failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=8, seconds=60.0, processes=4)
    side_by_side.hold_option(parser)
    parser.add_argument(
        "--shapes", nargs="+", help="these, such as 8192x4096x4096x8xhalves, before those drawn"
    )
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), help="these besides the choice")
    parser.add_argument("--kinds", type=int, default=0, help="of tiles, measured as well")
    arguments = parser.parse_args(argv)
    names = list(
        dict.fromkeys(["as chosen", *(WAYS if arguments.ways is None else arguments.ways)])
    )
    print(harness.machine(), flush=True)
    outcomes = side_by_side.prepared(
        functools.partial(ready, names, arguments.kinds),
        [*map(named, arguments.shapes or ()), *drawn(arguments.seed, arguments.count)],
        arguments.processes,
        arguments.seconds,
        arguments.hold,
    )
    rows, failed = side_by_side.collected(outcomes, str, show)
    mean = harness.geometric_mean([row.ratio for row in rows])
    if mean is not None:
        print(f"the faster rival over ours: {mean:.3f} of {len(rows)}")
    harness.write_json(arguments.json, "ragged_shapes", [dataclasses.asdict(row) for row in rows])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
