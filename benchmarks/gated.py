"""The gated half of a feed-forward layer (SwiGLU): one kernel, two operations, XLA.

``ops.gated_matmul`` is compared with one product by both weights side by side and ``ops.swiglu`` of
its halves, with two products and ``ops.swiglu``, and with XLA's program for the same. Shapes are
those of models in ``gemm_shapes.py``, with a number of rows drawn by ``--seed``. ``--kinds`` also
measures the best configurations of the kernel by the estimate, one of each kind of tile.
``gemm_times.py`` says how it is timed; every result is compared with one in float32 first.

    python benchmarks/gated.py --seed 1 --count 12 --json gated.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
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

from pallasite import ops
from pallasite_hopper.ops import MatmulConfig
from pallasite_hopper.ops.dense.choice import this_chip
from pallasite_hopper.ops.dense.gated import run_fused
from pallasite_hopper.ops.dense.gated_choice import fused_configs

MOST_FLOPS = 4e12
LARGEST_ERROR = 1e-2
RIVALS = ("one product", "two products", "XLA")

Shape = tuple[int, int, int]


@dataclasses.dataclass
class Measured:
    """Median microseconds of all ways, by name."""

    shape: Shape
    times: dict[str, float]
    failed: dict[str, str]

    @property
    def ratio(self) -> float:
        """The fastest other way's time by that of ``gated_matmul``."""
        return min(self.times[one] for one in RIVALS) / self.times["as chosen"]


def draw(seed: int, count: int) -> list[Shape]:
    """Rows, columns of a weight and depth."""
    models = [one for one in gemm_shapes.MODELS.values() if one.gated]
    shapes = []
    for number in range(count):
        dice = random.Random(f"{seed}/{number}")
        while True:
            model, m = dice.choice(models), round(2 ** dice.uniform(0, 14))
            shape = (m, model.feed_forward, model.hidden)
            if 4.0 * m * shape[1] * shape[2] <= MOST_FLOPS:
                shapes.append(shape)
                break
    return shapes


def named(shape: str) -> Shape:
    """A shape as it is given on the command line."""
    m, n, k = map(int, shape.split("x"))
    return m, n, k


def xla(a: Any, gate: Any, up: Any) -> Any:
    """As programs write it."""
    return jax.nn.silu(a @ gate) * (a @ up)


def one_product(a: Any, both: Any) -> Any:
    """One product by both weights."""
    joint = ops.matmul(a, both)
    half = joint.shape[1] // 2
    return ops.swiglu(joint[:, :half], joint[:, half:])


def two_products(a: Any, gate: Any, up: Any) -> Any:
    """A product by each weight."""
    return ops.swiglu(ops.matmul(a, gate), ops.matmul(a, up))


def reference(a: Any, gate: Any, up: Any) -> Any:
    """In float32."""
    one, other = (jnp.matmul(a, w, preferred_element_type=jnp.float32) for w in (gate, up))
    return jax.nn.silu(one) * other


def kinds(shape: Shape, count: int) -> dict[str, MatmulConfig]:
    """The best configurations of the kernel by the estimate, one of each kind of tile."""
    found: dict[Any, MatmulConfig] = {}
    other = "H100" if this_chip() == "H200" else "H200"
    for one in (*fused_configs(*shape, this_chip()), *fused_configs(*shape, other)[:1]):
        wide = one.tile_n > 128
        kind = (one.swap, one.tile_m, wide, one.alternate, one.split_k > 1, one.last_parts > 1)
        found.setdefault((*kind, one.cluster > 1, one.tile_n <= 16 and one.stages), one)
    first = list(found.values())
    return {describe(one): one for one in (*first[: count - 1], *first[-1:])} if count else {}


def describe(config: MatmulConfig) -> str:
    """Of what differs among them."""
    found = f"{config.tile_m}x{config.tile_n}, {config.stages} stages of {config.tile_k}"
    found += f", groups of {config.group}" + (", transposed" if config.swap else "")
    found += ", turns" if config.alternate else ""
    found += f", {config.split_k} parts" if config.split_k > 1 else ""
    found += ", last tiles shared" if config.last_parts > 1 else ""
    return found + (f", clusters along {config.cluster_along}" if config.cluster > 1 else "")


def ready(shape: Shape, count: int) -> Callable[[], Measured]:
    """Compiles all programs but XLA's; returns what measures them."""
    m, n, k = shape
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    a, weight, both = bf16((m, k)), bf16((k, n)), bf16((k, 2 * n))
    apart, joint = (a, weight, weight), (a, both)
    programs: dict[str, tuple[Any, bool]] = {}
    failed: dict[str, str] = {}
    ways: dict[str, tuple[Callable[..., Any], Any]] = {
        "as chosen": (lambda *operands: ops.gated_matmul(*operands), apart),
        "one product": (one_product, joint),
        "two products": (two_products, apart),
    }
    for name, config in kinds(shape, count).items():
        ways[name] = functools.partial(run_fused, jax.nn.silu, config), apart
    for name, (function, operands) in ways.items():
        try:
            programs[name] = jax.jit(function).lower(*operands).compile(), operands is joint
        except Exception as error:
            failed[name] = str(error)[:300]

    def drawn(key: Any) -> Any:
        scales = (1.0, k**-0.5, k**-0.5)
        return [
            jax.random.normal(one, x.shape, x.dtype) * scale
            for one, x, scale in zip(jax.random.split(key, 3), apart, scales, strict=True)
        ]

    def error_of(wanted: Any, got: Any) -> Any:
        return jnp.linalg.norm(got.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)

    wide = jax.ShapeDtypeStruct((m, n), jnp.float32)
    error = jax.jit(error_of).lower(wide, bf16((m, n))).compile()
    wanted_by = jax.jit(reference, **timing.reference_options()).lower(*apart).compile()
    drawn_by = jax.jit(drawn).lower(jax.random.key(0)).compile()
    between = jax.ShapeDtypeStruct((gemm_times.READ_BETWEEN,), jnp.float32)
    clear = jax.jit(gemm_times.read).lower(between).compile()

    def measured() -> Measured:
        from jax.experimental.mosaic.gpu import profiler

        options = gemm_times.CUBLAS_ONLY if jax.default_backend() == "gpu" else {}
        theirs = jax.jit(xla, compiler_options=options).lower(*apart).compile()
        programs["XLA"] = theirs, False
        separate = drawn_by(jax.random.key(m + n))
        together = (separate[0], jnp.concatenate(separate[1:], axis=1))
        wanted = wanted_by(*separate)
        large = jnp.zeros(between.shape, between.dtype)
        calls: dict[Any, Callable[[], Any]] = {}
        for name, (program, joined) in programs.items():
            operands = together if joined else separate
            worst = float(error(wanted, program(*operands)))
            if not worst < LARGEST_ERROR:
                raise ValueError(f"wrong result of {name}, relative error {worst}")
            calls[name] = lambda run=program, operands=operands: run(*operands)
        timer = timing.CuptiTimer(profiler.mosaic_gpu_lib._mosaic_gpu_ext)
        contenders = gemm_times.Contenders("jax", lambda: clear(large), calls)
        found, _ = gemm_times.in_random_order(timer, [contenders], m + n + k)
        times = {name: statistics.median(each) for name, each in found.items()}
        return Measured(shape, times, failed)

    return measured


def show(shape: Shape, row: Measured) -> str:
    """A line about a shape."""
    times = ", ".join(f"{name} {time:.1f}" for name, time in row.times.items())
    return f"{'x'.join(map(str, shape))}: {times}; {row.ratio:.3f} {row.failed or ''}"


def main(argv: Sequence[str]) -> int:
    """Measures, prints and writes JSON; 1 if a shape failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=12, seconds=90.0, processes=4)
    side_by_side.hold_option(parser)
    parser.add_argument("--shapes", nargs="+", help="these, as MxNxK, before those drawn")
    parser.add_argument("--kinds", type=int, default=0, help="of tiles, measured as well")
    arguments = parser.parse_args(argv)
    print(harness.machine(), flush=True)
    outcomes = side_by_side.prepared(
        functools.partial(ready, count=arguments.kinds),
        [*map(named, arguments.shapes or ()), *draw(arguments.seed, arguments.count)],
        arguments.processes,
        arguments.seconds,
        arguments.hold,
    )
    rows, failed = side_by_side.collected(outcomes, str, show)
    with contextlib.suppress(ValueError):
        mean = harness.geometric_mean([row.ratio for row in rows])
        print(f"the fastest other way over ours: {mean:.3f} of {len(rows)}")
    harness.write_json(arguments.json, "gated", [dataclasses.asdict(row) for row in rows])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
