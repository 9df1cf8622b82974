"""How long each stage of a compilation takes: tracing, every pass, lowering, LLVM, ptxas.

The stages are those of ``CompiledKernel.timings``, so that passes that a plugin or a semantics adds
are among them by their own names. Nothing is found in a cache, and no GPU is needed.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import harness

TRACE = "trace"
"""What is not spent on a kernel: JAX's tracing of the function."""


@dataclasses.dataclass
class StageTimes:
    """Medians in milliseconds of the stages of a kernel; the note says why there are none."""

    kernel: str
    milliseconds: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""

    @property
    def total(self) -> float | None:
        """Their sum."""
        return sum(self.milliseconds.values()) if self.milliseconds else None


def once(
    function: Callable[..., Any], args: Sequence[Any], target: str, assemble: bool
) -> dict[str, float]:
    """Milliseconds of each stage, in sum over all kernels that the function calls.

    The cache on disk is off; that in memory is left as it is.
    """
    import pallasite

    with pallasite.config.scoped(cache=False):
        start = time.perf_counter()
        compiled = pallasite.compile_all(function, *args, target=target, assemble=assemble)
        whole = (time.perf_counter() - start) * 1e3
    spent: dict[str, float] = {}
    for kernel in compiled:
        for stage, seconds in kernel.timings:
            spent[stage] = spent.get(stage, 0.0) + seconds * 1e3
    return {TRACE: whole - sum(spent.values())} | spent


def measure(
    kernel: str,
    make: Callable[[], tuple[Callable[..., Any], Sequence[Any]]],
    repeats: int,
    *,
    target: str = "sm_90a",
    assemble: bool = False,
) -> StageTimes:
    """Compiles a function again and again, with empty caches; the first time does not count.

    Args:
      kernel: its name.
      make: makes the function and its arguments, arrays or ``jax.ShapeDtypeStruct``.
      repeats: how often it counts.
      target: what to compile for.
      assemble: whether to make machine code.
    """
    import jax

    from pallasite.runtime import compiler

    found = []
    for _ in range(repeats + 1):
        try:
            function, args = make()
            jax.clear_caches()
            compiler.clear_memory()
            found.append(once(function, args, target, assemble))
        except Exception as failure:
            lines = str(failure).splitlines()
            note = f"{type(failure).__name__}: {lines[0] if lines else ''}"
            return StageTimes(kernel, note=note)
    return StageTimes(kernel, medians(found[1:]))


def medians(found: Iterable[dict[str, float]]) -> dict[str, float]:
    """The median of each stage over repetitions."""
    samples: dict[str, list[float]] = {}
    for one in found:
        for stage, milliseconds in one.items():
            samples.setdefault(stage, []).append(milliseconds)
    return {stage: statistics.median(values) for stage, values in samples.items()}


def inference_share(row: StageTimes) -> float | None:
    """The part of a kernel's time that is layout inference, in percent."""
    spent = row.milliseconds.get("infer layouts")
    return None if spent is None or not row.total else 100 * spent / row.total


def print_table(rows: Sequence[StageTimes]) -> None:
    """Prints the stages of all kernels, the part of layout inference, and what failed."""
    stages = ordered(rows)
    print("\nPallasite's compilation: milliseconds of each stage")
    lines = []
    for row in rows:
        values = [row.milliseconds.get(stage) for stage in stages]
        share = inference_share(row)
        texts = [None if v is None else f"{v:.1f}" for v in values]
        lines.append((row.kernel, *texts, row.total, None if share is None else f"{share:.1f}"))
    harness.print_table(("kernel", *stages, "sum", "inference %"), lines)
    for row in rows:
        if row.note:
            print(f"{row.kernel}: {row.note}")


def ordered(rows: Sequence[StageTimes]) -> list[str]:
    """All stages, those of a row in its order."""
    stages: list[str] = []
    for row in rows:
        place = 0
        for stage in row.milliseconds:
            if stage not in stages:
                stages.insert(place, stage)
            place = stages.index(stage) + 1
    return stages


def published(semantics: str) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """The kernels that JAX publishes, one configuration of each, in these semantics."""
    import published_cases

    cases = {case.row.group: case for case in reversed(published_cases.cases())}

    def make(case: published_cases.Case) -> tuple[Any, Any]:
        module = published_cases.loaded(case.module, semantics)
        return of_candidate(case.candidate(module), case.row)

    return {
        f"{group}, {semantics}": functools.partial(make, case)
        for group, case in reversed(cases.items())
    }


def library() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Operations of the Hopper library: the rows that their benchmarks take with ``--quick``."""
    import attention
    import library
    import matmul
    import program

    harness.use_checkout()
    arguments = program.parse(program.parser("the default configurations"), [])
    made = {}
    for module in (matmul, attention, library):
        this = module.benchmark(arguments)
        for name in this.quick:
            row = this.rows[name]
            ours = [one for one in this.contenders(row) if one.name == "ours"]
            if ours:
                made[f"{this.name} {name}"] = functools.partial(_of_contender, ours[0], row)
    return made


def _of_contender(contender: Any, row: Any) -> tuple[Any, Any]:
    return of_candidate(next(contender.candidates()), row)


def of_candidate(candidate: Any, row: Any) -> tuple[Any, Any]:
    """The call of a candidate, and the types of its arguments."""
    import jax

    inputs = jax.eval_shape(lambda: row.inputs(0))
    return candidate.call, jax.eval_shape(candidate.prepare, *inputs)
