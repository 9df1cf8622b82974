"""A few random kernels; ``python -m tests.fuzz kernels`` makes more."""

from __future__ import annotations

import pytest
from tests.fuzz.kernels import check, make_program


@pytest.mark.parametrize("first", range(0, 50, 5))
def test_random_kernels(first: int) -> None:
    for seed in range(first, first + 5):
        program = make_program(seed, length=5, largest=600)
        try:
            check(program)
        except Exception as error:
            error.add_note(f"seed {seed}: {program}")
            raise
