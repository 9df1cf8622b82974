"""Fits the rates of the estimate of GEMMs to measured times, and says how well it chooses.

It reads what ``gemm_configs.py --json`` wrote, and what was measured before
(``gemm_measured.json``: one NVIDIA H200, 2026-11-23). The rates stay near those that there are
where times do not tell (``--stay``). It prints how much slower the chosen configurations are than
the fastest that were measured, with the present rates and with the fitted ones, also of shapes that
the fit has not seen.

    python benchmarks/gemm_fit.py configurations.json
    python benchmarks/gemm_fit.py   # what was measured before
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import harness
import numpy as np

from pallasite_hopper.ops import MatmulConfig
from pallasite_hopper.ops.dense import choice
from pallasite_hopper.ops.dense.cost import H200, Rates, Sizes, nanoseconds

MEASURED = pathlib.Path(__file__).with_name("gemm_measured.json")
FITTED = (
    "clock", "operands", "sustained", "energy", "port", "l2", "misaligned", "empty", "latency",
    "held", "group", "step_overlap", "multicast", "multicast_apart", "split", "memory",
    "block_memory", "overlap", "write", "launch", "cluster", "exchange", "exchanged", "shared",
    "unused", "second", "partial",
)  # fmt: skip
"""Of our kernels; the others are of copies and of XLA's."""

WIDTH = 0.2
"""Logarithm of a ratio from which on an error counts hardly more."""


@dataclasses.dataclass
class Row:
    """What was measured of a shape: times in microseconds.

    Attributes:
      rival: of the faster rival.
      ours: configurations and times.
    """

    sizes: Sizes
    rival: float
    ours: list[tuple[MatmulConfig, float]]


def config_of(values: dict[str, Any]) -> MatmulConfig:
    """A configuration as ``gemm_times.described`` wrote it."""
    rest = values.get("rest")
    return MatmulConfig(**values | ({"rest": config_of(rest)} if rest else {}))


def read(path: pathlib.Path) -> list[Row]:
    """The rows of a file of either kind."""
    content = json.loads(path.read_text())
    rows = []
    for one in content["measured"] if "measured" in content else map(_medians, content["rows"]):
        fp8 = one["dtype"] == "fp8"
        m, n, k = one["shape"]
        sizes = Sizes(m, n, k, 1 if fp8 else 2, 2, transpose_b=fp8)
        ours = [(config_of(config), time) for config, time in one["ours"]]
        rows.append(Row(sizes, min(one[name] for name in ("xla", "torch") if one[name]), ours))
    return [row for row in rows if row.ours]


def _medians(row: dict[str, Any]) -> dict[str, Any]:
    """A row of ``gemm_configs.py``: what is chosen without options comes once more, by name."""
    pairs = zip(row["configurations"], row["ours"], strict=True)
    return {
        "shape": row["shape"],
        "dtype": row["dtype"],
        **{name: statistics.median(row[name]) if row[name] else None for name in ("xla", "torch")},
        "ours": [(config, statistics.median(times)) for config, times in pairs if config and times],
    }


def errors(rows: Sequence[Row], rates: Rates) -> np.ndarray:
    """Logarithms of estimated over measured times."""
    return np.array(
        [
            math.log(nanoseconds(config, row.sizes, rates) / (time * 1e3))
            for row in rows
            for config, time in row.ours
        ]
    )


def fit(rows: Sequence[Row], stay: float, start: Rates = H200) -> Rates:
    """Rates with which the estimates are nearest to the times."""
    from scipy import optimize

    def rates(steps: np.ndarray) -> Rates:
        pairs = zip(FITTED, steps, strict=True)
        return dataclasses.replace(
            start, **{name: getattr(start, name) * math.exp(step) for name, step in pairs}
        )

    def losses(steps: np.ndarray) -> np.ndarray:
        found = errors(rows, rates(steps))
        near = stay * math.sqrt(len(found) / 1600) * steps
        return np.concatenate([np.arctan(found / WIDTH) * WIDTH, near])

    found = optimize.least_squares(losses, np.zeros(len(FITTED)), max_nfev=8, diff_step=0.01)
    return rates(found.x)


def report(title: str, rows: Sequence[Row], rates: Rates) -> None:
    """Prints how good the estimate is, and what it chooses of what was measured."""
    lost, ratios = [], []
    for row in rows:
        chosen = min(row.ours, key=lambda one: nanoseconds(one[0], row.sizes, rates))[1]
        lost.append(chosen / min(time for _, time in row.ours))
        ratios.append(row.rival / chosen)
    below = ", ".join(
        f"{sum(one < limit for one in ratios)} below {limit}" for limit in (0.97, 0.9)
    )
    print(
        f"{title}: {len(rows)} shapes; chosen over fastest {harness.geometric_mean(lost):.4f}, "
        f"rival over chosen {harness.geometric_mean(ratios):.4f}, {below}; "
        f"standard deviation of the estimate {errors(rows, rates).std():.4f}"
    )


def main(argv: Sequence[str]) -> int:
    """Fits and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="written by gemm_configs.py")
    parser.add_argument("--stay", type=float, default=0.5, help="how much rates stay as they are")
    arguments = parser.parse_args(argv)
    rows = [row for path in (MEASURED, *arguments.files) for row in read(path)]
    report("present", rows, H200)
    by_choice = [
        min(row.ours, key=lambda one: choice._rank(row.sizes, one[0]))[1] / row.rival
        for row in rows
    ]
    print(
        f"with what some must gain: rival over chosen {1 / harness.geometric_mean(by_choice):.4f}"
    )
    fitted = fit(rows, arguments.stay)
    report("fitted", rows, fitted)
    random.Random(0).shuffle(rows)
    half = len(rows) // 2
    for seen, unseen in ((rows[:half], rows[half:]), (rows[half:], rows[:half])):
        report("unseen, present", unseen, H200)
        report("unseen, fitted", unseen, fit(seen, arguments.stay))
    for name in FITTED:
        print(f"    {name}={getattr(fitted, name):.3g},  # {getattr(H200, name):.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
