"""Tiles of queries and of keys with common segments are those that a search over all finds."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite_hopper.ops.flash.spans import spans

pytestmark = pytest.mark.runs_kernels


def expected(of_rows, of_columns, rows, columns, part):
    """For each tile of one sequence: [begin, end) of tiles that meet, then of each part those of
    its only segment; (0, 0) where there is none."""
    tiles = [of_columns[n : n + columns] for n in range(0, len(of_columns), columns)]
    found = []
    for start in range(0, len(of_rows), rows):
        own = of_rows[start : start + rows]
        meet = [n for n, t in enumerate(tiles) if own.min() <= t.max() and t.min() <= own.max()]
        entry = [(meet[0], meet[-1] + 1) if meet else (0, 0)]
        for number in range(rows // part):
            one = own[number * part : (number + 1) * part]
            same = [len(one) > 0 and {*one} == {*tile} and len({*one}) == 1 for tile in tiles]
            begin = same.index(True) if any(same) else 0
            end = begin
            while end < len(tiles) and same[end]:
                end += 1
            entry.append((begin, end) if end > begin else (0, 0))
        found.append(entry)
    return found


@pytest.mark.parametrize(
    ("lengths", "tiles", "segments", "ordered"),
    [
        ((1000, 900), (192, 128, 64), 5, True),
        ((1000, 900), (128, 80, 128), 3, True),
        ((130, 2100), (64, 16, 64), 40, True),
        ((500, 500), (128, 64, 64), 3, False),
        ((700, 700), (128, 128, 128), 1, True),
    ],
)
def test_spans(lengths, tiles, segments, ordered):
    generator = np.random.default_rng(0)
    both = [generator.integers(-segments, segments, (2, n)).astype(np.int32) for n in lengths]
    if ordered:
        both = [np.sort(one) for one in both]
    with pallasite.target("sm_90a"):
        found = np.asarray(spans(*map(jnp.asarray, both), *tiles))
    for batch in range(2):
        pairs = found[batch].reshape(found.shape[1], -1, 2)
        ours = [[(b, e) if e > b else (0, 0) for b, e in entry.tolist()] for entry in pairs]
        assert ours == expected(both[0][batch], both[1][batch], *tiles)
