"""Measures all candidates of an operation and keeps what was found."""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import json
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from pallasite.plugin import ExecutionError
from pallasite_std.tuning import entries
from pallasite_std.tuning.encoding import Json
from pallasite_std.tuning.inputs import input_sets
from pallasite_std.tuning.search import Measure, fastest
from pallasite_std.tuning.store import Entry
from pallasite_std.tuning.timing import measure_on_gpu
from pallasite_std.tuning.trials import on_another_thread, prepare

_SHOWN_FAILURES = 3

_one_at_a_time = threading.Lock()
"""Measurements that overlap would disturb each other."""
_is_tuning: contextvars.ContextVar[bool] = contextvars.ContextVar("pallasite_tuning", default=False)


class AutotuneWarning(UserWarning):
    """Configurations that cannot be used, or an operation that cannot be tuned."""


def is_tuning() -> bool:
    """Whether this code is part of a candidate that is being measured."""
    return _is_tuning.get()


def tune[Configuration: Hashable](
    name: str,
    function: Callable[..., Any],
    listed: Mapping[str, Configuration],
    args: Sequence[Any],
    key: Json,
    *,
    refresh: bool = False,
    check: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    make_inputs: Callable[[Any], Sequence[Any]] | None = None,
    measure: Measure | None = None,
    one_by_one: bool = False,
) -> Configuration:
    """The fastest configuration, measured now; see :func:`pallasite.autotune`.

    Args:
      name: under which it is kept.
      listed: the candidates by the text of their encoding.
      key: for which it is kept.
      refresh: whether what is kept already counts for nothing.
      one_by_one: whether candidates must not run at the same time.

    Raises:
      ExecutionError: no configuration works, or there is no GPU to measure on.
    """
    if measure is None and entries.device().platform != "gpu":
        raise ExecutionError(
            f"{name!r} cannot be tuned without a GPU",
            got=f"the device {entries.device().device_kind!r}",
            hint="where there is none, use what was measured before: PALLASITE_AUTOTUNE=cached",
        )
    with contextlib.nullcontext() if is_tuning() else _one_at_a_time, _tuning():
        entry = None if refresh else entries.find(name, key)
        if entry is None or entries.chosen(entry, listed) is None:  # Not tuned while waiting.
            sets = tuple(args), make_inputs
            made = on_another_thread(
                lambda: _measure(
                    *(name, function, listed, sets, check, tolerance),
                    measure or measure_on_gpu,
                    one_by_one,
                )
            )
            entry = entries.keep(name, key, made, replace=refresh or entry is not None)
    best = entries.chosen(entry, listed)
    assert best is not None, "a file of tuned configurations changed its meaning"
    return best[0]


def _measure[Configuration: Hashable](
    name: str,
    function: Callable[..., Any],
    listed: Mapping[str, Configuration],
    args: tuple[tuple[Any, ...], Callable[[Any], Sequence[Any]] | None],
    check: Callable[..., Any] | None,
    tolerance: float | None,
    measure: Measure,
    one_by_one: bool,
) -> Entry:
    texts = list(listed)
    trials, failures = prepare(
        function, listed.values(), input_sets(*args), check, tolerance, one_by_one
    )
    reasons = {
        number: f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        for number, error in failures.items()
    }
    if not trials:
        raise ExecutionError(
            f"no configuration of {name!r} works",
            got=_summary(reasons, list(listed.values())),
        ) from failures[0]
    if reasons:
        warnings.warn(
            f"{len(reasons)} of {len(listed)} configurations of {name!r} are left out: "
            + _summary(reasons, list(listed.values())),
            AutotuneWarning,
            stacklevel=2,
        )
    if len(trials) == 1:
        best, seconds = trials[0], dict[int, float]()
    else:
        best, seconds = fastest(trials, measure)
    return {
        "best": json.loads(texts[best.number]),
        "date": datetime.datetime.now().isoformat(" ", timespec="seconds"),
        "microseconds": _microseconds(seconds.get(best.number)),
        "candidates": [
            {"configuration": json.loads(text)}
            | (
                {"left out": reasons[number]}
                if number in reasons
                else {"microseconds": _microseconds(seconds.get(number))}
            )
            for number, text in enumerate(texts)
        ],
    }


def _microseconds(seconds: float | None) -> float | None:
    """To four digits; None for what JSON has no number for."""
    if seconds is None or not seconds < float("inf"):
        return None
    return float(f"{seconds * 1e6:.4g}")


def _summary(reasons: Mapping[int, str], configurations: Sequence[Any]) -> str:
    shown = [f"{configurations[n]}: {reasons[n]}" for n in list(reasons)[:_SHOWN_FAILURES]]
    rest = len(reasons) - len(shown)
    return "; ".join(shown) + (f"; and {rest} more" if rest > 0 else "")


@contextlib.contextmanager
def _tuning() -> Iterator[None]:
    token = _is_tuning.set(True)
    try:
        yield
    finally:
        _is_tuning.reset(token)
