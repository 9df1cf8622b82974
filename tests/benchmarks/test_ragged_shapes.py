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
    case = Case(200, 256, 64, 3, "halves")
    row = ragged_shapes.ready(["as chosen", "clusters, columns halved"], 1, case)()
    assert not row.failed and row.ratio == 0.5 and len(row.times) == 4
    said = ragged_shapes.show(case, row)
    assert said.startswith("200x256x64 in 3 groups (halves): each group by XLA 1.0")


def test_drawn() -> None:
    """Groups have all rows."""
    cases = [*ragged_shapes.drawn(5, 9), ragged_shapes.named("2100x256x64x40xhalves")]
    for case in cases:
        assert sum(case.sizes()) == case.rows >= ragged_shapes.LEAST_ROWS
        assert min(case.sizes()) >= 0
    assert len({case.spread for case in cases}) > 1
    assert ragged_shapes.named("4096x256x64x4") == Case(4096, 256, 64, 4)
