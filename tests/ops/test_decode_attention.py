"""Attention against a cache by ``pallasite.ops`` agrees with float64 on every target."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from ops_support import TARGETS, error, exact, on, random

import pallasite.ops
import pallasite_std.ops
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_std.ops import DecodeConfig, decode_configs

pytestmark = pytest.mark.runs_kernels


def reference(q, k, v, lengths, scale=None, soft_cap=None):
    """In float64; the keys of a query end with its own."""
    tokens = q.shape[1] if q.ndim == 4 else 1
    queries = exact(q).reshape(q.shape[0], tokens, *q.shape[-2:])
    result = np.zeros(queries.shape)
    group = q.shape[-2] // k.shape[2]
    for batch, length in enumerate(lengths):
        for token in range(tokens):
            seen = length - (tokens - 1) + token
            if seen <= 0:
                continue
            keys = np.repeat(k[batch, :seen], group, 1)
            values = np.repeat(v[batch, :seen], group, 1)
            scores = np.einsum("hd,khd->hk", queries[batch, token], keys)
            scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            powers = np.exp(scores - scores.max(1, keepdims=True))
            weights = powers / powers.sum(1, keepdims=True)
            result[batch, token] = np.einsum("hk,khd->hd", weights, values)
    return result.reshape(q.shape)


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target):
    """A program that names no chip; what lies beyond the lengths does not matter."""
    q = random(1, (3, 4, 64), "bfloat16")
    k, v = (random(seed, (3, 72, 2, 64), "bfloat16") for seed in (2, 3))
    lengths = [70, 0, 9]
    v = v.at[2, 9:].set(jnp.nan)
    with on(target):
        result = pallasite.ops.decode_attention(q, k, v, kv_lengths=jnp.asarray(lengths))
    assert error(result, reference(q, exact(k), exact(v), lengths)) < 5e-3


@pytest.mark.parametrize(
    ("dtype", "cache", "head_dim", "tokens", "options"),
    [
        ("float16", "float16", 80, 3, {"soft_cap": 4.0}),
        ("bfloat16", "int8", 32, 1, {"k_scale": 0.02, "v_scale": [0.01, 0.03]}),
        ("float16", "float8_e4m3fn", 40, 2, {"scale": 0.2}),
        ("float32", "float32", 16, 1, {}),
    ],
)
def test_dtypes(dtype, cache, head_dim, tokens, options):
    """Narrow caches, several queries, heads of any size, on Hopper as elsewhere."""
    q = random(1, (2, tokens, 6, head_dim), dtype)
    k, v = (random(seed, (2, 41, 2, head_dim), cache) for seed in (2, 3))
    given = {name: jnp.asarray(one) if "_" in name[:2] else one for name, one in options.items()}
    with on("sm_90a" if tokens == 3 else "sm_100a"):
        result = pallasite.ops.decode_attention(q, k, v, **given)
    factors = (np.reshape(options.get(name, 1.0), (-1, 1)) for name in ("k_scale", "v_scale"))
    keys, values = (exact(one) * factor for one, factor in zip((k, v), factors, strict=True))
    rest = {name: one for name, one in options.items() if name in ("scale", "soft_cap")}
    assert error(result, reference(q, keys, values, [41, 41], **rest)) < 1e-2


@pytest.mark.parametrize("config", [DecodeConfig(tile=32, splits=3), decode_configs(64, 2)[1]])
def test_configurations(config):
    """Blocks may share the keys of a sequence."""
    q = random(1, (2, 2, 32), "float16")
    k, v = (random(seed, (2, 130, 2, 32), "float16") for seed in (2, 3))
    lengths = [130, 33]
    with on("sm_90a"):
        result = pallasite.ops.decode_attention(
            q, k, v, kv_lengths=jnp.asarray(lengths), config=config
        )
    assert error(result, reference(q, exact(k), exact(v), lengths)) < 1e-3


@pytest.mark.parametrize(
    ("target", "page_size", "page_layout", "head_dim"),
    [
        ("sm_90", 16, "heads_first", 32),
        ("sm_90a", 24, "tokens_first", 64),
        ("sm_90a", 64, "heads_first", 64),
        ("sm_120a", 128, "tokens_first", 64),
    ],
)
def test_pages(target, page_size, page_layout, head_dim):
    """Pages anywhere in the cache; table entries beyond the length mean nothing."""
    q = random(1, (2, 4, head_dim), "bfloat16")
    shape = (2, 9, page_size, head_dim)
    k, v = (random(seed, shape, "bfloat16") for seed in (2, 3))
    table = np.asarray([[7, 2, 5], [1, 8, 10**6]])
    lengths = [3 * page_size - 3, page_size + 1]
    pages = [one.transpose(1, 2, 0, 3) if page_layout == "tokens_first" else one for one in (k, v)]
    with on(target):
        result = pallasite.ops.paged_attention(
            q, *pages, jnp.asarray(lengths), jnp.asarray(table), page_layout=page_layout
        )
    chosen = np.minimum(table, 8)
    gathered = [exact(one)[:, chosen].reshape(2, 2, -1, head_dim) for one in (k, v)]
    rows = [one.transpose(1, 2, 0, 3) for one in gathered]
    assert error(result, reference(q, *rows, lengths)) < 5e-3


@pytest.mark.parametrize(
    ("target", "tokens", "group"), [("sm_90a", 37, 1), ("sm_100a", 70, 2), ("sm_90", 9, 5)]
)
def test_prefill(target, tokens, group):
    """Many queries of sequences of which some are shorter; tiles of rows see different keys."""
    q = random(1, (2, tokens, 2 * group, 32), "float16")
    shape = (2, 9, 24, 32)
    k, v = (random(seed, shape, "float16") for seed in (2, 3))
    table = np.asarray([[7, 2, 5, 0], [1, 8, 10**6, -1]])
    lengths = [90, 25]
    with on(target):
        result = pallasite.ops.paged_attention(
            q, k, v, jnp.asarray(lengths), jnp.asarray(table), soft_cap=3.0
        )
    chosen = np.clip(table, 0, 8)
    rows = [exact(one)[:, chosen].reshape(2, 2, -1, 32).transpose(1, 2, 0, 3) for one in (k, v)]
    assert error(result, reference(q, *rows, lengths, soft_cap=3.0)) < 2e-3


def test_errors():
    """What no implementation takes is refused with values and what is expected."""
    q, k = random(1, (2, 4, 32), "float16"), random(2, (2, 8, 2, 32), "float16")
    for target in ("sm_90a", "sm_100a"):
        with on(target):
            with pytest.raises(InvalidTypeError, match="k and v do not fit q"):
                pallasite.ops.decode_attention(q, k, k.astype(jnp.int8))
            with pytest.raises(InvalidValueError, match="k_scale is for keys and values"):
                pallasite.ops.decode_attention(q, k, k, k_scale=2.0)
            with pytest.raises(InvalidValueError, match="heads of this size"):
                wide = jnp.zeros((2, 8, 2, 272), jnp.float16)
                pallasite.ops.decode_attention(jnp.zeros((2, 4, 272), jnp.float16), wide, wide)
            with pytest.raises(InvalidValueError, match="the pages do not fit the steps"):
                pages = jnp.zeros((2, 3, 6, 64), jnp.float16)
                numbers = jnp.asarray([1, 1]), jnp.asarray([[0], [1]])
                pallasite.ops.paged_attention(
                    jnp.zeros((2, 4, 64), jnp.float16), pages, pages, *numbers
                )
    with pytest.raises(InvalidTypeError, match="config is not of type DecodeConfig"):
        pallasite_std.ops.decode_attention(q, k, k, config=2)
    for wrong in ({"tile": 48}, {"stages": 1}, {"splits": 0}):
        with pytest.raises(InvalidValueError, match=f"DecodeConfig.{next(iter(wrong))}"):
            DecodeConfig(**wrong)
