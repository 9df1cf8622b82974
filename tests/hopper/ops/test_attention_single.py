"""The gradients of attention by one kernel, against formulas in float64."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite_hopper.ops.flash import single_api
from pallasite_hopper.ops.flash.api import attention
from pallasite_hopper.ops.flash.single_choice import configs
from pallasite_hopper.ops.flash.single_config import SingleConfig
from pallasite_std.api import AttentionCall, AttentionProblem, Extras, two_numbers

pytestmark = pytest.mark.runs_kernels

NOTHING = Extras()


def seen(shape, left, right, extras, period):
    """Which keys queries see: (batch, queries, keys)."""
    batch, q_seq, kv_seq = shape
    query, key = np.arange(q_seq)[:, None], np.arange(kv_seq)
    lengths = [
        np.full(batch, most) if given is None else np.asarray(given)
        for given, most in ((extras.q_lengths, q_seq), (extras.kv_lengths, kv_seq))
    ]
    queries, keys = (one[:, None, None] for one in lengths)
    position = query + keys - queries
    found = (query < queries) & (key < keys)
    if left is not None:
        found = found & (key >= position - left)
    if right is not None:
        found = found & (key <= position + right)
    if period is not None:
        found = found & (query // period == key // period)
    if extras.q_segments is not None:
        found = found & (np.asarray(extras.q_segments)[:, :, None] == extras.kv_segments[:, None])
    return found, position


def reference(q, k, v, d_out, call, extras, period):
    """(out, lse, d_q, d_k, d_v) in float64."""
    q, k, v, d_out = (np.asarray(one, np.float64) for one in (q, k, v, d_out))
    batch, q_seq, heads, _ = q.shape
    group = heads // k.shape[2]
    wide_k, wide_v = (np.repeat(one, group, 2) for one in (k, v))
    scores = call.scale * np.einsum("bqhd,bkhd->bhqk", q, wide_k)
    slope = np.ones_like(scores)
    if call.soft_cap is not None:
        bend = np.tanh(scores / call.soft_cap)
        scores, slope = call.soft_cap * bend, 1 - bend**2
    shown, position = seen((batch, q_seq, k.shape[1]), *call.window, extras, period)
    if extras.bias is not None:
        scores = scores + np.asarray(extras.bias, np.float64)
    if extras.slopes is not None:
        distance = np.abs(position - np.arange(k.shape[1]))[:, None]
        scores = scores - np.asarray(extras.slopes, np.float64)[:, :, None, None] * distance
    powers = np.where(shown[:, None], np.exp(scores), 0.0)
    sums = powers.sum(-1, keepdims=True)
    weights = powers / np.where(sums > 0, sums, 1)
    out = np.einsum("bhqk,bkhd->bqhd", weights, wide_v)
    d_weights = np.einsum("bqhd,bkhd->bhqk", d_out, wide_v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    d_products = call.scale * d_scores * slope

    def of_group(one):
        return one.reshape(*one.shape[:2], -1, group, one.shape[3]).sum(3)

    with np.errstate(divide="ignore"):
        lse = np.log(sums[..., 0]).astype(np.float32)
    return (
        out,
        lse,
        np.einsum("bhqk,bkhd->bqhd", d_products, wide_k),
        of_group(np.einsum("bhqk,bqhd->bkhd", d_products, q)),
        of_group(np.einsum("bhqk,bqhd->bkhd", weights, d_out)),
    )


def check(
    *, batch=1, seq=(70, 80), heads=(1, 1), sizes=(64, 64), dtype="bfloat16", period=None,
    config=None, window=(None, None), soft_cap=None, extras=NOTHING, **changes,
):  # fmt: skip
    rng = np.random.default_rng(sum(seq) + sum(sizes))
    shapes = [
        (batch, length, count, size)
        for length, count, size in (
            (seq[0], heads[0], sizes[0]), (seq[1], heads[1], sizes[0]),
            (seq[1], heads[1], sizes[1]), (seq[0], heads[0], sizes[1]),
        )
    ]  # fmt: skip
    q, k, v, d_out = (jnp.asarray(rng.standard_normal(one), dtype) for one in shapes)
    call = AttentionCall(window[1] == 0, sizes[0] ** -0.5, soft_cap, None, window)
    out, lse, *expected = reference(q, k, v, d_out, call, extras, period)
    problem = AttentionProblem.of(q, k, v, call, period)
    config = config or dataclasses.replace(configs(problem)[0], **changes)
    lse = jnp.asarray(lse)
    if extras.bias is not None or extras.slopes is not None:
        lse = two_numbers(lse, 1.0)
    found = single_api.gradients(
        problem, config, q, k, v, jnp.asarray(out, dtype), lse, d_out, extras
    )
    tolerance = 1e-2 if dtype == "bfloat16" else 2e-3
    for name, result, wanted in zip("qkv", found, expected, strict=True):
        assert result.dtype == dtype
        assert result.shape == wanted.shape
        error = np.abs(np.asarray(result, np.float64) - wanted).max()
        assert error <= tolerance * np.abs(wanted).max(), (name, error)


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (SingleConfig(), (1, 1)),
        (SingleConfig(columns=32, stages=1), (2, 1)),
        (SingleConfig(columns=32, stages=3, together=True), (2, 2)),
        (SingleConfig(together=True, split=2), (3, 1)),
        (SingleConfig(stages=1, split=4), (2, 1)),
        (SingleConfig(columns=32, split=8), (2, 1)),
    ],
)
def test_configurations(config, heads):
    check(batch=2, seq=(130, 70), heads=heads, config=config, window=(None, 0))


@pytest.mark.parametrize(
    "sizes",
    [(8, 8), (40, 96), (20, 13), (256, 256), pytest.param((144, 136), marks=pytest.mark.slow)],
)
def test_heads(sizes):
    check(seq=(43, 70), sizes=sizes, dtype="float16", heads=(2, 1))


def test_windows_segments_and_what_is_added_to_scores():
    rng = np.random.default_rng(1)
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, 90))), jnp.int32)
    check(
        batch=2, seq=(90, 90), heads=(2, 2), window=(30, 10), soft_cap=2.0,
        extras=Extras(q_segments=segments, kv_segments=segments),
    )  # fmt: skip
    check(
        batch=2, seq=(50, 90), heads=(2, 1), window=(None, 0), split=2,
        extras=Extras(
            q_lengths=jnp.asarray([50, 7], jnp.int32), kv_lengths=jnp.asarray([66, 90], jnp.int32),
            bias=jnp.asarray(rng.standard_normal((1, 2, 50, 90)), jnp.float32),
            slopes=jnp.asarray([[0.1, 0.2]], jnp.float32),
        ),
    )  # fmt: skip


def test_lengths_of_nothing():
    lengths = [jnp.asarray(one, jnp.int32) for one in ([70, 0, 3, 0], [0, 80, 80, 0])]
    check(batch=4, extras=Extras(q_lengths=lengths[0], kv_lengths=lengths[1]))


@pytest.mark.parametrize(
    "window", [pytest.param((None, None), marks=pytest.mark.slow), (None, 0), (2, 3)]
)
def test_sequences_one_after_the_other(window):
    check(seq=(150, 150), period=7, window=window, heads=(2, 1))
    check(seq=(150, 150), period=50, window=window, columns=32)


def operations(jaxpr):
    """Names of what a program computes, kernels as one each; reshaping moves nothing."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = equation.params.get("call_jaxpr", equation.params.get("call"))
        if name != "pallasite_kernel" and inner is not None:
            found += operations(inner.jaxpr)
        elif name != "reshape":
            found.append(name)
    return found


@pytest.mark.parametrize(
    ("q_shape", "kv_shape"),
    [((6, 43, 1, 112), None), ((1, 33, 16, 120), None), ((1, 170, 8, 64), (1, 170, 2, 64))],
)
def test_short_sequences_take_one_kernel(q_shape, kv_shape):
    q, kv = (jax.ShapeDtypeStruct(one, jnp.bfloat16) for one in (q_shape, kv_shape or q_shape))

    def both(d_out, *operands):
        return jax.vjp(lambda *arrays: attention(*arrays, causal=True), *operands)[1](d_out)

    with pallasite.target("sm_90a"):
        traced = jax.make_jaxpr(both)(q, q, kv, kv)
    assert operations(traced.jaxpr) == ["pallasite_kernel"] * 2


@pytest.mark.parametrize(
    "options", [{"block_mask": True}, {"length": 4096}, {"length": 4096, "segments": True}]
)
def test_what_takes_several(options):
    length = options.pop("length", 128)
    arrays = jax.ShapeDtypeStruct((1, length, 16, 128), jnp.bfloat16)
    call = AttentionCall(False, 1.0, None, None)
    segments = jnp.zeros((1, length), jnp.int32) if options.pop("segments", None) else None
    extras = Extras(q_segments=segments, kv_segments=segments, **options)
    problem = AttentionProblem.of(arrays, arrays, arrays, call, None)
    assert single_api.chosen(problem, extras) is None


@pytest.mark.parametrize("size", [64, 128, 160, 256])
def test_default_configurations_have_registers_enough(size):
    shape = jax.ShapeDtypeStruct((1, 200, 4, size), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((1, 4, 256), jnp.float32)
    problem = AttentionProblem.of(
        shape, shape, shape, AttentionCall(True, 1.0, None, None, (None, 0)), None
    )
    config = configs(problem)[0]

    def run(q, k, v, out, lse, d_out):
        return single_api.gradients(problem, config, q, k, v, out, lse, d_out, Extras())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (kernel,) = pallasite.compile_all(
            run, shape, shape, shape, shape, lse, shape, assemble=True, target="sm_90a"
        )
    assert kernel.cubin is not None
    assert kernel.resources.spill_store_bytes == kernel.resources.spill_load_bytes == 0
