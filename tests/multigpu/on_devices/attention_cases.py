"""Attention of a sequence that several devices share, against the textbook's in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_support import close, on_ring, operands, reference

import pallasite
from pallasite import config
from pallasite_multigpu import ops


@pytest.mark.parametrize(
    ("count", "tokens", "heads", "head_dim", "dtype", "options"),
    [
        (2, 20, (2, 1), 24, "bfloat16", {"causal": True}),
        (3, 8, (2, 1), 40, "float16", {"causal": True, "placement": "zigzag"}),
        (2, 200, (1, 1), 128, "bfloat16", {"causal": True, "placement": "zigzag"}),
        (4, 5, (2, 2), 16, "float32", {"causal": True, "placement": "zigzag", "soft_cap": 3.0}),
        (5, 4, (1, 1), 16, "float32", {"scale": 0.3}),
        pytest.param(8, 4, (1, 1), 16, "float32", {"scale": 0.3}, marks=pytest.mark.slow),
        (3, 5, (1, 1), 16, "float32", {"causal": True, "placement": "zigzag", "method": "gather"}),
    ],
)
def test_results(count, tokens, heads, head_dim, dtype, options):
    batch = 2 if count == 3 else 1
    *arrays, _ = operands(count, tokens, *heads, head_dim, jnp.dtype(dtype), batch)
    options = {"method": "ring", **options}

    def attend(q, k, v):
        return (ops.ring_attention(q, k, v, axis_name="x", **options),)

    with pallasite.target("sm_90a"), config.scoped(sanitize=True):
        (found,) = on_ring(arrays, count, attend, 1, options.get("placement"))
    with jax.enable_x64(True):
        expected = reference(
            *(one.astype(np.float64) for one in arrays),
            causal=options.get("causal", False),
            scale=options.get("scale", head_dim**-0.5),
            soft_cap=options.get("soft_cap"),
        )
    assert found.dtype == dtype
    close(found, expected, dtype)
