"""Gradients of the operations library, and products of matrices that devices have parts of."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import mesh_of, numbers
from jax.sharding import PartitionSpec

import pallasite
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_multigpu import ops


def test_gradients_are_those_of_jax():
    x, y = numbers((2, 4, 6), np.float32), numbers((2, 8, 6), np.float32, 1)
    half, whole = y[:, :2], y[:, :4]
    cases = (
        (ops.all_gather, jax.lax.all_gather, y),
        (ops.reduce_scatter, jax.lax.psum_scatter, half),
        (ops.all_to_all, functools.partial(jax.lax.all_to_all, split_axis=0, concat_axis=0), whole),
    )
    for ours, theirs, weights in cases:

        def gradient(function, weights=weights):
            mesh, spec = mesh_of(x=2), PartitionSpec("x")

            def one(a, w):
                return jax.grad(lambda b: (function(b[0]) * w[0]).sum())(a)

            call = jax.shard_map(
                one, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
            )
            return np.asarray(jax.jit(call)(x, weights))

        mine = gradient(functools.partial(ours, axis_name="x"))
        np.testing.assert_allclose(
            mine, gradient(functools.partial(theirs, axis_name="x", tiled=True)), 1e-6, 1e-6
        )


@pytest.mark.parametrize(("count", "m", "n", "k"), [(2, 128, 512, 128), (3, 256, 256, 64)])
def test_a_product_while_its_operand_is_gathered(count, m, n, k):
    x, y = numbers((count, m, k), jnp.bfloat16), numbers((count, k, n), jnp.bfloat16, 1)
    mesh, spec = mesh_of(x=count), PartitionSpec("x")

    def one(a, b):
        return ops.all_gather_matmul(a[0], b[0], axis_name="x", out_dtype=jnp.float32)[None]

    call = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with pallasite.target("sm_90a"):
        (kernel,) = pallasite.compile_all(call, x, y)
        assert kernel.name == "all_gather_matmul"
        found = np.asarray(jax.jit(call)(x, y))
    wide = x.astype(np.float64).reshape(count * m, k)
    for device in range(count):
        np.testing.assert_allclose(found[device], wide @ y[device].astype(np.float64), 1e-5, 1e-4)


def test_products_with_what_other_devices_have():
    x, y = numbers((2, 64, 64), jnp.bfloat16), numbers((2, 64, 128), jnp.bfloat16, 1)
    mesh, spec = mesh_of(x=2), PartitionSpec("x")

    def both(a, b):
        gathered = ops.all_gather_matmul(a[0], b[0], axis_name="x", out_dtype=jnp.float32)
        scattered = ops.matmul_reduce_scatter(a[0], b[0], axis_name="x", out_dtype=jnp.float32)
        return gathered[None], scattered[None]

    call = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False)
    with pallasite.target("sm_90a"):
        gathered, scattered = map(np.asarray, jax.jit(call)(x, y))
    wide, other = x.astype(np.float64), y.astype(np.float64)
    for device in range(2):
        expected = wide.reshape(128, 64) @ other[device]
        np.testing.assert_allclose(gathered[device], expected, 1e-5, 1e-4)
    expected = (wide @ other).sum(0).reshape(2, 32, 128)
    np.testing.assert_allclose(scattered, expected, 1e-5, 1e-4)
    with pytest.raises(InvalidValueError, match=r"got: \[4, 8\] and \[4, 8\]"):
        ops.all_gather_lhs_matmul(jnp.zeros((4, 8)), jnp.zeros((4, 8)), "x")
    with pytest.raises(InvalidTypeError, match="got: float32 and float16"):
        ops.matmul_reduce_scatter(jnp.zeros((4, 8)), jnp.zeros((8, 4), jnp.float16), axis_name="x")
