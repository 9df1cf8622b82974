"""Processor time from a call to machine code, Pallasite's against that of JAX's own compiler.

Both compile the same source without a GPU, in one process and in turns: the kernels of
``compile_time``, and those that JAX publishes for Hopper, in their own semantics. Every repetition
has another constant or other shapes. The time is that of this process and of the assemblers that it
starts. JAX's time ends with its compiler's host code, which is part of what it makes.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import pathlib
import resource
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "upstream"))

import contest
import harness
import jax
import jax_compiler
import jax_on_simulator
import published
import published_cases
import stage_times
import upstream_library
from compile_against import processor_time
from jax.experimental.pallas import mosaic_gpu as mosaic

import pallasite
from pallasite import gpu as plgpu
from pallasite.runtime import compiler

TARGET = "sm_90a"

Made = tuple[Callable[..., Any], Sequence[Any]]
"""A function and the types of its arguments."""


@dataclasses.dataclass
class Comparison:
    """Medians in milliseconds of processor time.

    Attributes:
      kernel: its name.
      ours_ms: from the call to machine code.
      assembler_ms: the part of it that is the assembler's.
      upstream_ms: from the call to machine code, by JAX's compiler.
      ratio: how many times as long JAX's takes, the median over pairs.
      note: why there are no numbers.
    """

    kernel: str
    ours_ms: float | None = None
    assembler_ms: float | None = None
    upstream_ms: float | None = None
    ratio: float | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A kernel for both compilers, by the number of a repetition."""

    name: str
    ours: Callable[[int], Made]
    upstream: Callable[[int], Made]


def _children_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def pairs(kernels: dict[str, Any]) -> Iterator[Pair]:
    """All kernels; ``kernels`` are those of ``compile_time``, by name."""
    for name, build in kernels.items():

        def made(gpu: Any, repeat: int, build: Any = build) -> Made:
            function, types = build(gpu, 1.5 + 0.125 * repeat)
            return function, [jax.ShapeDtypeStruct(one[:-1], one[-1]) for one in types]

        yield Pair(name, functools.partial(made, plgpu), functools.partial(made, mosaic))
    for place, case in enumerate(published_cases.compiled_cases(0)):
        yield Pair(
            f"published {case.row.group}",
            functools.partial(_published, place, "ours"),
            functools.partial(_published, place, "upstream"),
        )


def _published(place: int, who: str, repeat: int) -> Made:
    case = published_cases.compiled_cases(repeat)[place]
    if who == "ours":
        module = published_cases.loaded(case.module, "warpgroup")
    else:
        module = upstream_library.load(case.module)
        module.__dict__.update(published.with_multiprocessors(module, 4))
    return stage_times.of_candidate(case.candidate(module), case.row)


class Compilers:
    """Both compilers; each returns seconds, those of the assembler (if it is known) last."""

    def __init__(self) -> None:
        """Prepares JAX's compiler.

        Raises:
          SystemExit: it cannot be used here.
        """
        missing = jax_compiler.missing()
        if missing is not None:
            raise SystemExit(f"--upstream: JAX's kernels cannot be compiled: {missing}")
        capability = jax_on_simulator.capability_of(TARGET)

        def keep(code: bytes) -> Any:
            jax_compiler.Compiled(code, capability)

        jax_on_simulator.replace_lowering(capability, keep)

    def ours(self, function: Callable[..., Any], args: Sequence[Any]) -> tuple[float, float]:
        """By Pallasite."""
        assembled, start = _children_time(), processor_time()
        with pallasite.config.scoped(cache=False):
            pallasite.compile_all(function, *args, target=TARGET, assemble=True)
        return processor_time() - start, _children_time() - assembled

    def upstream(self, function: Callable[..., Any], args: Sequence[Any]) -> tuple[float, float]:
        """By JAX, which compiles while it lowers."""
        start = processor_time()
        jax.jit(function).trace(*args).lower()
        return processor_time() - start, 0.0


def compare(
    kernels: dict[str, Any], wanted: Callable[[str], bool], repeats: int
) -> list[Comparison]:
    """Compiles all wanted kernels with both compilers, in turns, ``repeats`` times each.

    Args:
      kernels: those of ``compile_time``, by name.
      wanted: says by its name whether a kernel counts.
      repeats: how often it counts; a first time does not.
    """
    compilers = Compilers()
    return [_compare(pair, compilers, repeats) for pair in pairs(kernels) if wanted(pair.name)]


def _compare(pair: Pair, compilers: Compilers, repeats: int) -> Comparison:
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "upstream": []}
    for repeat in range(repeats + 1):
        for who in list(found) if repeat % 2 else reversed(list(found)):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made = getattr(pair, who)(repeat)
                    jax.clear_caches()
                    compiler.clear_memory()
                    gc.collect()
                    spent = getattr(compilers, who)(*made)
            except Exception as failure:
                return Comparison(pair.name, note=f"{who}: {contest.describe(failure)}")
            if repeat:
                found[who].append(spent)
    ours, upstream = found["ours"], found["upstream"]

    def median(values: Sequence[tuple[float, float]], which: int) -> float:
        return statistics.median(one[which] for one in values) * 1e3

    return Comparison(
        pair.name,
        median(ours, 0),
        median(ours, 1),
        median(upstream, 0),
        statistics.median(b[0] / a[0] for a, b in zip(ours, upstream, strict=True)),
    )


def print_table(rows: Sequence[Comparison]) -> None:
    """Prints all comparisons and the geometric mean of their ratios."""
    print("\nProcessor time from a call to machine code, ms")
    harness.print_table(
        ("kernel", "ours", "of it the assembler", "upstream", "upstream / ours", "note"),
        [
            (row.kernel, row.ours_ms, row.assembler_ms, row.upstream_ms, row.ratio, row.note)
            for row in rows
        ],
    )
    mean = harness.geometric_mean(row.ratio for row in rows)
    print(f"geometric mean of upstream / ours: {mean:.3f}" if mean is not None else "nothing")
