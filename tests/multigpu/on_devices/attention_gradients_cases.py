"""Gradients of attention of a sequence that several devices share."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_support import close, on_ring, operands, reference

import pallasite
from pallasite_multigpu import ops
from pallasite_multigpu.ops import choice


@pytest.mark.parametrize(
    ("count", "tokens", "heads", "head_dim", "dtype", "options"),
    [
        (2, 9, (2, 1), 32, "bfloat16", {"causal": True, "placement": "zigzag"}),
        (3, 6, (1, 1), 16, "float32", {"causal": True}),
        (2, 8, (2, 1), 64, "float16", {}),
    ],
)
@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "ring"])
@pytest.mark.sampled(alone=("gathered",))
def test_gradients(count, tokens, heads, head_dim, dtype, options, gathered, monkeypatch):
    monkeypatch.setattr(choice, "GRADIENTS_GATHERED_AT_MOST", 1 << 30 if gathered else 0)
    arrays = operands(count, tokens, *heads, head_dim, jnp.dtype(dtype))
    options = {"method": "ring", **options}

    def gradients(*given):
        *parts, d_out = given
        call = functools.partial(ops.ring_attention, axis_name="x", **options)
        return jax.vjp(call, *parts)[1](d_out)

    with pallasite.target("sm_90a"):
        found = on_ring(arrays, count, gradients, 3, options.get("placement"))
    with jax.enable_x64(True):
        *wide, d_out = (jnp.asarray(one.astype(np.float64)) for one in arrays)
        whole = functools.partial(
            reference, causal=options.get("causal", False), scale=head_dim**-0.5
        )
        expected = jax.vjp(whole, *wide)[1](d_out)
    for one, other in zip(found, expected, strict=True):
        close(one, other, dtype)
