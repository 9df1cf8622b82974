"""Tests with many combinations of parameters, of which a session runs a sample.

Under ``@pytest.mark.sampled`` a test runs with so few of its combinations that each pair of values
of two parameters that occurs in any occurs in one of them; ``sampled(alone=("name", ...))`` asks of
these parameters only that each of their values occurs, and ``without`` names those of which nothing
is asked. Each field of a dataclass is a parameter, such as ``"program.dtype"``. All other
combinations are ``slow``, as are tests that say so themselves: ``make test-slow`` runs those, and
who names a test on the command line (``file.py::test``) runs all of it. Most defects need one
value, or two together (D. Kuhn, D. Wallace, A. Gallo, "Software fault interactions and implications
for software testing", 2004). The sample is the same in each session until parameters change.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence

import pytest

MARKERS = (
    "sampled(alone=(), without=()): runs with a part of its parameters; the others are slow",
    "slow: run by make test-slow only; a similar test runs always",
)

type Goals = frozenset[Hashable]


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is not in samples as slow, and leaves it out unless it is asked for."""
    groups = collections.defaultdict[Hashable, list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            groups[item.parent, item.originalname].append(item)
    for tests in groups.values():
        marker = tests[0].get_closest_marker("sampled")
        assert marker is not None
        alone, without = (marker.kwargs.get(name, ()) for name in ("alone", "without"))
        values = [
            {name: value for name, value in _values(one) if name not in without} for one in tests
        ]
        chosen = set(sample(values, alone, [one.name for one in tests]))
        for number, one in enumerate(tests):
            if number not in chosen:
                one.add_marker(pytest.mark.slow)
    if "slow" in config.option.markexpr or any("::" in one for one in config.args):
        return
    slow = [one for one in items if one.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        left_out = set(slow)
        items[:] = [one for one in items if one not in left_out]


def sample(
    combinations: Sequence[dict[str, Hashable]], alone: Collection[str], names: Sequence[str]
) -> list[int]:
    """Numbers of combinations that have all pairs of values which occur in any.

    Args:
      combinations: values by parameter.
      alone: parameters of which each value is enough, whatever the others are.
      names: of the combinations; they decide where several are as good.
    """
    goals = [_goals(one, alone) for one in combinations]
    left = set[Hashable]().union(*goals)
    order = sorted(range(len(goals)), key=lambda number: _digest(names[number]))
    chosen = []
    while left:
        best = max(order, key=lambda number: len(goals[number] & left))
        chosen.append(best)
        left -= goals[best]
    return sorted(chosen)


def _goals(values: dict[str, Hashable], alone: Collection[str]) -> Goals:
    together = [(name, value) for name, value in values.items() if name not in alone]
    pairs = itertools.combinations(together, 2)
    return frozenset([*values.items(), *pairs])


def _values(test: pytest.Function) -> Iterator[tuple[str, Hashable]]:
    """What tells a test's parameters apart; two that are written alike, or the same, are equal."""
    if not hasattr(test, "callspec"):
        return
    for name, value in test.callspec.params.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield f"{name}.{field.name}", repr(getattr(value, field.name))
        else:
            yield name, repr(value) if _is_written(value) else id(value)


def _is_written(value: object) -> bool:
    """Whether a value's text says all about it."""
    return value is None or isinstance(value, bool | int | float | str | tuple | dict | type)


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
