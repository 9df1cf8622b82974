"""Sequences that several devices share, and attention of them in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from devices_support import mesh_of
from jax.sharding import PartitionSpec

from pallasite_multigpu import ops


def reference(q, k, v, *, causal, scale, soft_cap=None):
    """The whole sequence at once."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(one, group, axis=2) for one in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if causal:
        tokens = q.shape[1]
        scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


@functools.lru_cache(maxsize=1)
def operands(count, tokens, q_heads, kv_heads, head_dim, dtype, batch=1):
    generator = np.random.default_rng(7)
    shapes = [(batch, count * tokens, heads, head_dim) for heads in (q_heads, kv_heads, kv_heads)]
    shapes.append(shapes[0])
    return [generator.standard_normal(one).astype(dtype) for one in shapes]


def on_ring(arrays, count, function, results, placement):
    """Applies a function to each device's part of sequences, along their second dimension."""
    order = np.arange(arrays[0].shape[1])
    if placement == "zigzag":
        order = ops.zigzag_order(len(order), count)
    mesh, spec = mesh_of(x=count), PartitionSpec(None, "x")
    call = jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=(spec,) * results, check_vma=False
    )
    found = jax.jit(call)(*(one[:, order] for one in arrays))
    return [np.asarray(one)[:, np.argsort(order)] for one in found]


def close(found, expected, dtype):
    expected = np.asarray(expected)
    error = np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max()
    assert error < {"float16": 3e-3, "bfloat16": 2e-2, "float32": 3e-3}[np.dtype(dtype).name], error
