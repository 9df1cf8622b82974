"""JAX's published matrix product for Hopper, compiled by Pallasite and by JAX's own compiler.

The source is the same: it is read from the installed JAX, and for Pallasite only the import of the
GPU module and the semantics that it asks for are replaced. Needs a GPU and absl-py.

    python benchmarks/published_kernels.py --json published_kernels.json
"""

from __future__ import annotations

import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import harness

harness.use_checkout()
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "upstream"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import published  # noqa: E402
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as theirs  # noqa: E402

SHAPES = ((4096, 4096, 4096), (4096, 8192, 4096), (8192, 8192, 8192))  # M, N, K

CONFIGS = (  # tile_m, tile_n, wg_dimension, grid_minor_dim, cluster_dimension
    (128, 128, "M", "M", None),
    (64, 256, "M", "M", None),
    (128, 128, "N", "M", None),
    (128, 128, "N", "N", None),
    (128, 128, "N", "M", "M"),
)


def product(module: Any, config: tuple[Any, ...]) -> Callable[..., jax.Array]:
    """The published function with one configuration."""
    tile_m, tile_n, shared, minor, cluster = config
    dimension = module.MatmulDimension
    tuning = module.TuningConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=64,
        max_concurrent_steps=4,
        epi_tile_m=64,
        epi_tile_n=64,
        grid_minor_dim=dimension[minor],
        grid_tile_width=8,
        wg_dimension=dimension[shared],
        cluster_dimension=None if cluster is None else dimension[cluster],
    )
    return jax.jit(lambda a, b: functools.partial(module.matmul, config=tuning)(a, b, None))


def measure(shape: tuple[int, int, int], config: tuple[Any, ...], rounds: int) -> dict[str, Any]:
    """One row: both compilers in turns, on the same inputs."""
    m, n, k = shape
    a = jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (k, n), jnp.bfloat16)
    ours = published.load("hopper_matmul_mgpu", lane_semantics=True)
    functions = {"ours": product(ours, config), "jax": product(theirs, config)}
    results, first_calls = {}, {}
    for name, function in functions.items():
        start = time.perf_counter()
        results[name] = jax.block_until_ready(function(a, b))
        first_calls[name] = time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(1e3 * harness.kernel_milliseconds(function, a, b))
    taken = {name: statistics.median(found) for name, found in times.items()}
    return {
        "shape": shape,
        "config": config,
        "microseconds": taken,
        "tflops": {name: 2 * m * n * k / t / 1e6 for name, t in taken.items()},
        "ratio": taken["jax"] / taken["ours"],
        "equal": bool((results["ours"] == results["jax"]).all()),
        "first_call_seconds": first_calls,
    }


def main(argv: Sequence[str]) -> int:
    """Prints a table and writes JSON; 1 if a result differs."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="times that both take a turn")
    arguments = parser.parse_args(argv)
    rows = [measure(s, c, arguments.rounds) for s in SHAPES for c in CONFIGS]
    lines = []
    for row in rows:
        tile_m, tile_n, shared, minor, cluster = row["config"]
        calls = row["first_call_seconds"]
        lines.append(
            (
                "x".join(map(str, row["shape"])),
                f"{tile_m}x{tile_n} wg={shared} minor={minor} cluster={cluster}",
                f"{row['tflops']['ours']:.0f}",
                f"{row['tflops']['jax']:.0f}",
                f"{row['ratio']:.3f}",
                "yes" if row["equal"] else "NO",
                f"{calls['ours']:.2f} / {calls['jax']:.2f}",
            )
        )
    harness.print_table(
        ("M x N x K", "configuration", "ours", "jax", "ours / jax", "equal", "first call s"), lines
    )
    mean = harness.geometric_mean([row["ratio"] for row in rows])
    print(f"\ngeometric mean of ours / jax: {mean:.3f}")
    harness.write_json(arguments.json, "published_kernels", rows, geometric_mean=mean)
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
