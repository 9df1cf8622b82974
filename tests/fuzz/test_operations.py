"""Some of the random calls of operations; ``operations.py`` runs as many as one likes."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import pytest
from tests.fuzz import operations


def _cheap(seed: int, most: int) -> Iterator[tuple[int, str, operations.Program]]:
    """Of each operation so many programs, of which one has gradients; most time is compilation."""
    counts: collections.Counter[str] = collections.Counter()
    for number, target, program in operations.programs(seed, 100):
        gradients = program.name if program.gradients else ""
        attention = "attention" in program.name
        if attention and gradients:
            continue
        counts[program.name] += 1
        if counts[program.name] > (1 if attention else most):
            continue
        counts[gradients + " by"] += bool(gradients)
        if gradients and counts[gradients + " by"] > 1:
            continue
        yield number, target, program


PROGRAMS = list(_cheap(seed=0, most=4))


@pytest.mark.runs_kernels(sanitize=False)
@pytest.mark.parametrize(
    ("target", "program"), [pytest.param(*rest, id=str(number)) for number, *rest in PROGRAMS]
)
def test_program(target, program):
    wrong = operations.problem(program, target)
    assert wrong is None, f"{target} {program}: {wrong}"
