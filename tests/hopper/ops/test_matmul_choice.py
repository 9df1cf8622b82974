"""Which configuration or kernel a product has."""

from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest

from pallasite_hopper.ops import MatmulConfig, matmul_configs
from pallasite_hopper.ops.dense.choice import batched_config, default_config
from pallasite_hopper.ops.dense.cost import Sizes, nanoseconds
from pallasite_hopper.ops.dense.turned import left_to_xla as turned_left_to_xla
from pallasite_hopper.ops.dense.unaligned import left_to_xla, without_copies

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("order", [(False, False), (False, True), (True, True)])
def test_much_to_calculate_is_not_left_to_xla(order):
    """Many elements along k are worth copies; with few of them, storing the result is not."""
    for m, n in ((2049, 3001), (5000, 8190), (16001, 1023)):
        assert not left_to_xla(Sizes(m, n, 9001, 2, 2, *order))
        assert left_to_xla(Sizes(4 * m, 4 * n + 3, 65, 2, 2, *order))
        assert without_copies(Sizes(m, n, 9001, 2, 2, *order)) is None


@pytest.mark.parametrize("order", [*itertools.product((False, True), repeat=2)])
def test_float32_whose_copies_take_longest(order):
    """The tensor cores read float32 along k only: few rows of large operands that are given the
    other way round are left to XLA, which need not copy them; others are not."""
    turned = {"turned_a": order[0], "turned_b": not order[1]}
    few, many = Sizes(7, 8192, 28672, 4, 4, False, True), Sizes(9000, 8192, 8192, 4, 4, False, True)
    assert turned_left_to_xla(few, **turned) == turned["turned_b"]
    assert not turned_left_to_xla(many, **turned)
    assert not turned_left_to_xla(Sizes(64, 64, 64, 4, 4, False, True), **turned)


def test_few_rows_of_integers():
    """XLA takes less time for them than a copy of the matrix, but not for one row, nor for many."""
    turned = {"turned_a": False, "turned_b": True}
    left = {m: turned_left_to_xla(Sizes(m, 8192, 8192, 1, 4, False, True), **turned)
            for m in (1, 4, 64, 1000)}  # fmt: skip
    assert left == {1: False, 4: True, 64: True, 1000: False}
    sizes = Sizes(4, 8192, 8192, 1, 4, False, True)
    assert not turned_left_to_xla(sizes, turned_a=True, turned_b=True)


def test_large_results_whose_rows_begin_between_lines():
    """They have the tiles that the estimate says, not those that write whole lines."""
    whole, between = (batched_config(Sizes(800, n, 80, 2, 2, batch=175)) for n in (2304, 2264))
    assert (whole.swap, whole.tile_m, whole.group, whole.grid_minor) == (True, 256, 4, "m")
    assert (between.tile_m, between.tile_n) != (whole.tile_m, whole.tile_n)


def test_last_round_of_tiles():
    """Where it would leave most multiprocessors without work, blocks share its tiles, or what is
    left has tiles of its own."""
    sizes = Sizes(5636, 4096, 8192, 2, 2)
    config = default_config(sizes)
    assert config.rest is not None or config.last_parts > 1
    alone = dataclasses.replace(config, rest=None, rest_from=0, rest_along="m", last_parts=1)
    assert nanoseconds(config, sizes) < 0.97 * nanoseconds(alone, sizes)
    usual = default_config(Sizes(4096, 4096, 4096, 2, 2))
    assert usual.rest is None and usual.last_parts == 1


@pytest.mark.parametrize("m", [137, 290, 430, 777])
def test_tiles_of_the_transposed_product(m):
    """Their columns may be any multiple of 8, so that tiles have hardly more than there is; if rows
    of a do not lie along k, they fill the swizzle."""
    config = default_config(Sizes(m, 4096, 4096, 2, 2))
    assert config.swap and -(-m // config.tile_n) * config.tile_n < m + 64
    for one in matmul_configs(m, 4096, 4096, BFLOAT16, transpose_a=True):
        assert not one.swap or one.tile_n % 64 == 0 or one.tile_n >= m


@pytest.mark.parametrize("m", [88, 104, 112, 120])
@pytest.mark.parametrize(("n", "k"), [(4096, 9001), (1152, 5600), (8192, 6317)])
def test_few_columns_of_a_transposed_operand(m, n, k):
    """Rows of a that lie across k are copied in pieces as long as the swizzle: tiles as wide as
    they are, but of pieces of 16 or 32 bytes, take long where blocks have much to copy; where rows
    lie along k they do not."""
    narrow = MatmulConfig(swap=True, tile_m=64, tile_n=m, stages=6, warpgroups=1)
    wide = dataclasses.replace(narrow, tile_n=128)
    across, along = Sizes(m, n, k, 2, 2, transpose_a=True), Sizes(m, n, k, 2, 2)
    assert nanoseconds(narrow, across) > nanoseconds(wide, across)
    assert nanoseconds(narrow, along) < nanoseconds(wide, along)
    chosen = default_config(across, "H200")
    width = chosen.tile_n if chosen.swap else chosen.tile_m
    assert width % 64 == 0 or chosen.tile_m > 64
