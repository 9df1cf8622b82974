"""The steps of docs/matmul-tutorial.md beside the library's product and XLA's, in one run.

Everything is checked and timed as in matmul.py.

    python benchmarks/matmul_steps.py --json matmul_steps.json
    python benchmarks/matmul_steps.py --render matmul_steps.json    # writes the table of the page
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import contest_tables
import harness
import jax
import matmul
import program
from contest import OURS, Candidate, Candidates, Contender, RowResult

SHAPE, TINY_SHAPE = (4096, 4096, 4096), (256, 256, 128)
PAGE = harness.ROOT / "docs" / "matmul-tutorial.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
LIBRARY = "`pallasite_hopper.ops.matmul`"
DESCRIPTIONS = {
    "step1_tile": "1. one tile per block, one stage, no swizzle",
    "step2_swizzle": "2. 128-byte swizzle",
    "step3_ring": "3. circular buffer of stages, one wgmma in flight",
    "step4_two_warpgroups": "4. two warpgroups, 128 x 256 tiles",
    "step5_specialized": "5. producer and consumer warpgroups",
    "step6_persistent": "6. persistent blocks, tile order",
    "step7_stores": "7. TMA stores",
    "step8_clusters": "8. clusters of two blocks, multicast",
    OURS: LIBRARY,
    "xla": "XLA",
}
"""What the table calls each contender, in its order."""


def contenders() -> list[Contender]:
    """The steps, the library's product, XLA's."""
    if str(harness.ROOT) not in sys.path:
        sys.path.insert(0, str(harness.ROOT))
    from examples.matmul_steps import STEPS

    def step(name: str) -> Contender:
        def candidates() -> Candidates:
            module = importlib.import_module(f"examples.matmul_steps.{name}")
            yield Candidate("as it is", jax.jit(module.matmul))

        return Contender(name, "jax", candidates)

    def library() -> Candidates:
        yield Candidate("default", jax.jit(matmul.our_product(matmul.SQUARE, None)))

    return [
        *map(step, STEPS),
        Contender(OURS, "jax", library),
        Contender("xla", "jax", matmul.xla_candidates),
    ]


def print_table(rows: list[RowResult], facts: dict[str, Any]) -> dict[str, Any]:
    """Prints speeds; returns them in TFLOP/s by row and contender."""
    speeds: dict[str, dict[str, float | None]] = {}
    for row in rows:
        speeds[row.name] = {r.contender: row.rate(r.contender) for r in row.results}
        lines = [
            (DESCRIPTIONS[name], microseconds, *rest)
            for name, microseconds, *rest in cells(row)
            if name in DESCRIPTIONS
        ]
        print(f"{row.name}")
        harness.print_table(("step", "us", "TFLOP/s", "step before", "XLA"), lines)
    return {"rates": speeds}


def cells(row: RowResult) -> list[tuple[str, ...]]:
    """For each contender: name, microseconds, TFLOP/s, speed over the step before and over XLA."""
    lines = []
    before: float | None = None
    xla = row.milliseconds("xla")
    for name in DESCRIPTIONS:
        if not any(result.contender == name for result in row.results):
            continue
        taken = row.milliseconds(name)
        over_before = before / taken if before and taken and name.startswith("step") else None
        over_xla = xla / taken if xla and taken else None
        (rate,) = contest_tables.rates(row, [name])
        lines.append(
            (
                name,
                "-" if taken is None else f"{taken * 1e3:.0f}",
                rate,
                "-" if over_before is None else f"{over_before:.2f}",
                contest_tables.ratio_text(over_xla),
            )
        )
        before = taken
    return lines


def rendered(data: dict[str, Any]) -> str:
    """The table as the page has it, from what a run has written as JSON."""
    (row,) = (RowResult.from_json(one) for one in data["rows"])
    m, n, k = row.name.partition("_")[2].split("x")
    machine = data["machine"]
    lines = [
        f"{m} x {k} times {k} x {n} in bfloat16, on one {machine['device']}, "
        f"jax {machine['jax']}; normally distributed inputs, medians over "
        f"{min(result.calls for result in row.results if result.calls)} calls or more:",
        "",
        "| step | µs | TFLOP/s | over the step before | over XLA |",
        "|---|---|---|---|---|",
    ]
    for name, *rest in cells(row):
        lines.append(f"| {' | '.join((DESCRIPTIONS[name], *rest))} |")
    return "\n".join(lines) + "\n"


def render(source: pathlib.Path, page: pathlib.Path = PAGE) -> None:
    """Puts the table of a run between the markers of the page."""
    text = page.read_text()
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no {BEGIN} with {END} after it")
    data = json.loads(source.read_text())
    page.write_text(f"{head}{begin}\n\n{rendered(data)}\n{end}{tail}")


def benchmark(arguments: argparse.Namespace) -> program.Benchmark:
    """What this program measures."""
    row = matmul.make_row(matmul.SQUARE, TINY_SHAPE if arguments.rehearse else SHAPE)
    return program.Benchmark(
        name="matmul_steps",
        script=__file__,
        rows={row.name: row},
        quick=[row.name],
        contenders=lambda row: contenders(),
        kernels={},
        facts=lambda timer: {},
        print_table=print_table,
    )


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table and writes JSON, or writes the table of the page."""
    parser = program.parser(__doc__.splitlines()[0])
    parser.set_defaults(seconds=50.0, step_seconds=30.0)
    parser.add_argument("--render", type=pathlib.Path, help="the JSON file of a run")
    arguments = parser.parse_args(argv)
    if arguments.render:
        render(arguments.render)
        return 0
    return program.main(benchmark, parser, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
