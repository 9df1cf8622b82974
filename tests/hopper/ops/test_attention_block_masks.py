"""Attention with masks of blocks, and its gradients: tiles that nobody sees are left out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallasite.errors import InvalidValueError
from pallasite_hopper.ops import attention
from pallasite_hopper.ops.flash.config import AttentionConfig
from pallasite_hopper.ops.flash.terms import visits

pytestmark = pytest.mark.runs_kernels


def reference(q, k, v, mask, *, block, causal=False, window=None, kv_lengths=None):
    """With a matrix that says which queries see which keys; zeros where a query sees none."""
    q_seq, kv_seq = q.shape[1], k.shape[1]
    seen = np.repeat(np.repeat(mask, block[0], 2), block[1], 3)[:, :, :q_seq, :kv_seq]
    lengths = np.full(q.shape[0], kv_seq) if kv_lengths is None else kv_lengths
    distance = np.arange(kv_seq) - np.arange(q_seq)[:, None]
    seen = seen & (np.arange(kv_seq) < lengths[:, None, None, None])
    ahead = distance - (lengths - q_seq)[:, None, None, None]
    if causal:
        seen = seen & (ahead <= 0)
    if window is not None:
        seen = seen & (ahead >= -window[0])
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    scores = jnp.where(seen, scores, -1e30)
    weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1), 0.0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize(
    ("sizes", "heads", "mask_shape", "options"),
    [
        ((1, 300, 270, 64), (2, 2), (1, 2, 3, 3), {}),
        pytest.param(
            (1, 300, 300, 128), (2, 1), (1, 1, 3, 3), {"causal": True}, marks=pytest.mark.slow
        ),
        ((2, 140, 400, 96), (1, 1), (2, 1, 2, 4), {"causal": True, "window": (150, None)}),
        ((2, 200, 260, 64), (2, 1), (2, 2, 2, 3), {"kv_lengths": np.array([260, 100])}),
        ((1, 130, 300, 200), (1, 1), (1, 1, 2, 3), {}),
        ((1, 260, 520, 64), (1, 1), (1, 1, 2, 3), {"mask_block": (256, 256)}),
    ],
)
def test_results_and_gradients(sizes, heads, mask_shape, options):
    """Some queries see nothing, some keys are seen by nobody; together with other masks."""
    batch, q_seq, kv_seq, size = sizes
    rng = np.random.default_rng(q_seq + kv_seq)
    shapes = [(batch, q_seq, heads[0], size), *[(batch, kv_seq, heads[1], size)] * 2]
    q, k, v, d_out = (
        jnp.asarray(rng.standard_normal(one), jnp.bfloat16) for one in (*shapes, shapes[0])
    )
    mask = rng.random(mask_shape) < 0.5
    mask[:, :, 0], mask[:, :, -1, 1] = False, True
    given = {
        name: jnp.asarray(one) if name == "kv_lengths" else one for name, one in options.items()
    }
    out, pull = jax.vjp(
        functools.partial(attention, block_mask=jnp.asarray(mask), **given), q, k, v
    )
    block = options.pop("mask_block", (128, 128))
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    expected, wanted = jax.vjp(
        functools.partial(reference, mask=mask, block=block, **options), *wide
    )
    results = (out, *pull(d_out))
    for one, other in zip(results, (expected, *wanted(d_out.astype(jnp.float32))), strict=True):
        assert one.shape == other.shape
        error = np.linalg.norm(np.asarray(one, np.float64) - np.asarray(other, np.float64))
        assert error < 1e-2 * np.linalg.norm(other)
    assert not np.asarray(out)[:, :128].any()


def test_lists_of_tiles():
    mask = jnp.asarray([[[[True, False, True], [False, False, True]]]])
    by_queries = np.asarray(visits(mask, (128, 128), 128, 64, False))[0, 0]
    assert by_queries.shape == (2, 13)
    assert by_queries[0, :7].tolist() == [0, 1, 2, 2, 2, 3, 4]
    assert by_queries[0, 7:11].tolist() == [0, 1, 4, 5]
    by_keys = np.asarray(visits(mask, (128, 128), 64, 128, True))[0, 0]
    assert by_keys.shape == (3, 9)
    assert by_keys[2].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert by_keys[1, :5].tolist() == [0] * 5


def test_tiles_divide_blocks():
    q = jnp.zeros((1, 256, 1, 64), jnp.bfloat16)
    mask = jnp.ones((1, 1, 2, 2), bool)
    with pytest.raises(InvalidValueError, match="do not divide the blocks of the mask"):
        attention(q, q, q, block_mask=mask, config=AttentionConfig(block_kv=176))
