"""Kernels that JAX publishes for Blackwell run with nothing but their import changed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.target_selection import find_target
from pallasite_simulator import simulate

pytest.importorskip("absl", reason="JAX's kernels import it")
pytestmark = pytest.mark.runs_kernels

TARGET = dataclasses.replace(find_target("sm_100a"), multiprocessors=4)
"""A chip with room for four blocks."""

UNFINISHED = (
    "thread ends before its asynchronous operation",
    "block ends while its shared memory is in use",
)
"""Their last copies are not waited for before the blocks end, which the sanitizer reports."""

SEMANTICS = pytest.mark.parametrize("lane", [False, True], ids=["own", "lane"])


def beside(name):
    """A module of the tests of what others made."""
    folder = str(pathlib.Path(__file__).parents[1] / "upstream")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


@functools.cache
def module(name, lane, fixed=False):
    """A module of JAX, on a GPU of few multiprocessors."""
    published = beside("published")

    replaced = {OWN_BARRIER: BARRIER_OF_BOTH} if fixed else {}
    found = published.load(name, lane_semantics=lane, replaced=replaced)
    for attribute, value in published.with_multiprocessors(found, 4).items():
        setattr(found, attribute, value)
    return found


OVERWRITTEN = "asynchronous operation not waited for, in tensor memory"
"""A race of their own in JAX's ragged product: that the second block of a pair has loaded its
accumulator is known to a warp of that block only, not to the first, which overwrites it."""

OWN_BARRIER = "store_done_barrier=plgpu.Barrier(num_arrivals=1, num_barriers=2,"
BARRIER_OF_BOTH = 'store_done_barrier=plgpu.ClusterBarrier(collective_axes=("x",), num_barriers=2,'


def run(function, *inputs, besides=()):
    """What a kernel returns; the sanitizer is on."""
    made = pallasite.compile(function, *inputs, target=TARGET)
    simulation = simulate(made, *inputs, sanitize=True)
    assert [
        str(one) for one in simulation.findings if one.kind not in (*UNFINISHED, *besides)
    ] == []
    return simulation.outputs[0]


def normal(number, shape, dtype):
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape).astype(dtype))


def assert_close(result, expected, limit):
    """Compares by the norm of the difference, relative to that of what is expected."""
    result = np.asarray(result, np.float64)
    assert result.shape == expected.shape
    assert np.linalg.norm(result - expected) < limit * np.linalg.norm(expected)


# One tile; an odd number of them, of which blocks (or pairs of them) take three, one more than the
# accumulator has slots.
@SEMANTICS
@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize(("rows", "columns", "steps"), [(1, 1, 1), (3, 3, 3)])
@pytest.mark.sampled
def test_matmul(rows, columns, steps, collective, lane):
    upstream = module("blackwell_matmul_mgpu", lane)
    chosen = upstream.TuningConfig(
        tile_m=128, tile_n=64, tile_k=64, max_concurrent_steps=2, collective=collective,
        epilogue_tile_n=32,
    )  # fmt: skip
    blocks = 1 + collective
    m, n, k = 128 * rows * blocks, 64 * columns * blocks, 64 * steps
    a, b = normal(0, (m, k), jnp.bfloat16), normal(1, (k, n), jnp.bfloat16)
    result = run(functools.partial(upstream.matmul_kernel, config=chosen), a, b)
    assert_close(result, np.asarray(a, np.float64) @ np.asarray(b, np.float64), 4e-3)


@SEMANTICS
@pytest.mark.parametrize(
    ("sizes", "columns", "fixed"),
    [((100, 0, 156), 1, False), ((1, 254, 1), 2, False), ((1, 254, 1), 2, True)],
)
@pytest.mark.sampled
def test_ragged_dot(sizes, columns, fixed, lane):
    """``fixed``: with a barrier that both blocks arrive at, which the kernel lacks."""
    upstream = module("blackwell_ragged_dot_mgpu", lane, fixed)
    chosen = upstream.TuningConfig(
        tile_m=128, tile_n=64, tile_k=64, max_concurrent_steps=2, collective=True,
        grid_tile_width=1, grid_minor_dim=upstream.blackwell_matmul_mgpu.MatmulDimension.N,
    )  # fmt: skip
    n = 128 * columns
    a = normal(0, (sum(sizes), 128), jnp.float16)
    b = normal(1, (len(sizes), 128, n), jnp.float16)
    numbers = jnp.asarray(sizes, jnp.int32)
    kernel = functools.partial(upstream.ragged_dot_kernel, config=chosen)
    result = run(kernel, a, b, numbers, besides=() if fixed else (OVERWRITTEN,))
    of_row = np.asarray(b, np.float64)[np.repeat(np.arange(len(sizes)), sizes)]
    expected = np.einsum("mk,mkn->mn", np.asarray(a, np.float64), of_row)
    assert_close(result, expected, 6e-4)


@SEMANTICS
@pytest.mark.parametrize("ragged", [False, True])
def test_products_are_in_flight_while_accumulators_are_read(ragged, lane):
    """The next tile's products depend on nothing that comes after the loads of the last one."""
    upstream = module(f"blackwell_{'ragged_dot' if ragged else 'matmul'}_mgpu", lane)
    options = {}
    if ragged:
        options["grid_minor_dim"] = upstream.blackwell_matmul_mgpu.MatmulDimension.N
    chosen = upstream.TuningConfig(
        tile_m=128, tile_n=64, tile_k=64, max_concurrent_steps=2, collective=True,
        epilogue_tile_n=32, grid_tile_width=1, **options,
    )  # fmt: skip
    a, b = normal(0, (256, 192), jnp.float16), normal(1, (192, 128 * 6), jnp.float16)
    inputs = (a, b[None], jnp.asarray([256], jnp.int32)) if ragged else (a, b)
    kernel = upstream.ragged_dot_kernel if ragged else upstream.matmul_kernel
    made = pallasite.compile(functools.partial(kernel, config=chosen), *inputs, target=TARGET)
    trace = beside("tensor_core_trace")
    begun, count = trace.overlaps(trace.traced(made, *inputs))
    assert begun == count >= 4


@pytest.mark.parametrize("slots", [1, 2])
def test_tiles_that_wait_for_the_last_one(slots):
    """What is counted: one warpgroup that loads each accumulator before it goes on."""

    def body(a_ref, b_ref, out_ref, a_smem, b_smem, acc, filled, done):
        plgpu.copy_gmem_to_smem(a_ref, a_smem, filled)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, filled)
        plgpu.barrier_wait(filled)

        @pl.loop(0, 3)
        def _(i):
            target = acc.at[:, pl.ds(pl.multiple_of(lax.rem(i, slots) * 64, 64), 64)]
            plgpu.tcgen05_mma(target, a_smem, b_smem, done, accumulate=False)
            plgpu.barrier_wait(done)
            out_ref[i] = plgpu.async_load_tmem(target)
            plgpu.wait_load_tmem()

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((3, 128, 64), jnp.float32),
        scratch_types=[
            plgpu.SMEM((128, 64), jnp.float16),
            plgpu.SMEM((64, 64), jnp.float16),
            plgpu.TMEM((128, 64 * slots), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )
    inputs = normal(0, (128, 64), jnp.float16), normal(1, (64, 64), jnp.float16)
    made = pallasite.compile(kernel, *inputs, target=TARGET)
    trace = beside("tensor_core_trace")
    assert trace.overlaps(trace.traced(made, *inputs)) == (0, 2)
