"""GEMMs of many shapes, drawn by a seed, against XLA and PyTorch (cuBLAS, cuBLASLt).

The shapes are those of ``gemm_shapes.py``; ``gemm_times.py`` measures them. Ours runs without
options, and tuned: with the fastest of the ``--tune`` best configurations by the estimate, which
other calls choose than those whose times count.

    python benchmarks/shapes.py --seed 7 --count 200 --json shapes.json
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

import gemm_shapes
import gemm_times
import harness
import side_by_side
from gemm_times import Case, Times

from pallasite_hopper.ops.dense import choice

MOST_FLOPS = 4e12
"""Larger products, whose rate does not depend on the shape, are left out."""

LIMITS = (0.97, 0.90)
"""How many rows are below these is counted."""

WORST = 25
"""So many of them are listed."""


def drawn(
    seed: int, count: int, dtype: str, rows: int, kind: str = "any", layout: str = "nn"
) -> list[gemm_times.Shape]:
    """The sample. Where the left operand is transposed, products are gradients of weights, which
    have tokens along k."""
    draw = gemm_shapes.draw_odd if kind == "odd" else gemm_shapes.draw
    shapes = draw(seed, count, MOST_FLOPS, rows)
    if layout[0] == "t":
        shapes = [(k, n, m) for m, n, k in shapes]
    if dtype == "fp8" and kind != "odd":  # cuBLASLt takes whole vectors of 16 elements only.
        shapes = [(m, -(-n // 16) * 16, -(-k // 16) * 16) for m, n, k in shapes]
    return list(dict.fromkeys(shapes))


def case(shape: gemm_times.Shape, dtype: str, tune: int, layout: str = "nn") -> Case:
    """What is measured of a shape: without options, and so many configurations. XLA's own kernels
    for float8 take seconds to search among, and are slower than cuBLASLt's."""
    plain = Case(shape, dtype, (None,), dtype == "bf16", layout=layout)
    m, n, k = shape
    if not (tune and plain.aligned):  # Others are copied first, or have kernels without a choice.
        return plain
    sizes = plain.sizes
    options = {"transpose_a": sizes.transpose_a, "transpose_b": sizes.transpose_b}
    left, _ = plain.operands
    listed = choice.matmul_configs(m, n, k, left.dtype, "bfloat16", **options)
    return dataclasses.replace(plain, configurations=(None, *listed[1 : tune + 1]))


def summary(rows: Sequence[Times], of: Callable[[Times], float]) -> dict[str, float | int | None]:
    """The geometric mean of the rivals' times over ours, and how many are below the limits."""
    ratios = [row.rival / of(row) for row in rows]
    below = {f"below {limit}": sum(one < limit for one in ratios) for limit in LIMITS}
    return {"shapes": len(rows), "geometric mean": harness.geometric_mean(ratios), **below}


def print_table(rows: Sequence[Times]) -> dict[str, dict[str, float | int | None]]:
    """Prints the worst rows and the summaries, which it returns."""
    print(f"microseconds; the {WORST} worst of {len(rows)}")
    harness.print_table(
        ("M x N x K", "without options", "tuned", "rival", "ratio", "tuned", "its kernels"),
        [
            (
                "x".join(map(str, row.shape)),
                *(f"{one:.1f}" for one in (row.default, row.tuned, row.rival)),
                row.rival / row.default,
                row.rival / row.tuned,
                gemm_times.ways(row.rival_names),
            )
            for row in sorted(rows, key=lambda row: row.rival / row.default)[:WORST]
        ],
    )
    found = {
        "without options": summary(rows, lambda row: row.default),
        "tuned": summary(rows, lambda row: row.tuned),
    }
    for name, one in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in one.items()))
    return found


def main(argv: Sequence[str]) -> int:
    """Measures, prints the table and writes JSON; 1 if a shape failed."""
    parser = side_by_side.parser(__doc__.splitlines()[0], count=200, processes=12)
    parser.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--tune", type=int, default=8, help="configurations besides; 0 for none")
    parser.add_argument("--rows", type=int, default=gemm_shapes.MOST_TOKENS, help="at most")
    some = "all, or only extents that are no multiples of 8"
    parser.add_argument("--kind", choices=["any", "odd"], default="any", help=some)
    given = "how operands are given: t for a transposed one"
    parser.add_argument("--layout", choices=gemm_times.LAYOUTS, default="nn", help=given)
    side_by_side.hold_option(parser)
    arguments = parser.parse_args(argv)
    dtype, layout = arguments.dtype, arguments.layout
    rows, kind = arguments.rows, arguments.kind
    shapes = drawn(arguments.seed, arguments.count, dtype, rows, kind, layout)
    cases = [case(shape, dtype, arguments.tune, layout) for shape in shapes]
    return run(cases, arguments, "shapes", print_table)


def run(
    cases: Sequence[Case],
    arguments: argparse.Namespace,
    name: str,
    table: Callable[[Sequence[Times]], object],
) -> int:
    """Measures cases; 1 if one failed."""
    print(harness.machine(), flush=True)
    rows: list[Times] = []

    def show(case: Case, row: Times) -> str:
        rows.append(row)
        if len(rows) % 10 == 0:
            write()
        return (
            f"{row.shape}: {row.rival:.1f} / {row.default:.1f} = {row.rival / row.default:.3f}, "
            f"tuned {row.rival / row.tuned:.3f}, seconds {row.seconds} {' '.join(row.failed)}"
        )

    def write(**more: object) -> None:
        configurations = {str(case.shape): case.configurations for case in cases}
        described = [
            {"configurations": list(map(gemm_times.described, configurations[str(row.shape)]))}
            for row in rows
        ]
        harness.write_json(arguments.json, name, gemm_times.joined(rows, described), **more)

    outcomes = side_by_side.prepared(
        gemm_times.ready, cases, arguments.processes, arguments.seconds, arguments.hold
    )
    _, failed = side_by_side.collected(outcomes, lambda case: str(case.shape), show)
    write(summary=table(rows) if rows else None)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
