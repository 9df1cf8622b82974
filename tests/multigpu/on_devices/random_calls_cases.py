"""A few random calls of kernels on several devices; ``python -m tests.fuzz calls`` makes more."""

from __future__ import annotations

import pytest
from tests.fuzz.calls import check, make_program


@pytest.mark.parametrize("first", range(100, 160, 20))
def test_random_calls(first):
    for seed in range(first, first + 20):
        program = make_program(seed)
        if program.devices == 1:
            continue
        try:
            check(program)
        except Exception as error:
            error.add_note(f"seed {seed}: {program}")
            raise
