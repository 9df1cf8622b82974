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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite.plugin import select_target
from pallasite_std.ops.arguments import matched
from pallasite_std.ops.flash.arguments import Extras
from pallasite_std.ops.flash.problem import Problem, View
from pallasite_std.ops.flash.residuals import in_parts, unit
from pallasite_std.ops.flash.steps import INDEX, SPANS, over_keys, over_queries, with_operands
from pallasite_std.ops.padding import padded
from pallasite_std.ops.rings import PARAMS, over_steps
from pallasite_std.ops.softmax import broadcast_rows, normalized


def gradients(
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    extras: Extras,
    with_bias: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The gradients of attention with respect to queries, keys, values and the bias.

    Args:
      problem: what was computed, without operands.
      q, k, v, out, d_out: operands, result and its cotangent; (batch, sequence, heads, head_dim).
      lse: natural logarithms of the sums of exponentials, as of ``residuals.py``.
      extras: the other arrays.
      with_bias: whether the gradient of the bias is wanted; it is None otherwise.
    """
    tile = _tile(problem, extras)
    products = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    deltas = padded(jnp.sum(products, axis=-1).transpose(0, 2, 1), 2, tile)
    own = in_parts(lse, unit(problem.scale, problem.soft_cap, extras))
    parts = (padded(one[..., : problem.q_seq], 2, tile) for one in own)
    operands = (q, k, v, d_out, *parts, deltas)
    cut = (tile, *_steps(problem, tile))
    width = cut[1]
    of_queries, arrays = with_operands(problem, extras, tile, width)
    d_scores, kind = [], None
    if with_bias:
        kind = np.dtype(_scores_dtype(problem, extras.bias))
        if not _sees_all(of_queries):  # What no block goes through stays zero.
            zeros = jnp.zeros(_scores_shape(problem, tile, width), kind)
            d_scores = [matched(zeros, *operands)[0]]
    d_q, *found = _kernel(_queries, of_queries, *cut, kind)(*operands, *arrays, *d_scores)
    of_keys, arrays = with_operands(problem, extras, width, tile, by_keys=True)
    d_k, d_v = _kernel(_keys, of_keys, *cut, None)(*operands, *arrays)
    return d_q, d_k, d_v, _of_bias(extras.bias, found[0]) if found else None


def _scores_dtype(problem: Problem, bias: jax.Array) -> Any:
    """Of the gradients of the scores: that of the bias, unless they are added up. Those of bfloat16
    have the range of float32, and errors of terms are no larger than that of their sum."""
    whole = bias.shape[:2] == (problem.batch, problem.q_heads)
    return bias.dtype if whole or bias.dtype == jnp.bfloat16 else jnp.float32


def _scores_shape(problem: Problem, tile: int, width: int) -> tuple[int, int, int, int]:
    """Of the gradients of the scores, in whole tiles."""
    rows, columns = -(-problem.q_seq // tile) * tile, -(-problem.kv_seq // width) * width
    return problem.batch, problem.q_heads, rows, columns


def _sees_all(problem: Problem) -> bool:
    """Whether blocks of queries go through all keys."""
    hiding = ("q_lengths", "kv_lengths", "q_segments", "block_mask", INDEX, SPANS)
    return (problem.left, problem.right) == (None, None) and not any(map(problem.has, hiding))


def _of_bias(bias: jax.Array, d_scores: jax.Array) -> jax.Array:
    """The gradient of a bias that batches or heads may share."""
    axes = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1 != d_scores.shape[axis])
    summed = jnp.sum(d_scores, axes, jnp.float32, keepdims=True) if axes else d_scores
    return summed[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)


def _tile(problem: Problem, extras: Extras) -> int:
    """Queries or keys of a block."""
    if extras.block_mask is not None and any(size % 64 for size in problem.mask_block):
        return 32
    return 64 if max(problem.head_dim, problem.v_dim) * problem.dtype.itemsize <= 256 else 32


def _steps(problem: Problem, tile: int) -> tuple[int, int]:
    """Keys or queries of a step, and how many steps have room: fewer than those of a block, and one
    step, if shared memory is too small."""
    limit = select_target().max_shared_memory
    size: int = problem.dtype.itemsize
    rows = (problem.head_dim + problem.v_dim) * size

    def needed(width: int, stages: int) -> int:
        scores = tile * width * 4 if size == 4 else 0
        return (tile + stages * width) * rows + scores + 1024

    choices = ((tile, 2), (tile // 2, 2), (tile // 2, 1))
    return next((one for one in choices if needed(*one) <= limit), choices[-1])


@functools.lru_cache(maxsize=256)
def _kernel(
    build: Callable[[Problem, int, int, int, Any], Callable[..., Any]],
    problem: Problem,
    tile: int,
    width: int,
    stages: int,
    kind: Any,
) -> Callable[..., Any]:
    return build(problem, tile, width, stages, kind)


def _queries(problem: Problem, tile: int, width: int, stages: int, kind: Any) -> Callable[..., Any]:
    """The kernel of the gradient of the queries; ``width`` keys are read at a time.

    Also of the gradients of the scores if ``kind``, their dtype, is not None; if blocks do not go
    through all keys, zeros for these are the last operand.
    """
    with_bias = kind is not None
    fills = with_bias and not _sees_all(problem)
    head_dim, v_dim, dtype = problem.head_dim, problem.v_dim, problem.dtype

    def body(
        q: Any,
        k: Any,
        v: Any,
        d_out: Any,
        maxima: Any,
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
        given = len(problem.operands)
        operands, (d_q, *d_bias) = tuple(rest[:given]), rest[given + fills :]
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        kv_head = lax.div(head, problem.group)
        start = lax.axis_index("tile") * tile
        view = View.of(problem, operands, batch, head)
        steps = over_keys(view, start, tile, width)
        rows = pl.ds(start, tile)

        def fetch(step: Any, stage: Any) -> None:
            keys = pl.ds(steps.place(step)[1], width)
            plgpu.copy_gmem_to_smem(k.at[batch, keys, kv_head], k_smem.at[stage], loaded.at[stage])
            plgpu.copy_gmem_to_smem(v.at[batch, keys, kv_head], v_smem.at[stage], loaded.at[stage])

        plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_smem, q_loaded)
        plgpu.copy_gmem_to_smem(d_out.at[batch, rows, head], d_smem, q_loaded)
        of_rows = [one[batch, head, rows] for one in (maxima, logarithms, deltas)]
        plgpu.barrier_wait(q_loaded)

        def step(step: Any, stage: Any, acc: Any) -> Any:
            key = steps.place(step)[1]
            zero = jnp.zeros((tile, width), jnp.float32)
            products = plgpu.mma(zero, q_smem[...], k_smem[stage].T)
            scores, capped = view.scores(products, start, key, keys_axis=1)
            shown = view.masked(scores, start, key, keys_axis=1)
            largest, logarithm, delta = (broadcast_rows(one, width) for one in of_rows)
            weights = normalized(shown, problem.factor, largest, logarithm)
            d_weights = plgpu.mma(zero, d_smem[...], v_smem[stage].T)
            d_weights = view.dropped(d_weights, start, key, keys_axis=1)
            d_scores = weights * (d_weights - delta)
            if with_bias:
                d_bias[0][batch, head, rows, pl.ds(key, width)] = d_scores.astype(kind)
            d_products = d_scores * problem.slope(capped)
            return plgpu.mma(acc, d_products.astype(dtype), k_smem[stage])

        zero = jnp.zeros((tile, head_dim), jnp.float32)
        result = over_steps(steps.count, stages, loaded, fetch, step, zero)
        q_smem[...] = result.astype(dtype)
        plgpu.copy_smem_to_gmem(q_smem, d_q.at[batch, rows, head])
        plgpu.wait_smem_to_gmem(0)

    shape = (problem.batch, problem.q_seq, problem.q_heads, head_dim)
    outputs = [jax.ShapeDtypeStruct(shape, dtype)]
    aliases = {}
    if with_bias:
        outputs.append(jax.ShapeDtypeStruct(_scores_shape(problem, tile, width), kind))
        aliases = {7 + len(problem.operands): 1} if fills else {}
    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=tuple(outputs),
        input_output_aliases=aliases,
        grid=(-(-problem.q_seq // tile), problem.q_heads, problem.batch),
        grid_names=("tile", "head", "batch"),
        scratch_types={
            "q_smem": plgpu.SMEM((tile, head_dim), dtype),
            "d_smem": plgpu.SMEM((tile, v_dim), dtype),
            "k_smem": plgpu.SMEM((stages, width, head_dim), dtype),
            "v_smem": plgpu.SMEM((stages, width, v_dim), dtype),
            "q_loaded": plgpu.Barrier(num_arrivals=2),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        kernel_name="warp_attention_queries",
        compiler_params=PARAMS,
    )
    return kernel


def _keys(problem: Problem, tile: int, width: int, stages: int, kind: None) -> Callable[..., Any]:
    """The kernel of the gradients of keys and values: rows are keys, columns are queries.

    A block goes through the queries of all heads that share its keys, ``width`` at a time.
    """
    del kind
    head_dim, v_dim, dtype = problem.head_dim, problem.v_dim, problem.dtype

    def body(
        q: Any,
        k: Any,
        v: Any,
        d_out: Any,
        maxima: Any,
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
        *operands, d_k, d_v = rest
        batch, kv_head = lax.axis_index("batch"), lax.axis_index("head")
        start = lax.axis_index("tile") * tile
        view = View.of(problem, tuple(operands), batch, kv_head)
        steps = over_queries(view, kv_head, start, tile, width)
        rows = pl.ds(start, tile)

        def place(step: Any) -> tuple[Any, Any]:
            """The head and the first query of a step."""
            part, query = steps.place(step)
            return kv_head * problem.group + part, query

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
            columns = pl.ds(query, width)
            largest, logarithm, delta = (
                _columns(one[batch, head, columns], tile) for one in (maxima, logarithms, deltas)
            )
            here = view.with_head(head)
            zero = jnp.zeros((tile, width), jnp.float32)
            products = plgpu.mma(zero, k_smem[...], q_smem[stage].T)
            scores, capped = here.scores(products, query, start, keys_axis=0)
            shown = here.masked(scores, query, start, keys_axis=0)
            weights = normalized(shown, problem.factor, largest, logarithm)
            used = here.dropped(weights, query, start, keys_axis=0)
            value_sums = plgpu.mma(value_sums, used.astype(dtype), d_smem[stage])
            d_weights = plgpu.mma(zero, v_smem[...], d_smem[stage].T)
            d_weights = here.dropped(d_weights, query, start, keys_axis=0)
            d_scores = weights * (d_weights - delta) * problem.slope(capped)
            return plgpu.mma(key_sums, d_scores.astype(dtype), q_smem[stage]), value_sums

        zeros = tuple(jnp.zeros((tile, size), jnp.float32) for size in (head_dim, v_dim))
        sums = over_steps(steps.count, stages, loaded, fetch, step, zeros)
        for staging, values, result in zip((k_smem, v_smem), sums, (d_k, d_v), strict=True):
            staging[...] = values.astype(dtype)
            plgpu.copy_smem_to_gmem(staging, result.at[batch, rows, kv_head])
        plgpu.wait_smem_to_gmem(0)

    shape = (problem.batch, problem.kv_seq, problem.kv_heads)
    kernel: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct((*shape, size), dtype) for size in (head_dim, v_dim)),
        grid=(-(-problem.kv_seq // tile), problem.kv_heads, problem.batch),
        grid_names=("tile", "head", "batch"),
        scratch_types={
            "k_smem": plgpu.SMEM((tile, head_dim), dtype),
            "v_smem": plgpu.SMEM((tile, v_dim), dtype),
            "q_smem": plgpu.SMEM((stages, width, head_dim), dtype),
            "d_smem": plgpu.SMEM((stages, width, v_dim), dtype),
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
