"""``gated_matmul``'s kernel agrees with float64 in every kind of configuration; the choice fits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite_hopper.ops import MatmulConfig, gated_matmul
from pallasite_hopper.ops.dense import run
from pallasite_hopper.ops.dense.choice import default_config, estimated
from pallasite_hopper.ops.dense.cost import Sizes
from pallasite_hopper.ops.dense.gated import run_fused
from pallasite_hopper.ops.dense.gated_choice import (
    both_weights,
    fused_config,
    fused_configs,
    halves,
)

pytestmark = pytest.mark.runs_kernels

PLAIN = {"tile_m": 128, "tile_n": 256, "split": "m", "stages": 2, "epilogue_n": 32}
TRANSPOSED = {
    "swap": True, "tile_m": 128, "tile_n": 24, "warpgroups": 1, "split": "m", "stages": 3,
    "epilogue_n": 16,
}  # fmt: skip
HALVED = TRANSPOSED | {"tile_m": 256, "warpgroups": 2}


def operands(m, n, k, dtype):
    generator = np.random.default_rng(m + n + k)
    a, gate, up = (generator.standard_normal(shape) for shape in ((m, k), (k, n), (k, n)))
    return [jnp.asarray(x.astype(dtype)) for x in (a, gate * 0.2, up)]


def relative_error(result, a, gate, up, activation=None):
    a, gate, up = (np.asarray(x).astype(np.float64) for x in (a, gate, up))
    x = a @ gate
    expected = (x / (1 + np.exp(-x)) if activation is None else activation(x)) * (a @ up)
    found = np.asarray(result).astype(np.float64)
    assert found.shape == expected.shape and np.isfinite(found).all()
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    "fields",
    [
        PLAIN,
        PLAIN | {"warpgroups": 1, "tile_m": 64, "tile_n": 128, "epilogue_n": 64},
        PLAIN | {"tile_m": 64, "split": "n"},  # Each warpgroup has columns of both weights.
        PLAIN | {"tile_m": 256, "tile_n": 128, "cluster": 2, "cluster_along": "n"},
        PLAIN | {"alternate": True, "tile_n": 128},
        TRANSPOSED,
        TRANSPOSED | {"evict_first": True, "epilogue_in_stages": True},
        TRANSPOSED | {"cluster": 2, "cluster_along": "n"},
        TRANSPOSED | {"cluster": 2, "cluster_along": "m", "tile_n": 32},
        TRANSPOSED | {"split_k": 3, "epilogue_n": 8},
        TRANSPOSED | {"warpgroups": 2, "split": "n", "tile_n": 48},
        TRANSPOSED | {"warpgroups": 2, "alternate": True, "tile_n": 48},
        HALVED,
        HALVED | {"split_k": 2, "tile_n": 32},
    ],
)
def test_configurations(fields):
    """Parts of tiles of both weights, divided in all ways."""
    config = MatmulConfig(**fields)
    assert halves(config)
    args = operands(70, 200, 264, "float16")
    activation = jax.nn.silu
    if config.epilogue_in_stages:
        args = operands(20, 200, 264, "float16")
    result = run_fused(activation, config, *args)
    assert relative_error(result, *args) < 2e-3


@pytest.mark.parametrize("fields", [PLAIN, TRANSPOSED, HALVED])
@pytest.mark.parametrize("shape", [(1, 8, 8), (33, 77, 130), (130, 136, 64)])
def test_extents(fields, shape):
    """Rows that are not aligned, and tiles of which most is beyond the end."""
    args = operands(*shape, "bfloat16")
    result = run_fused(jnp.tanh, MatmulConfig(**fields), *args)
    assert relative_error(result, *args, activation=np.tanh) < 1e-2


@pytest.mark.parametrize("fields", [TRANSPOSED | {"last_parts": 2}, HALVED | {"last_parts": 2}])
def test_last_tiles_are_shared(fields, monkeypatch):
    """By two blocks where whole rounds leave some."""
    monkeypatch.setattr(run, "MULTIPROCESSORS", 4)
    args = operands(20, 5 * 64 * (2 if fields["tile_m"] == 256 else 1), 192, "float16")
    result = run_fused(jax.nn.silu, MatmulConfig(**fields), *args)
    assert relative_error(result, *args) < 2e-3


@pytest.mark.parametrize(
    "fields",
    [
        TRANSPOSED | {"tile_m": 64},
        TRANSPOSED | {"tile_m": 192, "warpgroups": 2, "split": "n", "tile_n": 32},
        PLAIN | {"tile_n": 192},
        TRANSPOSED | {"parts": 2},
    ],
)
def test_tiles_that_have_no_halves(fields):
    assert not halves(MatmulConfig(**fields))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3000),
    st.integers(16, 2000).map(lambda n: 8 * n),
    st.integers(8, 1000).map(lambda k: 8 * k),
    st.sampled_from(["H100", "H200"]),
)
def test_choice(m, n, k, chip):
    """It fits registers and shared memory, and is the estimated best of one kernel and two."""
    both, each = both_weights(m, n, k), Sizes(m, n, k, 2, 2)
    found = fused_configs(m, n, k, chip)
    for config in found:
        assert halves(config)
        # The result is written as wide as it is; of the transposed GEMM half as many rows.
        assert config.fits(2, 1 if config.swap else 2)
        # Sums of a lane.
        assert config.warpgroup_m * config.warpgroup_n <= 128 * 200
    chosen = fused_config(m, n, k, chip)
    two = 2 * estimated(default_config(each, chip), each, chip)
    assert chosen in (None, *found[:1])
    if chosen is not None:  # The activation reads and writes six bytes for each element.
        assert estimated(chosen, both, chip) < 1.05 * (two + 1000 + 6 * m * n / 3600)
    else:
        assert not found or 1.1 * estimated(found[0], both, chip) > two


@pytest.mark.parametrize("shape", [(3, 8192, 3072), (150, 4096, 1024)])
def test_few_rows_take_one_kernel(shape):
    """Both weights are on their way at the same time."""
    assert fused_config(*shape, "H200").swap


def test_default():
    args = operands(20, 136, 200, "bfloat16")
    assert relative_error(gated_matmul(*args), *args) < 1e-2
