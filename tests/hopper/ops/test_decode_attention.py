"""Attention against a cache, with and without pages, against float64."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite.codegen.assembler import assemble
from pallasite.codegen.tools import find_tool
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_hopper.ops import DecodeConfig, decode_attention, paged_attention
from pallasite_hopper.ops.decode import prefill
from pallasite_hopper.ops.decode.config import Cache, default_config, evenly

DTYPES = {"bfloat16": (jnp.bfloat16, 2e-2), "float16": (jnp.float16, 3e-3)}


def random(rng, shape, dtype):
    return jnp.asarray(rng.normal(size=shape).astype(dtype))


def reference(q, k, v, lengths, scale, soft_cap=None):
    """In float64; q is (batch, tokens, q_heads, head_dim), k and v (batch, rows, heads, ...)."""
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    batch, tokens, q_heads, head_dim = q.shape
    group = q_heads // k.shape[2]
    grouped = q.reshape(batch, tokens, k.shape[2], group, head_dim)
    scores = np.einsum("bthgd,blhd->bthgl", grouped, k) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    seen = lengths[:, None] - (tokens - 1 - np.arange(tokens))
    shown = np.arange(k.shape[1]) < seen[..., None]
    scores = np.where(shown[:, :, None, None], scores, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e30))
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total > 0, total, 1)
    return np.einsum("bthgl,blhd->bthgd", weights, v).reshape(q.shape)


def check(
    config,
    *,
    batch=2,
    tokens=1,
    heads=2,
    group=4,
    head_dim=64,
    kv_len=192,
    lengths=None,
    soft_cap=None,
    scale=None,
    dtype="bfloat16",
):
    dtype, tolerance = DTYPES[dtype]
    rng = np.random.default_rng(0)
    q = random(rng, (batch, tokens, heads * group, head_dim), dtype)
    k, v = (random(rng, (batch, kv_len, heads, head_dim), dtype) for _ in range(2))
    given = None
    if lengths is not None:
        given = jnp.asarray(lengths, jnp.int32)
        beyond = np.arange(kv_len) >= np.asarray(lengths)[:, None]
        k, v = (jnp.where(beyond[..., None, None], jnp.nan, array) for array in (k, v))
    queries = q[:, 0] if tokens == 1 else q
    out = decode_attention(
        queries, k, v, kv_lengths=given, soft_cap=soft_cap, scale=scale, config=config
    )
    assert out.shape == queries.shape
    assert out.dtype == q.dtype
    counted = np.full(batch, kv_len) if lengths is None else np.asarray(lengths)
    k, v = (np.nan_to_num(np.asarray(array, np.float64)) for array in (k, v))
    expected = reference(q, k, v, counted, scale or head_dim**-0.5, soft_cap)
    found = np.asarray(out, np.float64).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("lines", "most", "count"),
    [(512, 264, 256), (64, 264, 256), (8, 264, 264), (100, 264, 264), (3, 1, 1)],
)
def test_blocks_end_where_lines_do(lines, most, count):
    assert evenly(lines, most) == count


@pytest.mark.parametrize(
    ("cache", "tile"),
    [
        (Cache(512, 8192, 64, lengths=True), 128),
        (Cache(1024, 4096), 128),
        (Cache(1024, 4096, lengths=True), 64),
        (Cache(512, 8192, 192), 64),
        (Cache(8, 8192, 64), 64),
        (Cache(1, 0), 64),
    ],
)
def test_steps_have_more_rows_where_blocks_have_many(cache, tile):
    assert default_config(128, 8, 2, cache).tile == tile
    # Registers do not suffice, or elements are converted in them.
    for size, columns, item in ((128, 64, 2), (128, 8, 1), (256, 8, 1)):
        assert default_config(size, columns, item, cache) == default_config(size, columns, item)


def test_heads_that_share_lines_are_read_side_by_side():
    large = Cache(512, 4096, neighbours=8)
    pair = default_config(80, 8, 2, large)
    assert (pair.heads, pair.tile, pair.blocks_per_multiprocessor) == (2, 64, 2)
    assert default_config(112, 32, 2, large).blocks_per_multiprocessor == 1
    others = (
        (80, 2, Cache(512, 4096)),  # Each head has pages of its own.
        (80, 2, Cache(512, 4096, neighbours=1)),
        (80, 2, Cache(32, 1344, neighbours=16)),  # It fits the L2 cache.
        (128, 2, large),
        (128, 1, large),
    )
    for head_dim, itemsize, cache in others:
        assert default_config(head_dim, 8, itemsize, cache).heads == 1


@pytest.mark.parametrize("blocks", [1, 3, 7, 12])
def test_ranges_of_blocks(blocks):
    """Ranges with whole items, parts of two, and one item in many ranges."""
    check(DecodeConfig(blocks=blocks))


@pytest.mark.runs_kernels
@pytest.mark.parametrize("heads", [1, 2])
def test_parts_are_combined_in_order(heads):
    """Blocks read what others have left of an item once these have left it."""
    config = DecodeConfig(blocks=5, heads=heads, blocks_per_multiprocessor=1)
    with pallasite.config.scoped(sanitize=True):
        check(config, lengths=(192, 130))


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    "blocks",
    [17, 33, 52, *(pytest.param(blocks, marks=pytest.mark.slow) for blocks in (18, 40))],
)
def test_items_that_many_blocks_share(blocks):
    """Groups of blocks combine what they have left first, of two items or three."""
    with pallasite.config.scoped(sanitize=True):
        check(DecodeConfig(blocks=blocks), heads=1, batch=3, kv_len=1400, lengths=(1400, 1300, 700))


@pytest.mark.runs_kernels
@pytest.mark.parametrize("blocks", [2, 5])
@pytest.mark.parametrize("lengths", [(1, 0, 200, 64, 65), (0, 0, 0, 0, 0), (256, 1, 1, 255, 1000)])
@pytest.mark.sampled(alone=("lengths", "blocks"))
def test_lengths(lengths, blocks):
    kept = tuple(min(length, 256) for length in lengths)
    assert kept[-1] <= 256
    for ahead in (False, True):
        config = DecodeConfig(blocks=blocks, ahead=ahead)
        check(config, batch=5, heads=1, kv_len=256, lengths=kept)


@pytest.mark.runs_kernels
def test_lengths_of_many_sequences():
    """More than lanes load."""
    lengths = np.random.default_rng(3).integers(0, 129, 35)
    check(DecodeConfig(blocks=4, ahead=True), batch=35, heads=1, kv_len=128, lengths=lengths)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("scale", [None, 0.3, 1.7])
def test_nothing_to_see(scale):
    """Zeros, whatever the rounding of the lowest number times the factor of the scores is."""
    check(None, batch=3, group=2, kv_len=72, lengths=(70, 0, 9), scale=scale)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("group", [1, 3, 16, 80])
def test_groups(group):
    check(DecodeConfig(blocks=3), batch=1, group=group, lengths=(150,))


@pytest.mark.runs_kernels
@pytest.mark.parametrize(("tokens", "group"), [(2, 1), (3, 4), (8, 12)])
def test_several_queries(tokens, group):
    check(DecodeConfig(blocks=3), tokens=tokens, group=group, heads=1, lengths=(3, 130))


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("head_dim", "config", "dtype"),
    [
        (64, DecodeConfig(tile=128, blocks=3), "float16"),
        (64, DecodeConfig(tile=192, blocks=2, stages=2), "bfloat16"),
        (128, DecodeConfig(heads=2, blocks=3, blocks_per_multiprocessor=1), "bfloat16"),
        (128, DecodeConfig(blocks=3), "float16"),
        (256, DecodeConfig(blocks=2, blocks_per_multiprocessor=1), "bfloat16"),
        (8, DecodeConfig(blocks=3), "bfloat16"),
        (80, DecodeConfig(blocks=3), "float16"),
        (112, DecodeConfig(blocks=3, heads=2, blocks_per_multiprocessor=1), "bfloat16"),
        (192, DecodeConfig(blocks=3), "float16"),
        (200, DecodeConfig(blocks=5, blocks_per_multiprocessor=1), "bfloat16"),
    ],
)
def test_configurations(head_dim, config, dtype):
    check(config, head_dim=head_dim, dtype=dtype, lengths=(192, 77), group=2)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("layout", [None, "heads_first", "tokens_first"])
def test_prefill(layout, monkeypatch):
    """Many queries, some before the first key; what is beyond the lengths is not a number."""
    monkeypatch.setattr(prefill, "gains", lambda q_shape, kv_heads: True)
    rng = np.random.default_rng(1)
    q = random(rng, (3, 40, 16, 24), jnp.float16)
    lengths, size = np.array([100, 25, 0]), 24
    table = np.array([[7, 2, 5, 0, 11], [1, 8, 10**6, -1, 10**9], [-5, 99, 0, 0, 0]])
    shape = (2, 12, size, 24)
    caches = [np.full(shape, np.nan, np.float16) for _ in range(2)]
    exact = [np.zeros((3, 120, 2, 24)) for _ in range(2)]
    for cache, rows in zip(caches, exact, strict=True):
        for sequence, length in enumerate(lengths):
            rows[sequence, :length] = rng.normal(size=(length, 2, 24)).astype(np.float16)
            for row in range(length):
                page = table[sequence, row // size]
                cache[:, page, row % size] = rows[sequence, row]
    if layout is None:
        exists = (np.arange(120) < lengths[:, None])[..., None, None]
        k, v = (jnp.asarray(np.where(exists, one, np.nan).astype(np.float16)) for one in exact)
        result = decode_attention(q, k, v, kv_lengths=jnp.asarray(lengths), soft_cap=3.0)
    else:
        axes = (0, 1, 2, 3) if layout == "heads_first" else (1, 2, 0, 3)
        k, v = (jnp.asarray(one.transpose(axes)) for one in caches)
        arrays = jnp.asarray(lengths), jnp.asarray(table.clip(-(2**31), 2**31 - 1), jnp.int32)
        result = paged_attention(q, k, v, *arrays, soft_cap=3.0, page_layout=layout)
    expected = reference(q, *exact, lengths, 24**-0.5, soft_cap=3.0)
    assert np.abs(np.asarray(result, np.float64) - expected).max() < 3e-3


@pytest.mark.parametrize(
    ("q_shape", "kv_heads", "gains"),
    [
        ((2, 700, 16, 128), 4, True),
        ((6, 150, 32, 64), 8, True),
        ((10, 10, 64, 128), 16, False),  # Tiles of attention's kernel have the rows of one head.
        ((14, 40, 24, 64), 8, False),
        ((20, 12, 6, 64), 6, False),
        ((8, 10, 8, 128), 8, False),  # The other kernel reads the cache at the memory's pace.
    ],
)
def test_rows_are_brought_together_where_that_takes_less_time(q_shape, kv_heads, gains):
    assert prefill.suits(q_shape, jnp.bfloat16, kv_heads, jnp.bfloat16) == gains
    assert not prefill.suits(q_shape, jnp.bfloat16, kv_heads, jnp.int8)


@pytest.mark.runs_kernels
def test_soft_cap_and_scale():
    check(DecodeConfig(blocks=3), soft_cap=2.0, scale=0.5, lengths=(100, 192))


@pytest.mark.runs_kernels
def test_extents_that_are_no_multiples():
    check(DecodeConfig(blocks=2), kv_len=75, heads=1)


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("cache_dtype", "head_dim", "tile", "dtype"),
    [
        (jnp.float8_e4m3fn, 64, 128, "bfloat16"),
        (jnp.float8_e4m3fn, 128, 64, "float16"),
        (jnp.int8, 64, 64, "bfloat16"),
        (jnp.int8, 64, 64, "float16"),
        (jnp.float8_e4m3fn, 96, 64, "bfloat16"),
        (jnp.int8, 192, 64, "bfloat16"),
    ],
)
def test_caches_of_8_bits(cache_dtype, head_dim, tile, dtype):
    dtype, tolerance = DTYPES[dtype]
    rng = np.random.default_rng(2)
    q = random(rng, (2, 8, head_dim), dtype)
    size = 30 if cache_dtype == jnp.int8 else 1
    k, v = (jnp.asarray(rng.normal(size=(2, 128, 2, head_dim)) * size) for _ in range(2))
    k, v = k.astype(cache_dtype), v.astype(cache_dtype)
    k_scale, v_scale = np.array([0.03, 0.05], np.float32) * 30 / size, 0.5
    config = DecodeConfig(blocks=3, tile=tile)
    out = decode_attention(
        q, k, v, kv_lengths=jnp.array([128, 70]), k_scale=k_scale, v_scale=v_scale, config=config
    )
    # A factor of the keys is one of the queries of their head.
    scaled = np.asarray(q, np.float64) * np.repeat(k_scale.astype(np.float64), 4)[:, None]
    lengths = np.array([128, 70])
    expected = reference(scaled[:, None], k, v, lengths, head_dim**-0.5)[:, 0] * v_scale
    error = np.abs(np.asarray(out, np.float64) - expected).max()
    assert error <= tolerance * np.abs(expected).max()


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("page_size", "config", "head_dim", "page_layout"),
    [
        (16, DecodeConfig(blocks=3), 64, "heads_first"),
        pytest.param(16, DecodeConfig(blocks=3), 64, "tokens_first", marks=pytest.mark.slow),
        (64, DecodeConfig(blocks=4, stages=3), 128, "heads_first"),
        (8, DecodeConfig(blocks=3, ahead=True), 64, "heads_first"),
        pytest.param(32, DecodeConfig(blocks=3), 80, "heads_first", marks=pytest.mark.slow),
        (32, DecodeConfig(blocks=3), 96, "tokens_first"),
        (
            128,
            DecodeConfig(blocks=3, heads=2, tile=64, blocks_per_multiprocessor=1),
            64,
            "tokens_first",
        ),
    ],
)
def test_pages(page_size, config, head_dim, page_layout):
    """Pages in any order; entries beyond a length, and pages of no sequence, hold rubbish."""
    rng = np.random.default_rng(1)
    batch, heads, group, per_sequence = 3, 2, 4, 256 // page_size
    pages = batch * per_sequence + 3
    lengths = np.array([256, 1, 140])
    shape = (pages, page_size, heads, head_dim)
    k, v = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    indices = rng.permutation(pages)[: batch * per_sequence].reshape(batch, per_sequence)
    q = random(rng, (batch, heads * group, head_dim), jnp.bfloat16)
    used = np.arange(per_sequence) * page_size < lengths[:, None]
    for array in (k, v):
        array[np.setdiff1d(np.arange(pages), indices[used])] = np.nan
        for sequence, length in enumerate(lengths):
            array[indices[sequence, (length - 1) // page_size], (length - 1) % page_size + 1 :] = (
                np.nan
            )
    table = np.where(used, indices, 2**30)
    k, v = (jnp.asarray(array, jnp.bfloat16) for array in (k, v))
    order = (2, 0, 1, 3) if page_layout == "heads_first" else (0, 1, 2, 3)
    out = paged_attention(
        q,
        jnp.transpose(k, order),
        jnp.transpose(v, order),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(table, jnp.int32),
        page_layout=page_layout,
        config=config,
    )
    rows = [np.nan_to_num(np.asarray(a, np.float64))[indices] for a in (k, v)]
    rows = [a.reshape(batch, -1, heads, head_dim) for a in rows]
    expected = reference(q[:, None], *rows, lengths, head_dim**-0.5)[:, 0]
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("q", "cache", "dtype"),
    [
        ((8, 32, 128), (8, 4096, 8, 128), jnp.bfloat16),
        ((8, 4, 128, 64), (8, 4096, 8, 64), jnp.float16),
        ((64, 256, 128), (64, 8192, 8, 128), jnp.bfloat16),
        ((8, 64, 256), (8, 4096, 2, 256), jnp.bfloat16),
        pytest.param((8, 56, 80), (8, 4096, 8, 80), jnp.bfloat16, marks=pytest.mark.slow),
        ((64, 32, 80), (64, 4096, 8, 80), jnp.bfloat16),
        pytest.param((64, 128, 96), (64, 4096, 8, 96), jnp.float16, marks=pytest.mark.slow),
        ((64, 32, 112), (64, 8192, 8, 112), jnp.float8_e4m3fn),
        pytest.param((8, 48, 192), (8, 4096, 8, 192), jnp.float16, marks=pytest.mark.slow),
        ((8, 32, 128), (8, 4096, 8, 128), jnp.float8_e4m3fn),
    ],
)
def test_default_configurations_assemble(q, cache, dtype):
    """Warnings of ptxas, such as of serialized products, are errors."""
    if find_tool("ptxas").path is None:
        pytest.skip("ptxas is not installed")
    queries = jax.ShapeDtypeStruct(q, dtype if np.dtype(dtype).itemsize == 2 else jnp.bfloat16)
    keys, lengths = jax.ShapeDtypeStruct(cache, dtype), jax.ShapeDtypeStruct(q[:1], jnp.int32)
    (kernel,) = pallasite.compile_all(
        lambda q, k, v, lengths: decode_attention(q, k, v, kv_lengths=lengths),
        *(queries, keys, keys, lengths),
        target="sm_90a",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assembly = assemble(kernel.ptx, kernel.name)
    assert assembly.spill_store_bytes == 0


def arrays(**changes):
    shapes = {"q": (2, 8, 64), "k": (2, 128, 2, 64), "v": (2, 128, 2, 64)} | changes
    return {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in shapes.items()}


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({"q": (2, 64)}, {}, InvalidTypeError, "neither three nor four"),
        ({"q": (2, 9, 8, 64)}, {}, InvalidValueError, "too many queries"),
        ({"q": (2, 7, 64)}, {}, InvalidValueError, "cannot be divided among"),
        ({"q": (3, 8, 64)}, {}, InvalidValueError, "same batch"),
        ({"q": (2, 8, 128)}, {}, InvalidValueError, "heads of these sizes"),
        (dict.fromkeys("kv", (2, 64, 1, 60)) | {"q": (2, 8, 60)}, {}, InvalidValueError, "of 8 up"),
        ({"v": (2, 64, 2, 64)}, {}, InvalidValueError, "do not have the same shape"),
        ({}, {"scale": -1.0}, InvalidValueError, "scale is not positive"),
        ({}, {"k_scale": 2.0}, InvalidValueError, "k_scale is for keys and values with 8 bits"),
        ({}, {"kv_lengths": jnp.zeros(3, jnp.int32)}, InvalidTypeError, "kv_lengths does not fit"),
        ({}, {"config": 3}, InvalidTypeError, "config is not of type DecodeConfig"),
        ({}, {"config": DecodeConfig(heads=3)}, InvalidValueError, "so many heads side by side"),
        ({}, {"config": DecodeConfig(stages=16)}, InvalidValueError, "does not fit shared memory"),
    ],
)
def test_refusals(changes, options, error, message):
    given = arrays(**changes)
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda q, k, v: decode_attention(q, k, v, **options), *given.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": 96}, "does not fit the tensor cores"),
        ({"heads": 5}, "heads of a decode configuration is out of range"),
        ({"stages": 1}, "stages of a decode configuration is out of range"),
    ],
)
def test_configurations_that_do_not_exist(options, message):
    with pytest.raises(InvalidValueError, match=message):
        DecodeConfig(**options)


def test_dtypes_that_do_not_fit():
    q, k, v = arrays().values()
    k = jax.ShapeDtypeStruct(k.shape, jnp.float32)
    with pytest.raises(InvalidTypeError, match=r"k and v do not fit q[\s\S]*float8_e4m3fn"):
        jax.eval_shape(decode_attention, q, k, v)


def test_pages_that_do_not_fit():
    shape = jax.ShapeDtypeStruct((2, 5, 24, 64), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((1, 8, 64), jnp.bfloat16)
    numbers = jnp.zeros((1,), jnp.int32), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(InvalidValueError, match=r"pages do not fit the steps"):
        jax.eval_shape(lambda q, k: paged_attention(q, k, k, *numbers), q, shape)
