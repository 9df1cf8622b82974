"""Time from calling a kernel to PTX and to its first result, against JAX's Mosaic GPU.

The same kernel bodies are compiled by both in one process. Every repetition is a different kernel
(a constant in it differs), so nothing is found in a cache; caches on disk are off. A first round
that is not counted takes imports and initialisation out of the measurement.

    python benchmarks/compile_time.py --json compile_time.json

Without a GPU only Pallasite's times up to PTX, and to machine code if an assembler is found, are
measured. A second table has every stage of Pallasite's compilation, with ``--stages`` also of the
operations of the Hopper library and of the kernels that JAX publishes.

    python benchmarks/compile_time.py --against ../earlier --stages library

compares the processor time of these compilations with that of another checkout instead, and

    python benchmarks/compile_time.py --upstream

that up to machine code with JAX's own compiler, without a GPU; this needs absl-py, and JAX's
compiler as tests/upstream/jax_compiler.py says. On a machine that others use, ``--cpu`` shows
processor time in the tables, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["PALLASITE_CACHE"] = "off"

import compile_against
import harness
import jax
import jax.numpy as jnp
import memory_bound
import stage_times
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from pallasite import gpu as plgpu
from pallasite.codegen.tools import find_tool


def elementwise(gpu: Any, constant: float) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A chain of arithmetic on rows."""

    @gpu.kernel(
        out_type=jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
        grid=(1024,),
        grid_names=("row",),
        **memory_bound.options(gpu),
    )
    def chain(x_ref, o_ref):
        row = lax.axis_index("row")
        x = x_ref[row]
        for step in range(8):
            x = x * (constant + step) + jnp.exp(-x)
        o_ref[row] = x

    return chain, ((1024, 4096, jnp.float32),)


def rms_norm(gpu: Any, constant: float) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """RMSNorm of rows of 8192."""

    def compute(x, combine, w):
        x = x.astype(jnp.float32)
        total = combine(jnp.add, jnp.sum(x * x), 0)
        return x * lax.rsqrt(total / 8192 + constant * 1e-6) * w()

    kernel = memory_bound.row_kernel(gpu, 1024, 8192, jnp.bfloat16, "rms_norm", compute)
    return kernel, ((1024, 8192, jnp.bfloat16), (8192, jnp.bfloat16))


def softmax(gpu: Any, constant: float) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Scaled softmax of rows of 8192."""

    def compute(x, combine):
        x = x.astype(jnp.float32) * constant
        e = jnp.exp(x - combine(jnp.maximum, jnp.max(x), 0))
        return e * (1.0 / combine(jnp.add, jnp.sum(e), 1))

    kernel = memory_bound.row_kernel(gpu, 1024, 8192, jnp.bfloat16, "softmax", compute)
    return kernel, ((1024, 8192, jnp.bfloat16),)


def tiled_copy(gpu: Any, constant: float) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A tile through swizzled shared memory by TMA, four steps in a ring of two slots."""
    transforms = (gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128))

    @gpu.kernel(
        out_type=jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),
        grid=(16, 64),
        grid_names=("row", "column"),
        scratch_types=[
            gpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=transforms),
            gpu.SMEM((64, 64), jnp.bfloat16, transforms=transforms),
            gpu.Barrier(num_barriers=2),
        ],
        **memory_bound.options(gpu),
    )
    def tiles(x_ref, o_ref, slots, result, loaded):
        row, column = lax.axis_index("row"), lax.axis_index("column")

        def window(ref, step):
            return ref.at[pl.ds(row * 256 + step * 64, 64), pl.ds(column * 64, 64)]

        def fetch(step):
            slot = lax.rem(step, 2)
            gpu.copy_gmem_to_smem(window(x_ref, step), slots.at[slot], loaded.at[slot])

        fetch(jnp.int32(0))

        @pl.loop(0, 4)
        def _(step):
            slot = lax.rem(step, 2)

            @pl.when(step < 3)
            def _():
                fetch(step + 1)

            gpu.barrier_wait(loaded.at[slot])
            value = slots[slot].astype(jnp.float32) * constant
            gpu.wait_smem_to_gmem(0)
            result[...] = value.astype(jnp.bfloat16)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(result, window(o_ref, step))

        gpu.wait_smem_to_gmem(0)

    return tiles, ((4096, 4096, jnp.bfloat16),)


KERNELS = {
    "elementwise": elementwise,
    "rms_norm": rms_norm,
    "softmax": softmax,
    "tiled_copy": tiled_copy,
}


@dataclasses.dataclass
class Row:
    """Times in milliseconds, medians over different kernels of one kind."""

    kernel: str
    ptx_ms: float
    machine_code_ms: float | None
    first_result_ms: float | None
    mosaic_first_result_ms: float | None
    stages_ms: dict[str, float]
    mosaic_note: str = ""


def arrays(types: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays of ones of the (shape..., dtype) tuples given."""
    return tuple(jnp.ones(one[:-1], one[-1]) for one in types)


def first_result(function: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Milliseconds from the first call of a jitted function to its result."""
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(function)(*args))
    return (time.perf_counter() - start) * 1e3


def measure(name: str, build: Any, repeats: int, gpu_there: bool) -> Row:
    """Times one kind of kernel."""
    ptx, code, first, theirs, stages = [], [], [], [], []
    note = ""
    assembler = find_tool("ptxas").path is not None
    for repeat in range(repeats + 1):
        constant = 1.5 + 0.125 * repeat
        function, types = build(plgpu, constant)
        structs = [jax.ShapeDtypeStruct(one[:-1], one[-1]) for one in types]
        timings = stage_times.once(function, structs, "sm_90a", assembler)
        whole, assembling = sum(timings.values()), timings.get("ptxas", 0.0)
        if gpu_there:
            args = arrays(types)
            function, _ = build(plgpu, constant + 0.0625)
            ours = first_result(function, args)
            try:
                function, _ = build(mosaic, constant + 0.0625)
                rival = first_result(function, args)
            except Exception as failure:
                rival = None
                note = f"{type(failure).__name__}: {str(failure).splitlines()[0][:80]}"
        if repeat == 0:
            continue
        ptx.append(whole - assembling)
        code.append(whole)
        stages.append(timings)
        if gpu_there:
            first.append(ours)
            if rival is not None:
                theirs.append(rival)
    return Row(
        name,
        statistics.median(ptx),
        statistics.median(code) if assembler else None,
        statistics.median(first) if first else None,
        statistics.median(theirs) if theirs else None,
        stage_times.medians(stages),
        note,
    )


STAGES = {
    "library": stage_times.library,
    "published-lane": lambda: stage_times.published("lane"),
    "published-warpgroup": lambda: stage_times.published("warpgroup"),
}
"""Further kernels whose stages are timed, by the names of the option."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = harness.parser(__doc__.splitlines()[0])
    result.add_argument(
        "--kernels", nargs="*", help="only kernels with one of these in their names"
    )
    result.add_argument(
        "--stages", nargs="*", choices=list(STAGES), default=[], help="stages of these kernels, too"
    )
    result.add_argument(
        "--cpu",
        action="store_true",
        help="processor time, assemblers included",
    )
    result.add_argument(
        "--upstream", action="store_true", help="compare with JAX's own compiler, without a GPU"
    )
    result.add_argument(
        "--against", type=pathlib.Path, metavar="PATH", help="compare with another checkout"
    )
    return result


def against(arguments: argparse.Namespace, wanted: Callable[[str], bool]) -> int:
    """Compares with another checkout; 1 if one of them refuses a kernel."""
    rows = compile_against.compare(arguments.against, arguments.stages, wanted, arguments.repeats)
    print(harness.machine())
    print(f"\nProcessor time up to PTX, against {arguments.against}")
    harness.print_table(
        ("kernel", "theirs ms", "ours ms", "theirs / ours", "note"),
        [(row.kernel, row.theirs_ms, row.ours_ms, row.ratio, row.note) for row in rows],
    )
    mean = harness.geometric_mean(row.ratio for row in rows)
    print(f"geometric mean of theirs / ours: {mean:.3f}" if mean is not None else "nothing")
    harness.write_json(arguments.json, "compile_against", rows)
    return 1 if any(row.note for row in rows) else 0


def upstream(arguments: argparse.Namespace, wanted: Callable[[str], bool]) -> int:
    """Compares with JAX's own compiler; 1 if one of them refuses a kernel."""
    import compile_upstream

    rows = compile_upstream.compare(KERNELS, wanted, arguments.repeats)
    print(harness.machine())
    compile_upstream.print_table(rows)
    harness.write_json(arguments.json, "compile_upstream", rows)
    return 1 if any(row.note for row in rows) else 0


def main(argv: Sequence[str]) -> int:
    """Measures, prints two tables and writes JSON; 1 if a kernel of ``--stages`` failed."""
    arguments = parser().parse_args(argv)

    def wanted(name: str) -> bool:
        return not arguments.kernels or any(part in name for part in arguments.kernels)

    if arguments.against is not None:
        return against(arguments, wanted)
    if arguments.upstream:
        return upstream(arguments, wanted)
    if arguments.cpu:
        # Stages are timed by this clock where they are.
        time.perf_counter = compile_against.processor_time
    repeats = min(arguments.repeats, 8)
    gpu_there = jax.default_backend() == "gpu"

    rows = [
        measure(name, build, repeats, gpu_there) for name, build in KERNELS.items() if wanted(name)
    ]
    assembler = find_tool("ptxas").path is not None
    stages = [stage_times.StageTimes(row.kernel, row.stages_ms) for row in rows]
    for one in arguments.stages:
        stages += [
            stage_times.measure(name, make, repeats, assemble=assembler)
            for name, make in STAGES[one]().items()
            if wanted(name)
        ]
    print(harness.machine())
    harness.print_table(
        ("kernel", "to PTX ms", "to machine code ms", "first result ms", "Mosaic first result ms",
         "Mosaic / ours", "note"),
        [
            (
                row.kernel, row.ptx_ms, row.machine_code_ms, row.first_result_ms,
                row.mosaic_first_result_ms,
                row.mosaic_first_result_ms / row.first_result_ms
                if row.mosaic_first_result_ms and row.first_result_ms
                else None,
                row.mosaic_note,
            )
            for row in rows
        ],
    )  # fmt: skip
    stage_times.print_table(stages)
    found = [dataclasses.asdict(one) for one in stages]
    harness.write_json(arguments.json, "compile_time", rows, stages=found)
    return 1 if any(one.note for one in stages) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
