"""Windows, segments, bias, block masks, dropout and values of other sizes in ``ops.attention``:
results and gradients agree with the textbook's formulas in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropped_weights import growth, kept
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_support import error, exact, on, random

import pallasite.ops
from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite_hopper.ops.flash import api as hopper_attention
from pallasite_hopper.ops.flash import backward, single_api, terms
from pallasite_hopper.ops.flash.backward_config import BackwardProblem
from pallasite_std.ops import AttentionConfig
from pallasite_std.ops.flash import api

pytestmark = pytest.mark.runs_kernels

TOLERANCE = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 3e-3}


def weights(q, k, options):
    """(batch, heads, queries, keys): normalized weights, scores before the bias, shown keys."""
    batch, q_seq, heads, head_dim = q.shape
    kv_seq = k.shape[1]
    scores = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, heads // k.shape[2], 2)) * head_dim**-0.5
    cap = options.get("soft_cap")
    scores = capped = scores if cap is None else cap * np.tanh(scores / cap)
    q_len = np.asarray(options.get("q_lengths", [q_seq] * batch))[:, None, None, None]
    kv_len = np.asarray(options.get("kv_lengths", [kv_seq] * batch))[:, None, None, None]
    query = np.arange(q_seq)[:, None]
    key = np.arange(kv_seq)
    position = query + kv_len - q_len
    shown = np.broadcast_to((query < q_len) & (key < kv_len), scores.shape).copy()
    if options.get("causal"):
        shown &= key <= position
    window = options.get("window")
    left, right = window if isinstance(window, tuple) else (window, window)
    if left is not None:
        shown &= key >= position - left
    if right is not None:
        shown &= key <= position + right
    if "q_segments" in options:
        of_queries, of_keys = (np.asarray(options[f"{one}_segments"]) for one in ("q", "kv"))
        shown &= (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
    if "block_mask" in options:
        rows, columns = options.get("mask_block", (128, 128))
        mask = np.repeat(np.repeat(options["block_mask"], rows, 2), columns, 3)
        shown &= mask[:, :, :q_seq, :kv_seq]
    if "bias" in options:
        scores = scores + exact(options["bias"])
    if "alibi_slopes" in options:
        slopes = exact(options["alibi_slopes"]).reshape(-1, heads)[:, :, None, None]
        scores = scores - slopes * np.abs(position - key)
    powers = np.where(shown, np.exp(scores), 0.0)
    sums = powers.sum(-1, keepdims=True)
    return powers / np.where(sums == 0, 1, sums), capped, sums


def reference(q, k, v, d_out, options):
    """The result, log-sum-exp, and the gradients by q, k, v and bias; then how large the result and
    the gradients would be if terms never cancelled (roots of sums of squares)."""
    q, k, v, d_out = (exact(one) for one in (q, k, v, d_out))
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    normal, capped, sums = weights(q, k, options)
    rate = options.get("dropout_rate", 0.0)
    keep = kept(options["dropout_seed"], normal.shape, rate) * growth(rate) if rate else 1.0
    out = np.einsum("bhqk,bkhd->bqhd", normal * keep, wide_v)
    d_weights = np.einsum("bqhd,bkhd->bhqk", d_out, wide_v) * keep
    d_scores = normal * (d_weights - (normal * d_weights).sum(-1, keepdims=True))
    slope = q.shape[3] ** -0.5
    if options.get("soft_cap") is not None:
        slope = slope * (1 - (capped / options["soft_cap"]) ** 2)

    def of_group(array):
        batch, length, heads, width = array.shape
        return array.reshape(batch, length, heads // group, group, width).sum(3)

    def gradients(d_scores, slope, q, k, d_out, factors):
        found = [
            np.einsum("bhqk,bkhd->bqhd", d_scores * slope, k),
            of_group(np.einsum("bhqk,bqhd->bkhd", d_scores * slope, q)),
            of_group(np.einsum("bhqk,bqhd->bkhd", factors, d_out)),
        ]
        if "bias" in options:
            shape = options["bias"].shape
            axes = tuple(n for n in range(4) if shape[n] == 1)
            found.append(d_scores.sum(axes, keepdims=True))
        return found

    factors = normal * keep
    found = gradients(d_scores, slope, q, wide_k, d_out, factors)
    squares = np.einsum("bqhd,bkhd->bhqk", d_out**2, wide_v**2) * keep**2
    means = (normal**2 * squares).sum(-1, keepdims=True)
    squares = normal**2 * np.maximum(squares * (1 - 2 * normal) + means, 0)
    sizes = [
        np.einsum("bhqk,bkhd->bqhd", factors**2, wide_v**2),
        *gradients(squares, slope**2, q**2, wide_k**2, d_out**2, factors**2),
    ]
    with np.errstate(divide="ignore"):
        return out, np.log(sums[..., 0]), found, [np.sqrt(one) for one in sizes]


def with_gradients(function, operands, d_out):
    """In one program, which takes less time to compile than its parts."""

    def both(operands, d_out):
        result, pullback = jax.vjp(function, *operands)
        return result, pullback(d_out)

    return jax.jit(both)(operands, d_out)


def check(shape, dtype, options, target="sm_100a", seed=0, gradients=True):
    """Shape: queries, keys, heads of both, elements of a key and of a value."""
    q_seq, kv_seq, q_heads, kv_heads, head_dim, v_dim = shape
    q = random(seed, (2, q_seq, q_heads, head_dim), dtype)
    k = random(seed + 1, (2, kv_seq, kv_heads, head_dim), dtype)
    v = random(seed + 2, (2, kv_seq, kv_heads, v_dim), dtype)
    d_out = random(seed + 3, (2, q_seq, q_heads, v_dim), dtype)
    arrays = {
        name: jnp.asarray(one) if isinstance(one, list | np.ndarray) else one
        for name, one in options.items()
    }
    differentiated = [q, k, v, *([arrays.pop("bias")] if "bias" in arrays else [])]

    def run(q, k, v, *bias):
        return pallasite.ops.attention(q, k, v, **arrays, **({"bias": bias[0]} if bias else {}))

    expected, _, of_inputs, (size, *of_gradients) = reference(q, k, v, d_out, options)
    with on(target):
        if not gradients:
            assert error(run(*differentiated), expected, size) < TOLERANCE[dtype]
            return
        result, found = with_gradients(run, differentiated, d_out)
    assert error(result, expected, size) < TOLERANCE[dtype]
    of_each = zip(found, of_inputs, of_gradients, differentiated, strict=True)
    for ours, theirs, size, one in of_each:
        assert (ours.shape, ours.dtype) == (one.shape, one.dtype)
        if np.linalg.norm(theirs) > 1e-3:
            assert error(ours, theirs, size) < 3 * TOLERANCE[dtype]


SEGMENTS = {
    "q_segments": np.sort(np.random.default_rng(0).integers(0, 4, (2, 150))),
    "kv_segments": np.sort(np.random.default_rng(1).integers(0, 4, (2, 150))),
}


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((30, 150, 2, 1, 16, 16), "bfloat16", {"window": (20, None), "causal": True}),
        ((130, 40, 1, 1, 16, 40), "float16", {"window": (3, 5), "soft_cap": 4.0}),
        (
            (40, 90, 2, 2, 32, 16),
            "float32",
            {"window": 7, "q_lengths": [40, 11], "kv_lengths": [90, 33]},
        ),
        ((150, 150, 2, 1, 16, 16), "float16", SEGMENTS),
        ((33, 70, 2, 1, 24, 16), "float16", {"bias": random(9, (1, 2, 33, 70), "float32")}),
        (
            (33, 41, 2, 2, 16, 48),
            "bfloat16",
            {"bias": random(9, (2, 1, 1, 41), "bfloat16"), "causal": True, "soft_cap": 3.0},
        ),
        (
            (50, 80, 2, 1, 16, 16),
            "float16",
            {"alibi_slopes": np.array([0.25, 0.0625], np.float32), "causal": True},
        ),
        (
            (50, 80, 2, 1, 16, 16),
            "float16",
            {"dropout_rate": 0.3, "dropout_seed": 7, "kv_lengths": [80, 13]},
        ),
        # Blocks of the mask have tiles that begin behind the last key and the last query.
        (
            (70, 31, 2, 1, 16, 16),
            "float16",
            {
                "bias": random(9, (1, 1, 70, 31), "float32"),
                "block_mask": np.ones((1, 1, 1, 1), bool),
                "mask_block": (192, 128),
            },
        ),
    ],
)
def test_options(shape, dtype, options):
    """One at a time, and some together."""
    check(shape, dtype, options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((200, 300, 2, 1, 64, 64), {"window": (90, 30)}),
        ((150, 150, 1, 1, 128, 128), {"window": 5, "causal": True, "q_lengths": [150, 70]}),
        ((70, 250, 1, 1, 256, 256), {"window": (100, None), "kv_lengths": [250, 1]}),
    ],
)
def test_windows_on_hopper(shape, options):
    """Its own kernels have them, forward and backward."""
    check(shape, "float16", options, "sm_90a")


PACKED = {
    "q_segments": np.repeat([[0, 1, 2, 3], [0, 2, 2, 5]], (20, 131, 59, 90), 1),
    "kv_segments": np.repeat([[0, 1, 2, 3], [0, 2, 2, 5]], (20, 131, 59, 90), 1),
}
"""With tiles that are of one segment as a whole, and others."""

UNORDERED = {
    "q_segments": np.random.default_rng(3).integers(0, 3, (2, 140)),
    "kv_segments": np.random.default_rng(4).integers(0, 3, (2, 220)),
}


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((300, 300, 1, 1, 64, 64), "float16", {"causal": True, **PACKED}),
        pytest.param(
            (300, 300, 1, 1, 128, 128),
            "bfloat16",
            {"window": (150, 40), **PACKED},
            marks=pytest.mark.slow,
        ),
        ((140, 220, 1, 1, 192, 128), "float16", {**UNORDERED, "kv_lengths": [220, 90]}),
        (
            (140, 220, 2, 1, 40, 40),
            "float16",
            {
                "alibi_slopes": np.array([[0.25, 0.1], [0.5, 0.3]], np.float32),
                "causal": True,
                "q_lengths": [140, 30],
                "kv_lengths": [100, 220],
                **UNORDERED,
            },
        ),
        (
            (70, 130, 2, 1, 64, 64),
            "float16",
            {"alibi_slopes": np.array([0.25, 0.1], np.float32), "soft_cap": 3.0},
        ),
        ((70, 130, 1, 1, 64, 80), "float16", {"bias": random(9, (2, 1, 70, 130), "float32")}),
        ((150, 150, 2, 1, 128, 64), "bfloat16", {"causal": True}),
        ((130, 200, 1, 1, 160, 120), "float16", {"window": (40, 10), "kv_lengths": [200, 33]}),
        ((1, 1, 2, 1, 64, 64), "float16", {}),
        ((5, 5, 2, 1, 128, 128), "bfloat16", {"causal": True}),
        pytest.param(
            (47, 47, 1, 1, 64, 32),
            "float16",
            {"window": (9, 3), "soft_cap": 2.0},
            marks=pytest.mark.slow,
        ),
        (
            (70, 90, 2, 1, 64, 64),
            "bfloat16",
            {"dropout_rate": 0.3, "dropout_seed": 7, "causal": True},
        ),
    ],
)
def test_own_kernels_of_hopper(shape, dtype, options, monkeypatch):
    """They have segments, slopes, bias, values of another size, and compute short sequences
    together; but not the gradient by a bias."""
    if "bias" not in options:
        monkeypatch.setattr(api, "_kernel", None)
    if "window" in options or "kv_lengths" in options:  # As if there were many keys.
        monkeypatch.setattr(terms, "SHORT", 0)
    check(shape, dtype, options, "sm_90a")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((130, 200, 2, 2, 192, 128), {}),
        pytest.param((70, 90, 2, 1, 160, 60), {"causal": True}, marks=pytest.mark.slow),
        ((150, 150, 1, 1, 256, 40), {}),
        ((70, 90, 1, 1, 64, 80), {"kv_lengths": [90, 33], "soft_cap": 5.0}),
    ],
)
def test_gradients_of_values_of_other_sizes_on_hopper(shape, options, monkeypatch):
    """By the kernels of long sequences."""
    monkeypatch.setattr(single_api, "chosen", lambda *_: None)
    check(shape, "bfloat16", options, "sm_90a")


@pytest.mark.parametrize(
    "changes", [{"parts": 3}, {"own_keys": True}, {"parts": 2, "own_keys": True}]
)
def test_divided_gradients_of_packed_sequences(changes, monkeypatch):
    """Blocks that share a tile of keys, and heads of queries with blocks of their own."""
    monkeypatch.setattr(single_api, "chosen", lambda *_: None)
    monkeypatch.setattr(terms, "SHORT", 0)
    default = backward.default_config
    monkeypatch.setattr(
        backward, "default_config", lambda p: dataclasses.replace(default(p), **changes)
    )
    check((150, 150, 2, 1, 64, 64), "bfloat16", SEGMENTS | {"causal": True}, "sm_90a")


def test_gradients_of_uneven_packed_sequences_are_divided():
    """A head of keys that eight of queries share has fewer tiles than there are multiprocessors;
    few of them see most."""
    problem = BackwardProblem(
        batch=1, q_heads=8, kv_heads=1, q_seq=14912, kv_seq=14912, head_dim=64,
        dtype=np.dtype(jnp.bfloat16), causal=True, scale=0.125, soft_cap=None, has_lengths=False,
        terms=terms.Terms(names=("q_segments", "kv_segments", "spans")),
    )  # fmt: skip
    config = backward.default_config(problem)
    assert config.own_keys or config.parts > 1


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((150, 210, 2, 1, 64, 64), {"causal": True, "kv_lengths": [210, 33]}),
        ((130, 200, 1, 1, 128, 128), {"window": (40, 10)}),
        ((70, 140, 2, 2, 160, 120), {"soft_cap": 4.0}),
        ((90, 150, 2, 1, 96, 96), {"alibi_slopes": np.array([0.25, 0.1], np.float32)}),
        ((190, 150, 1, 1, 256, 256), {"causal": True, "dropout_rate": 0.1}),
    ],
)
def test_dropout_by_the_kernels_of_long_sequences(shape, options, monkeypatch):
    monkeypatch.setattr(single_api, "chosen", lambda *_: None)
    monkeypatch.setattr(api, "_kernel", None)
    options = {"dropout_rate": 0.4, "dropout_seed": 2**31 + 11} | options
    check(shape, "bfloat16", options, "sm_90a")


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((150, 210, 2, 1, 64, 64), "bfloat16", {"bias": random(9, (1, 2, 150, 210), "bfloat16")}),
        (
            (133, 200, 2, 2, 128, 72),
            "bfloat16",
            {"bias": random(9, (2, 1, 133, 200), "bfloat16"), "causal": True},
        ),
        (
            (70, 130, 2, 1, 96, 96),
            "float16",
            {"bias": random(9, (2, 2, 70, 130), "float16"), "window": (40, 10)},
        ),
        (
            (140, 150, 1, 1, 32, 32),
            "bfloat16",
            {
                "bias": random(9, (1, 1, 1, 150), "bfloat16"),
                "kv_lengths": [150, 33],
                "dropout_rate": 0.2,
                "dropout_seed": 4,
            },
        ),
        (
            (200, 260, 2, 2, 64, 64),
            "bfloat16",
            {
                "bias": random(9, (1, 1, 200, 260), "bfloat16"),
                "block_mask": np.random.default_rng(0).random((1, 2, 2, 3)) < 0.5,
            },
        ),
    ],
)
def test_gradients_of_a_bias_on_hopper(shape, dtype, options, monkeypatch):
    """By the kernel of the other gradients, which writes those of the scores."""
    monkeypatch.setattr(hopper_attention, "portable_gradients", None)
    monkeypatch.setattr(api, "_kernel", None)
    check(shape, dtype, options, "sm_90a")


def test_masks_of_dropout():
    """Those that kernels use, as an array; rates that no bits tell from zero drop nothing."""
    shape = (2, 3, 50, 70)
    found = pallasite.ops.attention_dropout_mask(5, shape, 0.3)
    np.testing.assert_array_equal(found, kept(5, shape, 0.3))
    assert pallasite.ops.attention_dropout_mask(jax.random.key(2), shape, 1e-6).all()
    found = exact(pallasite.ops.attention_dropout_mask(1, (1, 2, 1024, 1024), 0.25))[0]
    assert abs(found.mean() - 0.75) < 1e-3
    for shift in ((0, 1), (1, 0), (0, 8), (8, 0), (8, 8), (16, 0)):
        moved = np.roll(found[0], shift, (0, 1))
        assert abs(np.corrcoef(found[0].ravel(), moved.ravel())[0, 1]) < 5e-3
    assert abs(np.corrcoef(found[0].ravel(), found[1].ravel())[0, 1]) < 5e-3
    for wrong in ((0.3, (2, 3, 4)), (1.5, shape)):
        with pytest.raises(InvalidValueError):
            pallasite.ops.attention_dropout_mask(1, wrong[1], wrong[0])


@pytest.mark.parametrize(
    ("tokens", "left"),
    [
        (1, None),
        pytest.param(3, None, marks=pytest.mark.slow),
        pytest.param(1, 20, marks=pytest.mark.slow),
        (4, 71),
        (2, 1),
    ],
)
def test_few_queries_on_hopper(tokens, left):
    """Those of a prefill of one, say: by the kernels for decoding, and gradients as ever."""
    lengths = np.array([150, 7])
    options = {"kv_lengths": lengths, "causal": True, "soft_cap": 4.0}
    if left is not None:
        options["window"] = (left, None)
    q, k, v = (
        random(n, (2, one, heads, 64), "float16")
        for n, (one, heads) in enumerate(((tokens, 4), (200, 2), (200, 2)))
    )
    expected, _, gradients, _ = reference(q, k, v, q, options)
    given = options | {"kv_lengths": jnp.asarray(lengths)}
    attend = functools.partial(pallasite.ops.attention, **given)
    with on("sm_90a"):
        result, pullback = jax.vjp(attend, q, k, v)
        found = [attend(q, k, v), result, *pullback(q)]
    for ours, theirs in zip(found, (expected, expected, *gradients), strict=False):
        assert error(ours, theirs) < 3e-3


def test_windows_of_one_query_on_hopper():
    """Without lengths, the first rows that are read are known beforehand."""
    options = {"window": (70, 3)}
    q, k, v = (
        random(n, (3, one, heads, 64), "bfloat16")
        for n, (one, heads) in enumerate(((1, 6), (333, 2), (333, 2)))
    )
    expected, *_ = reference(q, k, v, q, options)
    with on("sm_90a"):
        assert error(pallasite.ops.attention(q, k, v, **options), expected) < 6e-3


@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("shape", [(70, 700, 2, 1, 64, 64), (10, 300, 2, 2, 128, 64)])
@pytest.mark.sampled(alone=("shape", "parts"))
def test_parts_of_the_keys_on_hopper(shape, parts, monkeypatch):
    """As batches, of which the last ones of few blocks of keys have none."""
    monkeypatch.setattr(hopper_attention, "parts_of_keys", lambda problem: parts)
    check(shape, "float16", {}, "sm_90a")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bias_without_a_gradient_on_hopper(head_dim):
    """Its own kernels recompute the scores with it."""
    q, k, v, d_out = (random(n, (2, 90, 2, head_dim), "float16") for n in range(4))
    bias = random(5, (1, 2, 90, 90), "bfloat16")
    slopes = jnp.asarray([0.25, 0.125])
    options = {"bias": bias, "alibi_slopes": slopes, "causal": True}
    expected, _, gradients, _ = reference(q, k, v, d_out, options)
    with on("sm_90a"):
        result, pullback = jax.vjp(
            lambda q, k, v: pallasite.ops.attention(q, k, v, **options), q, k, v
        )
        found = pullback(d_out)
    assert error(result, expected) < 2e-3
    for ours, theirs in zip(found, gradients, strict=False):
        assert error(ours, theirs) < 3e-3


@pytest.mark.parametrize(
    ("heads", "block", "options"),
    [
        ((1, 1), (64, 64), {"causal": True}),
        ((2, 2), (32, 96), {"window": (50, 20)}),
        ((1, 2), (64, 32), {"kv_lengths": [150, 40], **SEGMENTS}),
    ],
)
def test_block_masks(heads, block, options):
    """Of all heads and of each, with tiles of attention that are smaller."""
    rng = np.random.default_rng(5)
    mask = rng.random((*heads, -(-150 // block[0]), -(-150 // block[1]))) < 0.5
    mask[..., 1, :] = False  # Queries that see nothing.
    check((150, 150, 2, 1, 16, 16), "float16", {"block_mask": mask, "mask_block": block, **options})


@settings(max_examples=4)
@given(st.data())
def test_random_problems(data):
    """Whatever options meet, on every target."""
    draw = data.draw
    q_seq, kv_seq = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    shape = (q_seq, kv_seq, kv_heads * group, kv_heads, draw(st.integers(1, 40)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    options = {}
    if draw(st.booleans()):
        side = st.one_of(st.none(), st.integers(0, 100))
        options["window"] = (draw(side), draw(side))
    options["causal"] = draw(st.booleans())
    if draw(st.booleans()):
        for name, extent in (("q_lengths", q_seq), ("kv_lengths", kv_seq)):
            options[name] = rng.integers(0, extent + 1, 2)
    if draw(st.booleans()):
        for name, extent in (("q_segments", q_seq), ("kv_segments", kv_seq)):
            options[name] = rng.integers(-1, 3, (2, extent))
    if draw(st.booleans()):
        full = (2, shape[2], q_seq, kv_seq)
        extents = tuple(one if draw(st.booleans()) else 1 for one in full)
        options["bias"] = jnp.asarray(rng.standard_normal(extents).astype(jnp.float32))
    if draw(st.booleans()):
        options["block_mask"] = rng.random((1, 1, -(-q_seq // 32), -(-kv_seq // 32))) < 0.6
        options["mask_block"] = (32, 32)
    if draw(st.booleans()):
        options |= {"dropout_rate": 0.5, "dropout_seed": int(rng.integers(0, 2**31))}
    target = draw(st.sampled_from(["sm_90a", "sm_100a"]))
    v_dim, gradients = draw(st.integers(1, 40)), draw(st.booleans())
    check((*shape, v_dim), "float32", options, target, gradients=gradients)


def test_terms_that_cancel():
    """Of two numbers that are a hundredth of what is added, the error is more than of others."""
    options = {"q_lengths": [1, 1], "kv_lengths": [18, 9]}
    check((1, 35, 1, 1, 1, 1), "float32", options, "sm_90a", gradients=False)


def test_log_sum_exp():
    """Of the scores that are seen, with their bias; what is dropped counts. Gradients from it."""
    q, k, v = (random(n, (2, 40, 2, 16), "float16") for n in range(3))
    options = {"window": (9, 4), "bias": random(3, (1, 1, 40, 40), "float16")}
    expected, logarithms, gradients, _ = reference(q, k, v, v, options)
    with on("sm_90a"):
        result, lse = pallasite.ops.attention_forward(q, k, v, **options)
        _, dropped = pallasite.ops.attention_forward(
            q, k, v, **options, dropout_rate=0.5, dropout_seed=3
        )
        found = pallasite.ops.attention_backward(q, k, v, result, lse, v, **options)
    assert error(result, expected) < 2e-3
    np.testing.assert_allclose(lse, logarithms, atol=5e-3)
    np.testing.assert_allclose(lse, dropped, rtol=1e-6)  # Of other kernels.
    for ours, theirs in zip(found, gradients, strict=False):
        assert error(ours, theirs) < 3e-3


def test_dropout_is_the_same_for_every_tiling():
    """A key as seed; the fraction that is dropped."""
    q, k = (random(n, (1, 64, 2, 16), "float32") for n in range(2))
    v = jnp.broadcast_to(jnp.eye(64, dtype=jnp.float32)[None, :, None], (1, 64, 2, 64))
    results = []
    with on("sm_100a"):
        for config in (None, AttentionConfig(block_q=32, block_kv=16)):
            results.append(
                pallasite.ops.attention(
                    q, k, v, dropout_rate=0.25, dropout_seed=jax.random.key(1), config=config
                )
            )
        other = pallasite.ops.attention(q, k, v, dropout_rate=0.25, dropout_seed=jax.random.key(2))
    np.testing.assert_array_equal(results[0] == 0, results[1] == 0)
    assert 0.2 < float((results[0] == 0).mean()) < 0.3
    assert 0.25 < float(((results[0] == 0) != (other == 0)).mean()) < 0.5


def test_hopper_takes_what_says_nothing():
    """Options that are given, but not used, leave the target's own kernels in place."""
    q, k, v = (random(n, (1, 40, 1, 64), "float16") for n in range(3))
    with on("sm_90a"):
        plain = pallasite.ops.attention(q, k, v)
        same = pallasite.ops.attention(q, k, v, window=None, bias=None, dropout_rate=0.0)
    np.testing.assert_array_equal(plain, same)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "window does not say how many keys"),
        ({"window": (1, 2, 3)}, "window does not say how many keys"),
        ({"q_segments": np.zeros((1, 8), int)}, "kv_segments is not given"),
        ({"bias": np.zeros((1, 1, 8, 9), np.float32)}, "bias does not fit q and k"),
        ({"bias": np.zeros((1, 1, 8, 8), int)}, "bias does not have a floating-point dtype"),
        ({"alibi_slopes": np.zeros(3)}, "alibi_slopes does not fit the heads"),
        ({"block_mask": np.ones((1, 1, 2, 1), bool)}, "block_mask does not fit q and k"),
        ({"block_mask": np.ones((1, 1, 1, 1))}, "block_mask is not boolean"),
        ({"mask_block": (16, 32)}, "mask_block does not fit"),
        ({"dropout_rate": 1.0, "dropout_seed": 0}, "dropout_rate is not a fraction"),
        ({"dropout_rate": 0.5}, "dropout needs a seed"),
        ({"dropout_rate": 0.5, "dropout_seed": 0.5}, "neither an integer nor a key"),
    ],
)
def test_errors(options, message):
    """What was got and what is accepted."""
    q = random(0, (1, 8, 2, 16), "float16")
    with on("sm_90a"), pytest.raises((InvalidValueError, InvalidTypeError), match=message):
        pallasite.ops.attention(q, q, q, **options)


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_windows_of_all_keys(target):
    """Numbers that stand for no limit, however large."""
    q, k = (random(n, (1, length, 2, 16), "float16") for n, length in ((0, 40), (1, 70)))
    with on(target):
        expected = pallasite.ops.attention(q, k, k, window=(3, None))
        for limit in (110, 2**31 - 1, 2**70):
            found = pallasite.ops.attention(q, k, k, window=(3, limit))
            np.testing.assert_array_equal(found, expected)


def test_rates_of_dropout_are_known():
    q = random(0, (1, 8, 2, 16), "float16")

    def attend(rate):
        return pallasite.ops.attention(q, q, q, dropout_rate=rate, dropout_seed=1)

    with on("sm_90a"), pytest.raises(InvalidValueError, match="dropout_rate is not a fraction"):
        jax.jit(attend)(0.5)


@pytest.mark.parametrize(
    ("target", "dtype", "low"),
    [
        ("sm_90a", "float16", -1e9),
        ("sm_90a", "bfloat16", -3e10),
        ("sm_90a", "bfloat16", np.finfo("f4").min),
        ("sm_100a", "float16", -1e9),
    ],
)
def test_biases_so_low_that_they_hide_keys(target, dtype, low):
    """A causal mask as a bias, tiles of keys without a visible one first, and rows of nothing else:
    there float32 knows no differences of scores, and all keys have the same weight."""
    seen = np.tri(66, 140, 74, dtype=bool)
    seen[20:26] = False
    q, k, v = (random(n, (1, length, 1, 32), dtype) for n, length in ((1, 66), (2, 140), (3, 140)))
    bias = np.where(seen, 0, low).astype(np.float32)[None, None]
    with on(target):
        out, pullback = jax.vjp(
            lambda *x: pallasite.ops.attention(*x, bias=jnp.asarray(bias)), q, k, v
        )
        found = pullback(out)
    hidden = np.where(seen, 0, -np.inf)[None, None]
    w = weights(exact(q), exact(k), {"bias": hidden})[0][0, 0]
    w[20:26] = 1 / 140
    expected = w @ exact(v)[0, :, 0]
    assert error(out[0, :, 0], expected) < TOLERANCE[dtype]
    d_w = expected @ exact(v)[0, :, 0].T
    d_scores = w * (d_w - (w * d_w).sum(axis=1, keepdims=True)) * 32**-0.5
    wanted = (d_scores @ exact(k)[0, :, 0], d_scores.T @ exact(q)[0, :, 0], w.T @ expected)
    for ours, theirs in zip(found, wanted, strict=True):
        assert error(ours[0, :, 0], theirs) < 3 * TOLERANCE[dtype]


def test_slopes_have_no_derivative():
    q = random(0, (1, 8, 2, 16), "float16")

    def total(slopes):
        return pallasite.ops.attention(q, q, q, alibi_slopes=slopes).sum()

    with on("sm_100a"), pytest.raises(UnsupportedError, match="no derivatives by alibi_slopes"):
        jax.grad(total)(jnp.ones(2))


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_second_derivatives_say_what_has_them(target):
    q = random(0, (1, 8, 2, 16), "float16")

    def slope(q):
        return jax.grad(lambda x: pallasite.ops.attention(x, q, q).astype("float32").sum())(q).sum()

    message = "derivative of attention has no derivatives(.|\n)*jax.nn.dot_product_attention has"
    with on(target), pytest.raises(UnsupportedError, match=message):
        jax.eval_shape(jax.grad(slope), q)


def test_gradient_of_a_bias_that_many_queries_share():
    """It is a sum over all of them, and not in the dtype of the bias."""
    q, k, v = (
        random(seed, (1, rows, 1, 16), "bfloat16") for seed, rows in ((1, 700), (2, 9), (3, 9))
    )
    bias = random(4, (1, 1, 1, 9), "bfloat16")

    def gradient(bias):
        def loss(bias):
            return pallasite.ops.attention(q, k, v, bias=bias).astype(jnp.float32).sum()

        return exact(jax.jit(jax.grad(loss))(bias))

    wide = gradient(bias.astype(jnp.float32))
    assert np.linalg.norm(gradient(bias) - wide) < 4e-3 * np.linalg.norm(wide)
