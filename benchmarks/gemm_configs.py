"""Configurations of GEMM: of shapes drawn by a seed, many are measured against XLA and PyTorch.

It shows how good the library's choice is, and what its estimate is to be fitted to. The default
comes first, then the best by the estimate and the best of each kind. Programs are compiled by
several processes side by side, and measured by one at a time: the kernels' times by CUPTI, each
call after a large array was read, so that the L2 cache has nothing of the operands. Results are
compared with XLA's.

    python benchmarks/gemm_configs.py --seed 1 --seconds 90 --json configurations.json
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable
from typing import Any

import gemm_shapes
import harness
import jax
import jax.numpy as jnp
import side_by_side
import timing

from pallasite_hopper.ops import MatmulConfig, matmul
from pallasite_hopper.ops.dense import choice
from pallasite_hopper.ops.dense.cost import Sizes, nanoseconds
from pallasite_std.tuning import winners

MOST_FLOPS = 2e12
MOST_CONFIGURATIONS = 20
NEAR = 1.3
"""Of a kind, the best is measured if it takes at most so many times the least by the estimate."""
READ_BETWEEN = 40 << 20
"""Numbers of float32."""
ROUNDS, CALLS = 3, 5


def listed(sizes: Sizes) -> list[MatmulConfig]:
    """What is measured of a shape, the default first."""
    ordered = choice._by_estimate(sizes)
    kinds: dict[Any, MatmulConfig] = {}
    for one in ordered:
        kinds.setdefault((one.swap, one.split_k > 1, one.parts > 1, one.cluster > 1), one)
        kinds.setdefault((one.swap, one.tile_m, one.tile_n > 128), one)
    limit = NEAR * nanoseconds(ordered[0], sizes)
    near = [one for one in kinds.values() if nanoseconds(one, sizes) < limit]
    found = [choice.default_config(sizes), *ordered[:8], *near]
    return list(dict.fromkeys(found))[:MOST_CONFIGURATIONS]


@dataclasses.dataclass
class Measured:
    """One shape; times in microseconds.

    Attributes:
      place: what a winner is looked up by.
      configurations: each with its time and the estimate of it, the default first.
      failed: what some configurations raised.
    """

    shape: tuple[int, int, int]
    place: dict[str, Any]
    xla: float
    torch: float | None
    configurations: list[tuple[dict[str, Any], float, float]]
    failed: list[str]

    @property
    def rival(self) -> float:
        """The fastest one's time."""
        return self.xla if self.torch is None else min(self.xla, self.torch)


def read(array: Any) -> Any:
    """Something that reads all of an array."""
    return array.max()


def times_of(
    timer: timing.CuptiTimer, framework: str, clear: Callable[[], Any], call: Callable[[], Any]
) -> list[float]:
    """Milliseconds of the kernels of some calls."""
    waits = timing.FRAMEWORKS[framework]
    between = len(timer.record(waits, clear)[0])
    records, _ = timer.record(waits, lambda: [(clear(), call())[1] for _ in range(CALLS)])
    each, rest = divmod(len(records), CALLS)
    if rest:
        raise timing.MeasurementError(f"{len(records)} kernels in {CALLS} calls")
    starts = range(0, len(records), each)
    return [timing.total(records[start + between : start + each]) for start in starts]


def measure(shape: tuple[int, int, int], alone: Any) -> Measured:
    """One shape."""
    m, n, k = shape
    sizes = Sizes(m, n, k, 2, 2)
    a, b = (jax.ShapeDtypeStruct(one, jnp.bfloat16) for one in ((m, k), (k, n)))
    out = jax.ShapeDtypeStruct((m, n), jnp.bfloat16)
    programs: list[tuple[MatmulConfig, Any]] = []
    failed = []
    for config in listed(sizes):

        def product(a: Any, b: Any, config: MatmulConfig = config) -> Any:
            return matmul(a, b, config=config)

        try:
            programs.append((config, jax.jit(product).lower(a, b).compile()))
        except Exception as error:
            failed.append(f"{config}: {error}")

    def error_of(got: Any, wanted: Any) -> Any:
        got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
        return jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted)

    def operands(key: Any) -> Any:
        keys = jax.random.split(key)
        return [jax.random.normal(i, x.shape, x.dtype) for i, x in zip(keys, (a, b), strict=True)]

    error = jax.jit(error_of).lower(out, out).compile()
    draw = jax.jit(operands).lower(jax.random.key(0)).compile()
    between = jax.ShapeDtypeStruct((READ_BETWEEN,), jnp.float32)
    clear = jax.jit(read).lower(between).compile()
    xla = jax.jit(lambda a, b: a @ b).lower(a, b)
    (question,) = winners.questions(matmul, a, b)
    with alone:
        from jax.experimental.mosaic.gpu import profiler

        timer = timing.CuptiTimer(profiler.mosaic_gpu_lib._mosaic_gpu_ext)
        left, right = draw(jax.random.key(m + n))
        large = jnp.zeros(between.shape, between.dtype)
        rival = xla.compile()
        wanted = rival(left, right)
        found: dict[Any, list[float]] = {None: []}
        for config, program in programs:
            worst = float(error(program(left, right), wanted))
            if not worst < 2e-2:
                raise ValueError(f"wrong result of {config}, relative error {worst}")
            found[config] = []
        for _ in range(ROUNDS):
            for config, program in [(None, rival), *programs]:
                found[config] += times_of(
                    timer, "jax", lambda: clear(large), lambda run=program: run(left, right)
                )
        other = by_torch(timer, left, right)
    median = {config: statistics.median(times) * 1e3 for config, times in found.items()}
    rows = [
        (dataclasses.asdict(config), median[config], nanoseconds(config, sizes) / 1e3)
        for config, _ in programs
    ]
    return Measured(shape, question.place(), median[None], other, rows, failed)


def by_torch(timer: timing.CuptiTimer, left: Any, right: Any) -> float | None:
    """Microseconds of PyTorch, if it is installed."""
    try:
        import torch
    except ImportError:
        return None
    operands = [torch.from_dlpack(one) for one in (left, right)]
    large = torch.zeros(READ_BETWEEN, device="cuda")
    torch.matmul(*operands)
    times = []
    for _ in range(ROUNDS):
        times += times_of(timer, "torch", lambda: read(large), lambda: torch.matmul(*operands))
    return statistics.median(times) * 1e3


def shown(config: dict[str, Any]) -> str:
    """The most important of a configuration."""
    text = "swap " if config["swap"] else ""
    text += f"{config['tile_m']}x{config['tile_n']}x{config['tile_k']} stages {config['stages']}"
    for name in ("cluster", "split_k", "parts"):
        if config[name] > 1:
            text += f" {name} {config[name]}"
    return text + (" and a rest" if config["rest"] else "")


def main() -> int:
    """Measures, prints and writes JSON; 1 if a shape failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=200, seconds=90.0, processes=6)
    arguments = parser.parse_args()
    print(harness.machine())
    drawn = gemm_shapes.draw(arguments.seed, arguments.count, MOST_FLOPS)
    # Others are copied first, or left to XLA, which takes more than a configuration.
    shapes = [(m, n, k) for m, n, k in drawn if n % 8 == 0 and k % 8 == 0]

    def show(shape: tuple[int, int, int], row: Measured) -> str:
        default, best = row.configurations[0], min(row.configurations, key=lambda one: one[1])
        line = (
            f"{shape}: rival {row.rival:.1f}, default {default[1]:.1f} ({shown(default[0])}), "
            f"best {best[1]:.1f} ({shown(best[0])}); {row.rival / default[1]:.3f}, "
            f"{row.rival / best[1]:.3f}"
        )
        return " ".join([line, *row.failed])

    rows, failed = side_by_side.measured(
        measure, shapes, arguments.processes, arguments.seconds, show=show
    )
    for what, pick in (("default", 0), ("best", None)):
        times = [
            row.configurations[0][1] if pick == 0 else min(one[1] for one in row.configurations)
            for row in rows
        ]
        ratios = [row.rival / time for row, time in zip(rows, times, strict=True)]
        below = ", ".join(f"{sum(r < x for r in ratios)} below {x}" for x in (0.97, 0.9))
        print(f"{what}: geometric mean {harness.geometric_mean(ratios)} of {len(rows)}, {below}")
    harness.write_json(arguments.json, "gemm_configs", rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
