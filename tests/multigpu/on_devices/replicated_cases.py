"""Operands that all devices have: results vary over the mesh, and gradients are summed over it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices_support import SEMAPHORE, mesh_of, numbers
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from pallasite import gpu as plgpu
from pallasite import ops as kernels
from pallasite_multigpu import ops

AXIS = {"axis_name": "x"}
COUNT = 2
gathered = functools.partial(lax.all_gather, axis_name="x", tiled=True)
scattered = functools.partial(lax.psum_scatter, axis_name="x", tiled=True)


def exchanged(x):
    return lax.all_to_all(x, "x", 0, 0, tiled=True)


def attended(q, k, v):
    """Causal attention of the whole sequence, for this device's part of it."""
    whole = [gathered(one, axis=1) for one in (q, k, v)]
    scores = jnp.einsum("bqhd,bkhd->bhqk", *whole[:2]) * q.shape[3] ** -0.5
    hidden = ~jnp.tri(scores.shape[2], dtype=bool)
    weights = jax.nn.softmax(jnp.where(hidden, -jnp.inf, scores))
    result = jnp.einsum("bhqk,bkhd->bqhd", weights, whole[2])
    return lax.dynamic_slice_in_dim(result, lax.axis_index("x") * q.shape[1], q.shape[1], 1)


def with_experts(x, weights, matrices):
    experts = jnp.asarray([[0], [1], [1], [0]])
    rows, sizes, route = ops.moe_dispatch(x, experts, num_experts=COUNT, **AXIS)
    return ops.moe_combine(kernels.ragged_matmul(rows, matrices, sizes), weights, route, **AXIS)


def with_gathered_experts(x, weights, matrices):
    return weights * jnp.einsum("tc,tcd->td", x, gathered(matrices)[np.array([0, 1, 1, 0])])


ATTENTION = functools.partial(ops.ring_attention, causal=True, **AXIS)
CASES = {
    "all_gather": (functools.partial(ops.all_gather, **AXIS), gathered, [(4, 3)]),
    "reduce_scatter": (functools.partial(ops.reduce_scatter, **AXIS), scattered, [(4, 3)]),
    "all_to_all": (functools.partial(ops.all_to_all, **AXIS), exchanged, [(4, 3)]),
    "all_gather_matmul": (
        functools.partial(ops.all_gather_matmul, **AXIS),
        lambda a, b: gathered(a) @ b,
        [(4, 8), (8, 5)],
    ),
    "all_gather_matmul of whole tiles": (
        functools.partial(ops.all_gather_matmul, **AXIS),
        lambda a, b: gathered(a) @ b,
        [(64, 64), (64, 64)],
    ),
    "matmul_reduce_scatter": (
        functools.partial(ops.matmul_reduce_scatter, **AXIS),
        lambda a, b: scattered(a @ b),
        [(4, 8), (8, 5)],
    ),
    "ring": (functools.partial(ATTENTION, method="ring"), attended, [(1, 3, 1, 16)] * 3),
    "gathered keys": (functools.partial(ATTENTION, method="gather"), attended, [(1, 3, 1, 16)] * 3),
    "experts": (with_experts, with_gathered_experts, [(4, 3), (4, 1), (2, 3, 3)]),
}


@pytest.mark.parametrize(
    ("name", "replicated"),
    [
        (name, replicated)
        for name, (_, _, shapes) in CASES.items()
        for replicated in (["all", "first", "others"] if len(shapes) > 1 else ["all"])
    ],
)
@pytest.mark.sampled(alone=("name", "replicated"))
def test_gradients_of_replicated_operands(name, replicated):
    operation, reference, shapes = CASES[name]
    mesh = mesh_of(x=COUNT)
    same = [replicated == "all" or (replicated == "first") == (i == 0) for i in range(len(shapes))]
    if name == "experts":
        same[2] = False  # Each device has its own.
    specs = tuple(P() if one else P("x") for one in same)
    arrays = [
        numbers(shape if one else (COUNT * shape[0], *shape[1:]), np.float32, seed)
        for seed, (shape, one) in enumerate(zip(shapes, same, strict=True))
    ]
    if name == "experts":
        arrays[2] = arrays[2][:COUNT]

    def of(function, pcasts):
        def on_one(*rows):
            if pcasts:
                pairs = zip(rows, same, strict=True)
                rows = [lax.pcast(one, "x", to="varying") if s else one for one, s in pairs]
            return function(*rows)

        call = jax.shard_map(on_one, mesh=mesh, in_specs=specs, out_specs=P("x"))

        def loss(*operands):
            result = call(*operands)
            return jnp.sum(jnp.sin(result)), result

        return jax.jit(jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True))(*arrays)

    found, expected = of(operation, False), of(reference, True)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = float(np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-2 * max(scale, 1e-3))


def own_index(x_ref, out_ref):
    out_ref[...] = x_ref[...] + lax.axis_index("x")


def sent_index(x_ref, out_ref, arrived):
    other = 1 - lax.axis_index("x")
    plgpu.remote_ref(out_ref, other)[...] = x_ref[...]
    pl.semaphore_signal(arrived, device_id=other)
    pl.semaphore_wait(arrived)


@pytest.mark.parametrize("body", [own_index, sent_index])
def test_results_of_kernels_that_tell_devices_apart(body):
    scratch = [SEMAPHORE] if body is sent_index else []
    out_type = jax.ShapeDtypeStruct((4,), jnp.int32)
    kernel = plgpu.kernel(body, out_type=out_type, scratch_types=scratch)
    x, mesh = jnp.zeros((4,), jnp.int32), mesh_of(x=COUNT, y=1)

    def typed(x):
        varying = jax.typeof(kernel(x)).manual_axis_type.varying
        assert varying == ({"x"} if body is own_index else {"x", "y"})
        return kernel(x)

    call = jax.jit(jax.shard_map(typed, mesh=mesh, in_specs=P(), out_specs=P(("x", "y"))))
    indices = [0, 1] if body is own_index else [0, 0]
    np.testing.assert_array_equal(call(x), np.repeat(indices, 4))
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=P(), out_specs=P()))(x)


def test_experts_without_tokens():
    mesh = mesh_of(x=COUNT)

    def on_one(x, experts, weights):
        rows, _, route = ops.moe_dispatch(x, experts, num_experts=COUNT, **AXIS)
        return ops.moe_combine(rows, weights, route, **AXIS)

    call = jax.shard_map(on_one, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    arrays = jnp.zeros((0, 5)), jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2))
    found = jax.jit(jax.grad(lambda *operands: call(*operands).sum(), argnums=(0, 2)))(*arrays)
    assert [one.shape for one in found] == [(0, 5), (0, 2)]
