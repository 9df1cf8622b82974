"""Candidates of a GEMM's configuration are made without checks, and pass them."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite_hopper.ops.dense.candidates import candidates, further_candidates
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.cost import Sizes

EXTENT = st.one_of(st.integers(1, 300), st.integers(1, 2000).map(lambda n: 8 * n))


def test_changed_fields():
    config = MatmulConfig(tile_m=64, warpgroups=1, split="m", epilogue_n=32)
    changed = config.changed(stages=7, group=3)
    assert changed == dataclasses.replace(config, stages=7, group=3) != config
    assert hash(changed) == hash(dataclasses.replace(config, stages=7, group=3))


@settings(max_examples=20, deadline=None)
@given(EXTENT, EXTENT, EXTENT, st.sampled_from([(1, 2), (2, 2), (2, 4), (4, 4)]), st.booleans())
def test_candidates_are_valid(m, n, k, bytes_of, transposed):
    sizes = Sizes(m, n, k, *bytes_of, transpose_a=transposed and bytes_of[0] == 2)
    found = [*candidates(sizes), *further_candidates(sizes)]
    assert found
    for one in found:
        assert dataclasses.replace(one) == one  # Its fields are checked.
