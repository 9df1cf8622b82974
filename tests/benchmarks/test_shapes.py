"""Shapes by a seed, and their table."""

import gemm_shapes
import pytest
import shapes
from gemm_times import Times


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

    def row(m: int, ours: float, rival: float) -> Times:
        return Times((m, 1, 1), "bf16", [rival] * 4, [], {"xla": ["k"]}, [[ours] * 4], [], [])

    found = shapes.print_table([row(1, 1.0, 2.0), row(2, 1.0, 0.95), row(3, 2.0, 1.0)])
    summary = found["without options"]
    assert (summary["below 0.97"], summary["below 0.9"]) == (2, 1)
    assert summary["geometric mean"] == pytest.approx((2 * 0.95 * 0.5) ** (1 / 3))
    text = capsys.readouterr().out
    assert text.index("3x1x1") < text.index("2x1x1") < text.index("1x1x1")


def test_few_tiles():
    """They are few, and k is long."""
    drawn = gemm_shapes.draw_few_tiles(5, 40)
    assert drawn == gemm_shapes.draw_few_tiles(5, 40) != gemm_shapes.draw_few_tiles(6, 40)
    assert all(-(-m // 128) * -(-n // 128) <= 264 and k >= 1024 for m, n, k in drawn)


def test_shapes_of_float8():
    """Rows are whole vectors, of which cuBLASLt has no others, but for odd ones; XLA does not
    search among kernels of its own."""
    drawn = shapes.drawn(4, 60, "fp8", 4096)
    assert all(n % 16 == k % 16 == 0 for _, n, k in drawn)
    assert all(shapes.case(one, "fp8", 0).aligned for one in drawn)
    odd = shapes.drawn(4, 60, "fp8", 4096, "odd")
    assert not any(shapes.case(one, "fp8", 0).aligned for one in odd)
    assert not shapes.case(odd[0], "fp8", 0).search and shapes.case(odd[0], "bf16", 0).search
