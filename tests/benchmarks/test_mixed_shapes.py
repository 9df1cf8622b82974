"""GEMMs with narrow weights by tiles: a whole case on the CPU, and which tiles are measured."""

from typing import Any

import gemm_times
import mixed_shapes
import pytest
from mixed_shapes import Case


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_case_on_the_simulator(monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    """Results are compared; each way has a time."""

    def once(timer: Any, contenders: list[gemm_times.Contenders], seed: int) -> Any:
        calls = {name: call for one in contenders for name, call in one.calls.items()}
        return {name: [2.0 if name == "as chosen" else 1.0] for name in calls}, {}

    monkeypatch.setattr(gemm_times, "in_random_order", once)
    monkeypatch.setattr(gemm_times, "READ_BETWEEN", 64)
    monkeypatch.setattr(mixed_shapes, "OTHERS", 1)
    case = Case(260, 128, 128, weights)
    row = mixed_shapes.ready(case)()
    assert not row.failed and row.ratio == 0.5 and len(row.times) == 4
    assert mixed_shapes.show(case, row).startswith(f"{weights} 260x128x128: as chosen 2.0, ")


def test_drawn() -> None:
    """Shapes have several tiles of rows; tiles differ from the default's and fill rounds."""
    for case in mixed_shapes.drawn(5, 20):
        assert case.m >= mixed_shapes.LEAST_ROWS
        tiles = [one.tile_m for one in mixed_shapes.listed(case)]
        assert len(set(tiles)) == len(tiles) == mixed_shapes.OTHERS


def test_ways() -> None:
    """Each way has configurations that fit shared memory and that names tell apart."""
    shapes = ("int8:4096x8192x8192", "int4:600x1024x4096", "int8:300x4096x4096")
    for case in map(mixed_shapes.named, shapes):
        every = mixed_shapes.listed(case, tuple(mixed_shapes.WAYS))
        assert all(one.stages > 2 or one.tile_k == 128 for one in every)
        assert len({mixed_shapes.describe(one) for one in every}) == len(every)
        assert {128, 256} <= {one.tile_n for one in every} <= {64, 128, 256}
