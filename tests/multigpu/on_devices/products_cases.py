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
from pallasite import config
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_multigpu import ops
from pallasite_multigpu.ops.scattered_product import scattered_product


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
def test_gradients_of_a_gathered_product(count, m, n, k, fused):
    """Of whole tiles, which one kernel gathers and multiplies, and of others."""
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
def test_a_product_while_its_operand_is_gathered(count, m, n, k):
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


@pytest.mark.parametrize(
    ("count", "m", "n", "k", "out"),
    [(2, 256, 256, 128, jnp.float32), (3, 384, 256, 64, jnp.bfloat16)],
)
def test_a_product_whose_tiles_are_sent(count, m, n, k, out):
    x, y = numbers((count, m, k), jnp.bfloat16), numbers((count, k, n), jnp.bfloat16, 1)
    d_out = numbers((count, m // count, n), jnp.bfloat16, 2)
    mesh, spec = mesh_of(x=count), PartitionSpec("x")
    operation = functools.partial(ops.matmul_reduce_scatter, axis_name="x", out_dtype=out)

    def one(a, b):
        return operation(a[0], b[0])[None]

    call = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    wide, right, d_wide = (each.astype(np.float64) for each in (x, y, d_out))
    with pallasite.target("sm_90a"), config.scoped(sanitize=True):
        (kernel,) = pallasite.compile_all(call, x, y)
        assert kernel.name == "matmul_reduce_scatter"
        found = np.asarray(jax.jit(call)(x, y))
        of_x, _ = gradients(operation, [x, y], d_out.astype(out))
    expected = np.einsum("dmk,dkn->mn", wide, right).reshape(found.shape)
    tolerance = 1e-4 if out == jnp.float32 else 2e-2
    assert found.dtype == out
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()
    if out == jnp.bfloat16:  # Only what travels is rounded, and the sum.
        each = np.einsum("dmk,dkn->dmn", wide, right).reshape(count, *found.shape)
        rounded, own = each.astype(out).astype(np.float64), np.arange(count)
        total = rounded.sum(0) - rounded[own, own] + each[own, own]
        assert (found != total.astype(out)).mean() < 0.005
    expected = np.einsum("mn,dkn->dmk", d_wide.reshape(m, n), right)
    assert np.abs(of_x - expected).max() < 1e-2 * np.abs(expected).max()


@pytest.mark.parametrize(("n", "tile_n"), [(512, 128), (384, 192)])
def test_blocks_that_send_several_tiles_and_sum_up_several(n, tile_n):
    count, m, k = 2, 512, 64
    x, y = numbers((count, m, k), np.float16), numbers((count, k, n), np.float16, 1)
    mesh, spec = mesh_of(x=count), PartitionSpec("x")
    chosen = MatmulConfig(tile_n=tile_n, stages=2, group=3, epilogue_n=32, grid_minor="n")

    def one(a, b):
        return scattered_product(a[0], b[0], "x", count, jnp.float32, 3, chosen)[None]

    call = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with pallasite.target("sm_90a"), config.scoped(sanitize=True):
        found = np.asarray(jax.jit(call)(x, y)).reshape(m, n)
    expected = np.einsum("dmk,dkn->mn", x.astype(np.float64), y.astype(np.float64))
    np.testing.assert_allclose(found, expected, 1e-5, 1e-4)


@pytest.mark.parametrize(
    ("chosen", "fused"),
    [
        (MatmulConfig(tile_m=64, tile_n=128, tile_k=64, stages=2, split="n"), True),
        (MatmulConfig(tile_m=128, tile_n=128, stages=2, cluster=2, epilogue_n=32), False),
        (MatmulConfig(tile_m=128, tile_n=256, stages=2, split_k=2), False),
    ],
    ids=["tiles", "clusters", "split-k"],
)
def test_configurations_of_products(chosen, fused):
    x, y = numbers((2, 256, 128), jnp.bfloat16), numbers((2, 128, 256), jnp.bfloat16, 1)
    mesh, spec = mesh_of(x=2), PartitionSpec("x")
    options = {"axis_name": "x", "out_dtype": jnp.float32, "config": chosen}

    def both(a, b):
        gathered = ops.all_gather_matmul(a[0], b[0], **options)
        return gathered[None], ops.matmul_reduce_scatter(a[0], b[0], **options)[None]

    call = jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False)
    with pallasite.target("sm_90a"):
        names = [one.name for one in pallasite.compile_all(call, x, y)]
        gathered, scattered = (np.asarray(one) for one in jax.jit(call)(x, y))
    assert ("all_gather_matmul" in names) == (fused or chosen.cluster == 2), names
    assert ("matmul_reduce_scatter" in names) == fused
    wide, right = x.astype(np.float64), y.astype(np.float64)
    whole = wide.reshape(512, 128)
    for device in range(2):
        np.testing.assert_allclose(gathered[device], whole @ right[device], 1e-5, 1e-4)
    total = sum(wide[device] @ right[device] for device in range(2))
    np.testing.assert_allclose(scattered.reshape(256, 256), total, 1e-5, 1e-4)


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
