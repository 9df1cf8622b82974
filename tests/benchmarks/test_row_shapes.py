"""Widths by a seed, ways, and their table."""

import numpy as np
import pytest
import row_shapes
from row_shapes import Row

from pallasite_std.ops.rows import pipelines


def test_a_seed_says_which_widths():
    drawn = row_shapes.widths(3, 40)
    assert drawn == row_shapes.widths(3, 40) != row_shapes.widths(4, 40)
    assert sum(width % 8 > 0 for width in drawn) == 20 and max(drawn) > 1 << 15


@pytest.mark.parametrize("way", row_shapes.WAYS)
def test_ways_change_what_there_is(way):
    changes = row_shapes.WAYS[way]
    before = [getattr(module, name) for module, name, _ in changes]
    with row_shapes.changed(way):
        assert all(getattr(module, name) is value for module, name, value in changes)
    assert [getattr(module, name) for module, name, _ in changes] == before


def test_clusters_of_two_at_most():
    half = np.dtype("float16")

    def plan():
        return pipelines.gradient_pipeline(1 << 12, 50_000, [half] * 2, 4, 2, 132, 227 * 1024)

    found = plan()
    assert found is not None and found.blocks == 4
    with row_shapes.changed("clusters of two at most"):
        assert plan() is None


def test_table(capsys: pytest.CaptureFixture[str]):
    def row(operation, size, ms, xla, failed=None):
        return Row(operation, "forward", (1, size), "float32", 4 * size, ms, {}, xla, failed or {})

    found = [
        row(None, 1000, {"copy": 1.0}, None),
        row("first", 1000, {"as chosen": 1.0, "smaller tiles": 2.0}, 2.0),
        row("second", 1000, {"as chosen": 2.0}, 1.0, {"smaller tiles": "no room"}),
    ]
    means = row_shapes.table(found, ["as chosen", "smaller tiles"])
    assert means == {"as chosen": pytest.approx(1.0), "smaller tiles": pytest.approx(1.0)}
    text = capsys.readouterr().out
    assert text.index("second") < text.index("first") < text.index("no room")
