"""Some of the random calls of operations; ``operations.py`` runs as many as one likes."""

from __future__ import annotations

import operations
import pytest

PROGRAMS = list(operations.programs(seed=0, count=24))


@pytest.mark.runs_kernels(sanitize=False)
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_program(number):
    _, target, program = PROGRAMS[number]
    wrong = operations.problem(program, target)
    assert wrong is None, f"{target} {program}: {wrong}"
