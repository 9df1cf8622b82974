"""Tables and summaries of contests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import harness
from contest import OURS, Result, RowResult


def rates(row: RowResult, contenders: Sequence[str], unit: float = 1e12) -> list[str]:
    """The cells of a table with the speed of each contender."""
    return _cells(row, contenders, lambda milliseconds: row.flops / (milliseconds * 1e-3) / unit)


def microseconds(row: RowResult, contenders: Sequence[str]) -> list[str]:
    """The cells of a table with the time of each contender."""
    return _cells(row, contenders, lambda milliseconds: milliseconds * 1e3)


def _cells(row: RowResult, contenders: Sequence[str], value: Callable[[float], float]) -> list[str]:
    cells = []
    for name in contenders:
        result = next((r for r in row.results if r.contender == name), None)
        if result is None:
            cells.append("-")
        elif result.milliseconds is None:
            cells.append("wrong" if "WrongResultError" in result.note else "failed")
        else:
            cells.append(f"{value(result.milliseconds):.1f}")
    return cells


def percent(share: float | None) -> str:
    """A share as a cell of a table."""
    return "-" if share is None else f"{100 * share:.1f} %"


def ratio_text(ratio: float | None) -> str:
    """A ratio as a cell of a table."""
    return "-" if ratio is None else f"{ratio:.3f}"


def group_means(rows: Sequence[RowResult]) -> dict[str, float | None]:
    """For each group, the geometric mean of our speed over the fastest rival's."""
    groups = dict.fromkeys(row.group for row in rows)
    return {g: harness.geometric_mean(r.ratio() for r in rows if r.group == g) for g in groups}


def print_notes(rows: Sequence[RowResult]) -> None:
    """Prints the chosen configurations, and what failed."""
    chosen = [
        (
            row.name,
            result.contender,
            _spread(result),
            _microseconds(result.kernels),
            _microseconds(result.elapsed),
            len(result.trials),
            result.label,
        )
        for row in rows
        for result in row.results
        if result.milliseconds is not None
    ]
    if chosen:
        print("\nquartiles of the time that counts, medians of both times, in microseconds;")
        print("how many candidates were tried, and the one that was chosen")
        header = ("row", "contender", "quartiles", "kernels", "elapsed", "tried", "chosen")
        harness.print_table(header, chosen)
    failures: dict[str, list[str]] = {}
    for row in rows:
        for result in row.results:
            if result.note:
                failures.setdefault(f"{result.contender}: {result.note}", []).append(row.name)
        if row.note:
            failures.setdefault(f"the whole row: {row.note}", []).append(row.name)
    if failures:
        print("\nwhat failed")
        for failure, where in failures.items():
            print(f"{failure}\n    in {' '.join(where)}", flush=True)


def print_trials(rows: Sequence[RowResult], contender: str = OURS, most: int = 12) -> None:
    """Prints the fastest candidates of a contender that were tried in each row."""
    for row in rows:
        for result in row.results:
            if result.contender != contender or not result.trials:
                continue
            print(f"\n{row.name}: {contender}, {len(result.trials)} candidates")
            trials = sorted(result.trials, key=lambda t: t.milliseconds or math.inf)
            table = [
                (f"{t.milliseconds * 1e3:.1f}", f"{row.flops / t.milliseconds / 1e9:.1f}", t.label)
                for t in trials
                if t.milliseconds is not None
            ]
            harness.print_table(("us", "TFLOP/s", "candidate"), table[:most])
            for trial in trials:
                if trial.note:
                    print(f"failed: {trial.label}: {trial.note}")


def _spread(result: Result) -> str:
    if result.quartiles is None:
        return "-"
    return f"{result.quartiles[0] * 1e3:.1f} - {result.quartiles[1] * 1e3:.1f}"


def _microseconds(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds * 1e3:.1f}"
