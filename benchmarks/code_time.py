"""Time from a call to machine code, ours against upstream's, for the same operation.

Every repetition has another shape, so neither finds a kernel in a cache. The steps are those of
JAX: trace, lower, compile, and the first run, in which a launcher may still assemble and load. The
first repetition, which imports and initialises, does not count.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import contest
import contest_tables
import harness
import jax

STEPS = ("trace", "lower", "compile", "first run")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel to compile.

    Attributes:
      name: of the kernel.
      compilers: for each of them, makes a function and its arguments for a repetition.
    """

    name: str
    compilers: dict[str, Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]]


@dataclasses.dataclass
class CodeTime:
    """Medians in milliseconds of each step, and of their sum; None where a compiler failed."""

    kernel: str
    compiler: str
    steps: dict[str, float] = dataclasses.field(default_factory=dict)
    total: float | None = None
    note: str = ""


def steps_of(function: Callable[..., Any], args: tuple[Any, ...]) -> list[float]:
    """Milliseconds of each step of a function that was not called before."""
    jax.block_until_ready(args)
    times = [time.perf_counter()]
    traced = jax.jit(function).trace(*args)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    jax.block_until_ready(compiled(*args))
    times.append(time.perf_counter())
    return [(end - start) * 1e3 for start, end in zip(times, times[1:], strict=False)]


def measure(
    kernel: Kernel,
    repeats: int,
    notify: Callable[[str], None] = lambda compiler: None,
    skip: dict[str, str] | None = None,
) -> list[CodeTime]:
    """Times all compilers of a kernel, in turn.

    Raises:
      contest.BrokenDeviceError: the device no longer computes.
    """
    results = {name: CodeTime(kernel.name, name) for name in kernel.compilers}
    for name, reason in (skip or {}).items():
        results[name].note = reason
    samples: dict[str, list[list[float]]] = {name: [] for name in kernel.compilers}
    for repetition in range(repeats + 1):
        names = list(kernel.compilers)
        for name in names if repetition % 2 else reversed(names):
            if results[name].note:
                continue
            notify(name)
            try:
                steps = steps_of(*kernel.compilers[name](repetition))
            except Exception as failure:
                results[name].note = contest.report(f"{kernel.name}: {name}", failure)
                try:
                    contest.FRAMEWORKS["jax"].check()
                except Exception as broken:
                    raise contest.BrokenDeviceError(results[name].note) from broken
                continue
            if repetition:
                samples[name].append(steps)
    notify("")
    for name, rows in samples.items():
        if rows and not results[name].note:
            medians = [statistics.median(column) for column in zip(*rows, strict=True)]
            results[name].steps = dict(zip(STEPS, medians, strict=True))
            results[name].total = statistics.median(sum(row) for row in rows)
    return list(results.values())


def print_table(results: Sequence[CodeTime], rival: str = "upstream") -> None:
    """Prints the steps of each compiler and the ratio of the sums."""
    if not results:
        return
    print("\ntime from call to the first result, in milliseconds")
    totals = {(one.kernel, one.compiler): one.total for one in results}
    rows = []
    for one in results:
        other = totals.get((one.kernel, rival)) if one.compiler == contest.OURS else None
        ratio = other / one.total if other and one.total else None
        steps = [_milliseconds(one.steps.get(step)) for step in STEPS]
        ratio_text = contest_tables.ratio_text(ratio)
        rows.append((one.kernel, one.compiler, *steps, _milliseconds(one.total), ratio_text))
    harness.print_table(("kernel", "compiler", *STEPS, "sum", f"{rival} / ours"), rows)
    for one in results:
        if one.note:
            print(f"{one.kernel}: {one.compiler}: {one.note}")


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
