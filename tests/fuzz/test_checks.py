"""A few pairs of kernels, one with a mistake; ``python -m tests.fuzz checks`` makes more."""

from __future__ import annotations

import pytest
from tests.fuzz.checks import check, make_program


@pytest.mark.parametrize("first", range(0, 30, 5))
def test_mistakes_are_found(first: int) -> None:
    for seed in range(first, first + 5):
        program = make_program(seed)
        try:
            check(program, run=seed % 10 == 0)
        except Exception as error:
            error.add_note(f"seed {seed}: {program}")
            raise
