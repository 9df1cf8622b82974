"""Gated GEMMs by their ways: a whole case on the CPU, and which kernels are measured."""

from typing import Any

import gated
import gemm_times
import pytest


def test_case_on_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are compared; each way has a time."""

    def once(timer: Any, contenders: list[gemm_times.Contenders], seed: int) -> Any:
        calls = {name: call for one in contenders for name, call in one.calls.items()}
        return {name: [2.0 if name == "as chosen" else 1.0] for name in calls}, {}

    monkeypatch.setattr(gemm_times, "in_random_order", once)
    monkeypatch.setattr(gemm_times, "READ_BETWEEN", 64)
    shape = (20, 128, 128)
    row = gated.ready(shape, 2)()
    assert not row.failed and row.ratio == 0.5 and len(row.times) == 6
    assert gated.show(shape, row).startswith("20x128x128: as chosen 2.0, ")


def test_kinds() -> None:
    """The best of each kind of tile, of which names tell them apart."""
    for shape in (*gated.draw(3, 4), gated.named("1000x4096x2048")):
        every = gated.kinds(shape, 5)
        assert len(every) == 5
        assert not gated.kinds(shape, 0)
