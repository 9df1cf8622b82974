"""All ways to multiply unaligned extents: a whole case on the CPU."""

import sys
import types
from typing import Any

import gemm_times
import numpy as np
import pytest
import unaligned


class Tensor(np.ndarray):
    """An array that has PyTorch's name of the transposed one."""

    def t(self) -> Any:
        """It."""
        return self.T


@pytest.mark.parametrize("shape", [unaligned.Shape(5, 33, 70, False, True)], ids=str)
def test_case_on_the_simulator(monkeypatch: pytest.MonkeyPatch, shape: unaligned.Shape) -> None:
    """Results are compared; each way has a time, and those that are estimated an estimate."""
    torch = types.ModuleType("torch")
    torch.from_dlpack = lambda x: np.asarray(x).astype(np.float32).view(Tensor)
    torch.matmul = np.matmul
    monkeypatch.setitem(sys.modules, "torch", torch)

    def once(timer: Any, contenders: list[gemm_times.Contenders], seed: int) -> Any:
        calls = {name: call for one in contenders for name, call in one.calls.items()}
        for call in calls.values():
            call()
        return {name: [2.0 if name == "ours" else 1.0] for name in calls}, {}

    monkeypatch.setattr(gemm_times, "in_random_order", once)
    monkeypatch.setattr(gemm_times, "READ_BETWEEN", 64)
    monkeypatch.setattr(unaligned, "SAMPLED", 0)
    row = unaligned.ready(shape)()
    assert not row.failed and row.ratio == 0.5
    assert {"xla", "torch", "copies", "ours"} < row.times.keys()
    assert row.estimates.keys() == row.times.keys() - {"torch", "ours"}
    assert "without copies 1.0" in unaligned.show(shape, row)


def test_shapes_are_unaligned() -> None:
    """In some order of operands, each of which occurs."""
    shapes = unaligned.shapes(3, 40)
    assert all(one.n % 8 or one.k % 8 for one in shapes)
    assert len({(one.transpose_a, one.transpose_b) for one in shapes}) == 4
    small = unaligned.shapes(3, 40, kind="small")
    assert all(one.n % 8 or one.k % 8 for one in small)
    assert all(one.n * one.k <= 1 << 20 for one in small)
