"""GEMMs of many shapes, drawn by a seed, against XLA and PyTorch (cuBLAS, cuBLASLt).

The shapes are those of ``gemm_shapes.py``. Ours runs without options, or tuned with ``--tune``.
Contenders of a row are checked and timed in the same run; docs/benchmarks.md says how.

    python benchmarks/shapes.py --seed 7 --count 200 --rounds 3 --json shapes.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import contest_tables
import gemm_shapes
import harness
import matmul
import program
import rates
from contest import RowResult

RIVALS = ("xla", "torch")
MOST_FLOPS = 4e12
"""Larger products, whose rate does not depend on the shape, are left out."""

LIMITS = (0.97, 0.90)
"""How many rows are below these is counted."""

WORST = 20
"""So many of them are listed."""


def print_table(rows: list[RowResult], facts: dict[str, Any]) -> dict[str, Any]:
    """Prints the worst rows; returns the geometric mean and how many are below the limits."""
    ratios = {row.name: ratio for row in rows if (ratio := row.ratio()) is not None}
    listed = sorted((row for row in rows if row.name in ratios), key=lambda r: ratios[r.name])
    names = ("ours", *RIVALS)
    print(f"microseconds; the {WORST} worst of {len(ratios)}")
    harness.print_table(
        ("row (M x N x K)", *names, "ours / best rival"),
        [
            (row.name, *contest_tables.microseconds(row, names), f"{ratios[row.name]:.3f}")
            for row in listed[:WORST]
        ],
    )
    mean = harness.geometric_mean(ratios.values())
    below = {str(limit): sum(r < limit for r in ratios.values()) for limit in LIMITS}
    print(
        f"\nours / best rival, geometric mean of {len(ratios)}: {contest_tables.ratio_text(mean)}"
    )
    print(", ".join(f"below {limit}: {count}" for limit, count in below.items()))
    return {"geometric_mean": mean, "rows": len(ratios), "below": below}


def benchmark(arguments: argparse.Namespace) -> program.Benchmark:
    """What this program measures."""
    group = matmul.FP8 if arguments.dtype == "fp8" else matmul.SQUARE
    count = 2 if arguments.rehearse else arguments.count
    most = 1e8 if arguments.rehearse else MOST_FLOPS
    shapes = gemm_shapes.draw(arguments.seed, count, most)
    if group == matmul.FP8:  # The rivals take whole vectors of 16 elements only.
        shapes = [(m, -(-n // 16) * 16, -(-k // 16) * 16) for m, n, k in shapes]
    rows = [matmul.make_row(group, shape) for shape in dict.fromkeys(shapes)]
    return program.Benchmark(
        name="shapes",
        script=__file__,
        rows={row.name: row for row in rows},
        quick=[row.name for row in rows[:20]],
        contenders=lambda row: [
            one for one in matmul.contenders(row, arguments) if one.name in ("ours", *RIVALS)
        ],
        kernels={},
        facts=lambda timer: rates.copy(timer, arguments.rehearse),
        print_table=print_table,
    )


def main(argv: Sequence[str]) -> int:
    """Measures, prints the table and writes JSON; 1 if one of ours failed."""
    parser = program.parser(__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--count", type=int, default=200, help="shapes")
    parser.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16")
    return program.main(benchmark, parser, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
