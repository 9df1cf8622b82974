"""Gradients of the operations library, and products of matrices that devices have parts of."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import gradients, mesh_of, numbers
from jax.sharding import PartitionSpec

import pallasite
from pallasite import config
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_multigpu import ops
from pallasite_multigpu.ops import fused_choice


def _all_to_all(x, axis_name):
    return jax.lax.all_to_all(x, axis_name, 0, 1, tiled=True)


@pytest.mark.parametrize(
    ("count", "shape", "dtype", "ours", "theirs"),
    [
        (2, (4, 6), np.float32, ops.all_gather, jax.lax.all_gather),
        (3, (3, 5), jnp.bfloat16, ops.all_gather, jax.lax.all_gather),
        (3, (6, 7), np.float16, ops.reduce_scatter, jax.lax.psum_scatter),
        (4, (4, 8, 3), np.float32, ops.all_to_all, _all_to_all),
        (2, (33,), np.float32, ops.all_reduce, None),
        (3, (5, 3), jnp.bfloat16, functools.partial(ops.all_reduce, method="two_steps"), None),
        (8, (4, 4), np.float16, ops.all_reduce, None),
    ],
)
def test_gradients_are_those_of_jax(count, shape, dtype, ours, theirs):
    """The gradient of a sum over all devices is the sum of their gradients."""
    x = numbers((count, *shape), dtype)
    if ours is ops.all_to_all:
        ours = functools.partial(ours, split_dimension=0, concat_dimension=1)
    elif theirs is not None:
        theirs = functools.partial(theirs, tiled=True)
    function = functools.partial(ours, axis_name="x")
    reference = functools.partial(theirs or jax.lax.psum, axis_name="x")
    if theirs is None:
        d_out = numbers(x.shape, dtype, 1)
        expected = np.broadcast_to(d_out.astype(np.float64).sum(0), d_out.shape)
    else:
        made = jax.eval_shape(
            jax.shard_map(
                lambda row: reference(row[0])[None],
                mesh=mesh_of(x=count),
                in_specs=PartitionSpec("x"),
                out_specs=PartitionSpec("x"),
                check_vma=False,
            ),
            x,
        )
        d_out = numbers(made.shape, dtype, 1)
        (expected,) = gradients(reference, [x.astype(np.float32)], d_out.astype(np.float32))
    (found,) = gradients(function, [x], d_out)
    assert found.dtype == dtype
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        found.astype(np.float64), np.asarray(expected, np.float64), tolerance, tolerance
    )


@pytest.mark.parametrize(
    ("count", "m", "n", "k", "fused"), [(2, 128, 256, 64, True), (3, 10, 24, 12, False)]
)
def test_gradients_of_a_gathered_product(count, m, n, k, fused, monkeypatch):
    """Of whole tiles, which one kernel gathers and multiplies, and of others."""
    monkeypatch.setattr(fused_choice, "APART", 10**9 if fused else 0)
    x, y = numbers((count, m, k), jnp.bfloat16), numbers((count, k, n), jnp.bfloat16, 1)
    d_out = numbers((count, count * m, n), jnp.bfloat16, 2)
    with pallasite.target("sm_90a"):
        found = gradients(functools.partial(ops.all_gather_matmul, axis_name="x"), [x, y], d_out)
    wide, columns, d_wide = (one.astype(np.float64) for one in (x, y, d_out))
    of_x = np.einsum("dmn,dkn->mk", d_wide, columns).reshape(count, m, k)
    of_y = np.einsum("mk,dmn->dkn", wide.reshape(count * m, k), d_wide)
    for one, other in zip(found, (of_x, of_y), strict=True):
        error = np.abs(one.astype(np.float64) - other).max() / np.abs(other).max()
        assert error < 1e-2, error


def test_gradients_of_a_scattered_product():
    count, m, n, k = 3, 6, 10, 20
    x, y = numbers((count, m, k), np.float16), numbers((count, k, n), np.float16, 1)
    d_out = numbers((count, m // count, n), np.float16, 2)
    found = gradients(functools.partial(ops.matmul_reduce_scatter, axis_name="x"), [x, y], d_out)
    wide = d_out.astype(np.float64).reshape(m, n)
    of_x = np.einsum("mn,dkn->dmk", wide, y.astype(np.float64))
    of_y = np.einsum("dmk,mn->dkn", x.astype(np.float64), wide)
    for one, other in zip(found, (of_x, of_y), strict=True):
        error = np.abs(one.astype(np.float64) - other).max() / np.abs(other).max()
        assert error < 2e-3, error


@pytest.mark.parametrize(("count", "m", "n", "k"), [(2, 128, 512, 128), (3, 256, 256, 64)])
def test_a_product_while_its_operand_is_gathered(count, m, n, k, monkeypatch):
    monkeypatch.setattr(fused_choice, "APART", 10**9)
    x, y = numbers((count, m, k), jnp.bfloat16), numbers((count, k, n), jnp.bfloat16, 1)
    mesh, spec = mesh_of(x=count), PartitionSpec("x")

    def one(a, b):
        return ops.all_gather_matmul(a[0], b[0], axis_name="x", out_dtype=jnp.float32)[None]

    call = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with pallasite.target("sm_90a"), config.scoped(sanitize=True):
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
