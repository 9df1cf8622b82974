"""How the time of every stage of a compilation grows with the size of a kernel.

Kernels of a few kinds, each in several sizes: many stores and loads of shared memory, one after the
other or on one allocation each, long arithmetic, deep nests of loops and of branches. Nothing is
found in a cache, and no GPU is needed. A stage that does its work once takes twice the time for a
kernel of twice the size; the last column of the table says what power of the size it took.

    python benchmarks/compile_growth.py --json compile_growth.json
    python benchmarks/compile_growth.py --kernels loops --sizes 8 16 32
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ["PALLASITE_CACHE"] = "off"

import harness
import jax
import jax.numpy as jnp
import stage_times
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu

ARRAY = (128, 64)


def kernel(body: Callable[..., None], scratch: Sequence[Any] = ()) -> tuple[Any, tuple[Any, ...]]:
    """A kernel of one block with an operand and a result, and its argument."""
    made = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(ARRAY, jnp.float32),
        scratch_types=list(scratch),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return made, (jax.ShapeDtypeStruct(ARRAY, jnp.float32),)


def pairs(size: int) -> tuple[Any, tuple[Any, ...]]:
    """So many stores to shared memory, each followed by a load from it."""

    def body(x_ref, o_ref, scratch):
        x = x_ref[...]
        for step in range(size):
            scratch[...] = x
            plgpu.commit_smem()
            x = scratch[...] + float(step)
        o_ref[...] = x

    return kernel(body, [plgpu.SMEM(ARRAY, jnp.float32)])


def allocations(size: int) -> tuple[Any, tuple[Any, ...]]:
    """So many small pieces of shared memory, each stored once and loaded once."""

    def body(x_ref, o_ref, *pieces):
        x = x_ref[...]
        for number, piece in enumerate(pieces):
            rows = pl.ds(8 * (number % 16), 8)
            piece[...] = x_ref[rows]
            plgpu.commit_smem()
            o_ref[rows] = piece[...] + float(number)
        o_ref[...] = x

    return kernel(body, [plgpu.SMEM((8, 64), jnp.float32)] * size)


def arithmetic(size: int) -> tuple[Any, tuple[Any, ...]]:
    """So many operations on an array in registers."""

    def body(x_ref, o_ref):
        x = x_ref[...]
        for step in range(size):
            x = x * (1.0 + step) + 0.5
        o_ref[...] = x

    return kernel(body)


def loops(size: int) -> tuple[Any, tuple[Any, ...]]:
    """Loops, nested so deeply, that carry an array and a number; shared memory is used inside."""

    def body(x_ref, o_ref, scratch):
        def nest(depth: int, number: Any, x: Any) -> tuple[Any, Any]:
            if depth == size:
                rows = pl.ds(lax.rem(number, 16) * 8, 8)
                scratch[...] = o_ref[rows] + 1.0
                plgpu.commit_smem()
                o_ref[rows] = scratch[...]
                return number + 8, x * 1.5

            def step(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                number, x = carry
                return nest(depth + 1, number + 8 * i, x + 1.0)

            return lax.fori_loop(0, 2 + depth % 2, step, (number, x))

        number, x = nest(0, jnp.int32(0), x_ref[...])
        o_ref[...] = x + number.astype(jnp.float32)

    return kernel(body, [plgpu.SMEM((8, 64), jnp.float32)])


def branches(size: int) -> tuple[Any, tuple[Any, ...]]:
    """Conditionals on what is only known when the kernel runs, nested so deeply."""

    def nest(depth: int, number: Any, x: Any) -> Any:
        if depth == size:
            return x * 2.0
        return lax.cond(number > depth, lambda: nest(depth + 1, number, x + 1.0), lambda: x - 1.0)

    def body(x_ref, o_ref):
        o_ref[...] = nest(0, lax.axis_index("row") * 3, x_ref[...])

    made = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct(ARRAY, jnp.float32), grid=(64,), grid_names=("row",)
    )
    return made, (jax.ShapeDtypeStruct(ARRAY, jnp.float32),)


KERNELS: dict[str, tuple[Callable[[int], tuple[Any, tuple[Any, ...]]], tuple[int, ...]]] = {
    "pairs": (pairs, (50, 100, 200)),
    "allocations": (allocations, (16, 32, 64)),
    "arithmetic": (arithmetic, (100, 200, 400)),
    "loops": (loops, (6, 12, 24)),
    "branches": (branches, (6, 12, 24)),
}
"""Kernels by name, each with the sizes that are measured."""


@dataclasses.dataclass
class Row:
    """Times of one kind of kernel: milliseconds of each stage for each size."""

    kernel: str
    sizes: list[int]
    milliseconds: list[dict[str, float]]

    def growth(self, stage: str) -> float | None:
        """The power of the size that the time of a stage grew with, from the last two sizes."""
        if len(self.sizes) < 2:
            return None
        before, after = (one.get(stage, 0.0) for one in self.milliseconds[-2:])
        if before <= 0.0 or after <= 0.0:
            return None
        return math.log(after / before) / math.log(self.sizes[-1] / self.sizes[-2])


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table for each kernel and writes JSON."""
    parser = harness.parser(__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="*", choices=list(KERNELS), default=list(KERNELS))
    parser.add_argument("--sizes", nargs="*", type=int, help="sizes instead of each kernel's own")
    parser.add_argument("--target", default="sm_90a")
    arguments = parser.parse_args(argv)
    repeats = min(arguments.repeats, 3)
    print(harness.machine())
    rows = []
    for name in arguments.kernels:
        make, sizes = KERNELS[name]
        row = Row(name, [], [])
        for size in arguments.sizes or sizes:
            found = stage_times.measure(
                name, lambda size=size, make=make: make(size), repeats, target=arguments.target
            )
            if found.note:
                raise SystemExit(f"{name}, size {size}: {found.note}")
            row.sizes.append(size)
            row.milliseconds.append(found.milliseconds)
        rows.append(row)
        print(f"\n{name}: milliseconds by size")
        stages = sorted(row.milliseconds[-1], key=lambda stage: -row.milliseconds[-1][stage])
        harness.print_table(
            ("stage", *map(str, row.sizes), "power of the size"),
            [
                (stage, *(one.get(stage) for one in row.milliseconds), row.growth(stage))
                for stage in stages
                if row.milliseconds[-1][stage] >= 1.0
            ],
        )
    harness.write_json(arguments.json, "compile_growth", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
