"""A few random kernels of loops; ``python -m tests.fuzz loops`` makes more."""

from __future__ import annotations

import pytest
from tests.fuzz.loops import check, make_program


@pytest.mark.parametrize("first", range(0, 40, 5))
def test_random_kernels_of_loops(first: int) -> None:
    for seed in range(first, first + 5):
        program = make_program(seed, length=8)
        try:
            check(program)
        except Exception as error:
            error.add_note(f"seed {seed}: {program}")
            raise
