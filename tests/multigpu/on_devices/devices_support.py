"""Running kernels on several CPU devices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import pallasite
from pallasite import gpu as plgpu

SEMAPHORE = plgpu.SemaphoreType.REGULAR
LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
PARTIAL = plgpu.CompilerParams(plugin_options={"standard": {"partial_outputs": True}})
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    """A mesh of the first devices, or of those in ``devices`` (an array of its shape)."""
    count = math.prod(axes.values())
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices")
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return jax.sharding.Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def run(kernel: Any, mesh: jax.sharding.Mesh, *arrays: Any) -> Any:
    """Runs a kernel on each device, on rows of the arrays: what it returns, row by row, one row for
    each device in the order of the mesh."""
    spec = PartitionSpec(mesh.axis_names)

    def on_one(*rows: Any) -> Any:
        results = kernel(*(row[0] for row in rows))
        return jax.tree.map(lambda one: one[None], results)

    call = jax.shard_map(on_one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with pallasite.kernel_errors():
        return jax.tree.map(np.asarray, jax.jit(call)(*arrays))


def rows(mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Random numbers, a row for each device of the mesh."""
    generator = np.random.default_rng(seed)
    whole = (mesh.devices.size, *shape)
    if jnp.issubdtype(dtype, np.integer):
        return generator.integers(-1000, 1000, whole).astype(dtype)
    return generator.standard_normal(whole).astype(dtype)


def like(array: Any, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    """The type of one row."""
    return jax.ShapeDtypeStruct(array.shape[1:] if shape is None else shape, array.dtype)


def numbers(shape, dtype, seed=0):
    generator = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, np.integer):
        return generator.integers(-100, 100, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


def on_devices(operation, x, **axes):
    """Applies an operation on each device to a row of ``x``; returns a row of each."""
    mesh = mesh_of(**(axes or {"x": len(x)}))
    spec = PartitionSpec(mesh.axis_names)

    def one(row):
        return operation(row[0])[None]

    call = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(call)(x))


def gradients(function, arrays, d_out):
    """Of one device's operands, for a cotangent on each device; and what each device has."""
    mesh, spec = mesh_of(x=len(d_out)), PartitionSpec("x")

    def one(*given):
        *operands, cotangent = (row[0] for row in given)
        return tuple(one[None] for one in jax.vjp(function, *operands)[1](cotangent))

    call = jax.shard_map(
        one, mesh=mesh, in_specs=spec, out_specs=(spec,) * len(arrays), check_vma=False
    )
    return [np.asarray(one) for one in jax.jit(call)(*arrays, d_out)]
