"""A few warp-specialized kernels; ``python -m tests.fuzz specialized`` makes more."""

from __future__ import annotations

import pytest
from tests.fuzz.specialized import findings, make_program, sanitized, with_mistake


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_nothing_is_said_of_right_ones(first: int) -> None:
    for seed in range(first, first + 15):
        program = make_program(seed)
        assert not findings(program), (seed, program)


@pytest.mark.parametrize("seed", [1000, 1008, 1044])
def test_mistakes_are_found(seed: int) -> None:
    program = with_mistake(make_program(seed), seed)
    assert findings(program), program
    assert sanitized(program), program
