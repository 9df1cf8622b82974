"""The forward of attention against a reference in float64, in all configurations."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pallasite
from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite_hopper.ops.flash import api, tiles
from pallasite_hopper.ops.flash.api import attention, attention_forward
from pallasite_hopper.ops.flash.config import (
    SHARED_BYTES,
    AttentionConfig,
)
from pallasite_hopper.ops.flash.forward_choice import default_config

pytestmark = pytest.mark.runs_kernels

HEAD_DIMS = (64, 128, 256)

SMALL = AttentionConfig(block_kv=32)
"""Small steps, so that short sequences take several."""


@pytest.fixture(autouse=True)
def _few_multiprocessors(monkeypatch):
    """Blocks that go through several tiles even of small problems."""
    monkeypatch.setattr(api, "MULTIPROCESSORS", 4)


def inputs(batch, q_seq, kv_seq, heads, head_dim, dtype=jnp.bfloat16):
    shapes = [(batch, q_seq, heads[0], head_dim), *[(batch, kv_seq, heads[1], head_dim)] * 2]
    generator = np.random.default_rng(q_seq * kv_seq)
    return [jnp.asarray(generator.standard_normal(shape).astype(dtype)) for shape in shapes]


def reference(q, k, v, *, causal, scale, soft_cap=None, q_lengths=None, kv_lengths=None):
    """(out, lse) in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
    for batch, head in np.ndindex(q.shape[0], q.shape[2]):
        queries = q.shape[1] if q_lengths is None else int(q_lengths[batch])
        keys = k.shape[1] if kv_lengths is None else int(kv_lengths[batch])
        kv_head = head // (q.shape[2] // k.shape[2])
        for row in range(queries):
            seen = min(keys, row + 1 + keys - queries) if causal else keys
            if seen <= 0:
                continue
            scores = scale * k[batch, :seen, kv_head] @ q[batch, row, head]
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            largest = scores.max()
            weights = np.exp(scores - largest)
            out[batch, row, head] = weights @ v[batch, :seen, kv_head] / weights.sum()
            lse[batch, head, row] = largest + np.log(weights.sum())
    return out, lse


def check(
    batch=1, q_seq=128, kv_seq=96, heads=(1, 1), head_dim=64, *, dtype=jnp.bfloat16, causal=False,
    scale=None, config=SMALL, arrays=None, lse_tolerance=1e-5, **options,
):  # fmt: skip
    q, k, v = inputs(batch, q_seq, kv_seq, heads, head_dim, dtype) if arrays is None else arrays
    scale = head_dim**-0.5 if scale is None else scale
    out, lse = reference(q, k, v, causal=causal, scale=scale, **options)
    given = {
        name: value if name == "soft_cap" else jnp.asarray(value) for name, value in options.items()
    }
    result, sums = attention_forward(q, k, v, causal=causal, scale=scale, config=config, **given)
    assert result.dtype == dtype and result.shape == q.shape
    assert sums.dtype == jnp.float32 and sums.shape == lse.shape
    # Weights are rounded to the dtype, and so are results.
    unit = 2.0 ** (-8 if dtype == jnp.bfloat16 else -11)
    np.testing.assert_allclose(
        np.asarray(result, np.float64), out, rtol=2 * unit, atol=unit * np.abs(v).max()
    )
    assert (np.isneginf(sums) == np.isneginf(lse)).all()
    finite = np.isfinite(lse)
    np.testing.assert_allclose(sums[finite], lse[finite], rtol=1e-5, atol=lse_tolerance)


@pytest.mark.parametrize(("split", "warpgroups"), [(2, 1), (4, 1), (8, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {"q_seq": 70, "kv_seq": 300, "heads": (2, 1)},
        {"q_seq": 130, "kv_seq": 130, "causal": True, "head_dim": 72, "soft_cap": 3.0},
        {"batch": 2, "q_seq": 50, "kv_seq": 200, "kv_lengths": [0, 70], "q_lengths": [50, 20]},
        {"q_seq": 64, "kv_seq": 170, "head_dim": 256, "dtype": jnp.float16},
    ],
    ids=["shared", "causal", "lengths", "256"],
)
@pytest.mark.sampled(alone=("split",))
def test_blocks_share_the_keys_of_a_tile(split: int, warpgroups: int, options):
    options = {name: np.array(v) if "lengths" in name else v for name, v in options.items()}
    if warpgroups > 1 and options.get("head_dim") == 256:
        pytest.skip("sums do not fit the keys' place")
    config = AttentionConfig(
        warpgroups=warpgroups,
        block_kv=32,
        ping_pong=warpgroups == 2,
        persistent=False,
        separate_out=False,
        split=split,
    )
    check(**options, config=config)


@pytest.mark.parametrize(
    ("head_dim", "causal", "q_seq", "heads", "kv_seq", "left", "shared"),
    [
        (64, True, 2500, 1, 2500, None, True),
        (128, False, 4000, 1, 4000, None, True),
        (256, True, 900, 4, 900, None, True),
        (128, False, 64, 8, 8192, None, True),
        (72, False, 300, 1, 300, None, False),  # Too few keys.
        (64, True, 3000, 1, 3000, 500, False),
        (64, True, 600, 8, 600, None, False),  # Too many tiles.
        (128, False, 4096, 16, 4096, None, False),
    ],
)
def test_blocks_share_keys_where_tiles_are_few(
    head_dim, causal, q_seq, heads, kv_seq, left, shared
):
    config = default_config(head_dim, causal, q_seq, heads=heads, kv_seq=kv_seq, left=left)
    assert (config.split > 1) == shared and config.fits(head_dim)


def test_few_queries_of_many_keys():
    check(q_seq=20, kv_seq=1300, heads=(2, 1), causal=True, config=None)


@pytest.mark.parametrize(("split", "warpgroups"), [(4, 1), (2, 2)])
def test_blocks_share_keys_in_a_window_with_segments_and_slopes(split, warpgroups):
    generator = np.random.default_rng(5)
    q, k, v = inputs(1, 150, 150, (2, 2), 64)
    segments = np.sort(generator.integers(0, 3, (1, 150))).astype(np.int32)
    options = {
        "causal": True,
        "window": 60,
        "q_segments": segments,
        "kv_segments": segments,
        "alibi_slopes": jnp.asarray([0.1, 0.3]),
    }
    fields = {"warpgroups": warpgroups, "persistent": False, "separate_out": False}
    config = AttentionConfig(block_kv=32, split=split, **fields)
    out = attention(q, k, v, **options, config=config)
    rows, columns = np.indices((150, 150))
    shown = (columns <= rows) & (columns >= rows - 60) & (segments == segments.T)
    scores = np.einsum("bqhd,bkhd->bhqk", *(np.asarray(x, np.float64) for x in (q, k))) / 8
    scores -= np.array([0.1, 0.3])[:, None, None] * np.abs(rows - columns)
    weights = np.where(shown, np.exp(scores), 0)
    weights /= weights.sum(axis=-1, keepdims=True)
    wanted = np.einsum("bhqk,bkhd->bqhd", weights, np.asarray(v, np.float64))
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.sampled(alone=("head_dim", "dtype"))
def test_head_dims_and_dtypes(head_dim, dtype):
    config = AttentionConfig(block_kv=32, separate_out=head_dim != 256)
    check(head_dim=head_dim, dtype=dtype, causal=dtype == jnp.float16, config=config)


@pytest.mark.parametrize("head_dim", [8, 20, 72, 80, 96, 192])
def test_heads_that_do_not_fill_tiles(head_dim):
    check(q_seq=70, kv_seq=90, heads=(2, 1), head_dim=head_dim, causal=True, config=None)


def test_programs_have_no_constants():
    """What surrounds the kernel, such as jit, need not pass any on."""
    program = jax.make_jaxpr(attention)(*inputs(1, 8, 8, (1, 1), 72))
    assert not program.consts


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_default_configurations(head_dim):
    check(q_seq=64, kv_seq=100, head_dim=head_dim, config=None)


@pytest.mark.parametrize(
    ("q_seq", "kv_seq", "causal"),
    [(1, 1, True), (70, 97, False), (70, 97, True), (140, 33, True), (64, 32, False)],
)
def test_lengths_that_do_not_divide_tiles(q_seq, kv_seq, causal):
    check(batch=1 + (q_seq == 70), q_seq=q_seq, kv_seq=kv_seq, causal=causal)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_grouped_heads(heads):
    check(batch=heads[1], q_seq=64, kv_seq=40, heads=heads, causal=True)


@pytest.mark.parametrize(
    ("causal", "change"),
    [
        (True, {"warpgroups": 1}),
        (False, {"warpgroups": 3}),
        (True, {"warpgroups": 3, "ping_pong": False}),
        (True, {"persistent": False}),
        (False, {"stages": 3}),
        (False, {"separate_out": False}),
        (True, {"separate_out": False, "persistent": False}),
        (False, {"cluster": 2}),
        (True, {"cluster": 2, "separate_out": False}),
        (True, {"cluster": 4, "warpgroups": 1}),
        (True, {"block_kv": 16}),
        (False, {"block_kv": 176}),
        (True, {"cache_bytes": 1}),
    ],
    ids=str,
)
def test_configurations(causal, change):
    config = AttentionConfig(**{"block_kv": 32, **change})
    check(q_seq=150, kv_seq=70, heads=(2, 2), causal=causal, config=config)


@pytest.mark.parametrize("every", [1, 3])
def test_polynomial_exponentials(every):
    config = AttentionConfig(block_kv=32, polynomial=every)
    check(config=config, causal=True, q_seq=120, kv_seq=90, lse_tolerance=1e-4)


def test_soft_cap():
    check(soft_cap=1.0, causal=True, kv_seq=120)


@pytest.mark.parametrize("scale", [1e-3, 7.5])
def test_scales(scale):
    check(scale=scale, lse_tolerance=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_variable_lengths(causal):
    options = {"q_lengths": np.array([70, 0, 33, 1]), "kv_lengths": np.array([100, 50, 20, 0])}
    check(batch=4, q_seq=70, kv_seq=100, causal=causal, **options)
    one = "q_lengths" if causal else "kv_lengths"
    check(batch=4, q_seq=70, kv_seq=100, causal=causal, **{one: options[one]})


@pytest.mark.parametrize(
    ("names", "causal"),
    [
        (("q_lengths", "kv_lengths"), False),
        (("q_lengths", "kv_lengths"), True),
        (("q_lengths",), True),
        (("kv_lengths",), False),
    ],
)
def test_lengths_beyond_the_arrays(names, causal):
    q, k, v = inputs(3, 70, 100, (1, 1), 64)
    pairs = {"q_lengths": ([90, 70, -3], 70), "kv_lengths": ([100, 117, 101], 100)}
    lengths = {name: np.array(pairs[name][0]) for name in names}
    clipped = {name: np.clip(pairs[name][0], 0, pairs[name][1]) for name in names}

    def with_gradients(given):
        found, pull = jax.vjp(functools.partial(attention, causal=causal, **given), q, k, v)
        return found, *pull(jnp.cos(found))

    found, *gradients = with_gradients(lengths)
    expected, _ = reference(q, k, v, causal=causal, scale=64**-0.5, **clipped)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=2e-2)
    for one, other in zip((found, *gradients), with_gradients(clipped), strict=True):
        np.testing.assert_array_equal(one, other)


def test_queries_that_see_no_key():
    check(q_seq=200, kv_seq=10, causal=True)


def test_large_scores():
    q, k, v = inputs(1, 64, 64, (1, 1), 64)
    check(arrays=(q * 100, k * 100, v), causal=True, lse_tolerance=1.0)


def test_maximum_grows_from_block_to_block():
    q, k, v = inputs(1, 64, 128, (1, 1), 64)
    growth = jnp.linspace(8, 0, 128)[None, :, None, None]
    check(arrays=(jnp.abs(q), (jnp.abs(k) * growth).astype(q.dtype), v), lse_tolerance=1e-3)


@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    q_seq=st.integers(1, 150),
    kv_seq=st.integers(1, 100),
    heads=st.sampled_from([(1, 1), (2, 1)]),
    causal=st.booleans(),
    warpgroups=st.integers(1, 3),
    cluster=st.sampled_from([1, 2]),
    stages=st.integers(2, 3),
    block_kv=st.sampled_from([16, 48]),
    separate_out=st.booleans(),
)
def test_random_problems(q_seq, kv_seq, heads, causal, **fields):
    check(q_seq=q_seq, kv_seq=kv_seq, heads=heads, causal=causal, config=AttentionConfig(**fields))


# As part of programs ------------------------------------------------------------------------------


def test_without_residuals_and_in_jit():
    q, k, v = inputs(1, 64, 64, (2, 1), 64)
    expected, _ = reference(q, k, v, causal=True, scale=0.125)
    result = jax.jit(lambda *args: attention(*args, causal=True, config=SMALL))(q, k, v)
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, atol=2e-2)


@pytest.mark.parametrize(("causal", "head_dim"), [(False, 64), (True, 64), (True, 72)])
def test_derivatives(causal, head_dim):
    q, k, v = inputs(1, 64, 64, (2, 1), head_dim)
    weights = jnp.asarray(np.random.default_rng(9).standard_normal(q.shape).astype(jnp.float32))

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * head_dim**-0.5
        if causal:
            scores = jnp.where(jnp.tri(64, dtype=bool), scores, -jnp.inf)
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return jnp.sum(out * weights)

    def ours(q, k, v):
        return jnp.sum(attention(q, k, v, causal=causal) * weights)

    gradients = jax.jit(jax.grad(ours, argnums=(0, 1, 2)))(q, k, v)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    wanted = jax.jit(jax.grad(plain, (0, 1, 2)))(*wide)
    for result, expected in zip(gradients, wanted, strict=True):
        assert result.dtype == jnp.bfloat16
        error = jnp.linalg.norm(result.astype(jnp.float32) - expected)
        assert error <= 1e-2 * jnp.linalg.norm(expected)


# The order of tiles -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal", "multiprocessors", "cache_bytes"),
    [
        (False, 3, 1),
        (True, 3, 1 << 17),
        (True, 8, 1),
        (True, 3, 1 << 30),
        (False, 132, 1 << 30),
        (True, 132, 1 << 17),
    ],
)
def test_each_tile_once(causal, multiprocessors, cache_bytes, monkeypatch):
    config = AttentionConfig(cache_bytes=cache_bytes)
    problem = tiles.Problem(2, 1000, 512, 4, 2, 64, jnp.bfloat16, causal, 1.0)
    order = tiles.Tiles(problem, config, multiprocessors)
    table = order.table()
    assert (table is not None) == (causal and order.clusters < order.count)
    seen: collections.Counter = collections.Counter()
    work: collections.Counter = collections.Counter()
    for block in range(order.clusters):
        monkeypatch.setattr(tiles.lax, "axis_index", lambda name, block=block: jnp.int32(block))

        def note(tile, carry, block=block):
            jax.debug.callback(
                lambda *where: (
                    seen.update([tuple(map(int, where[:3]))]),
                    work.update({block: int(where[3])}),
                ),
                tile.batch, tile.head, tile.start, jnp.int32(tile.blocks),
            )  # fmt: skip
            return carry

        order.each(note, jnp.int32(0), (None, None), None if table is None else jnp.asarray(table))
    jax.effects_barrier()
    assert len(seen) == 2 * 4 * 8 and set(seen.values()) == {1}
    assert {start for _, _, start in seen} == set(range(0, 1000, 128))
    most, mean = max(work.values()), sum(work.values()) / order.clusters
    assert most <= mean + 9  # The longest tile has 8 blocks.


# Code ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 40, 192])
@pytest.mark.sampled(alone=("head_dim", "causal"))
def test_default_configuration_fits_registers_and_shared_memory(head_dim, causal):
    config = default_config(head_dim, causal, 4096)
    assert config.shared_bytes(head_dim) <= SHARED_BYTES - 256
    x = jax.ShapeDtypeStruct((1, 4096, 2, head_dim), jnp.bfloat16)
    problem = tiles.Problem(1, 4096, 4096, 2, 2, head_dim, x.dtype, causal, 0.1)
    kernel = api._kernel(problem, config, 132)
    compiled = pallasite.compile(kernel, x, x, x, target="sm_90a")
    products = compiled.ptx.count("wgmma.mma_async")
    assert products == (3 if causal else 2) * (-(-head_dim // 32) * 32 + config.block_kv) // 16
    assert "div.full" in compiled.ptx and "ex2.approx.ftz.f32" in compiled.ptx


# Errors -------------------------------------------------------------------------------------------


def refused(kind, *args, **kwargs):
    with pytest.raises(kind) as error:
        attention(*args, **kwargs)
    return str(error.value)


def array(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


def test_shapes_are_checked():
    q, k = array(1, 64, 4, 64), array(1, 64, 2, 64)
    assert "four dimensions" in refused(InvalidTypeError, q[0], k, k)
    assert "same shape" in refused(InvalidValueError, q, k, k[:, :32])
    assert "batch and head_dim" in refused(
        InvalidValueError, q, array(2, 64, 2, 64), array(2, 64, 2, 64)
    )
    assert "divided among" in refused(
        InvalidValueError, q, array(1, 64, 3, 64), array(1, 64, 3, 64)
    )
    text = refused(InvalidValueError, *[array(1, 64, 1, 264)] * 3)
    assert "head_dim 264" in text and "at most 256" in text
    assert attention(array(1, 0, 4, 64), k, k).shape == (1, 0, 4, 64)


def test_dtypes_are_checked():
    q = array(1, 64, 1, 64)
    assert "bfloat16 or float16" in refused(InvalidTypeError, q.astype(jnp.float32), q, q)
    assert "one dtype" in refused(InvalidTypeError, q, q.astype(jnp.float16), q)


@pytest.mark.parametrize("name", ["scale", "soft_cap"])
def test_numbers_are_checked(name):
    q = array(1, 64, 1, 64)
    for value in (0.0, -1.0, float("inf"), float("nan")):
        assert f"{name} is not positive" in refused(InvalidValueError, q, q, q, **{name: value})
    assert f"{name} must be known" in refused(InvalidTypeError, q, q, q, **{name: "1"})


def test_lengths_are_checked():
    q = array(2, 64, 1, 64)
    assert "integers of shape (2,)" in refused(InvalidTypeError, q, q, q, q_lengths=jnp.arange(3))
    assert "kv_lengths" in refused(InvalidTypeError, q, q, q, kv_lengths=jnp.ones(2))


def test_configurations_are_checked():
    q = array(1, 64, 1, 256)
    text = refused(InvalidValueError, q, q, q, config=AttentionConfig(stages=4))
    assert "does not fit shared memory" in text and "stages" in text
    assert "not of type AttentionConfig" in refused(InvalidTypeError, q, q, q, config="fast")
    for wrong in (
        {"warpgroups": 4},
        {"block_kv": 264},
        {"block_kv": 24},
        {"cluster": 3},
        {"split": 3},
        {"split": 2},
        {"stages": 1},
    ):
        with pytest.raises(InvalidValueError, match=next(iter(wrong))):
            AttentionConfig(**wrong)


@pytest.mark.parametrize(
    ("extents", "options"),
    [
        ((1, 70, 200, (2, 1), 64), {}),
        ((2, 100, 100, (1, 1), 128), {"causal": True, "kv_lengths": np.array([100, 37])}),
        ((1, 40, 130, (1, 1), 200), {"soft_cap": 3.0}),
        ((3, 20, 20, (2, 2), 64), {"causal": True}),
    ],
)
def test_floats_of_8_bits(extents, options):
    """Only the operands are; what is computed of them is not rounded to so few bits."""
    q, k, v = inputs(*extents, jnp.float8_e4m3fn)
    scale = extents[-1] ** -0.5
    expected, lse = reference(q, k, v, **{"causal": False} | options, scale=scale)
    given = {name: jnp.asarray(x) if name == "kv_lengths" else x for name, x in options.items()}
    result, sums = attention_forward(q, k, v, **given)
    assert result.dtype == jnp.bfloat16 and result.shape == expected.shape
    difference = np.linalg.norm(np.asarray(result, np.float64) - expected)
    assert difference < 4e-3 * np.linalg.norm(expected)
    # Tensor cores add products of 8-bit floats with fewer bits than float32 has: 4.1e-4 on an H200.
    np.testing.assert_allclose(sums, lse, rtol=0, atol=1e-3)
    _, wrong = reference(q, k, v, **{"causal": False} | options, scale=1.01 * scale)
    seen = np.isfinite(lse)
    assert np.max(np.abs(wrong[seen] - lse[seen])) > 4e-3


def test_floats_of_8_bits_have_no_derivatives():
    q, k, v = inputs(1, 16, 64, (1, 1), 64, jnp.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="8-bit floats has no derivatives"):
        jax.vjp(attention, q, k, v)[1](jnp.ones((1, 16, 1, 64), jnp.bfloat16))
    with pytest.raises(InvalidValueError, match="does not suit elements of 8 bits"):
        attention(q, k, v, config=AttentionConfig(separate_out=False))
