"""``pallasite.ops.attention`` agrees with NumPy in float64 on every target, and so do gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_support import TARGETS, error, exact, on, random

import pallasite.ops
import pallasite_std.ops
from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite_std.ops import AttentionConfig, attention_configs

pytestmark = pytest.mark.runs_kernels

TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 3e-3}


def operands(q_seq, kv_seq, q_heads, kv_heads, head_dim, dtype="bfloat16", batch=2):
    keys = (batch, kv_seq, kv_heads, head_dim)
    return (
        random(1, (batch, q_seq, q_heads, head_dim), dtype),
        random(2, keys, dtype),
        random(3, keys, dtype),
    )


def scores(q, k, causal, scale, soft_cap, q_lengths, kv_lengths):
    """(batch, heads, queries, keys): scores, and which keys a query sees."""
    batch, q_seq, heads, head_dim = q.shape
    kv_seq = k.shape[1]
    q_lengths = np.full(batch, q_seq) if q_lengths is None else np.asarray(q_lengths)
    kv_lengths = np.full(batch, kv_seq) if kv_lengths is None else np.asarray(kv_lengths)
    values = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, heads // k.shape[2], 2))
    values = values * (head_dim**-0.5 if scale is None else scale)
    if soft_cap is not None:
        values = soft_cap * np.tanh(values / soft_cap)
    queries, keys = np.arange(q_seq)[:, None], np.arange(kv_seq)[None, :]
    shown = np.zeros((batch, 1, q_seq, kv_seq), bool)
    for one in range(batch):
        shown[one, 0] = (queries < q_lengths[one]) & (keys < kv_lengths[one])
        if causal:
            shown[one, 0] &= keys <= queries + kv_lengths[one] - q_lengths[one]
    return values, np.broadcast_to(shown, values.shape)


def reference(q, k, v, causal=False, scale=None, soft_cap=None, q_lengths=None, kv_lengths=None):
    """The result and log-sum-exp in float64."""
    q, k, v = exact(q), exact(k), exact(v)
    values, shown = scores(q, k, causal, scale, soft_cap, q_lengths, kv_lengths)
    powers = np.where(shown, np.exp(values), 0.0)
    sums = powers.sum(-1, keepdims=True)
    weights = powers / np.where(sums == 0, 1, sums)
    with np.errstate(divide="ignore"):
        lse = np.log(sums[..., 0])
    return np.einsum("bhqk,bkhd->bqhd", weights, np.repeat(v, q.shape[2] // v.shape[2], 2)), lse


@pytest.mark.parametrize("target", TARGETS)
def test_targets(target):
    """A program that names no chip."""
    args = operands(70, 130, 2, 1, 64)
    with on(target):
        result = pallasite.ops.attention(*args, causal=True)
    assert error(result, reference(*args, causal=True)[0]) < 5e-3


@pytest.mark.parametrize(
    ("dtype", "head_dim", "options"),
    [
        ("float16", 40, {"causal": True}),
        ("bfloat16", 72, {"scale": 0.3, "soft_cap": 5.0}),
        ("float16", 256, {"q_lengths": [3, 20], "kv_lengths": [0, 33]}),
        ("float32", 32, {"causal": True, "kv_lengths": [41, 17]}),
        ("bfloat16", 7, {}),
    ],
)
def test_shapes(dtype, head_dim, options):
    """Heads of any size, sequences that divide nothing, on Hopper as elsewhere."""
    args = operands(20, 41, 4, 2, head_dim, dtype)
    given = {name: jnp.asarray(one) if "len" in name else one for name, one in options.items()}
    with on("sm_90a" if head_dim == 72 else "sm_100a"):
        result, lse = pallasite.ops.attention_forward(*args, **given)
    expected, logarithms = reference(*args, **options)
    assert error(result, expected) < TOLERANCE[dtype]
    missing = np.isneginf(logarithms)
    np.testing.assert_array_equal(np.isneginf(lse), missing)
    np.testing.assert_allclose(
        np.where(missing, 0, lse), np.where(missing, 0, logarithms), atol=5e-3
    )


@pytest.mark.parametrize("config", attention_configs(64, 64)[1:9:3])
def test_configurations(config):
    """Tuning may choose any of them."""
    args = operands(70, 100, 1, 1, 16, batch=1)
    with on("sm_90a"):  # Hopper leaves portable configurations to the portable kernel.
        result = pallasite.ops.attention(*args, causal=True, config=config)
    assert error(result, reference(*args, causal=True)[0]) < 5e-3


def gradients_in_float64(args, d_out, **options):
    """The textbook's formulas."""
    q, k, v = (exact(one) for one in args)
    group = q.shape[2] // k.shape[2]
    soft_cap = options.get("soft_cap")
    scale = q.shape[3] ** -0.5
    names = ("causal", "scale", "soft_cap", "q_lengths", "kv_lengths")
    values, shown = scores(q, k, *(options.get(name) for name in names))
    powers = np.where(shown, np.exp(values), 0.0)
    sums = powers.sum(-1, keepdims=True)
    weights = powers / np.where(sums == 0, 1, sums)
    d_weights = np.einsum("bqhd,bkhd->bhqk", d_out, np.repeat(v, group, 2))
    delta = (weights * d_weights).sum(-1, keepdims=True)
    d_scores = weights * (d_weights - delta) * scale
    if soft_cap is not None:
        d_scores = d_scores * (1 - (values / soft_cap) ** 2)

    def of_group(array):
        batch, length, heads, width = array.shape
        return array.reshape(batch, length, heads // group, group, width).sum(3)

    d_q = np.einsum("bhqk,bkhd->bqhd", d_scores, np.repeat(k, group, 2))
    d_k = of_group(np.einsum("bhqk,bqhd->bkhd", d_scores, q))
    return d_q, d_k, of_group(np.einsum("bhqk,bqhd->bkhd", weights, d_out))


@pytest.mark.parametrize(
    ("target", "shape", "dtype", "options"),
    [
        ("sm_90", (70, 70, 2, 1, 16), "float16", {"causal": True}),
        (
            "sm_120a",
            (20, 41, 2, 2, 24),
            "bfloat16",
            {"soft_cap": 3.0, "q_lengths": [3, 20], "kv_lengths": [0, 33]},
        ),
        ("sm_90a", (20, 20, 1, 1, 16), "float32", {}),
        # Shared memory has room for the operands of one step only.
        ("sm_120a", (34, 33, 1, 1, 256), "float32", {"causal": True}),
    ],
)
def test_gradients(target, shape, dtype, options):
    """Of queries, keys and values."""
    args = operands(*shape, dtype)
    d_out = random(4, args[0].shape, dtype)
    given = {name: jnp.asarray(one) if "len" in name else one for name, one in options.items()}
    with on(target):
        _, pullback = jax.vjp(lambda *x: pallasite.ops.attention(*x, **given), *args)
        found = pullback(d_out)
    expected = gradients_in_float64(args, exact(d_out), **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == np.dtype(dtype)
        assert error(ours, theirs) < 2 * TOLERANCE[dtype]


def test_errors():
    """What no implementation takes is refused with values and what is expected."""
    q, k, v = operands(4, 4, 3, 2, 16)
    with on("sm_90a"), pytest.raises(InvalidValueError, match="cannot be divided"):
        pallasite.ops.attention(q, k, v)
    with on("sm_90a"):
        float32_too = "float8_e4m3fn, or float32 with pallasite.ops.attention\n  try: convert q"
        with pytest.raises(InvalidTypeError, match=float32_too):
            pallasite.ops.attention(*(one.astype(jnp.int32) for one in (q, k, v)))
        narrow = [one.astype(jnp.float8_e4m3fn) for one in (q, q, q)]
        options = {"block_mask": jnp.ones((1, 1, 1, 1), bool), "mask_block": (32, 64)}
        said = r"block_mask of blocks .* of 128\n  got: \(32, 64\), and q of float8_e4m3fn"
        with pytest.raises(UnsupportedError, match=f"8-bit floats has no {said}") as caught:
            pallasite.ops.attention(*narrow, **options)
        message = str(caught.value)
        assert "expected: q, k and v of bfloat16, float16 or float32, or no" in message
        assert "try: convert q, k and v" in message
    big = operands(4, 4, 1, 1, 264)
    for target in ("sm_90a", "sm_100a"):
        with on(target), pytest.raises(InvalidValueError, match="heads of this size"):
            pallasite.ops.attention(*big)
    with on("sm_100a"):
        with pytest.raises(InvalidTypeError, match="attention of this dtype of q"):
            pallasite.ops.attention(q.astype(jnp.int8), k, v)
        with pytest.raises(InvalidTypeError, match="config is not of type AttentionConfig"):
            pallasite_std.ops.attention(k, k, v, config=1)
    for wrong in ({"block_q": 48}, {"block_kv": 8}, {"stages": 1}):
        with pytest.raises(InvalidValueError, match=f"AttentionConfig.{next(iter(wrong))}"):
            AttentionConfig(**wrong)
