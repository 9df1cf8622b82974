"""``ops.attention`` of extreme scores: only what a mask or minus infinity hides is hidden.

The reference rounds scores to float32 once, as every implementation in float32 does, and computes
all else in float64.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_support import error, exact, on, random

import pallasite.ops
from pallasite_hopper.ops.flash import single_api

pytestmark = pytest.mark.runs_kernels

TOLERANCE = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 3e-3}

LEAST = float(np.finfo(np.float32).min)

ROWS = (
    (0.0,),
    (-1e9,),
    (-1e30,),
    (LEAST,),
    (-np.inf,),
    (1e9,),
    (-1e4, -1e4 - 1, -1e9),
    (0.0, -1e9, -1e30, LEAST, -np.inf),
    (-1e9, -np.inf),
    (LEAST, -np.inf),
    (-1e30, LEAST),
    (1e9, 0.0, LEAST),
)
"""What the biases of the keys of a query are drawn from, for one query after the other."""


def extreme_bias(queries, keys):
    generator = np.random.default_rng(0)
    rows = [generator.choice(np.array(ROWS[n % len(ROWS)]), keys) for n in range(queries)]
    return np.stack(rows).astype(np.float32)[None, None]


def softmax_of(scores, shown):
    """In float64; zero for rows that see no key."""
    hidden = ~shown | np.isneginf(scores)
    scores = np.where(hidden, -np.inf, scores.astype(np.float64))
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(largest), 0, largest))
    sums = weights.sum(-1, keepdims=True)
    return weights / np.where(sums == 0, 1, sums)


def gradients_of(weights, q, k, v, d_out, scale):
    """By q, k, v and scores, for one batch of as many heads of keys as of queries."""
    d_weights = np.einsum("bqhd,bkhd->bhqk", d_out, v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    return (
        np.einsum("bhqk,bkhd->bqhd", d_scores, k) * scale,
        np.einsum("bhqk,bqhd->bkhd", d_scores, q) * scale,
        np.einsum("bhqk,bqhd->bkhd", weights, d_out),
        d_scores,
    )


def operands(queries, keys, dtype, heads=2, size=64):
    q, k, v, d_out = (
        random(seed, (1, length, heads, size), dtype)
        for seed, length in ((1, queries), (2, keys), (3, keys), (4, queries))
    )
    return q, k, v, d_out


@pytest.mark.parametrize(
    ("target", "dtype", "kernels", "options"),
    [
        ("sm_100a", "bfloat16", "portable", {}),
        ("sm_100a", "float32", "portable", {"causal": True}),
        ("sm_90a", "bfloat16", "several", {"causal": True}),
        ("sm_90a", "float16", "several", {"soft_cap": 3.0}),
        ("sm_90a", "float16", "single", {}),
        ("sm_90a", "bfloat16", "single", {"causal": True, "soft_cap": 3.0}),
        ("sm_90a", "bfloat16", "with bias", {"window": 40}),
    ],
)
def test_extreme_biases(target, dtype, kernels, options, monkeypatch):
    queries, keys = 100, 150
    q, k, v, d_out = operands(queries, keys, dtype)
    bias = extreme_bias(queries, keys)
    if kernels == "several":
        monkeypatch.setattr(single_api, "chosen", lambda *_: None)
    if kernels == "single":
        monkeypatch.setattr(single_api, "one_kernel", lambda problem: single_api.SingleConfig())

    def attend(q, k, v, bias):
        return pallasite.ops.attention(q, k, v, bias=bias, **options)

    def run(bias, d_out, *operands):
        if kernels in ("several", "single"):
            bias = jax.lax.stop_gradient(bias)
        out, pullback = jax.vjp(attend, *operands, bias)
        return out, pullback(d_out)

    with on(target):
        out, found = jax.jit(run)(jnp.asarray(bias), d_out, q, k, v)
    q, k, v, d_out = map(exact, (q, k, v, d_out))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * 64**-0.5
    slope = 1.0
    if cap := options.get("soft_cap"):
        scores = cap * np.tanh(scores / cap)
        slope = 1 - (scores / cap) ** 2
    rounded = scores.astype(np.float32) + bias
    key, own = np.arange(keys), np.arange(queries)[:, None] + keys - queries
    shown = np.ones((queries, keys), bool)
    if options.get("causal"):
        shown &= key <= own
    if "window" in options:
        shown &= abs(key - own) <= options["window"]
    weights = softmax_of(rounded, shown)
    for row in range(len(ROWS)):
        expected = np.einsum("bhqk,bkhd->bqhd", weights, v)[:, row :: len(ROWS)]
        assert error(out[:, row :: len(ROWS)], expected) < TOLERANCE[dtype], ROWS[row]
    d_weights = np.einsum("bqhd,bkhd->bhqk", d_out, v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    wanted = (
        np.einsum("bhqk,bkhd->bqhd", d_scores * slope, k) / 8,
        np.einsum("bhqk,bqhd->bkhd", d_scores * slope, q) / 8,
        np.einsum("bhqk,bqhd->bkhd", weights, d_out),
        d_scores.sum(1, keepdims=True),
    )
    for name, ours, theirs in zip(("q", "k", "v", "bias"), found, wanted, strict=True):
        if name == "bias" and kernels in ("several", "single"):
            continue
        assert error(ours, theirs) < 3 * TOLERANCE[dtype], name
        rows = range(len(ROWS)) if name == "q" else ()
        for row in rows:
            part = np.s_[:, row :: len(ROWS)]
            scale = np.linalg.norm(theirs) / len(ROWS) ** 0.5
            assert error(ours[part], theirs[part], scale) < 3 * TOLERANCE[dtype], ROWS[row]


@pytest.mark.parametrize(("target", "dtype"), [("sm_90a", "bfloat16"), ("sm_100a", "float32")])
def test_large_scores(target, dtype):
    """Up to 1e30, of either sign, without a bias: as exact products, of which many are equal."""
    queries, keys = 80, 200
    generator = np.random.default_rng(5)
    powers = np.array([0, 3, 8, 15, 24, 30, 45, 60, 90]) / 2
    large = np.exp2(np.floor(powers))
    q = np.zeros((1, queries, 1, 64))
    q[0, :, 0, 0] = generator.choice(large, queries) * generator.choice([-1, 1], queries)
    k = np.zeros((1, keys, 1, 64))
    k[0, :, 0, 0] = generator.choice([1, 1.0078125, 2, 3], keys) * 2.0**45
    v = exact(random(3, (1, keys, 1, 64), dtype))
    for scale in (2.0**-3, 2.0**-45, 2.0**5):
        with on(target):
            out = jax.jit(lambda *x, scale=scale: pallasite.ops.attention(*x, scale=scale))(
                *(jnp.asarray(one, dtype) for one in (q, k, v))
            )
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
        weights = softmax_of(scores, np.ones((queries, keys), bool))
        expected = np.einsum("bhqk,bkhd->bqhd", weights, v)
        for row in range(queries):
            assert error(out[:, row], expected[:, row]) < TOLERANCE[dtype], q[0, row, 0, 0]


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_large_scores_of_few_queries(target):
    keys = 300
    q = np.zeros((6, 1, 2, 64))
    q[:, 0, :, 0] = np.array([1, -1, 2.0**20, -(2.0**20), 2.0**50, -(2.0**50)])[:, None]
    k = np.zeros((6, keys, 1, 64))
    k[..., 0] = np.random.default_rng(5).choice([1, 1.0078125, 2], (6, keys, 1)) * 2.0**20
    v = exact(random(3, (6, keys, 1, 64), "bfloat16"))
    with on(target):
        out = pallasite.ops.attention(*(jnp.asarray(one, "bfloat16") for one in (q, k, v)))
    scores = np.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) / 8
    weights = softmax_of(scores, np.ones((1, keys), bool))
    expected = np.einsum("bhqk,bkd->bqhd", weights, v[:, :, 0])
    for batch in range(6):
        assert error(out[batch], expected[batch]) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize(("target", "queries"), [("sm_90a", 70), ("sm_90a", 1), ("sm_100a", 70)])
def test_what_is_not_a_number_stays_so(target, queries):
    """In queries that have or see one, and in no others."""
    q, k, v, _ = operands(queries, 130, "bfloat16")
    q = q.at[0, 0, 0, 5].set(jnp.nan)
    with on(target):
        of_queries = exact(pallasite.ops.attention(q, k, v))
        k = k.at[0, 100, 1, 5].set(jnp.nan)
        of_keys = exact(pallasite.ops.attention(q[:, ::-1], k, v, causal=True))
    assert np.isnan(of_queries[0, 0, 0]).all()
    assert np.isfinite(of_queries[0, 1:, 0]).all() and np.isfinite(of_queries[0, :, 1]).all()
    seeing = np.arange(queries) + 130 - queries >= 100
    assert np.isnan(of_keys[0, seeing, 1]).all() and np.isfinite(of_keys[0, ~seeing, 1]).all()


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_biases_that_are_not_numbers(target):
    q, k, v, d_out = operands(70, 130, "float16")
    bias = np.zeros((1, 1, 70, 130), np.float32)
    bias[0, 0, 3, 70] = np.nan
    bias[0, 0, 5, 7] = np.inf
    with on(target):
        out = exact(pallasite.ops.attention(q, k, v, bias=jnp.asarray(bias)))
    rows = np.isin(np.arange(70), (3, 5))
    assert np.isnan(out[0, rows]).all() and np.isfinite(out[0, ~rows]).all()


def test_log_sum_exp_of_extreme_biases():
    """It is that of the scores, and minus infinity only for queries that see no key."""
    q, k, v, _ = operands(24, 40, "bfloat16", heads=1)
    bias = extreme_bias(24, 40)
    with on("sm_90a"):
        _, lse = pallasite.ops.attention_forward(q, k, v, bias=jnp.asarray(bias))
    scores = np.einsum("bqhd,bkhd->bhqk", exact(q), exact(k)) / 8
    scores = (scores.astype(np.float32) + bias).astype(np.float64)
    largest = scores.max(-1)
    with np.errstate(invalid="ignore"):
        expected = largest + np.log(np.exp(scores - largest[..., None]).sum(-1))
    expected = np.where(np.isneginf(largest), -np.inf, expected)
    np.testing.assert_allclose(lse, expected.astype(np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("queries", [1, 70])
def test_scores_that_overflow(target, queries):
    """As in ``jax.nn.softmax``: minus infinity has no weight, infinity makes a row NaN."""
    q, k, v, _ = operands(queries, 90, "bfloat16", heads=1)
    large = 2.0**70
    q = q.at[..., 0].set(large)
    k = k.at[..., 0].set(0).at[0, 10:20, 0, 0].set(-large)
    with on(target):
        out = pallasite.ops.attention(q, k, v)
        k = k.at[0, 50, 0, 0].set(large)
        assert np.isnan(exact(pallasite.ops.attention(q, k, v))).all()
    scores = np.einsum("bqhd,bkhd->bhqk", exact(q)[..., 1:], exact(k)[..., 1:]) / 8
    scores[..., 10:20] = -np.inf
    expected = np.einsum("bhqk,bkhd->bqhd", softmax_of(scores, scores < np.inf), exact(v))
    assert error(out, expected) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize(("target", "most"), [("sm_90a", 2.0**24), ("sm_100a", np.inf)])
@pytest.mark.parametrize("kernels", ["several", "single"])
def test_gradients_of_large_scores(target, most, kernels, monkeypatch):
    """By Hopper's kernels of queries whose log-sum-exp tells weights, by the others of all."""
    if kernels == "several":
        monkeypatch.setattr(single_api, "chosen", lambda *_: None)
    q, k, v, d_out = (exact(one) for one in operands(90, 130, "bfloat16", heads=1))
    sizes = np.exp2(np.array([0, 4, 9, 30, 60])[np.arange(90) % 5]) * (-1.0) ** np.arange(90)
    q[..., 0], q[..., 1:] = sizes[:, None], q[..., 1:] / 4
    k[..., 0] = np.array([1, 1, 2, 2])[np.arange(130) % 4, None]
    given = [jnp.asarray(one, "bfloat16") for one in (q, k, v, d_out)]

    def run(q, k, v, d_out):
        out, pullback = jax.vjp(pallasite.ops.attention, q, k, v)
        return out, pullback(d_out)

    with on(target):
        out, found = jax.jit(run)(*given)
    q, k, v, d_out = map(exact, given)
    scores = (np.einsum("bqhd,bkhd->bhqk", q, k) / 8).astype(np.float32)
    weights = softmax_of(scores, np.ones(scores.shape, bool))
    assert error(out, np.einsum("bhqk,bkhd->bqhd", weights, v)) < TOLERANCE["bfloat16"]
    weights = np.where(abs(scores.max(-1, keepdims=True)) < most, weights, 0.0)
    *others, d_v, _ = gradients_of(weights, q, k, v, d_out, 1 / 8)
    assert error(found[2], d_v) < 3 * TOLERANCE["bfloat16"]
    small = sizes[:, None] ** 2 < 2.0**10
    d_q = np.where(small[..., None], others[0], 0)
    assert error(jnp.where(small[..., None], found[0], 0), d_q) < 3 * TOLERANCE["bfloat16"]
    assert all(np.isfinite(exact(one)).all() for one in found)
