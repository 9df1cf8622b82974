"""Kernels that JAX publishes for Blackwell run with nothing but their import changed."""

from __future__ import annotations

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite import config

pytest.importorskip("absl", reason="JAX's kernels import it")
pytestmark = pytest.mark.runs_kernels

# Their last copies are not waited for before the blocks end, which the sanitizer reports.
OPTIONS = {"target": "sm_100a", "sanitize": False}


@functools.cache
def module(name):
    """A module of JAX, on a GPU of few multiprocessors."""
    folder = str(pathlib.Path(__file__).parents[1] / "upstream")
    if folder not in sys.path:
        sys.path.append(folder)
    import published

    found = published.load(name, lane_semantics=False)
    for attribute, value in published.with_multiprocessors(found, 4).items():
        setattr(found, attribute, value)
    return found


def normal(number, shape, dtype):
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape), dtype)


def assert_close(result, expected, limit):
    """Compares by the norm of the difference, relative to that of what is expected."""
    result = np.asarray(result, np.float64)
    assert result.shape == expected.shape
    assert np.linalg.norm(result - expected) < limit * np.linalg.norm(expected)


@pytest.mark.parametrize("collective", [False, True])
def test_matmul(collective):
    upstream = module("blackwell_matmul_mgpu")
    chosen = upstream.TuningConfig(
        tile_m=128, tile_n=64, tile_k=64, max_concurrent_steps=2, collective=collective,
        epilogue_tile_n=32,
    )  # fmt: skip
    a, b = normal(0, (256, 192), jnp.bfloat16), normal(1, (192, 256), jnp.bfloat16)
    with config.scoped(**OPTIONS):
        result = jax.jit(lambda a, b: upstream.matmul_kernel(a, b, chosen))(a, b)
    assert_close(result, np.asarray(a, np.float64) @ np.asarray(b, np.float64), 4e-3)


def test_ragged_dot():
    upstream = module("blackwell_ragged_dot_mgpu")
    chosen = upstream.TuningConfig(
        tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=2, collective=True,
        grid_tile_width=1, grid_minor_dim=upstream.blackwell_matmul_mgpu.MatmulDimension.N,
    )  # fmt: skip
    sizes = jnp.asarray([100, 0, 156], jnp.int32)
    a, b = normal(0, (256, 128), jnp.float16), normal(1, (3, 128, 256), jnp.float16)
    with config.scoped(**OPTIONS):
        result = jax.jit(
            lambda a, b, sizes: upstream.ragged_dot_kernel(a, b, sizes, chosen)
        )(a, b, sizes)  # fmt: skip
    of_row = np.asarray(b, np.float64)[np.repeat(np.arange(3), np.asarray(sizes))]
    expected = np.einsum("mk,mkn->mn", np.asarray(a, np.float64), of_row)
    assert_close(result, expected, 6e-4)
