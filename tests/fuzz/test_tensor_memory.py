"""A few random kernels with tensor memory; ``python -m tests.fuzz tensor_memory`` makes more."""

from __future__ import annotations

import pytest
from tests.fuzz.tensor_memory import check, check_mistake, make_program

pytest.importorskip("pallasite_blackwell")


@pytest.mark.parametrize("seed", range(10))
def test_random_kernels(seed: int) -> None:
    program = make_program(seed, length=5)
    try:
        check(program)
    except Exception as error:
        error.add_note(f"seed {seed}: {program}")
        raise


@pytest.mark.parametrize("seed", range(5, 9))
def test_mistakes(seed: int) -> None:
    program = make_program(seed)
    for mistake in program.mistakes()[:3]:
        check_mistake(program, mistake)
