"""What a run gave, as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from pallasite.cli import output
from pallasite.executors import RunReport

_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a comparison with a reference said."""

    correct: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All that ``pallasite run`` shows.

    Attributes:
      title: what ran, for what target.
      executor: where.
      outputs: NumPy arrays.
      reports: of the kernels, if the executor gives any.
      verdict: of a comparison; None if the file offers none.
    """

    title: str
    executor: str
    outputs: Sequence[Any]
    reports: Sequence[RunReport] = ()
    verdict: Verdict | None = None

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        wrong = self.verdict is not None and not self.verdict.correct
        return not wrong and not any(report.findings for report in self.reports)


def as_text(outcome: Outcome) -> str:
    """For people; what kernels printed is not in it."""
    parts = [f"{outcome.title} on {outcome.executor}"]
    if outcome.outputs:
        rows = [(number, *_row(array)) for number, array in enumerate(outcome.outputs)]
        headers = ("output", "type", "min", "max", "mean", "not finite", "first elements")
        parts.append(output.table(headers, rows))
    if outcome.verdict is not None:
        parts.append(f"check: {outcome.verdict.text}")
    for report in outcome.reports:
        for title, text in report.sections.items():
            parts.append(f"{title}: {text}" if "\n" not in text else text)
        if report.findings:
            count = len(report.findings)
            listed = "\n\n".join(
                output.indented(f"{n}. {text}") for n, text in enumerate(report.findings, 1)
            )
            parts.append(f"{count} error{'s' * (count > 1)} in kernel {report.name}:\n{listed}")
    return "\n\n".join(parts)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """For programs."""
    verdict = outcome.verdict
    return {
        "what": outcome.title,
        "executor": outcome.executor,
        "good": outcome.good,
        "outputs": [_json(array) for array in outcome.outputs],
        "check": None if verdict is None else dataclasses.asdict(verdict),
        "kernels": [
            {
                "name": report.name,
                "printed": report.printed,
                "findings": list(report.findings),
                **report.data,
            }
            for report in outcome.reports
        ],
    }


def _row(array: Any) -> tuple[str, ...]:
    numbers = _json(array)
    first = ", ".join(f"{value:.6g}" for value in _wide(array).reshape(-1)[:_SHOWN])
    more = ", ..." if array.size > _SHOWN else ""
    cells = ["" if numbers[k] is None else f"{numbers[k]:.6g}" for k in ("min", "max", "mean")]
    return (
        f"{array.dtype.name}[{','.join(map(str, array.shape))}]",
        *cells,
        str(numbers["not_finite"] or ""),
        first + more,
    )


def _json(array: Any) -> dict[str, Any]:
    import numpy as np

    values = _wide(array)
    finite = values[np.isfinite(values)]
    numbers = [float(f(finite)) if finite.size else None for f in (np.min, np.max, np.mean)]
    return {
        "dtype": array.dtype.name,
        "shape": list(array.shape),
        **dict(zip(("min", "max", "mean"), numbers, strict=True)),
        "not_finite": int(values.size - finite.size),
    }


def _wide(array: Any) -> Any:
    """As float64, in which all types have their order; complex numbers by their magnitude."""
    return abs(array) if array.dtype.kind == "c" else array.astype("float64")


def verdict_of(result: Any) -> Verdict:
    """What a check returned: a relative error, a bool, or nothing if it is content."""
    import numpy as np

    if isinstance(result, bool | np.bool_):
        return Verdict(bool(result), "correct" if result else "wrong")
    if isinstance(result, float | int | np.number) and not math.isnan(result):
        return Verdict(True, f"correct, relative error {float(result):.1e}")
    return Verdict(True, "correct")
