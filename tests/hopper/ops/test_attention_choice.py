"""The configuration of attention's forward by an estimate of its time."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest

from pallasite_hopper.ops.flash import forward_choice, forward_time
from pallasite_hopper.ops.flash.config import MULTIPROCESSORS, AttentionConfig
from pallasite_hopper.ops.flash.forward_choice import default_config, parts_of_least_time
from pallasite_hopper.ops.flash.forward_time import Work, microseconds


def by_rounds(config: AttentionConfig, *args: object, **named: object) -> AttentionConfig:
    return config


@pytest.mark.parametrize(
    ("head_dim", "q_seq", "heads", "causal", "left"),
    [
        (64, 9500, 2, True, None),  # A round of long tiles, of which the longest decides.
        (40, 2900, 9, True, None),
        (192, 1100, 8, True, None),
        (128, 14000, 1, True, None),
        (96, 3600, 2, False, None),
        (64, 200, 500, True, 20),  # Rows of tiles that do not exist.
        (160, 270, 50, False, None),
        (64, 240, 4000, False, None),
    ],
)
def test_tiles_are_smaller_where_rounds_of_large_ones_leave_multiprocessors_idle(
    head_dim, q_seq, heads, causal, left
):
    options = {"heads": heads, "kv_seq": q_seq, "left": left}
    found = default_config(head_dim, causal, q_seq, **options)
    with mock.patch.object(forward_choice, "_of_least_time", by_rounds):
        rounds = default_config(head_dim, causal, q_seq, **options)
    assert found.warpgroups < rounds.warpgroups or found.split > rounds.split
    assert found.fits(head_dim)
    work = Work(heads, q_seq, q_seq, head_dim, left, 0 if causal else None)
    assert microseconds(work, found) < 0.92 * microseconds(work, rounds)


def test_tiles_stay_large_where_reading_keys_takes_the_time():
    """Heads whose rows begin within sectors: smaller tiles read the keys more often."""
    aligned, unaligned = (
        default_config(head_dim, True, 4200, heads=4, kv_seq=4200) for head_dim in (208, 200)
    )
    assert aligned.warpgroups == 1 and unaligned.warpgroups == 2


def test_tiles_of_three_warpgroups_where_those_of_two_are_a_few_too_many():
    found = default_config(128, False, 1100, heads=16, kv_seq=1100)
    assert (found.warpgroups, found.block_kv) == (3, 64) and found.fits(128)


@pytest.mark.parametrize(
    ("head_dim", "q_seq", "heads", "causal"),
    [(64, 16384, 16, True), (64, 4096, 44, False), (128, 8192, 32, True), (256, 2048, 132, False)],
)
def test_many_tiles_stay_large(head_dim, q_seq, heads, causal):
    found = default_config(head_dim, causal, q_seq, heads=heads, kv_seq=q_seq)
    assert found == default_config(head_dim, causal, q_seq)


def test_estimates_are_when_the_last_block_ends():
    config = AttentionConfig()
    once, full, more = (
        microseconds(Work(heads, 128, 4096, 128), config)
        for heads in (1, MULTIPROCESSORS, MULTIPROCESSORS + 1)
    )
    assert once == full and more - full == pytest.approx(full - forward_time._RATES.kernel)
    shared = dataclasses.replace(config, persistent=False, split=2)
    assert once / 2 < microseconds(Work(1, 128, 4096, 128), shared) < once
    # Blocks of one warpgroup read as many keys for half the queries.
    small = dataclasses.replace(config, warpgroups=1)
    few, many = (microseconds(Work(heads, 64, 4096, 128), small) for heads in (1, MULTIPROCESSORS))
    assert few < many < once


def test_steps_are_those_with_keys_that_are_seen():
    generator = np.random.default_rng(7)
    for _ in range(20):
        rows, more = generator.integers(1, 700, 2)
        left = int(generator.integers(0, 300)) if generator.random() < 0.5 else None
        work = Work(3, int(rows), int(rows + more), 64, left, 0)
        config = AttentionConfig(warpgroups=int(generator.integers(1, 4)), block_kv=64)
        own = np.arange(rows)[:, None] + more
        keys = np.arange(rows + more)
        seen = (keys <= own) & ((left is None) | (keys >= own - (left or 0)))
        tiles = [
            seen[at : at + config.block_q].any(axis=0) for at in range(0, rows, config.block_q)
        ]
        blocks = [len({int(key) // 64 for key in np.flatnonzero(tile)}) for tile in tiles]
        assert forward_time._steps(work, config) == blocks


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((8, 64, 50000, 64, 1, None), 16),  # Eight tiles, of many keys.
        ((16, 256, 16384, 128, 1, None), 4),
        ((8, 4096, 77, 64, 1, None), 1),
        ((96, 300, 9000, 64, 1, None), 1),  # As many tiles as fill the GPU.
        ((4, 64, 2000, 64, 1, None), 1),  # Adding parts up would take longer.
    ],
)
def test_keys_are_divided_where_tiles_are_few(shape, parts):
    assert parts_of_least_time(*shape) == parts
