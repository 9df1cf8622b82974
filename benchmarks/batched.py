"""Many products at once: ``jax.vmap`` of ``ops.matmul`` against XLA and PyTorch.

Numbers of products and extents are drawn by ``--seed``. The kernel for all products is also
compared with the kernel for one of them that has a further grid dimension, and with its own best
configurations by the estimate (``--kinds``). ``gemm_times.py`` says how it is timed; every result
is compared with one in float32 first.

    python benchmarks/batched.py --seed 1 --count 20 --json batched.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gemm_times
import harness
import jax
import jax.numpy as jnp
import operands
import side_by_side
import timing

from pallasite_hopper.ops import MatmulConfig, matmul
from pallasite_hopper.ops.dense import batched, choice
from pallasite_hopper.ops.dense.candidates import candidates
from pallasite_hopper.ops.dense.cost import Sizes

MOST_FLOPS, MOST_BYTES = 6e11, 1 << 30
LARGEST_ERROR = 8e-3

Shape = tuple[int, int, int, int]
"""How many products, and the extents of each."""


@dataclasses.dataclass
class Measured:
    """Median microseconds of all ways, by name."""

    shape: Shape
    times: dict[str, float]
    failed: dict[str, str]

    @property
    def ratio(self) -> float:
        """The faster rival's time by ours."""
        rivals = [self.times[one] for one in ("XLA", "PyTorch") if one in self.times]
        return min(rivals) / self.times["as chosen"]


def draw(seed: int, count: int) -> list[Shape]:
    """Products: heads of attention, experts, and anything between."""
    shapes: list[Shape] = []
    for number in range(count):
        dice = random.Random(f"{seed}/{number}")
        while True:
            size = round(2 ** dice.uniform(1, 9))
            m, n, k = (8 * round(2 ** dice.uniform(1, 9)) for _ in range(3))
            moved = 2 * size * (m * k + k * n + m * n)
            if 2.0 * size * m * n * k <= MOST_FLOPS and 1 << 20 <= moved <= MOST_BYTES:
                shapes.append((size, m, n, k))
                break
    return shapes


def kinds(shape: Shape, count: int) -> dict[str, MatmulConfig]:
    """The best configurations by the estimate, one of each kind of tile."""
    size, m, n, k = shape
    sizes = Sizes(m, n, k, 2, 2, batch=size)
    rank = functools.partial(choice._rank, sizes, chip=choice.this_chip())
    found: dict[Any, MatmulConfig] = {}
    for one in sorted(filter(batched._is_whole, candidates(sizes)), key=rank):
        if one.cluster_blocks == 1:
            found.setdefault((one.swap, one.tile_m, one.tile_n // 64, one.alternate), one)
    return {describe(one): one for one in list(found.values())[1 : count + 1]}


def describe(config: MatmulConfig) -> str:
    """Of what differs among them."""
    found = f"{config.tile_m}x{config.tile_n}, {config.stages} stages of {config.tile_k}"
    return found + ", transposed" * config.swap + ", turns" * config.alternate


def each_in_the_grid(a: Any, b: Any) -> Any:
    """The kernel for one product, with a further grid dimension."""
    with_rule = batched._config
    batched._config = lambda *_: None  # type: ignore[assignment]
    try:
        return jax.vmap(lambda a, b: matmul(a, b))(a, b)
    finally:
        batched._config = with_rule


def ready(shape: Shape, count: int) -> Callable[[], Measured]:
    """Compiles all programs but XLA's; returns what measures them."""
    if operands.torch_is_there() and jax.default_backend() == "gpu":
        importlib.import_module("torch")  # before CUPTI comes into the process
    size, m, n, k = shape
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    given = bf16((size, m, k)), bf16((size, k, n))
    programs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    ways: dict[str, Callable[..., Any]] = {
        "as chosen": jax.vmap(lambda a, b: matmul(a, b)),
        "each in the grid": each_in_the_grid,
    }
    for name, config in kinds(shape, count).items():
        ways[name] = jax.vmap(functools.partial(matmul, config=config))
    for name, function in ways.items():
        try:
            programs[name] = jax.jit(function).lower(*given).compile()
        except Exception as error:
            failed[name] = str(error)[:300]

    def drawn(key: Any) -> Any:
        keys = jax.random.split(key)
        return [jax.random.normal(i, x.shape, x.dtype) for i, x in zip(keys, given, strict=True)]

    def error(a: Any, b: Any, got: Any) -> Any:
        wanted = jnp.matmul(a, b, preferred_element_type=jnp.float32)
        return jnp.linalg.norm(got.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)

    options = timing.reference_options()
    error_of = jax.jit(error, **options).lower(*given, bf16((size, m, n))).compile()
    drawn_by = jax.jit(drawn).lower(jax.random.key(0)).compile()
    between = jax.ShapeDtypeStruct((gemm_times.READ_BETWEEN,), jnp.float32)
    clear = jax.jit(gemm_times.read).lower(between).compile()

    def measured() -> Measured:
        from jax.experimental.mosaic.gpu import profiler

        programs["XLA"] = jax.jit(jnp.matmul).lower(*given).compile()
        a, b = drawn_by(jax.random.key(m + n))
        large = jnp.zeros(between.shape, between.dtype)
        for name, program in list(programs.items()):
            worst = float(error_of(a, b, program(a, b)))
            if not worst < LARGEST_ERROR:
                raise ValueError(f"wrong result of {name}, relative error {worst}")
        timer = timing.CuptiTimer(profiler.mosaic_gpu_lib._mosaic_gpu_ext)
        calls: dict[Any, Callable[[], Any]] = {
            name: lambda run=run: run(a, b) for name, run in programs.items()
        }
        contenders = [gemm_times.Contenders("jax", lambda: clear(large), calls)]
        if operands.torch_is_there():
            contenders.append(_by_torch(a, b))
        found, _ = gemm_times.in_random_order(timer, contenders, m + n + k)
        times = {name: statistics.median(each) for name, each in found.items()}
        return Measured(shape, times, failed)

    return measured


def _by_torch(left: Any, right: Any) -> gemm_times.Contenders:
    import torch

    a, b = operands.to_torch(left, right)
    large = torch.zeros(gemm_times.READ_BETWEEN, device="cuda")
    torch.bmm(a, b)
    calls: dict[Any, Callable[[], Any]] = {"PyTorch": lambda: torch.bmm(a, b)}
    return gemm_times.Contenders("torch", lambda: gemm_times.read(large), calls)


def show(shape: Shape, row: Measured) -> str:
    """A line about a shape."""
    times = ", ".join(f"{name} {time:.1f}" for name, time in row.times.items())
    return f"{'x'.join(map(str, shape))}: {times}; {row.ratio:.3f} {row.failed or ''}"


def main(argv: Sequence[str]) -> int:
    """Measures, prints and writes JSON; 1 if a shape failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=20, seconds=90.0, processes=4)
    side_by_side.hold_option(parser)
    parser.add_argument("--kinds", type=int, default=0, help="of tiles, measured as well")
    arguments = parser.parse_args(argv)
    print(harness.machine(), flush=True)
    outcomes = side_by_side.prepared(
        functools.partial(ready, count=arguments.kinds),
        draw(arguments.seed, arguments.count),
        arguments.processes,
        arguments.seconds,
        arguments.hold,
    )
    rows, failed = side_by_side.collected(outcomes, str, show)
    with contextlib.suppress(ValueError):
        mean = harness.geometric_mean([row.ratio for row in rows])
        below = sum(row.ratio < 0.97 for row in rows)
        print(f"the faster rival over ours: {mean:.3f} of {len(rows)}, {below} below 0.97")
    harness.write_json(arguments.json, "batched", [dataclasses.asdict(row) for row in rows])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
