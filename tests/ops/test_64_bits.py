"""Programs with ``jax_enable_x64``: operations compute as without, and take integers of 64 bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_support import on

from pallasite import ops

pytestmark = pytest.mark.runs_kernels


def _ragged(a, b):
    return ops.ragged_matmul(a, b, jnp.asarray([2, 0, 3]))


def _transposed_ragged(a, b):
    return ops.transposed_ragged_matmul(a, b, jnp.asarray([2, 0, 3]))


def _attention(q, k, v):
    return ops.attention(q, k, v, causal=True, kv_lengths=jnp.asarray([7]))


def _loss(logits):
    return ops.softmax_cross_entropy(logits, jnp.asarray([1, 0, 5]))


def _rotated(x):
    return ops.rotary_embedding(x, jnp.arange(5) + 3)


HEADS = ((1, 5, 2, 16), (1, 9, 1, 16), (1, 9, 1, 16))


@pytest.mark.parametrize(
    ("target", "operation", "shapes"),
    [
        ("sm_90a", _ragged, ((5, 8), (3, 8, 6))),
        ("sm_120a", _transposed_ragged, ((5, 8), (5, 6))),
        ("sm_90a", _attention, HEADS),
        ("sm_120a", _attention, HEADS),
        ("sm_120a", ops.layer_norm, ((3, 13), (13,), (13,))),
        ("sm_120a", _loss, ((3, 7),)),
        ("sm_120a", _rotated, ((5, 2, 8),)),
        ("sm_90a", ops.gated_matmul, ((5, 12), (12, 7), (12, 7))),
        ("sm_120a", lambda x: ops.top_k(x, 3)[0], ((4, 9),)),
    ],
    ids=["ragged", "transposed", "Hopper", "attention", "norm", "loss", "rotary", "gated", "top_k"],
)
def test_as_with_32_bits(target, operation, shapes):
    generator = np.random.default_rng(0)
    arrays = [jnp.asarray(generator.standard_normal(one), jnp.float32) for one in shapes]

    def value_and_gradients():
        def loss(*arrays):
            return jnp.sum(jnp.sin(operation(*arrays)))

        every = tuple(range(len(arrays)))
        return operation(*arrays), jax.jit(jax.grad(loss, every))(*arrays)

    with on(target):
        expected = value_and_gradients()
        with jax.enable_x64(True):
            assert jnp.arange(2).dtype == np.int64
            found = value_and_gradients()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
@pytest.mark.parametrize("wide", [False, True])
def test_labels_that_32_bits_do_not_hold(wide, dtype):
    """They count as the nearest class, also in arrays of NumPy, which JAX converts modulo 2**32."""
    logits = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32)
    labels = np.array([0, 2**32 - 1, 2**31], dtype)
    wide_logits = logits.astype(np.float64)
    classes = wide_logits[np.arange(3), np.minimum(labels, 6).astype(int)]
    expected = np.log(np.sum(np.exp(wide_logits), axis=1)) - classes
    with on("sm_120a"), jax.enable_x64(wide):
        found = ops.softmax_cross_entropy(logits, labels)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
