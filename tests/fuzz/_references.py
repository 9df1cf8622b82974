"""What operations compute, in ``jax.numpy`` of float64, from their definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def with_gradients(
    function: Callable[..., Any], arrays: dict[str, Any], by: tuple[str, ...]
) -> list[np.ndarray]:
    """Results of a function, and the gradients of the sum of the first one by some arguments."""
    found = _computed(function, arrays, by, {})
    if all(np.isfinite(one).all() for one in found):
        return found
    # Unoptimized, XLA's derivative of tanh is NaN for some numbers (jaxlib 0.11.2, on the CPU).
    return _computed(function, arrays, by, {"xla_backend_optimization_level": 2})


def _computed(
    function: Callable[..., Any],
    arrays: dict[str, Any],
    by: tuple[str, ...],
    options: dict[str, Any],
) -> list[np.ndarray]:
    with jax.enable_x64(True):
        given = {k: None if a is None else jnp.asarray(a) for k, a in arrays.items()}
        others = {name: array for name, array in given.items() if name not in by}

        def total(chosen: dict[str, Any], others: dict[str, Any]) -> Any:
            results = jax.tree.leaves(function(**chosen, **others))
            return jnp.sum(results[0]), results

        chosen = {name: given[name] for name in by}
        # As one function: compiled one by one, its steps would take longer than the operation.
        if not by:
            once = jax.jit(total, compiler_options=options)
            return [np.asarray(one) for one in once(chosen, others)[1]]
        both = jax.value_and_grad(total, has_aux=True)
        (_, results), slopes = jax.jit(both, compiler_options=options)(chosen, others)
        return [np.asarray(one) for one in (*results, *(slopes[name] for name in by))]


def matmul(
    a: Any,
    b: Any,
    row_scale: Any,
    column_scale: Any,
    bias: Any,
    residual: Any,
    *,
    transpose_a: bool,
    transpose_b: bool,
    out_dtype: Any = None,
    activation: Any = None,
) -> Any:
    """``activation(a @ b * scales + bias) + residual``."""
    del out_dtype
    values = (a.T if transpose_a else a) @ (b.T if transpose_b else b)
    if row_scale is not None:
        values = values * row_scale.reshape(-1, 1)
    if column_scale is not None:
        values = values * column_scale.reshape(1, -1)
    if bias is not None:
        values = values + bias
    if activation is not None:
        values = activation(values)
    return values if residual is None else values + residual


def attention(
    q: Any,
    k: Any,
    v: Any,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    q_segments: Any = None,
    kv_segments: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    block_mask: Any = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: Any = None,
    mask_block: tuple[int, int] = (128, 128),
    factors: Any = None,
    logarithms: bool = False,
    weighted: Any = None,
) -> Any:
    """Softmax of scores, by values; zeros for queries that see no key.

    Args:
      factors: of the normalized weights, which dropout leaves.
      logarithms: whether the log-sum-exp is returned, too.
      weighted: instead of the result, returns what this returns of normalized weights, the
        derivatives of capped scores by products of q and k, and k and v of each head of q.
    """
    batch, q_seq, heads, dim = q.shape
    kv_seq, kv_heads = k.shape[1:3]
    queries, keys = jnp.arange(q_seq)[:, None], jnp.arange(kv_seq)
    q_lengths = jnp.full(batch, q_seq) if q_lengths is None else jnp.clip(q_lengths, 0, q_seq)
    kv_lengths = jnp.full(batch, kv_seq) if kv_lengths is None else jnp.clip(kv_lengths, 0, kv_seq)
    ends, starts = kv_lengths[:, None, None], q_lengths[:, None, None]
    positions = queries + (ends - starts)
    seen = (keys < ends) & (queries < starts)
    before, after = window if isinstance(window, tuple) else (window, window)
    if causal:
        after = 0 if after is None else min(after, 0)
    if before is not None:
        seen = seen & (keys >= positions - before)
    if after is not None:
        seen = seen & (keys <= positions + after)
    if q_segments is not None:
        seen = seen & (q_segments[:, :, None] == kv_segments[:, None, :])
    k, v = (jnp.repeat(one, heads // max(1, kv_heads), axis=2) for one in (k, v))
    scale = dim**-0.5 if scale is None else scale
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if soft_cap is not None:
        capped = jnp.tanh(scores / soft_cap)
        scale, scores = scale * (1 - capped**2), soft_cap * capped
    seen = jnp.broadcast_to(seen[:, None], scores.shape)
    if bias is not None:
        scores = scores + bias
    if alibi_slopes is not None:
        slopes = jnp.atleast_2d(alibi_slopes)[:, :, None, None]
        scores = scores - slopes * jnp.abs(positions - keys)[:, None]
    if block_mask is not None:
        mask = jnp.repeat(jnp.repeat(block_mask, mask_block[0], 2), mask_block[1], 3)
        seen = seen & (mask[:, :, :q_seq, :kv_seq] != 0)
    largest = jnp.max(jnp.where(seen, scores, -1e30), axis=-1, keepdims=True, initial=-1e30)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - largest, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    safe = jnp.where(total > 0, total, 1.0)
    weights = weights / safe
    if weighted is not None:
        return weighted(weights, scale, k, v)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights if factors is None else weights * factors, v)
    if not logarithms:
        return out
    return out, jnp.where(total > 0, jnp.log(safe) + largest, -jnp.inf)[..., 0]


def attention_gradients(q: Any, k: Any, v: Any, d_out: Any, **options: Any) -> Any:
    """The gradients of attention by q, k and v."""
    return jax.vjp(lambda *given: attention(*given, **options), q, k, v)[1](d_out)


def attention_terms(
    q: Any, k: Any, v: Any, d_out: Any = None, *, factors: Any = None, **options: Any
) -> Any:
    """How large the gradients of attention by q, k, v and the bias are if nothing cancels out.

    Without the gradient by the bias if d_out is given, as :func:`attention_gradients`.

    A score's gradient is its weight times the difference of the weight's gradient and their mean
    over all keys. Both are sums of products that are rounded apart, so that the difference is no
    more exact than they are; it is zero where there is one key.

    Returns:
      Roots of sums of squared terms, of the shapes of the gradients.
    """
    bias, kv_heads = options.get("bias"), k.shape[2]

    def terms(weights: Any, scale: Any, keys: Any, values: Any) -> Any:
        d = jnp.ones((*q.shape[:3], v.shape[-1])) if d_out is None else d_out
        used = weights if factors is None else weights * factors
        out = jnp.einsum("bhqk,bkhd->bqhd", used, values)
        # Squares of the weights' gradients, times those of the weights; and of their means.
        each = used**2 * jnp.einsum("bqhd,bkhd->bhqk", d**2, values**2)
        mean = (jnp.einsum("bqhd,bqhd->bhq", d**2, out**2) + each.sum(-1))[..., None]
        products, slopes = each * scale**2, weights * scale
        # What a mean is off by, all keys have in common.
        by_q = jnp.einsum("bhqk,bkhd->bqhd", products, keys**2)
        by_q += jnp.einsum("bhqk,bkhd->bqhd", slopes, keys) ** 2 * mean.transpose(0, 2, 1, 3)
        by_k = jnp.einsum("bhqk,bqhd->bkhd", products + slopes**2 * mean, q**2)
        by_v = jnp.einsum("bhqk,bqhd->bkhd", used**2, d**2)
        found = [by_q, _of_groups(by_k, kv_heads), _of_groups(by_v, kv_heads)]
        if bias is not None and d_out is None:
            shared = [axis for axis in range(4) if bias.shape[axis] == 1]
            whole = weights.sum(-1, keepdims=True) if 3 in shared else weights
            found.append(
                each.sum(shared, keepdims=True) + (whole**2 * mean).sum(shared, keepdims=True)
            )
        return tuple(jnp.sqrt(one) for one in found)

    return attention(q, k, v, **options, weighted=terms)


def _of_groups(by_head: Any, kv_heads: int) -> Any:
    """Sums over the heads of q that share one of k and v."""
    batch, rows, heads, dim = by_head.shape
    group = heads // max(1, kv_heads)
    return by_head.reshape(batch, rows, kv_heads, group, dim).sum(3)


def gated_matmul(a: Any, gate: Any, up: Any, *, activation: Any) -> Any:
    """``activation(a @ gate) * (a @ up)``."""
    return activation(a @ gate) * (a @ up)


def top_k(x: Any, *, k: int) -> Any:
    """The largest elements of each row and their columns; the lowest of equal ones first."""
    columns = jnp.argsort(-x, axis=-1, stable=True)[..., :k]
    return jnp.take_along_axis(x, columns, axis=-1), columns


def decode(
    q: Any,
    k: Any = None,
    v: Any = None,
    kv_lengths: Any = None,
    k_pages: Any = None,
    v_pages: Any = None,
    page_indices: Any = None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    page_layout: str = "heads_first",
    **options: Any,
) -> Any:
    """Attention of the last queries of each sequence, each of which sees the keys up to its own."""
    if page_indices is not None:
        order = (1, 2, 0, 3) if page_layout == "heads_first" else (0, 1, 2, 3)
        table = page_indices.astype(int)
        pools = (one.transpose(order)[table] for one in (k_pages, v_pages))
        k, v = (
            one.reshape(one.shape[0], one.shape[1] * one.shape[2], *one.shape[3:]) for one in pools
        )
    queries = q[:, None] if q.ndim == 3 else q
    out = attention(queries, k * k_scale, v * v_scale, None, kv_lengths, causal=True, **options)
    return out.reshape(q.shape)


def _groups(group_sizes: Any, rows: int) -> Any:
    """(rows, groups): one where a row is of a group."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(rows)[:, None]
    return ((row < ends) & (row >= ends - group_sizes)).astype(jnp.float64)


def ragged_matmul(
    a: Any, b: Any, group_sizes: Any, *, transpose_b: bool, out_dtype: Any = None
) -> Any:
    """Each group of rows by its own matrix."""
    del out_dtype
    each = jnp.einsum("mk,gnk->mgn" if transpose_b else "mk,gkn->mgn", a, b)
    return jnp.einsum("mg,mgn->mn", _groups(group_sizes, a.shape[0]), each)


def transposed_ragged_matmul(a: Any, b: Any, group_sizes: Any, *, out_dtype: Any = None) -> Any:
    """The transpose of each group of rows by the same rows of another matrix."""
    del out_dtype
    return jnp.einsum("mg,mk,mn->gkn", _groups(group_sizes, a.shape[0]), a, b)


def mixed_matmul(a: Any, b: Any, scales: Any, *, transpose_b: bool, out_dtype: Any = None) -> Any:
    """Activations by weights times their factors."""
    del out_dtype
    weights = b.T if transpose_b else b
    if scales is not None and scales.ndim == 1:
        return (a @ weights) * scales
    if scales is not None:
        weights = weights * jnp.repeat(scales, weights.shape[0] // scales.shape[0], axis=0)
    return a @ weights
