"""Grouped GEMMs by tilings: a whole case on the CPU, and which cases are drawn."""

from typing import Any

import gemm_times
import pytest
import ragged_shapes
from ragged_shapes import Case


def test_case_on_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are compared; each way has a time."""

    def once(timer: Any, contenders: list[gemm_times.Contenders], seed: int) -> Any:
        calls = {name: call for one in contenders for name, call in one.calls.items()}
        return {name: [2.0 if name == "as chosen" else 1.0] for name in calls}, {}

    monkeypatch.setattr(gemm_times, "in_random_order", once)
    monkeypatch.setattr(gemm_times, "READ_BETWEEN", 64)
    monkeypatch.setattr(ragged_shapes, "TILES", ((128, 256, "n", 1),))
    monkeypatch.setattr(ragged_shapes, "BANDS", (4,))
    monkeypatch.setattr(ragged_shapes, "HALVES", (True,))
    case = Case(200, 256, 64, 3)
    row = ragged_shapes.ready(case)()
    assert not row.failed and row.ratio == 0.5 and len(row.times) == 3
    assert ragged_shapes.show(case, row).startswith("200x256x64 in 3 groups: each group by XLA 1.0")


def test_drawn() -> None:
    """Groups have all rows, and the library's choice is not listed again."""
    for case in ragged_shapes.drawn(5, 6):
        assert sum(case.sizes()) == case.rows >= ragged_shapes.LEAST_ROWS
        assert len(ragged_shapes.listed(case)) >= len(ragged_shapes.TILES) * 2
