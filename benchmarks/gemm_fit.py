"""Fits the rates of the estimate of GEMMs to measured times, and says how well it chooses.

It reads what ``gemm_configs.py --json`` wrote, and what was measured before on such a chip
(``gemm_measured.json``: one NVIDIA H200, 2026-11-23; ``gemm_measured_h100.json``: NVIDIA H100s,
2026-11-28). The rates stay near those that there are
where times do not tell (``--stay``). It prints how much slower the chosen configurations are than
the fastest that were measured, with the present rates and with the fitted ones, also of shapes that
the fit has not seen.

    python benchmarks/gemm_fit.py configurations.json
    python benchmarks/gemm_fit.py   # what was measured before
    python benchmarks/gemm_fit.py --choice 4   # rates by which configurations are compared
    python benchmarks/gemm_fit.py --chip H100 --choice 4   # on another chip

With ``--choice`` it looks for rates that choose well rather than for those whose times are nearest,
by so many rounds of coordinate descent from the present ones, and tells how they choose for shapes
that it has not seen: what a choice takes more than the fastest that was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
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
from pallasite_hopper.ops.dense.candidates import candidates
from pallasite_hopper.ops.dense.cost import (
    H100_CHOICE,
    H200,
    H200_CHOICE,
    Rates,
    Sizes,
    nanoseconds,
)

MEASURED = pathlib.Path(__file__).with_name("gemm_measured.json")
MEASURED_H100 = pathlib.Path(__file__).with_name("gemm_measured_h100.json")
CHIPS = {"H200": (MEASURED, H200_CHOICE), "H100": (MEASURED_H100, H100_CHOICE)}
"""What was measured on each before, and the rates by which configurations are compared there."""
FITTED = (
    "clock", "operands", "sustained", "energy", "port", "l2", "misaligned", "between_sectors",
    "empty", "latency", "held", "group", "step_overlap", "multicast", "multicast_apart", "split",
    "memory", "block_memory", "overlap", "write", "launch", "cluster", "exchange", "exchanged",
    "shared", "unused", "second", "partial",
)  # fmt: skip
"""Of our kernels; the others are of copies and of XLA's."""

STEPS = {
    "turn": 0.1, "turn_first": 0.4, "turn_mma": 0.2, "turn_cluster": 0.15, "turn_overlap": 0.2,
    "multicast": 0.3, "cluster": 0.15, "group": 0.06, "step_overlap": 0.1, "held": 0.1,
    "latency": 0.12, "port": 0.06, "l2": 0.06, "empty": 0.2, "operands": 0.1, "memory": 0.02,
    "block_memory": 0.05, "overlap": 0.15, "write": 0.1, "piece": 0.25, "launch": 0.08,
    "exchange": 0.1, "exchanged": 0.15, "shared": 0.1, "second": 0.15, "partial": 0.12,
    "split": 0.3, "least_step": 0.1, "parts_step": 0.3, "parts_memory": 0.3,
}  # fmt: skip
"""Logarithms of the first steps of the rates by which configurations are compared."""

BLUR = 0.02
"""Logarithm of a ratio of estimates for which either of two configurations may be chosen."""

AHEAD = 0.98
"""A choice that takes more than the rival's time over this counts twice."""

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


def choice_loss(rows: Sequence[Row], rates: Rates, chip: str = "H200") -> float:
    """What a choice by these rates takes more than the fastest, and than the rival, in the mean of
    the logarithms; close estimates choose either."""
    lost = 0.0
    for row in rows:
        estimates = np.array([math.log(_rank(row, one, rates, chip)) for one, _ in row.ours])
        times = np.array([time for _, time in row.ours])
        chosen = np.exp(-(estimates - estimates.min()) / BLUR)
        behind = np.maximum(0, np.log(times * AHEAD / row.rival))
        lost += float(chosen @ (np.log(times / times.min()) + behind) / chosen.sum())
    return lost / len(rows)


def _rank(row: Row, config: MatmulConfig, rates: Rates, chip: str) -> float:
    """What configurations of 16 bits are compared by, with other rates."""
    return nanoseconds(config, row.sizes, rates) * _gain(row.sizes, config, chip)


@functools.cache
def _gain(sizes: Sizes, config: MatmulConfig, chip: str) -> float:
    return choice._rank(sizes, config, chip) / nanoseconds(config, sizes, CHIPS[chip][1])


def descend(rows: Sequence[Row], rounds: int, chip: str = "H200") -> Rates:
    """Rates that choose better, by coordinate descent."""
    found, steps = CHIPS[chip][1], dict(STEPS)
    least = choice_loss(rows, found, chip)
    for _ in range(rounds):
        for name in STEPS:
            for sign in (1, -1):
                value = getattr(found, name) * math.exp(sign * steps[name])
                other = dataclasses.replace(found, **{name: value})
                loss = choice_loss(rows, other, chip)
                if loss < least:
                    found, least = other, loss
                    break
            else:
                steps[name] /= 2
    return found


def report_choice(rows: list[Row], rounds: int, chip: str) -> None:
    """Prints rates that choose better, and how those of one half choose for the other."""
    rows = [_of_candidates(row) for row in rows if row.sizes.size == 2]
    rows = [row for row in rows if len(row.ours) > 1]
    present = CHIPS[chip][1]
    random.Random(0).shuffle(rows)
    half = len(rows) // 2
    for seen, unseen in ((rows[:half], rows[half:]), (rows[half:], rows[:half])):
        rates = (present, descend(seen, rounds, chip))
        before, after = (choice_loss(unseen, one, chip) for one in rates)
        print(f"unseen: {before:.4f} with the present rates, {after:.4f} with those found")
    found = descend(rows, rounds, chip)
    before, after = (choice_loss(rows, one, chip) for one in (present, found))
    print(f"all: {before:.4f}, {after:.4f}")
    for name in STEPS:
        print(f"    {name}={getattr(found, name):.3g},  # {getattr(present, name):.3g}")


def _of_candidates(row: Row) -> Row:
    """Without the configurations that are never chosen without measuring."""
    accepted = set(candidates(row.sizes))
    return dataclasses.replace(row, ours=[one for one in row.ours if one[0] in accepted])


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
    parser.add_argument("--choice", type=int, help="rounds of descent of rates that choose well")
    parser.add_argument("--chip", choices=CHIPS, default="H200", help="that was measured")
    arguments = parser.parse_args(argv)
    measured, _ = CHIPS[arguments.chip]
    rows = [row for path in (measured, *arguments.files) for row in read(path)]
    if arguments.choice:
        report_choice(rows, arguments.choice, arguments.chip)
        return 0
    report("present", rows, H200)
    by_choice = [
        min(row.ours, key=lambda one: choice._rank(row.sizes, one[0], arguments.chip))[1]
        / row.rival
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
