"""Skinny GEMMs in one round of tiles, the choice by the GPU, and groups of tiles of equal width."""

from __future__ import annotations

import dataclasses
import types

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite_hopper.ops import matmul
from pallasite_hopper.ops.dense import choice
from pallasite_hopper.ops.dense.candidates import asks_for_much, candidates
from pallasite_hopper.ops.dense.config import SHARED_MEMORY
from pallasite_hopper.ops.dense.cost import H200, Sizes
from pallasite_hopper.ops.dense.one_round import one_round_config

pytestmark = pytest.mark.runs_kernels

MULTIPROCESSORS = H200.multiprocessors


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 300),
    st.integers(100, 40000).map(lambda n: 8 * n),
    st.integers(8, 4000).map(lambda k: 8 * k),
    st.sampled_from([2, 4]),
    st.sampled_from(["H100", "H200"]),
)
def test_tiles_of_one_round(m, n, k, out_size, chip):
    """All tiles are resident at once where that is possible, with about as much in flight as memory
    answers without delay; and they fit."""
    config = one_round_config(Sizes(m, n, k, 2, out_size), chip)
    if config is None:
        assert chip == "H200" or not 0 < m <= 64 or n < 70 * 64 or 2 * n * k <= H200.cache
        return
    assert m <= (128 if chip == "H200" else 256)
    assert config.fits(2, out_size) and config.shared_bytes(2, out_size) <= SHARED_MEMORY
    assert config.tile_n >= m and config.swap and config.evict_first and config.stages >= 2
    lanes = 128 * config.warpgroups
    assert config.tile_m * config.tile_n <= lanes * (160 if config.warpgroups == 2 else 128)
    tiles = -(-n // config.tile_m)
    at_once = MULTIPROCESSORS * config.resident
    assert tiles <= at_once or chip == "H100"
    if m <= 64 and chip == "H100":
        assert (tiles <= at_once) == (n <= 512 * MULTIPROCESSORS)
    if tiles <= at_once:
        smaller = [rows for rows in (64, 128, 192, 256, 320, 384) if rows < config.tile_m]
        sizes = [rows for rows in smaller if -(-n // rows) <= MULTIPROCESSORS]
        assert all(rows in ((64,) if m > 64 else (64, 192, 320)) for rows in sizes)
        in_flight = config.stages * tiles * config.tile_m * config.tile_k * 2
        assert in_flight < 16e6 or config.stages <= 4 or (config.tile_m == 128 and m > 64)


@pytest.mark.parametrize(
    ("m", "n", "k", "changes"),
    [
        (3, 35000, 1024, {"tile_m": 384}),
        (33, 18432, 3072, {"tile_m": 256}),
        (64, 60000, 512, {"tile_m": 512}),
        (20, 16384, 2048, {"tile_m": 128}),
        (5, 8200, 8192, {"tile_m": 64, "resident": 1}),
        (37, 8800, 4096, {"tile_m": 64, "resident": 2}),
        (77, 20000, 2048, {"tile_m": 192, "split": "n", "stages": 4}),
        (128, 40000, 1024, {"tile_m": 320, "tile_n": 128}),
        (233, 16384, 2048, {"tile_m": 128, "tile_n": 240, "warpgroups": 2}),
        (90, 152064, 512, {"tile_m": 384, "stages": 3}),
    ],
)
def test_results(m, n, k, changes):
    """The configuration of a large matrix, on the first columns of one; with an edge of rows."""
    config = one_round_config(Sizes(m, n, k, 2, 2), "H100")
    assert config is not None
    assert {name: getattr(config, name) for name in changes} == changes
    columns = 2 * config.tile_m + 40
    generator = np.random.default_rng(m)
    a, b = (
        generator.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for shape in ((m, 192), (192, columns))
    )
    result = np.asarray(matmul(jnp.asarray(a), jnp.asarray(b), config=config)).astype(np.float64)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert np.linalg.norm(result - expected) < 4e-3 * np.linalg.norm(expected)


def test_results_of_tiles_of_320_rows():
    """Two columns of them, written where the stages were, with edges of rows and columns."""
    found = [one for one in candidates(Sizes(220, 18176, 4544, 2, 2)) if one.tile_m == 320]
    config = next(one for one in found if one.epilogue_in_stages)
    generator = np.random.default_rng(320)
    a, b = (
        generator.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for shape in ((220, 320), (320, 1000))
    )
    result = np.asarray(matmul(jnp.asarray(a), jnp.asarray(b), config=config)).astype(np.float64)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    assert np.linalg.norm(result - expected) < 4e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize(("m", "n", "k"), [(300, 16384, 4096), (200, 30000, 4096), (100, 65536, 8)])
@pytest.mark.parametrize("chip", ["H100", "H200"])
def test_what_has_no_tiles_of_one_round(m, n, k, chip):
    """Many rows, tiles that registers do not hold, and matrices that the L2 cache holds."""
    assert one_round_config(Sizes(m, n, k, 2, 2), chip) is None


@pytest.mark.parametrize(
    ("m", "n", "rows"), [(1, 16960, 256), (90, 18432, 192), (60, 6144, 64), (20, 8192, None)]
)
def test_tiles_on_an_h200(m, n, rows):
    """Where other configurations are as fast, there are none."""
    config = one_round_config(Sizes(m, n, 7168, 2, 2), "H200")
    assert (config and config.tile_m) == rows


@pytest.mark.parametrize(("m", "n", "k"), [(449, 1280, 5120), (547, 1536, 7168), (250, 2560, 5120)])
def test_blocks_ask_for_less_on_an_h100(m, n, k):
    """Of small tiles there are configurations with fewer stages, which an H100 prefers."""
    sizes = Sizes(m, n, k, 2, 2)
    every = set(candidates(sizes))
    much = [one for one in every if asks_for_much(one, sizes)]
    assert much
    for one in much:
        fewer = {
            other.stages for other in every if dataclasses.replace(other, stages=one.stages) == one
        }
        assert any(
            stages < one.stages
            and not asks_for_much(dataclasses.replace(one, stages=stages), sizes)
            for stages in fewer
        )
    assert not asks_for_much(choice.default_config(sizes, "H100"), sizes)


def test_the_gpu_decides(monkeypatch):
    """An H100's memory is slower than an H200's; other GPUs count as one of them."""
    kinds = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "cpu": "H200"}
    skinny, large = Sizes(4, 32000, 5120, 2, 2), Sizes(1643, 5120, 27648, 2, 2)
    for kind, chip in kinds.items():
        found = types.SimpleNamespace(device_kind=kind)
        monkeypatch.setattr(choice, "device", lambda found=found: found)
        assert choice.this_chip() == choice.chip_of(kind) == chip
        for sizes in (skinny, large):
            assert choice.default_config(sizes) == choice.default_config(sizes, chip)
        assert choice.default_config(skinny, chip) == one_round_config(skinny, chip)
    for sizes in (skinny, large):
        assert choice.default_config(sizes, "H100") != choice.default_config(sizes, "H200")


def test_tuning_tries_one_round():
    """On any GPU."""
    assert one_round_config(
        Sizes(4, 32000, 5120, 2, 2), choice.this_chip()
    ) in choice.matmul_configs(4, 32000, 5120, "bfloat16")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(40, 700).map(lambda m: 8 * m),
    st.integers(40, 2000).map(lambda n: 8 * n),
    st.integers(16, 400).map(lambda k: 8 * k),
)
def test_no_group_of_tiles_is_narrow(m, n, k):
    """As many groups as chosen, whose widths differ by less than their number."""
    for config in candidates(Sizes(m, n, k, 2, 2)):
        rows = -(-(n if config.swap else m) // config.step_m)
        groups = -(-rows // config.group)
        assert groups == 1 or groups * config.group - rows < groups
