"""The portable kernels of the gradients of attention.

Weights are computed again from log-sum-exp, tile by tile, so that nothing as large as all scores is
ever in memory. One kernel has a block for a tile of queries, the other a block for a tile of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite.plugin import select_target
from pallasite_std.ops.flash.problem import Problem
from pallasite_std.ops.padding import padded
from pallasite_std.ops.rings import PARAMS, over_steps
from pallasite_std.ops.softmax import LOG2_E, broadcast_rows


def gradients(
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    lengths: list[jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of attention with respect to queries, keys and values.

    Args:
      problem: what was computed.
      q, k, v, out, d_out: operands, result and its cotangent; (batch, sequence, heads, head_dim).
      lse: (batch, q_heads, q_seq), natural logarithms of the sums of exponentials.
      lengths: of queries and keys, as far as they are given.
    """
    tile = _tile(problem)
    products = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    deltas = padded(jnp.sum(products, axis=-1).transpose(0, 2, 1), 2, tile)
    # Rows that see no key have no weights: 2 ** (score - infinity).
    logarithms = jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2_E)
    logarithms = padded(logarithms, 2, tile)
    operands = (q, k, v, d_out, logarithms, deltas, *lengths)
    steps = _steps(problem)
    d_q = _kernel(_queries, problem, *steps)(*operands)
    d_k, d_v = _kernel(_keys, problem, *steps)(*operands)
    return d_q, d_k, d_v


def _tile(problem: Problem) -> int:
    """Queries or keys of a block."""
    return 64 if problem.head_dim * problem.dtype.itemsize <= 256 else 32


def _steps(problem: Problem) -> tuple[int, int]:
    """Keys or queries of a step, and how many steps have room: fewer than those of a block, and one
    step, if shared memory is too small."""
    tile, limit = _tile(problem), select_target().max_shared_memory
    size: int = problem.dtype.itemsize
    rows = problem.head_dim * size

    def needed(width: int, stages: int) -> int:
        scores = tile * width * 4 if size == 4 else 0
        return 2 * (tile + stages * width) * rows + scores + 1024

    choices = ((tile, 2), (tile // 2, 2), (tile // 2, 1))
    return next((one for one in choices if needed(*one) <= limit), choices[-1])


@functools.lru_cache(maxsize=256)
def _kernel(
    build: Callable[[Problem, int, int], Callable[..., Any]],
    problem: Problem,
    width: int,
    stages: int,
) -> Callable[..., Any]:
    return build(problem, width, stages)


def _queries(problem: Problem, width: int, stages: int) -> Callable[..., Any]:
    """The kernel of the gradient of the queries; ``width`` keys are read at a time."""
    tile, head_dim, dtype = _tile(problem), problem.head_dim, problem.dtype

    def body(
        q: Any,
        k: Any,
        v: Any,
        d_out: Any,
        logarithms: Any,
        deltas: Any,
        *rest: Any,
        q_smem: Any,
        d_smem: Any,
        k_smem: Any,
        v_smem: Any,
        q_loaded: Any,
        loaded: Any,
    ) -> None:
        *given, d_q = rest
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        kv_head = lax.div(head, problem.group)
        start = lax.axis_index("tile") * tile
        lengths = problem.lengths_of(batch, tuple(given))
        steps = lax.div(problem.keys_seen(start, tile, lengths) + (width - 1), width)
        rows = pl.ds(start, tile)

        def fetch(step: Any, stage: Any) -> None:
            keys = pl.ds(step * width, width)
            plgpu.copy_gmem_to_smem(k.at[batch, keys, kv_head], k_smem.at[stage], loaded.at[stage])
            plgpu.copy_gmem_to_smem(v.at[batch, keys, kv_head], v_smem.at[stage], loaded.at[stage])

        plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_smem, q_loaded)
        plgpu.copy_gmem_to_smem(d_out.at[batch, rows, head], d_smem, q_loaded)
        logarithm = logarithms[batch, head, rows]
        delta = deltas[batch, head, rows]
        plgpu.barrier_wait(q_loaded)

        def step(step: Any, stage: Any, acc: Any) -> Any:
            zero = jnp.zeros((tile, width), jnp.float32)
            scores = problem.scores(plgpu.mma(zero, q_smem[...], k_smem[stage].T))
            shown = problem.masked(scores, start, step * width, lengths, keys_axis=1)
            weights = jnp.exp2(shown - broadcast_rows(logarithm, width))
            d_weights = plgpu.mma(zero, d_smem[...], v_smem[stage].T)
            d_scores = weights * (d_weights - broadcast_rows(delta, width)) * problem.slope(scores)
            return plgpu.mma(acc, d_scores.astype(dtype), k_smem[stage])

        zero = jnp.zeros((tile, head_dim), jnp.float32)
        result = over_steps(steps, stages, loaded, fetch, step, zero)
        q_smem[...] = result.astype(dtype)
        plgpu.copy_smem_to_gmem(q_smem, d_q.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)

    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (problem.batch, problem.q_seq, problem.q_heads, head_dim), dtype
        ),
        grid=(-(-problem.q_seq // tile), problem.q_heads, problem.batch),
        grid_names=("tile", "head", "batch"),
        scratch_types={
            "q_smem": plgpu.SMEM((tile, head_dim), dtype),
            "d_smem": plgpu.SMEM((tile, head_dim), dtype),
            "k_smem": plgpu.SMEM((stages, width, head_dim), dtype),
            "v_smem": plgpu.SMEM((stages, width, head_dim), dtype),
            "q_loaded": plgpu.Barrier(num_arrivals=2),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        kernel_name="warp_attention_queries",
        compiler_params=PARAMS,
    )
    return kernel


def _keys(problem: Problem, width: int, stages: int) -> Callable[..., Any]:
    """The kernel of the gradients of keys and values: rows are keys, columns are queries.

    A block goes through the queries of all heads that share its keys, ``width`` at a time.
    """
    tile, head_dim, dtype = _tile(problem), problem.head_dim, problem.dtype

    def body(
        q: Any,
        k: Any,
        v: Any,
        d_out: Any,
        logarithms: Any,
        deltas: Any,
        *rest: Any,
        k_smem: Any,
        v_smem: Any,
        q_smem: Any,
        d_smem: Any,
        k_loaded: Any,
        loaded: Any,
    ) -> None:
        *given, d_k, d_v = rest
        batch, kv_head = lax.axis_index("batch"), lax.axis_index("head")
        start = lax.axis_index("tile") * tile
        q_length, kv_length = lengths = problem.lengths_of(batch, tuple(given))
        first = jnp.int32(0)
        if problem.causal:
            first = lax.div(lax.max(start - (kv_length - q_length), 0), width)
        tiles = lax.max(lax.div(q_length + (width - 1), width) - first, 0)
        tiles = jnp.where(start < kv_length, tiles, 0)
        rows = pl.ds(start, tile)

        def place(step: Any) -> tuple[Any, Any]:
            """The head and the first query of a step."""
            part = lax.div(step, lax.max(tiles, 1))
            return kv_head * problem.group + part, (first + step - part * tiles) * width

        def fetch(step: Any, stage: Any) -> None:
            head, query = place(step)
            queries = pl.ds(query, width)
            plgpu.copy_gmem_to_smem(q.at[batch, queries, head], q_smem.at[stage], loaded.at[stage])
            plgpu.copy_gmem_to_smem(
                d_out.at[batch, queries, head], d_smem.at[stage], loaded.at[stage]
            )

        plgpu.copy_gmem_to_smem(k.at[batch, rows, kv_head], k_smem, k_loaded)
        plgpu.copy_gmem_to_smem(v.at[batch, rows, kv_head], v_smem, k_loaded)
        plgpu.barrier_wait(k_loaded)

        def step(step: Any, stage: Any, carry: Any) -> Any:
            key_sums, value_sums = carry
            head, query = place(step)
            logarithm = logarithms[batch, head, pl.ds(query, width)]
            delta = deltas[batch, head, pl.ds(query, width)]
            zero = jnp.zeros((tile, width), jnp.float32)
            scores = problem.scores(plgpu.mma(zero, k_smem[...], q_smem[stage].T))
            shown = problem.masked(scores, query, start, lengths, keys_axis=0)
            weights = jnp.exp2(shown - _columns(logarithm, tile))
            value_sums = plgpu.mma(value_sums, weights.astype(dtype), d_smem[stage])
            d_weights = plgpu.mma(zero, v_smem[...], d_smem[stage].T)
            d_scores = weights * (d_weights - _columns(delta, tile)) * problem.slope(scores)
            return plgpu.mma(key_sums, d_scores.astype(dtype), q_smem[stage]), value_sums

        zero = jnp.zeros((tile, head_dim), jnp.float32)
        steps = tiles * problem.group
        sums = over_steps(steps, stages, loaded, fetch, step, (zero, zero))
        for staging, values, result in zip((k_smem, v_smem), sums, (d_k, d_v), strict=True):
            staging[...] = values.astype(dtype)
            plgpu.copy_smem_to_gmem(staging, result.at[batch, rows, kv_head])
        plgpu.wait_smem_to_gmem(0)

    shape = (problem.batch, problem.kv_seq, problem.kv_heads, head_dim)
    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(shape, dtype),) * 2,
        grid=(-(-problem.kv_seq // tile), problem.kv_heads, problem.batch),
        grid_names=("tile", "head", "batch"),
        scratch_types={
            "k_smem": plgpu.SMEM((tile, head_dim), dtype),
            "v_smem": plgpu.SMEM((tile, head_dim), dtype),
            "q_smem": plgpu.SMEM((stages, width, head_dim), dtype),
            "d_smem": plgpu.SMEM((stages, width, head_dim), dtype),
            "k_loaded": plgpu.Barrier(num_arrivals=2),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        kernel_name="warp_attention_keys",
        compiler_params=PARAMS,
    )
    return kernel


def _columns(values: Any, rows: int) -> Any:
    """A value for each column as a matrix."""
    return lax.broadcast_in_dim(values, (rows, values.shape[0]), (1,))
