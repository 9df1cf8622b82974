"""Kernels that JAX publishes for Hopper run unchanged, in the semantics that they ask for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest

import pallasite
from pallasite.errors import InvalidValueError

pytest.importorskip("absl", reason="JAX's kernels import it")
pytestmark = pytest.mark.runs_kernels


@functools.cache
def module(name):
    """A module of JAX, on a GPU of few multiprocessors."""
    found = published.load(name, lane_semantics=False)
    for attribute, value in published.with_multiprocessors(found, 4).items():
        setattr(found, attribute, value)
    return found


def normal(generator, shape, dtype):
    return jnp.asarray(generator.standard_normal(shape).astype(dtype))


def exact(array):
    return np.asarray(array, np.float64)


def assert_close(result, expected, limit):
    """Compares by the norm of the difference, relative to that of what is expected."""
    result, expected = exact(result), exact(expected)
    assert result.shape == expected.shape
    assert np.linalg.norm(result - expected) < limit * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("sizes", "blocks", "dtype", "transposed"),
    [
        ((70, 0, 33, 89), (64, 64, 64), jnp.bfloat16, False),
        ((0, 131, 0, 0, 61), (64, 128, 64), jnp.float16, False),
        ((70, 0, 33, 89), (64, 128, 64), jnp.bfloat16, True),
        ((1, 254, 1), (128, 128, 64), jnp.float16, False),
        ((3, 0, 98, 1), (64, 64, 128), jnp.float16, True),  # 102 rows: the last block is clipped.
        ((5, 31), (64, 128, 64), jnp.bfloat16, False),  # Fewer rows than a block has.
    ],
)
def test_ragged_dot(sizes, blocks, dtype, transposed):
    m, k, n = sum(sizes), 128, 256
    generator = np.random.default_rng(0)
    lhs = normal(generator, (m, k), dtype)
    rhs = normal(generator, (len(sizes), *((n, k) if transposed else (k, n))), dtype)

    @jax.jit
    def run(lhs, rhs, sizes):
        return module("ragged_dot_mgpu").ragged_dot(
            lhs,
            rhs,
            group_sizes=sizes,
            block_m=blocks[0],
            block_n=blocks[1],
            block_k=blocks[2],
            max_concurrent_steps=2,
            grid_block_n=1,
            transpose_rhs=transposed,
        )

    result = run(lhs, rhs, jnp.asarray(sizes, jnp.int32))
    of_row = exact(rhs)[np.repeat(np.arange(len(sizes)), sizes)]
    expected = np.einsum("mk,mnk->mn" if transposed else "mk,mkn->mn", exact(lhs), of_row)
    assert_close(result, expected, 5e-3 if dtype == jnp.bfloat16 else 6e-4)


@pytest.mark.parametrize(
    ("sizes", "blocks", "steps"),
    [((70, 0, 97, 89), (64, 64, 64), 2), ((0, 3, 253), (128, 128, 64), 1)],
)
def test_transposed_ragged_dot(sizes, blocks, steps):
    k, m, n = sum(sizes), 128, 128
    generator = np.random.default_rng(0)
    lhs, rhs = (normal(generator, (k, extent), jnp.float16) for extent in (m, n))

    @jax.jit
    def run(lhs, rhs, sizes):
        return module("transposed_ragged_dot_mgpu").transposed_ragged_dot(
            lhs,
            rhs,
            group_sizes=sizes,
            block_m=blocks[0],
            block_n=blocks[1],
            block_k=blocks[2],
            max_concurrent_steps=steps,
            grid_block_n=1,
        )

    result = run(lhs, rhs, jnp.asarray(sizes, jnp.int32))
    groups = np.cumsum(sizes)[:-1]
    parts = zip(np.split(exact(lhs), groups), np.split(exact(rhs), groups), strict=True)
    assert_close(result, np.stack([one.T @ other for one, other in parts]), 6e-4)


@pytest.mark.parametrize(("wait", "accepted"), [(None, False), (2, False), (1, True), (0, True)])
def test_lane_semantics_name_the_wait_that_the_transposed_ragged_kernel_lacks(wait, accepted):
    """It releases the slots of a step one step later, but waits for no wgmma in its loop; nor does
    JAX's compiler, in whose code the next copy follows the wgmma at once."""
    product = "plgpu.wgmma(acc_ref, lhs_smem.transpose((1, 0)), rhs_smem)\n"
    waits = {} if wait is None else {product: f"{product.rstrip()}; plgpu.wgmma_wait({wait})\n"}
    this = published.load("transposed_ragged_dot_mgpu", lane_semantics=True, replaced=waits)
    this.__dict__.update(published.with_multiprocessors(this, 4))
    sizes = {"block_m": 64, "block_n": 64, "block_k": 64, "grid_block_n": 1}

    def run(lhs, rhs, group_sizes):
        return this.transposed_ragged_dot(
            lhs, rhs, group_sizes=group_sizes, max_concurrent_steps=3, **sizes
        )

    matrix = jax.ShapeDtypeStruct((256, 128), jnp.float16)
    types = (matrix, matrix, jax.ShapeDtypeStruct((3,), jnp.int32))
    if accepted:
        assert pallasite.compile_all(run, *types, target="sm_90a")
        return
    with pytest.raises(InvalidValueError, match="while a wgmma that reads it is") as raised:
        pallasite.compile_all(run, *types, target="sm_90a")
    assert "plgpu.wgmma_wait(1) in between" in str(raised.value)


@pytest.mark.parametrize("wg_dimension", ["M", "N"])
@pytest.mark.parametrize("cluster_dimension", [None, "M", "N"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_mixed_type_matmul(wg_dimension, cluster_dimension, dtype):
    this = module("hopper_mixed_type_matmul_mgpu")
    config = this.TuningConfig(
        tile_m=64,
        tile_n=64,
        tile_k=64,
        max_concurrent_steps=2,
        wg_dimension=this.MatmulDimension[wg_dimension],
        cluster_dimension=cluster_dimension and this.MatmulDimension[cluster_dimension],
    )
    generator = np.random.default_rng(0)
    a = jnp.asarray(generator.integers(-128, 128, (256, 128)).astype(jnp.int8))
    b = normal(generator, (128, 256), dtype)
    run = jax.jit(functools.partial(this.mixed_matmul_kernel, out_dtype=dtype, config=config))
    assert_close(run(a, b), exact(a) @ exact(b), 5e-3 if dtype == jnp.bfloat16 else 6e-4)


def attention_inputs(length, width, count):
    """Arrays for two heads of queries and one of keys and values; then of queries again."""
    generator = np.random.default_rng(0)
    heads = (2, 1, 1, 2)[:count]
    return [normal(generator, (1, length, head, width), jnp.float16) for head in heads]


def attention_reference(q, k, v, causal=False):
    """Attention and the logarithms (to base 2) of its sums, in double precision."""
    q, k, v = map(exact, (q, k, v))
    logits = np.einsum("bqhc,bkoc->bhqk", q, k)
    if causal:
        logits[..., ~np.tri(*logits.shape[-2:], dtype=bool)] = -np.inf
    largest = logits.max(-1, keepdims=True)
    sums = np.exp(logits - largest).sum(-1, keepdims=True)
    weights = np.exp(logits - largest) / sums
    logarithms = (largest / np.log(2) + np.log2(sums))[..., 0]
    return np.einsum("bhqk,bkoc->bqhc", weights, v), logarithms


@pytest.mark.parametrize(
    ("function", "causal", "width"),
    [
        ("attention", False, 64),
        ("attention", True, 64),
        ("attention", True, 128),
        ("attention_with_pipeline_emitter", False, 64),
        ("attention_with_pipeline_emitter", False, 128),
    ],
)
def test_attention(function, causal, width):
    this = module("attention_mgpu")
    q, k, v = attention_inputs(256, width, 3)
    config = this.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=2, causal=causal)
    result, (logarithms,) = getattr(this, function)(q, k, v, config, True)
    expected, expected_logarithms = attention_reference(q, k, v, causal)
    assert_close(result, expected, 1e-3)
    assert_close(logarithms, expected_logarithms, 1e-5)


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_attention_backward(warpgroups):
    this = module("attention_mgpu")
    q, k, v, upstream = attention_inputs(128 * warpgroups, 64, 4)
    config = this.TuningConfig(
        block_q=64,
        block_kv=64,
        max_concurrent_steps=2,
        compute_wgs_bwd=warpgroups,
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
    )
    _, pullback = jax.vjp(lambda *operands: this.attention(*operands, config), q, k, v)
    wide = [operand.astype(jnp.float32) for operand in (q, k, v, upstream)]
    _, reference = jax.vjp(this.attention_reference, *wide[:3])
    for result, expected in zip(pullback(upstream), reference(wide[3]), strict=True):
        assert_close(result, expected, 2e-3)
