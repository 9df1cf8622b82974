"""The Hopper operations with inferred layouts against the same kernels that name their layouts.

Ours are the operations of ``pallasite_hopper.ops``, whose layouts are inferred; ``explicit`` are
their kernels in ``benchmarks/explicit_layouts``, with the same configurations. docs/benchmarks.md
says how the two are compared.

    python benchmarks/layouts.py --json layouts.json
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import io
import sys
import tokenize
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import attention
import contest_tables
import explicit_layouts
import harness
import jax
import matmul
import program
from contest import OURS, Candidate, Candidates, Contender, Row, RowResult
from library_decode import Decode
from library_mixed import Mixed
from library_ragged import Ragged

EXPLICIT = "explicit"
"""The contender whose kernels name their layouts."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A row, and what makes our candidates for it.

    Attributes:
      family: the kernels that it uses, see :data:`explicit_layouts.FAMILIES`.
      row: of the benchmark that it is taken from.
      ours: its candidates, given the options.
    """

    family: str
    row: Row
    ours: Callable[[argparse.Namespace], Candidates]


def product(group: str, m: int, n: int, k: int) -> Case:
    """A matrix product."""
    row = matmul.make_row(group, (m, n, k))
    return Case("dense", row, lambda options: matmul.ours(group, (m, n, k), options))


def attend(
    batch: int,
    sequence: int,
    heads: int,
    head_dim: int,
    causal: bool = False,
    backward: bool = False,
) -> Case:
    """Attention."""
    problem = attention.Problem(batch, sequence, heads, head_dim, causal, backward)
    ours = functools.partial(attention.ours, problem)
    if backward:
        ours = functools.partial(_by_several_kernels, ours)
    return Case("backward" if backward else "forward", attention.make_row(problem), ours)


def _by_several_kernels(
    ours: Callable[[argparse.Namespace], Candidates], arguments: argparse.Namespace
) -> Candidates:
    """Those without the one kernel for gradients of few tiles, which has no explicit form."""
    from pallasite_hopper.ops.flash import single_api

    def several[**P, R](function: Callable[P, R]) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with mock.patch.object(single_api, "chosen", lambda *_: None):
                return function(*args, **kwargs)

        return call

    candidates, milliseconds = ours(arguments), None
    with contextlib.suppress(StopIteration):
        while True:
            candidate = candidates.send(milliseconds)
            milliseconds = yield dataclasses.replace(
                candidate, call=jax.jit(several(candidate.call))
            )


def other(family: str, problem: Mixed | Ragged | Decode) -> Case:
    """Another operation of the library."""
    return Case(family, problem.row(), problem.ours)


def cases(rehearse: bool) -> list[Case]:
    """All rows; tiny ones to rehearse."""
    if rehearse:
        return [
            product(matmul.SQUARE, 128, 256, 128),
            product(matmul.FP8, 128, 256, 128),
            product(matmul.SKINNY, 16, 256, 128),
            other("mixed", Mixed("int8", 16, 128, 128)),
            other("ragged", Ragged(192, 128, 128, 3)),
            other("ragged", Ragged(192, 128, 128, 3, transposed=True)),
            attend(1, 256, 2, 64),
            attend(1, 256, 1, 128, causal=True),
            attend(1, 256, 1, 64, backward=True),
            other("decode", Decode(2, 256, full=False, heads=4, kv_heads=2)),
        ]
    square, skinny = matmul.SQUARE, matmul.SKINNY
    sizes = [(4, 4096, 16, dim, causal) for dim in (64, 128) for causal in (False, True)]
    return [
        *(product(square, size, size, size) for size in (2048, 4096, 8192)),
        product(matmul.FP8, 4096, 4096, 4096),
        *(product(skinny, rows, 8192, 8192) for rows in (64, 128)),
        *(other("mixed", Mixed("int8", rows, 8192, 8192)) for rows in (64, 128, 4096)),
        other("ragged", Ragged(8192, 4096, 4096, 8)),
        other("ragged", Ragged(8192, 4096, 4096, 8, transposed=True)),
        *(attend(*size) for size in sizes),
        *(attend(*size, backward=True) for size in sizes),
        *(other("decode", Decode(64, 8192, full=full)) for full in (True, False)),
    ]


def explicit(case: Case, arguments: argparse.Namespace) -> Candidates:
    """Our candidates by kernels that name their layouts."""
    inferred = case.ours(arguments)
    milliseconds = None
    with contextlib.suppress(StopIteration):
        while True:
            milliseconds = yield with_layouts(inferred.send(milliseconds))


def with_layouts(candidate: Candidate) -> Candidate:
    """The same, by kernels that name their layouts."""
    call = explicit_layouts.with_explicit_layouts(candidate.call)
    prepare = explicit_layouts.with_explicit_layouts(candidate.prepare)
    return dataclasses.replace(candidate, call=jax.jit(call), prepare=prepare)


def contenders(case: Case, arguments: argparse.Namespace) -> list[Contender]:
    """Both."""
    return [
        Contender(OURS, "jax", lambda: case.ours(arguments)),
        Contender(EXPLICIT, "jax", lambda: explicit(case, arguments)),
    ]


def kernels(arguments: argparse.Namespace) -> dict[str, Any]:
    """The kernels whose compilation is timed; every repetition has another shape."""
    size = 256 if arguments.rehearse else 4096

    def longer(step: int, repetition: int) -> int:
        return size + step * (repetition + 1)

    makers: dict[str, Callable[[int], Case]] = {
        f"bf16 {size}x{size}xK": lambda r: product(matmul.SQUARE, size, size, longer(128, r)),
        "forward d128": lambda r: attend(1, longer(256, r), 1, 128),
        "forward causal d128": lambda r: attend(1, longer(256, r), 1, 128, True),
    }

    def kernel(name: str, make: Callable[[int], Case]) -> Any:
        def call(repetition: int, change: Callable[[Candidate], Candidate]) -> Any:
            case = make(repetition)
            one = change(next(case.ours(arguments)))
            return one.call, one.prepare(*case.row.inputs(repetition))

        return program.compilers(
            name,
            arguments,
            ours=lambda repetition: call(repetition, lambda candidate: candidate),
            explicit=lambda repetition: call(repetition, with_layouts),
        )

    return {name: kernel(name, make) for name, make in makers.items()}


_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def code_lines(source: str) -> int:
    """Lines of a program that are not empty and hold more than comments and docstrings."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str())):
                texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def source_lines() -> dict[str, dict[str, int]]:
    """For each family of kernels, the lines of code of both."""

    def total(sources: Sequence[str]) -> int:
        return sum(map(code_lines, sources))

    harness.use_checkout()
    found = {}
    for family in explicit_layouts.FAMILIES:
        inferred, named = explicit_layouts.source_texts(family)
        found[family] = {"inferred": total(inferred), EXPLICIT: total(named)}
    return found


def print_table(rows: list[RowResult], facts: dict[str, Any]) -> dict[str, Any]:
    """Prints both tables; returns geometric means and the lines of code."""
    lines = [
        (row.name, *contest_tables.microseconds(row, (OURS, EXPLICIT)), *_rates(row))
        for row in rows
    ]
    print("layouts inferred, and named in the source")
    header = ("row", "inferred us", f"{EXPLICIT} us", "TFLOP/s", "TFLOP/s", "inferred / explicit")
    harness.print_table(header, lines)
    means = contest_tables.group_means(rows)
    print(f"\ninferred / {EXPLICIT}, geometric means: ", end="")
    print(", ".join(f"{group} {contest_tables.ratio_text(mean)}" for group, mean in means.items()))
    source = source_lines()
    print("\nlines of code of the kernels, without comments and docstrings")
    counts = [(family, *both.values()) for family, both in source.items()]
    counts.append(("all", *(sum(column) for column in zip(*(c[1:] for c in counts), strict=True))))
    harness.print_table(("kernels", "inferred", EXPLICIT), counts)
    return {"geometric_means": means, "lines": source}


def _rates(row: RowResult) -> list[str]:
    cells = contest_tables.rates(row, (OURS, EXPLICIT))
    return [*cells, contest_tables.ratio_text(row.ratio())]


def benchmark(arguments: argparse.Namespace) -> program.Benchmark:
    """What this program measures."""
    by_name = {case.row.name: case for case in cases(arguments.rehearse)}
    first = {case.family: name for name, case in reversed(by_name.items())}
    return program.Benchmark(
        name="layouts",
        script=__file__,
        rows={name: case.row for name, case in by_name.items()},
        quick=list(by_name) if arguments.rehearse else list(first.values()),
        contenders=lambda row: contenders(by_name[row.name], arguments),
        kernels=kernels(arguments),
        facts=lambda timer: {},
        print_table=print_table,
    )


def main(argv: Sequence[str]) -> int:
    """Measures, prints tables and writes JSON; 1 if one of ours failed."""
    return program.main(benchmark, program.parser(__doc__.splitlines()[0]), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
