"""A few random calls of kernels; ``python -m tests.fuzz calls`` makes more.

Those of several devices are in ``tests/multigpu/on_devices``.
"""

from __future__ import annotations

import pytest
from tests.fuzz.calls import check, make_program


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_calls(first: int) -> None:
    for seed in range(first, first + 10):
        program = make_program(seed)
        if program.devices > 1:
            continue
        try:
            check(program)
        except Exception as error:
            error.add_note(f"seed {seed}: {program}")
            raise
