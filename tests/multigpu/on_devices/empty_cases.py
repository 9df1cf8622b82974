"""Collective operations of arrays without elements, eagerly and compiled, and their gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import mesh_of
from jax.sharding import PartitionSpec

from pallasite_multigpu import ops

BOTH = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def check(operation, arrays, expected, compiled):
    """Compares results of each device's rows of arrays, and that gradients are zeros."""
    mesh, spec = mesh_of(x=len(arrays[0])), PartitionSpec("x")
    operate = jax.shard_map(
        lambda *rows: operation(*(row[0] for row in rows))[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    floats = [n for n, one in enumerate(arrays) if jnp.issubdtype(one.dtype, jnp.floating)]

    def total(*arrays):
        return operate(*arrays).astype(jnp.float32).sum()

    slopes = jax.grad(total, argnums=floats)
    if compiled:
        operate, slopes = jax.jit(operate), jax.jit(slopes)
    np.testing.assert_array_equal(operate(*arrays), expected, strict=True)
    for one, n in zip(slopes(*arrays), floats, strict=True):
        np.testing.assert_array_equal(one, np.zeros_like(arrays[n]), strict=True)


@BOTH
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("shape", [(0, 4), (8, 0)])
@pytest.mark.sampled(alone=("count",))
def test_exchanges(count, shape, compiled):
    x, (rows, columns) = jnp.zeros((count, *shape)), shape

    def empty(rows):
        return np.zeros((count, rows, columns), np.float32)

    gather, scatter = ops.all_gather, ops.reduce_scatter
    check(lambda x: gather(x, axis_name="x"), [x], empty(rows * count), compiled)
    check(lambda x: scatter(x, axis_name="x"), [x], empty(rows // count), compiled)
    check(lambda x: ops.all_reduce(x, axis_name="x"), [x], empty(rows), compiled)
    check(lambda x: ops.all_to_all(x, axis_name="x"), [x], empty(rows), compiled)
    turned = np.zeros((count, rows // count, columns * count), np.float32)
    exchange = functools.partial(ops.all_to_all, split_dimension=0, concat_dimension=1)
    check(lambda x: exchange(x, axis_name="x"), [x], turned, compiled)


@BOTH
@pytest.mark.parametrize(("m", "k", "n"), [(0, 32, 16), (8, 0, 16), (8, 32, 0), (0, 0, 0)])
def test_products(m, k, n, compiled):
    lhs, rhs = jnp.ones((2, m, k), jnp.bfloat16), jnp.ones((2, k, n), jnp.bfloat16)
    check(
        lambda lhs, rhs: ops.all_gather_matmul(lhs, rhs, axis_name="x"),
        [lhs, rhs],
        np.zeros((2, 2 * m, n), jnp.bfloat16),
        compiled,
    )
    check(
        lambda lhs, rhs: ops.matmul_reduce_scatter(lhs, rhs, axis_name="x"),
        [lhs, rhs],
        np.zeros((2, m // 2, n), jnp.bfloat16),
        compiled,
    )


@BOTH
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("tokens", "columns", "k"), [(0, 8, 2), (3, 0, 2), (3, 8, 0)])
@pytest.mark.sampled(alone=("count",))
def test_experts(count, tokens, columns, k, compiled):
    x = jnp.ones((count, tokens, columns))
    experts = jnp.zeros((count, tokens, k), jnp.int32)
    weights = jnp.ones((count, tokens, k))

    def both(x, experts, weights):
        rows, _, route = ops.moe_dispatch(x, experts, axis_name="x", num_experts=2 * count)
        return ops.moe_combine(rows, weights, route, axis_name="x")

    check(both, [x, experts, weights], np.zeros(x.shape, np.float32), compiled)


@BOTH
@pytest.mark.parametrize("shape", [(0, 8, 2, 64), (1, 0, 2, 64), (1, 8, 0, 64)])
def test_attention(shape, compiled):
    q = jnp.ones((2, *shape), jnp.bfloat16)
    check(
        lambda q, k, v: ops.ring_attention(q, k, v, axis_name="x"),
        [q, q, q],
        np.zeros(q.shape, jnp.bfloat16),
        compiled,
    )
