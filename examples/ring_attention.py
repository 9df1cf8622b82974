"""Causal attention of a sequence that is sharded over devices, by operations of Pallasite.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/ring_attention.py

Each device has a piece of both halves of the sequence (a zigzag), so that a causal mask leaves all
of them the same work. Keys and values travel around the ring of devices while each computes with
those that it has.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from pallasite_multigpu.ops import ring_attention, zigzag_order


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of (batch, sequence, heads, head_dim), on all devices."""
    count = jax.device_count()
    order = zigzag_order(q.shape[1], count)
    parts = PartitionSpec(None, "x")
    attention = jax.shard_map(
        functools.partial(
            ring_attention, axis_name="x", causal=True, placement="zigzag", method="ring"
        ),
        mesh=Mesh(np.array(jax.devices()), ("x",)),
        in_specs=parts,
        out_specs=parts,
        check_vma=False,
    )
    placed = attention(*(one.take(order, axis=1) for one in (q, k, v)))
    result: jax.Array = placed.take(np.argsort(order), axis=1)
    return result


def main() -> None:
    """Attends, and compares."""
    generator = np.random.default_rng(0)
    shape = (1, 8 * jax.device_count(), 2, 16)
    q, k, v = (jnp.asarray(generator.standard_normal(shape), jnp.float32) for _ in range(3))
    found = jax.jit(attend)(q, k, v)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(found, expected, atol=5e-3)
    print(f"attended to {shape[1]} tokens on {jax.device_count()} devices")


if __name__ == "__main__":
    main()
