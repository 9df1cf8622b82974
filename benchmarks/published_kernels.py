"""Kernels that JAX publishes for Hopper, compiled by Pallasite and by JAX's own compiler.

The source is the same: it is read from the installed JAX, and for Pallasite only the import of the
GPU module is replaced, and the semantics that it asks for with ``--semantics lane``. Configurations
are the same, too; docs/benchmarks.md says how the two are compared. Needs absl-py.

    python benchmarks/published_kernels.py --semantics warpgroup --json published_kernels.json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import contest_tables
import harness
import jax
import jax.numpy as jnp
import program
import timing
from contest import Candidate, Candidates, Contender, Row, RowResult, describe
from published_cases import Case, cases, compiled_cases, loaded, tiny_cases

JAX = "upstream"
"""The name of JAX's compiler among the contenders."""

NOT_EQUAL = "not equal"
"""Among the errors: elements in which a result differs from that of JAX's compiler."""


def contenders(case: Case, semantics: str) -> list[Contender]:
    """Both compilers."""

    def ours() -> Candidates:
        yield case.candidate(loaded(case.module, semantics))

    def theirs() -> Candidates:
        yield case.theirs

    return [Contender("ours", "jax", ours), Contender(JAX, "jax", theirs)]


def compared(case: Case) -> Row:
    """The row, whose errors have :data:`NOT_EQUAL` as well, if JAX's compiler has a result.

    What counts is the time of the kernels, for what is between them is the same for both.
    """
    row = case.row

    def reference(*inputs: Any) -> tuple[Any, Any]:
        try:
            theirs = case.theirs.output(case.theirs.call(*case.theirs.prepare(*inputs)))
            timing.FRAMEWORKS["jax"].wait(theirs)
        except Exception as failure:
            print(f"{row.name}: nothing to compare with: {describe(failure)}", file=sys.stderr)
            theirs = None
        return row.reference(*inputs), theirs

    def errors(result: Any, references: tuple[Any, Any]) -> dict[str, Any]:
        reference, theirs = references
        found = dict(row.errors(result, reference))
        if theirs is not None:
            pairs = zip(jax.tree.leaves(result), jax.tree.leaves(theirs), strict=True)
            found[NOT_EQUAL] = sum(jnp.sum(one != other) for one, other in pairs)
        return found

    return dataclasses.replace(row, reference=reference, errors=errors, metric="kernels")


def kernels(arguments: argparse.Namespace) -> dict[str, Any]:
    """All kernels, whose compilation is timed; the shapes are others each time."""
    make_cases = tiny_cases if arguments.rehearse else compiled_cases

    def kernel(place: int, group: str) -> Any:
        def call(repetition: int, candidate: Callable[[Case], Candidate]) -> Any:
            case = make_cases(repetition)[place]
            made = candidate(case)
            return made.call, made.prepare(*case.row.inputs(repetition))

        def ours(case: Case) -> Candidate:
            return case.candidate(loaded(case.module, arguments.semantics))

        return program.compilers(
            group,
            arguments,
            ours=lambda repetition: call(repetition, ours),
            upstream=lambda repetition: call(repetition, lambda case: case.theirs),
        )

    groups = [case.row.group for case in make_cases(0)]
    return {group: kernel(place, group) for place, group in enumerate(groups)}


def print_table(rows: list[RowResult], facts: dict[str, Any]) -> dict[str, Any]:
    """Prints the table; returns how many elements differ, and geometric means."""
    lines, differing = [], {}
    for row in rows:
        ours = next((r for r in row.results if r.contender == "ours"), None)
        count = None if ours is None else ours.errors.get(NOT_EQUAL)
        differing[row.name] = count
        equal = "-" if count is None else f"{count:.0f} differ" if count else "yes"
        cells = contest_tables.rates(row, ("ours", JAX))
        lines.append((row.name, *cells, contest_tables.ratio_text(row.ratio()), equal))
    print("TFLOP/s; one source, compiled by Pallasite and by JAX's compiler")
    harness.print_table(("row", "ours", JAX, f"ours / {JAX}", "equal"), lines)
    means = contest_tables.group_means(rows)
    print(f"\nours / {JAX}, geometric means: ", end="")
    print(", ".join(f"{group} {contest_tables.ratio_text(mean)}" for group, mean in means.items()))
    return {"not_equal": differing, "geometric_means": means}


def benchmark(arguments: argparse.Namespace) -> program.Benchmark:
    """What this program measures."""
    listed = tiny_cases() if arguments.rehearse else cases()
    by_name = {case.row.name: case for case in listed}
    first = {case.row.group: case.row.name for case in reversed(listed)}
    return program.Benchmark(
        name="published_kernels",
        script=__file__,
        rows={name: compared(case) for name, case in by_name.items()},
        quick=list(by_name) if arguments.rehearse else list(first.values()),
        contenders=lambda row: contenders(by_name[row.name], arguments.semantics),
        kernels=kernels(arguments),
        facts=lambda timer: {"semantics": arguments.semantics},
        print_table=print_table,
    )


def main(argv: Sequence[str]) -> int:
    """Measures, prints tables and writes JSON; 1 if one of ours failed."""
    parser = program.parser(__doc__.splitlines()[0])
    parser.set_defaults(code_time=1, rounds=5, seconds=120.0)
    parser.add_argument(
        "--semantics",
        choices=["warpgroup", "lane"],
        default="warpgroup",
        help="warpgroup, which the source asks for, or lane instead",
    )
    return program.main(benchmark, parser, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
