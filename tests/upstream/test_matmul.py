"""The matrix product that JAX publishes for Hopper runs unchanged, in lane semantics."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest

pytestmark = pytest.mark.runs_kernels


@pytest.fixture(scope="module")
def module():
    """The module, on a GPU of few multiprocessors."""
    found = published.load("hopper_matmul_mgpu", lane_semantics=True)
    found.get_num_sms = lambda: 4
    return found


def inputs(m, n, k, dtype):
    generator = np.random.default_rng(0)
    return [
        jnp.asarray(generator.standard_normal(s).astype(dtype)) for s in ((m, k), (k, n), (m, n))
    ]


@pytest.mark.parametrize("wg_dimension", ["M", "N"])
@pytest.mark.parametrize("cluster_dimension", [None, "M", "N"])
@pytest.mark.parametrize("added", [False, True])
def test_numbers(module, wg_dimension, cluster_dimension, added):
    """Both ways of sharing a tile, clusters, and a matrix that is added."""
    dimension = module.MatmulDimension
    config = module.TuningConfig(
        tile_m=64,
        tile_n=64,
        tile_k=64,
        max_concurrent_steps=2,
        epi_tile_m=64,
        epi_tile_n=32,
        grid_minor_dim=dimension.M,
        grid_tile_width=2,
        wg_dimension=dimension[wg_dimension],
        cluster_dimension=None if cluster_dimension is None else dimension[cluster_dimension],
    )
    a, b, c = inputs(256, 256, 256, jnp.bfloat16)
    run = jax.jit(functools.partial(module.matmul, config=config))
    result = np.asarray(run(a, b, c if added else None), np.float64)
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    if added:
        expected += np.asarray(c, np.float64)
    assert np.linalg.norm(result - expected) < 6e-3 * np.linalg.norm(expected)
