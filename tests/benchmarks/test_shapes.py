"""Shapes by a seed, and their table."""

import gemm_shapes
import pytest
import shapes
from contest import Result, RowResult


def test_a_seed_says_which_shapes():
    """Others for another seed; few are odd; all are of the sizes that are asked for."""
    drawn = gemm_shapes.draw(3, 300, 1e12)
    assert drawn == gemm_shapes.draw(3, 300, 1e12) != gemm_shapes.draw(4, 300, 1e12)
    assert all(1 <= m <= gemm_shapes.MOST_TOKENS and 2 * m * n * k <= 1e12 for m, n, k in drawn)
    projections = {one for model in gemm_shapes.MODELS.values() for one in model.projections()}
    odd = [one for one in drawn if one[1:] not in projections]
    assert 0.1 < len(odd) / len(drawn) < 0.35
    assert len(gemm_shapes.MODELS) >= 10


def test_table(capsys: pytest.CaptureFixture[str]):
    """The worst come first; rows below the limits are counted."""

    def row(name: str, ours: float, rival: float) -> RowResult:
        def result(who: str, milliseconds: float) -> Result:
            return Result(who, "one", milliseconds, [milliseconds], [milliseconds], {})

        return RowResult(name, "bf16 square", 1, 1, [result("ours", ours), result("xla", rival)])

    rows = [row("bf16_1x1x1", 1.0, 2.0), row("bf16_2x2x2", 1.0, 0.95), row("bf16_3x3x3", 2.0, 1.0)]
    summary = shapes.print_table(rows, {})
    assert summary["below"] == {"0.97": 2, "0.9": 1}
    assert summary["geometric_mean"] == pytest.approx((2 * 0.95 * 0.5) ** (1 / 3))
    text = capsys.readouterr().out
    assert text.index("bf16_3x3x3") < text.index("bf16_2x2x2") < text.index("bf16_1x1x1")
