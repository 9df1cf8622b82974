"""GEMM of extents that are no multiples of 8, in each of the ways that there are.

Shapes are drawn by a seed; every sixth has one or both operands transposed. XLA, PyTorch, our
kernel with copies to aligned rows, the kernel that loads any rows, the one for few rows and the one
that reads several rows as one with several configurations, the best by their estimates first, and
what is chosen without options. It
shows how good the choice is, and what the estimates (``pallasite_hopper.ops.dense.direct_choice``,
``unaligned``) are to be fitted to. Each result is compared with a product in float32 before it is
timed; ``gemm_times.py`` says how that is done.

    python benchmarks/unaligned.py --seed 1 --seconds 90 --json unaligned.json
    python benchmarks/unaligned.py --seed 2 --rows 4 --kind any
    python benchmarks/unaligned.py --seed 3 --kind small
"""

from __future__ import annotations

import dataclasses
import functools
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import gemm_shapes
import gemm_times
import harness
import jax
import jax.numpy as jnp
import numpy as np
import side_by_side
import timing

from pallasite_hopper.ops import matmul
from pallasite_hopper.ops.dense import (
    direct_choice,
    few_rows,
    few_rows_choice,
    joined_rows,
    padding,
    run,
    unaligned,
)
from pallasite_hopper.ops.dense.choice import default_config
from pallasite_hopper.ops.dense.cost import Sizes
from pallasite_hopper.ops.dense.direct import DirectConfig, build
from pallasite_hopper.ops.dense.few_rows import FewRowsConfig
from pallasite_std.api import Epilogue, MatmulProblem

MOST_FLOPS = 4e11
ORDERS = ((False, True), (True, False), (True, True))
"""Of the operands, for every sixth shape."""

NEAR, SAMPLED = 1.5, 3
"""Of the configurations that take at most so many times the least time, so many are measured."""

LARGEST_ERROR = 1e-2
BFLOAT16 = np.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a product, with the order of its operands."""

    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    others: bool = True
    """Whether kernels without copies are measured, too."""

    def __str__(self) -> str:
        order = "".join("T" if one else "N" for one in (self.transpose_a, self.transpose_b))
        return f"{self.m}x{self.n}x{self.k} {order}"

    @property
    def sizes(self) -> Sizes:
        """For the estimates."""
        return Sizes(self.m, self.n, self.k, 2, 2, self.transpose_a, self.transpose_b)

    @property
    def operands(self) -> list[jax.ShapeDtypeStruct]:
        """Their shapes."""
        a, b = (self.m, self.k), (self.k, self.n)
        shapes = (a[::-1] if self.transpose_a else a, b[::-1] if self.transpose_b else b)
        return [jax.ShapeDtypeStruct(one, BFLOAT16) for one in shapes]

    def product(self, a: Any, b: Any, **options: Any) -> Any:
        """By XLA."""
        a, b = a.T if self.transpose_a else a, b.T if self.transpose_b else b
        return jnp.matmul(a, b, **options)


@dataclasses.dataclass
class Measured:
    """One shape; microseconds by the name of the way, and the estimates of some of them."""

    shape: Shape
    times: dict[str, float]
    estimates: dict[str, float]
    failed: dict[str, str]

    @property
    def ratio(self) -> float:
        """The fastest rival's time over ours, as it is chosen."""
        return min(self.times[one] for one in ("xla", "torch")) / self.times["ours"]


def listed(sizes: Sizes) -> list[DirectConfig]:
    """Configurations of the kernel without copies, the best by the estimate first."""
    if not direct_choice._loadable(sizes):
        return []
    estimate = functools.partial(direct_choice.direct_nanoseconds, sizes=sizes)
    ordered = sorted(direct_choice._candidates(sizes), key=estimate)
    near = [one for one in ordered if estimate(one) < NEAR * estimate(ordered[0])]
    some = random.Random(str(sizes)).sample(near, min(SAMPLED, len(near)))
    kinds = [next((one for one in near if one.swap == swap), ordered[0]) for swap in (True, False)]
    alone = [one for one in near if one.warpgroups == one.split_k == 1]
    other = [dataclasses.replace(one, at_once=not one.at_once) for one in alone[:1]]
    return list(dict.fromkeys([*ordered[:2], *kinds, *some, *alone[:1], *other]))


def listed_few_rows(sizes: Sizes) -> list[FewRowsConfig]:
    """Configurations of the kernel for few rows, the best by the estimate first."""
    estimate = functools.partial(few_rows_choice.few_rows_nanoseconds, sizes=sizes)
    ordered = sorted(few_rows_choice.candidates(sizes), key=estimate)
    near = [one for one in ordered if estimate(one) < NEAR * estimate(ordered[0])]
    some = random.Random(str(sizes)).sample(near, min(2 * SAMPLED, len(near)))
    found = list(dict.fromkeys([*ordered[:2], *some]))
    folded = [dataclasses.replace(one, fold=not one.fold) for one in found if one.columns < 128]
    return [*found, *folded[:2]]


def listed_joined_rows(sizes: Sizes) -> list[joined_rows.JoinedRowsConfig]:
    """Configurations of the kernel that reads several rows as one, the best by the estimate
    first."""
    ordered = joined_rows.joined_rows_configs(sizes)
    estimate = functools.partial(joined_rows.joined_rows_nanoseconds, sizes=sizes)
    near = [one for one in ordered if estimate(one) < NEAR * estimate(ordered[0])]
    some = random.Random(str(sizes)).sample(near, min(SAMPLED, len(near)))
    return list(dict.fromkeys([*ordered[:2], *some]))


def copied_by_xla(*operands: Any, **options: Any) -> Any:
    """Our kernel with copies of the operands by XLA instead of a kernel of ours."""
    with mock.patch.object(run, "aligned", padding.by_xla):
        return matmul(*operands, **options)


def ways(shape: Shape) -> tuple[dict[str, Callable[..., Any]], dict[str, float]]:
    """Functions of the operands, by name, and estimates of microseconds."""
    sizes = shape.sizes
    options = {"transpose_a": shape.transpose_a, "transpose_b": shape.transpose_b}
    config = default_config(sizes)
    found: dict[str, Callable[..., Any]] = {
        "xla": shape.product,
        "ours": functools.partial(matmul, **options),
        "copies": functools.partial(matmul, config=config, **options),
        "copies by XLA": functools.partial(copied_by_xla, config=config, **options),
    }
    estimates = {
        "xla": unaligned.nanoseconds_by_xla(sizes) / 1e3,
        "copies": unaligned.nanoseconds_with_copies(sizes) / 1e3,
        "copies by XLA": unaligned.nanoseconds_with_copies(sizes) / 1e3,
    }
    if not shape.others:
        return found, estimates
    problem = MatmulProblem(
        m=shape.m,
        n=shape.n,
        k=shape.k,
        dtype_a=BFLOAT16,
        dtype_b=BFLOAT16,
        out_dtype=BFLOAT16,
        accumulator=np.dtype(np.float32),
        **options,
    )
    for one in listed(sizes):
        name = str(one)
        found[name] = build(problem, one, Epilogue())
        estimates[name] = direct_choice.direct_nanoseconds(one, sizes) / 1e3
    for few in listed_few_rows(sizes):
        name = str(few)
        found[name] = few_rows.build(problem, few, Epilogue())
        estimates[name] = few_rows_choice.few_rows_nanoseconds(few, sizes) / 1e3
    for joined in listed_joined_rows(sizes):
        name = str(joined)
        found[name] = joined_rows.build(problem, joined, Epilogue(), run.MULTIPROCESSORS)
        estimates[name] = joined_rows.joined_rows_nanoseconds(joined, sizes) / 1e3
    return found, estimates


def ready(shape: Shape) -> Callable[[], Measured]:
    """Compiles all programs of a shape but those of XLA; returns what measures it."""
    import torch  # before CUPTI comes into the process

    functions, estimates = ways(shape)
    programs, failed = {}, {}
    for name, function in functions.items():
        try:
            lowered = jax.jit(function).lower(*shape.operands)
            # XLA measures its own kernels, and ours may be XLA's.
            programs[name] = lowered if name in ("xla", "ours") else lowered.compile()
        except Exception as error:
            failed[name] = str(error)[:300]

    def error_of(got: Any, wanted: Any) -> Any:
        return jnp.linalg.norm(got.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)

    def reference(a: Any, b: Any) -> Any:
        highest = jax.lax.Precision.HIGHEST
        return shape.product(a.astype(jnp.float32), b.astype(jnp.float32), precision=highest)

    exact = jax.jit(reference, **timing.reference_options()).lower(*shape.operands)
    between = jax.ShapeDtypeStruct((gemm_times.READ_BETWEEN,), jnp.float32)
    clear = jax.jit(gemm_times.read).lower(between).compile()

    def measured() -> Measured:
        from jax.experimental.mosaic.gpu import profiler

        for name in ("xla", "ours"):
            programs[name] = programs[name].compile()
        keys = jax.random.split(jax.random.key(shape.m + shape.n))
        a, b = (
            jax.random.normal(i, x.shape, x.dtype)
            for i, x in zip(keys, shape.operands, strict=True)
        )
        large, wanted = jnp.zeros(between.shape, between.dtype), exact.compile()(a, b)
        calls: dict[str, Callable[[], Any]] = {}
        for name, program in programs.items():
            error = float(error_of(program(a, b), wanted))
            if not error < LARGEST_ERROR:
                raise ValueError(f"wrong result of {name}, relative error {error}")
            calls[name] = lambda run=program: run(a, b)
        timer = timing.CuptiTimer(profiler.mosaic_gpu_lib._mosaic_gpu_ext)
        seed = shape.m + shape.n + shape.k
        ours = gemm_times.Contenders("jax", lambda: clear(large), calls)
        left, right = (torch.from_dlpack(one) for one in (a, b))
        left = left.t() if shape.transpose_a else left
        right = right.t() if shape.transpose_b else right
        read = torch.from_dlpack(large)
        product = {"torch": lambda: torch.matmul(left, right)}
        product["torch"]()
        theirs = gemm_times.Contenders("torch", lambda: gemm_times.read(read), product)
        found, _ = gemm_times.in_random_order(timer, [ours, theirs], seed)
        times = {name: statistics.median(each) for name, each in found.items()}
        return Measured(shape, times, estimates, failed)

    return measured


def shapes(
    seed: int, count: int, rows: int = gemm_shapes.MOST_TOKENS, kind: str = "odd"
) -> list[Shape]:
    """The sample."""
    if kind == "any":
        every = gemm_shapes.draw(seed, count, MOST_FLOPS, rows)
        return [Shape(*one, False, False) for one in dict.fromkeys(every)]
    if kind == "small":
        return [Shape(*one, False, False) for one in gemm_shapes.draw_small(seed, count, rows)]
    drawn = gemm_shapes.draw_odd(seed, count, MOST_FLOPS, rows)
    orders = [ORDERS[i // 6 % 3] if i % 6 == 4 else (False, False) for i in range(count)]
    return [Shape(*one, *order) for one, order in zip(drawn, orders, strict=True)]


def show(shape: Shape, row: Measured) -> str:
    """A line about a shape."""
    text = ", ".join(
        f"{name} {row.times[name]:.1f}"
        for name in ("xla", "torch", "copies", "copies by XLA", "ours")
    )
    for kind, title in (
        ("DirectConfig", "without copies"),
        ("FewRowsConfig", "few rows"),
        ("JoinedRowsConfig", "joined rows"),
    ):
        times = {name: time for name, time in row.times.items() if name.startswith(kind)}
        best = min(times, key=lambda name: times[name], default=None)
        if best is not None:
            text += f", {title} {times[best]:.1f} (estimate {row.estimates[best]:.1f}, {best})"
    return f"{shape}: {text}; {row.ratio:.3f} " + " ".join(row.failed.values())


def main() -> int:
    """Measures, prints and writes JSON; 1 if a shape failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=60, seconds=90.0, processes=7)
    parser.add_argument("--rows", type=int, default=gemm_shapes.MOST_TOKENS, help="at most")
    some = "extents that are no multiples of 8, small ones, or those of programs, too"
    parser.add_argument("--kind", choices=["odd", "small", "any"], default="odd", help=some)
    parser.add_argument("--copies", action="store_true", help="only ways with copies, and rivals'")
    side_by_side.hold_option(parser)
    arguments = parser.parse_args()
    print(harness.machine())
    drawn = shapes(arguments.seed, arguments.count, arguments.rows, arguments.kind)
    cases = side_by_side.prepared(
        ready,
        [dataclasses.replace(one, others=not arguments.copies) for one in drawn],
        arguments.processes,
        arguments.seconds,
        arguments.hold,
    )
    rows, failed = side_by_side.collected(cases, str, show)
    ratios = [row.ratio for row in rows]
    below = ", ".join(f"{sum(r < x for r in ratios)} below {x}" for x in (0.97, 0.9))
    print(f"chosen: geometric mean {harness.geometric_mean(ratios)} of {len(rows)}, {below}")
    fastest = [min(t for n, t in r.times.items() if n != "torch") for r in rows]
    share = harness.geometric_mean(r.times["ours"] / t for r, t in zip(rows, fastest, strict=True))
    print(f"chosen over the fastest of all ways, XLA's included: {share}")
    harness.write_json(arguments.json, "unaligned", rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
