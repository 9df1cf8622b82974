"""The kernels of JAX's tutorial for Blackwell, with nothing but their import changed.

They are in a test file of JAX's, ``tests/pallas/mgpu_examples_test.py``, which
``JAX_TUTORIAL`` names.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib

import jax.numpy as jnp
import numpy as np
import published
import pytest
import tensor_core_trace

import pallasite
from pallasite.target_selection import find_target
from pallasite_simulator import simulate

PATH = os.environ.get("JAX_TUTORIAL")
pytestmark = [
    pytest.mark.runs_kernels,
    pytest.mark.skipif(PATH is None, reason="JAX_TUTORIAL names no file"),
]

TARGET = dataclasses.replace(find_target("sm_100a"), multiprocessors=4)
"""A chip with room for four blocks."""


@functools.cache
def module(lane):
    found = published.load_file(pathlib.Path(PATH or ""), lane_semantics=lane)
    for attribute, value in published.with_multiprocessors(found, 4).items():
        setattr(found, attribute, value)
    return found


@pytest.mark.parametrize("lane", [False, True], ids=["own", "lane"])
@pytest.mark.parametrize("step", range(7))
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 1, 1), (3, 1, 5), (1, 5, 3)])
def test_steps(step, rows, columns, depth, lane):
    """One tile, an odd number of them, and one more than there are slots for blocks."""
    tutorial = module(lane)
    blocks = 2 if step >= 3 else 1
    grid = {"grid_minor_dim": 0, "grid_tile_width": 2} if step == 6 else {}
    chosen = tutorial.TuningConfig(tile_m=128, tile_n=64, tile_k=64, max_concurrent_steps=2, **grid)
    m, n, k = 128 * rows * blocks, 64 * columns * blocks, 64 * depth
    random = np.random.default_rng(step)
    a, b = (jnp.asarray(random.normal(size=s), jnp.float16) for s in ((m, k), (k, n)))
    kernel = functools.partial(getattr(tutorial, f"matmul{step}"), config=chosen)
    simulation = simulate(pallasite.compile(kernel, a, b, target=TARGET), a, b, sanitize=True)
    assert [str(one) for one in simulation.findings] == []
    expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    error = np.linalg.norm(np.asarray(simulation.outputs[0], np.float64) - expected)
    assert error < 1e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("step", [4, 5, 6])
def test_products_in_flight(step):
    """From step 5 on, there are two accumulators: products write one while the other is read."""
    tutorial = module(False)
    grid = {"grid_minor_dim": 0, "grid_tile_width": 2} if step == 6 else {}
    chosen = tutorial.TuningConfig(tile_m=128, tile_n=64, tile_k=64, max_concurrent_steps=2, **grid)
    random = np.random.default_rng(step)
    a, b = (jnp.asarray(random.normal(size=s), jnp.float16) for s in ((256, 192), (192, 768)))
    kernel = functools.partial(getattr(tutorial, f"matmul{step}"), config=chosen)
    made = pallasite.compile(kernel, a, b, target=TARGET)
    begun, count = tensor_core_trace.overlaps(tensor_core_trace.traced(made, a, b))
    assert count >= 4 and begun == (0 if step == 4 else count)
