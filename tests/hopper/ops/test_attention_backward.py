"""The backward of attention against a reference in float64."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_hopper.ops.flash.backward import attention_backward
from pallasite_hopper.ops.flash.backward_choice import best_of, default_config, microseconds
from pallasite_hopper.ops.flash.backward_config import BackwardConfig, BackwardProblem
from pallasite_hopper.ops.flash.steps import makespan, meeting

pytestmark = pytest.mark.runs_kernels


def reference(q, k, v, d_out, *, causal, scale, soft_cap=None, q_lengths=None, kv_lengths=None):
    """(out, lse, dq, dk, dv) in float64; what does not exist is zero, and -inf in lse."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    group = q.shape[2] // k.shape[2]
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    for batch, head in np.ndindex(q.shape[0], q.shape[2]):
        queries = slice(0, q.shape[1] if q_lengths is None else int(q_lengths[batch]))
        keys = slice(0, k.shape[1] if kv_lengths is None else int(kv_lengths[batch]))
        mine, theirs = (batch, queries, head), (batch, keys, head // group)
        scores = scale * q[mine] @ k[theirs].T
        slope = np.ones_like(scores)
        if soft_cap is not None:
            bend = np.tanh(scores / soft_cap)
            scores, slope = soft_cap * bend, 1 - bend**2
        if causal:
            rows, columns = np.indices(scores.shape)
            scores[columns > rows + keys.stop - queries.stop] = -np.inf
        largest = scores.max(axis=1, keepdims=True, initial=-1e300)
        exponentials = np.exp(scores - largest)
        sums = exponentials.sum(axis=1, keepdims=True)
        seeing = sums[:, 0] > 0
        p = exponentials / np.where(sums > 0, sums, 1)
        lse[batch, head, queries][seeing] = (
            largest[:, 0] + np.log(np.where(seeing, sums[:, 0], 1))
        )[seeing]
        out[mine] = p @ v[theirs]
        dv[theirs] += p.T @ d_out[mine]
        dp = d_out[mine] @ v[theirs].T
        ds = p * (dp - np.sum(d_out[mine] * out[mine], axis=1, keepdims=True)) * slope
        dq[mine] = scale * ds @ k[theirs]
        dk[theirs] += scale * ds.T @ q[mine]
    return out, lse.astype(np.float32), dq, dk, dv


def inputs(batch, q_seq, kv_seq, q_heads, kv_heads, head_dim, dtype):
    generator = np.random.default_rng(q_seq + kv_seq)
    q_shape, kv_shape = (batch, q_seq, q_heads, head_dim), (batch, kv_seq, kv_heads, head_dim)
    shapes = (q_shape, kv_shape, kv_shape, q_shape)
    return [jnp.asarray(generator.standard_normal(shape).astype(dtype)) for shape in shapes]


def check(
    *, batch=1, q_seq=128, kv_seq=128, heads=(1, 1), head_dim=64, dtype=jnp.bfloat16, causal=False,
    config=None, scale=None, **options,
):  # fmt: skip
    q, k, v, d_out = inputs(batch, q_seq, kv_seq, *heads, head_dim, dtype)
    scale = head_dim**-0.5 if scale is None else scale
    out, lse, *expected = reference(q, k, v, d_out, causal=causal, scale=scale, **options)
    arrays = {
        name: value if name == "soft_cap" else jnp.asarray(value, jnp.int32)
        for name, value in options.items()
    }
    results = attention_backward(
        q, k, v, jnp.asarray(out, dtype), jnp.asarray(lse), d_out,
        causal=causal, scale=scale, config=config, **arrays,
    )  # fmt: skip
    tolerance = 1e-2 if dtype == jnp.bfloat16 else 2e-3
    for name, result, wanted in zip(("dq", "dk", "dv"), results, expected, strict=True):
        assert result.dtype == dtype and result.shape == wanted.shape
        result = np.asarray(result, np.float64)
        assert np.isfinite(result).all(), name
        error = np.abs(result - wanted).max()
        assert error <= tolerance * np.abs(wanted).max(), (name, error)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (128, True)])
def test_several_tiles(head_dim, causal):
    check(q_seq=140, kv_seq=150, head_dim=head_dim, causal=causal)


def test_float16():
    check(q_seq=64, kv_seq=64, dtype=jnp.float16, causal=True)


@pytest.mark.parametrize(
    ("q_seq", "kv_seq", "causal"),
    [(1, 1, True), (3, 130, True), (130, 3, True), (70, 200, False)],
)
def test_lengths_that_do_not_divide_the_tiles(q_seq, kv_seq, causal):
    check(q_seq=q_seq, kv_seq=kv_seq, causal=causal)


@pytest.mark.parametrize(
    ("causal", "changes"), [(False, {"parts": 3}), (True, {"parts": 2, "own_keys": True})]
)
def test_blocks_that_share_keys(causal, changes):
    """Blocks go through a part of the queries, or through those of one head of the group."""
    config = BackwardConfig(block_q=64, warpgroups=1, ds_stages=2, **changes)
    shapes = dict(kv_seq=300, q_seq=290, heads=(4, 2), head_dim=32)
    check(**shapes, q_lengths=[200], causal=causal, config=config)


@pytest.mark.parametrize(
    ("shape", "divided"),
    [
        # A few blocks more than multiprocessors, and the first go through twice as much as most.
        (dict(q_heads=16, kv_heads=2, q_seq=4305, kv_seq=4305, head_dim=160, causal=True), True),
        (dict(q_heads=8, kv_heads=1, q_seq=5000, kv_seq=5000, head_dim=96, causal=True), True),
        (dict(q_heads=1, kv_heads=1, q_seq=6000, kv_seq=6000, left=4000, right=0), True),
        # 224 blocks of 132 multiprocessors, with groups of 8.
        (dict(q_heads=64, kv_heads=8, q_seq=3521, kv_seq=3521, head_dim=96, causal=True), True),
        # Few blocks of one warpgroup, whose steps take as long as those of two.
        (dict(q_heads=2, kv_heads=2, q_seq=700, kv_seq=700, head_dim=64, causal=True), True),
        (dict(batch=8, causal=True), False),
        (dict(q_heads=132, kv_heads=132, q_seq=64, kv_seq=64), False),
        # Steps of windows take longer than the estimate says.
        (
            dict(
                q_heads=8, kv_heads=1, q_seq=12575, kv_seq=12575, head_dim=160, left=5686, right=0
            ),
            False,
        ),
    ],
)
def test_work_is_divided_where_multiprocessors_would_be_idle(shape, divided):
    given = problem(**shape)
    config = default_config(given)
    assert (config.parts > 1 or config.own_keys) == divided
    alone = dataclasses.replace(config, parts=1, own_keys=False)
    assert 0 < microseconds(given, config) <= microseconds(given, alone)


@pytest.mark.parametrize(
    ("heads", "length", "head_dim", "warpgroups"),
    [(1, 5000, 64, 2), (3, 1900, 96, 2), (3, 600, 64, 1), (10, 250, 32, 1)],
)
def test_few_tiles_of_two_warpgroups_where_their_steps_are_many(
    heads, length, head_dim, warpgroups
):
    given = problem(q_heads=heads, kv_heads=heads, q_seq=length, kv_seq=length, head_dim=head_dim)
    halves = best_of(given)
    assert halves.warpgroups == 1 and default_config(given).warpgroups == warpgroups
    whole = best_of(given, halves=False)
    assert (microseconds(given, whole) < 0.8 * microseconds(given, halves)) == (warpgroups == 2)


def test_time_of_blocks_by_their_order():
    assert makespan([], 2) == 0
    assert makespan([5, 3, 3, 1], 2) == 6
    assert makespan([1, 3, 3, 5], 2) == 8


def test_tiles_that_meet():
    """Counted as pairs of tiles of which some rows see each other."""
    for left, right, period in ((None, None, None), (None, 0, None), (40, 3, None), (None, 0, 48)):
        queries, keys = (192, 192) if period else (200, 150)
        row, column = np.indices((queries, keys))
        seen = np.ones((queries, keys), bool)
        shift = keys - queries
        if left is not None:
            seen &= column >= row + shift - left
        if right is not None:
            seen &= column <= row + shift + right
        if period is not None:
            seen &= row // period == column // period
        counts = meeting(
            keys, queries, 64, 32, before=right, after=left, shift=-shift, period=period
        )
        for tile, count in enumerate(counts):
            rows = np.flatnonzero(seen[:, tile * 64 : (tile + 1) * 64].any(axis=1)) // 32
            assert count >= np.unique(rows).size
            assert count <= np.unique(rows).size + 1


@pytest.mark.parametrize(("heads", "causal"), [((4, 2), True), ((3, 1), False)])
def test_heads_of_queries_share_heads_of_keys(heads, causal):
    check(batch=heads[1], q_seq=80, kv_seq=70, heads=heads, causal=causal)


@pytest.mark.parametrize(
    ("head_dim", "causal"),
    [
        (256, False),
        (256, True),
        (160, True),
        pytest.param(200, True, marks=pytest.mark.slow),
        (96, False),
    ],
)
def test_other_heads(head_dim, causal):
    heads = (2, 1) if causal else (1, 1)
    check(q_seq=70, kv_seq=80, heads=heads, head_dim=head_dim, causal=causal)


def test_soft_cap():
    check(q_seq=70, kv_seq=70, head_dim=128, soft_cap=2.0, scale=0.5)
    check(q_seq=70, kv_seq=70, causal=True, soft_cap=2.0, scale=0.5)


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_with_lengths_of_their_own(causal):
    check(
        batch=4, q_seq=130, kv_seq=140, causal=causal,
        q_lengths=(130, 31, 1, 0), kv_lengths=(129, 140, 0, 64),
    )  # fmt: skip
    if causal:
        check(batch=4, q_seq=130, kv_seq=140, causal=causal, q_lengths=(64, 60, 0, 130))


CONFIGS = {
    "plain": BackwardConfig(ahead="nothing"),
    "dk": BackwardConfig(ahead="dk", ds_stages=2),
    "scores": BackwardConfig(ahead="scores", ds_stages=2, parts=2),
    "values_first": BackwardConfig(values_first=True, heads_per_section=2),
    "80": BackwardConfig(block_q=80, transposed_dq=True, ahead="nothing", stagger=True),
    "one_stage": BackwardConfig(q_stages=1, d_out_stages=1, ahead="nothing"),
    "128": BackwardConfig(block_q=128, ds_stages=2, ahead="nothing"),
    "rounds": BackwardConfig(shared_keys=True, dq_rounds=2),
}


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        ("plain", True),
        ("dk", False),
        ("dk", True),
        ("scores", False),
        ("scores", True),
        ("values_first", True),
        ("80", False),
        ("80", True),
        ("one_stage", False),
        ("128", True),
        ("rounds", True),
    ],
)
@pytest.mark.sampled(alone=("name", "causal"))
def test_configurations(name, causal):
    head_dim = {"80": 128, "rounds": 224}.get(name, 64)
    check(q_seq=140, kv_seq=150, head_dim=head_dim, causal=causal, config=CONFIGS[name])


def test_configuration_of_another_head_size():
    with pytest.raises(InvalidValueError, match="cannot be shared by the warpgroups"):
        check(config=CONFIGS["80"])


def problem(**changes):
    fields = {
        "batch": 1, "q_heads": 16, "kv_heads": 16, "q_seq": 4096, "kv_seq": 4096, "head_dim": 128,
        "dtype": jnp.bfloat16, "causal": False, "scale": 0.1, "soft_cap": None,
        "has_lengths": False,
    }  # fmt: skip
    return BackwardProblem(**fields | changes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.sampled(alone=("head_dim", "causal"))
def test_default_configurations_have_registers_enough(head_dim, causal):
    shape = jax.ShapeDtypeStruct((1, 4096, 16, head_dim), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((1, 16, 4096), jnp.float32)
    config = default_config(problem(head_dim=head_dim, causal=causal))
    function = functools.partial(
        attention_backward, causal=causal, scale=head_dim**-0.5, config=config
    )
    arguments = (shape, shape, shape, shape, lse, shape)
    with warnings.catch_warnings():
        # Of spills, and of products that ptxas does not run asynchronously.
        warnings.simplefilter("error")
        kernels = pallasite.compile_all(function, *arguments, assemble=True, target="sm_90a")
    for kernel in kernels:
        assert kernel.cubin is not None
        assert kernel.resources.spill_store_bytes == kernel.resources.spill_load_bytes == 0


def refused(kind, message, *arrays, **options):
    with pytest.raises(kind) as error:
        attention_backward(*arrays, **{"causal": False, "scale": 1.0} | options)
    assert message in str(error.value)


def test_what_does_not_fit_together():
    q, k, v, d_out = inputs(1, 64, 64, 2, 1, 64, jnp.bfloat16)
    lse = jnp.zeros((1, 2, 64))
    refused(InvalidValueError, "q does not have the dimensions", q[0], k, v, q, lse, d_out)
    refused(InvalidValueError, "q, k and v do not fit", q, k, v[:, :32], q, lse, d_out)
    refused(InvalidValueError, "cannot share", k, q, q, k, lse[:, :1], k)
    refused(InvalidTypeError, "float32", q, k.astype(jnp.float32), v, q, lse, d_out)
    wide = [jnp.zeros((*x.shape[:3], 264), x.dtype) for x in (q, k, v, q)]
    refused(InvalidValueError, "head_dim 264", *wide, lse, d_out)
    refused(InvalidValueError, "lse does not", q, k, v, q, lse[..., :3], d_out)
    refused(InvalidValueError, "d_out is not like q", q, k, v, q, lse, k)
    refused(InvalidValueError, "q_lengths", q, k, v, q, lse, d_out, q_lengths=jnp.zeros((2,), int))


@pytest.mark.parametrize(
    "arguments",
    [
        {"block_q": 24},
        {"block_q": 80},
        {"ds_stages": 3},
        {"ahead": "x"},
        {"ahead": "dk", "q_stages": 1},
        {"dq_rounds": 3},
    ],
)
def test_configurations_that_cannot_work(arguments):
    with pytest.raises(InvalidValueError, match="BackwardConfig"):
        BackwardConfig(**arguments)
