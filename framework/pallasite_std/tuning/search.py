"""Successive halving: all candidates are measured a little, the faster half of them more.

Jamieson, Talwalkar: Non-stochastic Best Arm Identification and Hyperparameter Optimization, 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pallasite.plugin import ExecutionError
from pallasite_std.tuning.trials import Trial

FIRST_REPEATS = 4
LAST_REPEATS = 32
FINALISTS = 4
"""How many are measured with the most repeats."""
TIE = 0.01
"""Times that differ by less than this part are the same: the candidate that comes first wins."""

Measure = Callable[[Sequence[Trial[Any]], int], Sequence[float]]
"""``measure(trials, repeats)`` gives the seconds of one run of each; not finite if it failed."""


def fastest[Configuration](
    trials: Sequence[Trial[Configuration]], measure: Measure
) -> tuple[Trial[Configuration], dict[int, float]]:
    """The fastest candidate; of several that are equally fast, the first.

    Args:
      trials: the candidates, best guess first.
      measure: takes the times.

    Returns:
      The candidate, and by number the last time of each in seconds.

    Raises:
      ExecutionError: no time was measured.
    """
    seconds: dict[int, float] = {}
    left, repeats = list(trials), FIRST_REPEATS
    while True:
        final = len(left) <= FINALISTS
        times = measure(left, LAST_REPEATS if final else repeats)
        seconds.update({trial.number: time for trial, time in zip(left, times, strict=True)})
        left = [trial for trial in left if math.isfinite(seconds[trial.number])]
        if not left:
            raise ExecutionError(
                "no configuration could be measured",
                expected="finite times",
                hint="run one of them on its own to see what goes wrong",
            )
        if final:
            break
        left.sort(key=lambda trial: (seconds[trial.number], trial.number))
        left = sorted(left[: math.ceil(len(left) / 2)], key=lambda trial: trial.number)
        repeats = min(2 * repeats, LAST_REPEATS)
    limit = min(seconds[trial.number] for trial in left) * (1 + TIE)
    return next(trial for trial in left if seconds[trial.number] <= limit), seconds
