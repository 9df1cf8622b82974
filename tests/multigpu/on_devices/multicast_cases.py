"""The memory of all devices at once: stores, reducing loads, signals and copies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from devices_support import LANE, PARTIAL, SEMAPHORE, WARPGROUP, like, mesh_of, rows, run
from jax import lax
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu

BOTH = pytest.mark.parametrize("params", [LANE, WARPGROUP], ids=["lane", "warpgroup"])


def _meet(semaphore):
    """All devices wait for one another."""
    plgpu.semaphore_signal_multicast(semaphore, collective_axes="x")
    pl.semaphore_wait(semaphore, lax.axis_size("x"))


@BOTH
@pytest.mark.parametrize("dtype", [np.float32, np.int32, jnp.bfloat16, np.float16, np.int8])
def test_stores_to_all(dtype, params):
    mesh = mesh_of(x=3)
    x = (rows(mesh, (512,), np.float32) * 10).astype(dtype)

    def body(x_ref, out_ref, semaphore):
        own = lax.axis_index("x")
        plgpu.multimem_store(x_ref[...], out_ref.at[own], "x")
        _meet(semaphore)

    kernel = plgpu.kernel(
        body, out_type=like(x, (3, 512)), scratch_types=[SEMAPHORE], compiler_params=params
    )
    np.testing.assert_array_equal(run(kernel, mesh, x), np.broadcast_to(x, (3, 3, 512)))


def test_scalars_are_stored_to_all():
    mesh = mesh_of(x=2)
    x = rows(mesh, (128,), np.int32)

    def body(x_ref, out_ref, semaphore):
        plgpu.multimem_store(x_ref[3], out_ref.at[lax.axis_index("x")], ("x",))
        _meet(semaphore)

    kernel = plgpu.kernel(body, out_type=like(x, (2,)), scratch_types=[SEMAPHORE])
    np.testing.assert_array_equal(run(kernel, mesh, x), np.broadcast_to(x[:, 3], (2, 2)))


_LOADS = [
    (np.float32, "add"),
    (np.int32, "add"),
    (np.int32, "min"),
    (np.uint32, "max"),
    (np.int32, "xor"),
    (np.float16, "add"),
    (np.float16, "max"),
    (jnp.bfloat16, "add"),
    (jnp.bfloat16, "min"),
]


@BOTH
@pytest.mark.parametrize("dtype, operation", _LOADS)
def test_loads_that_reduce(dtype, operation, params):
    mesh = mesh_of(x=4)
    x = (rows(mesh, (256,), np.float32) * 100).astype(dtype)

    def body(x_ref, out_ref):
        out_ref[...] = plgpu.multimem_load_reduce(
            x_ref, collective_axes="x", reduction_op=operation
        )

    kernel = plgpu.kernel(body, out_type=like(x), compiler_params=params)
    found = run(kernel, mesh, x)
    expected = _reduced(x, operation)
    np.testing.assert_array_equal(found, np.broadcast_to(expected, x.shape))


def _reduced(x, operation):
    if np.issubdtype(x.dtype, np.integer):
        ufuncs = {"add": np.add, "min": np.minimum, "max": np.maximum, "xor": np.bitwise_xor}
        return ufuncs[operation].reduce(x, axis=0, dtype=x.dtype)
    total = x[0].astype(np.float32)
    combine = {"add": np.add, "min": np.minimum, "max": np.maximum}[operation]
    for one in x[1:]:
        total = combine(total, one.astype(np.float32))
    return total.astype(x.dtype)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_narrow_floats_on_blackwell(dtype):
    mesh = mesh_of(x=2)
    x = rows(mesh, (512,), np.float32).astype(dtype)

    def body(x_ref, out_ref):
        out_ref[...] = plgpu.multimem_load_reduce(x_ref, collective_axes="x", reduction_op="add")

    kernel = plgpu.kernel(body, out_type=like(x), compiler_params=LANE)
    with pallasite.target("sm_100a"):
        found = run(kernel, mesh, x)
    expected = x.astype(np.float16).sum(axis=0, dtype=np.float16).astype(dtype)
    np.testing.assert_array_equal(
        found.astype(np.float32), np.broadcast_to(expected, x.shape).astype(np.float32)
    )


def test_integers_of_64_bits():
    mesh = mesh_of(x=2)
    jax.config.update("jax_enable_x64", True)
    try:
        x = rows(mesh, (128,), np.int64) * 10**12

        def body(x_ref, sum_ref, least_ref):
            for ref, operation in ((sum_ref, "add"), (least_ref, "min")):
                ref[...] = plgpu.multimem_load_reduce(
                    x_ref, collective_axes="x", reduction_op=operation
                )

        kernel = plgpu.kernel(body, out_type=(like(x), like(x)), compiler_params=LANE)
        total, least = run(kernel, mesh, x)
    finally:
        jax.config.update("jax_enable_x64", False)
    np.testing.assert_array_equal(total, np.broadcast_to(x.sum(axis=0), x.shape))
    np.testing.assert_array_equal(least, np.broadcast_to(x.min(axis=0), x.shape))


@pytest.mark.parametrize("columns", [32, 64], ids=["window", "whole rows"])
def test_copies_to_all(columns):
    mesh = mesh_of(x=3)
    x = rows(mesh, (16, columns), np.float32)

    def body(x_ref, out_ref, buffer, barrier, semaphore):
        own = lax.axis_index("x")
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        plgpu.barrier_wait(barrier)
        window = out_ref.at[own, 0:16, 0:columns]
        plgpu.copy_smem_to_gmem(buffer, plgpu.multicast_ref(window, "x"))
        plgpu.wait_smem_to_gmem(0)
        _meet(semaphore)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((3, 16, 64), np.float32),
        compiler_params=PARTIAL,
        scratch_types=[plgpu.SMEM((16, columns), np.float32), plgpu.Barrier(), SEMAPHORE],
    )
    found = run(kernel, mesh, x)[..., :columns]
    np.testing.assert_array_equal(found, np.broadcast_to(x, (3, *x.shape)))
