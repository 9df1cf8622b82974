"""``jax.vmap`` of attention is attention of more batches: results and gradients agree with float64,
whatever has the new dimension."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_support import error, on, random
from test_attention_options import reference

import pallasite
import pallasite.ops

pytestmark = pytest.mark.runs_kernels

CALLS = 3


def check(shape, options, mapped=(), target="sm_90a", inner=lambda function: function):
    """Shape: batch, queries, keys, heads, elements of a head."""
    batch, q_seq, kv_seq, heads, dim = shape
    q, d_out = (random(n, (CALLS, batch, q_seq, heads, dim), "float16") for n in (0, 3))
    k, v = (random(n, (CALLS, batch, kv_seq, heads, dim), "float16") for n in (1, 2))
    given = {name: jnp.asarray(options[name]) for name in mapped}
    fixed = {name: one for name, one in options.items() if name not in mapped}

    def both(q, k, v, d_out, given):
        def attend(q, k, v):
            return pallasite.ops.attention(q, k, v, **fixed, **given)

        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(d_out), attend(q, k, v)

    with on(target):
        found = jax.jit(jax.vmap(inner(both)))(q, k, v, d_out, given)
    for number in range(CALLS):
        own = fixed | {name: options[name][number] for name in mapped}
        out, _, gradients, _ = reference(q[number], k[number], v[number], d_out[number], own)
        for ours, theirs in zip(found, (out, *gradients[:3], out), strict=True):
            assert error(ours[number], theirs) < 3e-3


@pytest.mark.parametrize("inner", [lambda function: function, jax.jit])
@pytest.mark.parametrize("batch", [1, 2])
def test_short_sequences(batch, inner):
    """Batches of one call, or of all calls, share tiles, and log-sum-exp lies differently."""
    check((batch, 40, 40, 2, 64), {"causal": True}, inner=inner)


def test_lengths():
    lengths = np.array([[90, 20], [3, 90], [55, 1]])
    options = {"kv_lengths": lengths, "q_lengths": jnp.array([70, 11]), "window": (30, 8)}
    check((2, 70, 90, 2, 64), options, ("kv_lengths",))


def test_biases_and_slopes():
    """One of each call and batch, and one for all."""
    bias = np.random.default_rng(9).normal(size=(CALLS, 1, 2, 70, 70)).astype(np.float32)
    options = {"bias": bias, "alibi_slopes": jnp.array([0.2, 0.1])}
    check((2, 70, 70, 2, 32), options, ("bias",))


@pytest.mark.parametrize("target", ["sm_100a", "sm_90a"])
def test_segments_for_all(target):
    segments = jnp.arange(70)[None] // 20
    check((1, 70, 70, 2, 32), {"q_segments": segments, "kv_segments": segments}, target=target)


def test_masks_of_each_call():
    masks = np.random.default_rng(1).random((CALLS, 1, 2, 2, 2)) < 0.7
    check((1, 200, 130, 2, 32), {"block_mask": masks}, ("block_mask",))


def test_one_kernel_is_cut_up_for_all_calls():
    """Tiles and their order are those of as many batches."""
    q = jax.ShapeDtypeStruct((8, 1, 1024, 4, 64), jnp.bfloat16)
    together = jax.ShapeDtypeStruct((8, 1024, 4, 64), jnp.bfloat16)
    with pallasite.target("sm_90a"):
        mapped, joined = (
            pallasite.compile_all(function, *[one] * 3, target="sm_90a")
            for function, one in (
                (jax.vmap(pallasite.ops.attention), q),
                (pallasite.ops.attention, together),
            )
        )
    assert [one.ptx for one in mapped] == [one.ptx for one in joined]


def test_dropped_weights_are_those_of_one_call():
    q, k, v = (random(n, (2, 1, 33, 1, 16), "float32") for n in range(3))

    def attend(q, k, v):
        return pallasite.ops.attention(q, k, v, dropout_rate=0.4, dropout_seed=3)

    with on("sm_90a"):
        found = jax.jit(jax.vmap(attend))(q, k, v)
    for number in range(2):
        options = {"dropout_rate": 0.4, "dropout_seed": 3}
        expected, *_ = reference(q[number], k[number], v[number], v[number], options)
        assert error(found[number], expected) < 3e-3
