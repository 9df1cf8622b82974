"""``attention_backward``: the gradients of attention."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_hopper.ops.flash import backward_rows, backward_tiles
from pallasite_hopper.ops.flash.backward_choice import default_config
from pallasite_hopper.ops.flash.backward_config import BackwardConfig, BackwardProblem
from pallasite_hopper.ops.flash.config import LARGEST_HEAD, head_tile
from pallasite_hopper.ops.flash.terms import MASK_STEP, Terms, given_arrays, with_arrays
from pallasite_std.api import Extras, zeros
from pallasite_std.api import padded as padded_to

VECTOR = 8
"""Elements of 16 bytes: rows of the copy engine are whole vectors of these."""


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    causal: bool,
    scale: float,
    soft_cap: float | None = None,
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    window: tuple[int | None, int | None] = (None, None),
    extras: Extras | None = None,
    period: int | None = None,
    mask_block: tuple[int, int] = (MASK_STEP, MASK_STEP),
    dropout: float = 0.0,
    with_bias: bool = False,
    config: BackwardConfig | None = None,
) -> tuple[jax.Array, ...]:
    """The gradients of attention with respect to queries, keys and values, and perhaps a bias.

    The gradient of the queries is summed up in the order in which blocks come, so it may differ in
    the last places from run to run.

    Args:
      q: (batch, q_seq, q_heads, head_dim), bfloat16 or float16; head_dim up to
        256, of which those that 8 does not divide are filled up with zeros first.
      k, v: (batch, kv_seq, kv_heads, head_dim), where kv_heads divides q_heads; query head h uses
        head h // (q_heads // kv_heads). Heads of v may have fewer elements.
      out: the attention's result, as q, of heads of v.
      lse: (batch, q_heads, q_seq), float32: natural logarithms of the sums of exponentials;
        negative infinity for a query that sees no key. There may be more numbers at the end. With a
        bias or slopes (batch, q_heads, 2, q_seq): the largest scores, and the logarithms relative
        to these.
      d_out: the gradient with respect to ``out``, as it.
      causal: query i sees keys up to i + (keys - queries).
      scale: factor of the scores.
      soft_cap: scores are ``soft_cap * tanh(scores / soft_cap)``, if given.
      q_lengths, kv_lengths: (batch,), int32: how many queries and keys of each sequence exist;
        the gradients of others are zero. What the arrays hold there must be finite.
      window: keys before and after a query's own position that it sees, None for all.
      extras: segments, slopes, bias, block mask and seed of it count.
      period: as of ``Terms``.
      mask_block: queries and keys of a block of the mask.
      dropout: the fraction of the weights that were dropped, by the seed of ``extras``.
      with_bias: whether the gradient of the bias is wanted; see :func:`has_bias_gradient`.
      config: how to compute it; by default chosen from the shape.

    Returns:
      (dq, dk, dv), of the shapes and dtypes of q, k and v, and with a bias its gradient.

    Raises:
      InvalidTypeError, InvalidValueError: shapes or dtypes that do not fit together.
    """
    problem = _problem(q, k, v, causal, scale, soft_cap, q_lengths, kv_lengths)
    problem = dataclasses.replace(
        problem, left=window[0], right=window[1], dropout=dropout, with_bias=with_bias
    )
    arrays = {} if extras is None else given_arrays(extras)
    terms = Terms(period, tuple(arrays))
    _check(problem, q, v, out, lse, d_out, terms.biased)
    size, v_size, kv_heads = problem.head_dim, v.shape[3], problem.kv_heads
    q, k, v, out, d_out = (padded_to(array, 3, VECTOR) for array in (q, k, v, out, d_out))
    problem = dataclasses.replace(
        problem, head_dim=head_tile(size), stored=q.shape[3], v_stored=v.shape[3], terms=terms
    )
    config = default_config(problem) if config is None else config
    given: list[jax.Array] = []
    if terms:
        tile = config.block_q, config.block_kv
        terms, given = with_arrays(
            period, arrays, *tile, config.block_kv, by_keys=True, mask_block=mask_block
        )
        problem = dataclasses.replace(problem, terms=terms)
    if separate_heads(problem, config):
        # Each query head has gradients of keys of its own, which are added up.
        problem = dataclasses.replace(problem, kv_heads=problem.q_heads, sharing=problem.group)
    batch = problem.batch
    lengths = None
    if problem.has_lengths:
        pair = [
            jnp.full((batch,), most, jnp.int32) if given is None else given.astype(jnp.int32)
            for given, most in ((q_lengths, problem.q_seq), (kv_lengths, problem.kv_seq))
        ]
        lengths = jnp.stack(pair, axis=1)
    step = math.lcm(config.block_q, backward_rows.ROWS)
    padded = -(-problem.q_seq // step) * step
    row_lengths = None if q_lengths is None else q_lengths.astype(jnp.int32)
    tiles, shape = backward_tiles.build(problem, config)
    statistics, nothing = backward_rows.row_statistics(
        problem, out, d_out, lse, row_lengths, padded, shape
    )
    operands = [q, k, v, d_out, statistics, *([] if lengths is None else [lengths]), *given]
    if with_bias and not problem.sees_all:
        operands.append(zeros(problem.scores_shape, problem.dtype, *operands))
    sums, dk, dv, *d_scores = tiles(*operands, nothing)
    dk, dv = (_of_shared(_of_parts(one, config.parts), kv_heads) for one in (dk, dv))
    gradients = (backward_rows.convert_dq(problem, config, sums), dk, dv)
    dq, dk, dv = (
        one if one.shape[3] == elements else one[..., :elements]
        for one, elements in zip(gradients, (size, size, v_size), strict=True)
    )
    if not with_bias:
        return dq, dk, dv
    return dq, dk, dv, _of_bias(arrays["bias"], d_scores[0])


def has_bias_gradient(q: jax.Array, v: jax.Array, bias: jax.Array, soft_cap: float | None) -> bool:
    """Whether these kernels have the gradient of a bias: they write those of the scores as they
    multiply them, rounded to the type of the operands."""
    whole = bias.shape[:2] == (q.shape[0], q.shape[2])
    exact = bias.dtype == q.dtype and (whole or q.dtype == jnp.bfloat16)
    return exact and soft_cap is None and max(q.shape[3], v.shape[3]) <= _NOT_SHARED


_NOT_SHARED = 128
"""Heads whose keys warpgroups do not share."""


def _of_bias(bias: jax.Array, d_scores: jax.Array) -> jax.Array:
    """The gradient of a bias that batches or heads may share, from those of scores by keys."""
    axes = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1 != d_scores.shape[axis])
    summed = jnp.sum(d_scores, axes, jnp.float32, keepdims=True) if axes else d_scores
    found: jax.Array = jnp.swapaxes(summed, 2, 3)[:, :, : bias.shape[2]].astype(bias.dtype)
    return found


def separate_heads(problem: BackwardProblem, config: BackwardConfig) -> bool:
    """Whether query heads that share keys have blocks of their own, as masks that differ among them
    need."""
    return problem.group > 1 and (config.own_keys or "visits" in problem.terms.of_head)


def _of_parts(gradient: jax.Array, parts: int) -> jax.Array:
    """The sum over parts of the queries."""
    if parts == 1:
        return gradient
    each = gradient.reshape(parts, -1, *gradient.shape[1:])
    return each.astype(jnp.float32).sum(axis=0).astype(gradient.dtype)


def _of_shared(gradient: jax.Array, kv_heads: int) -> jax.Array:
    """The sum over heads of queries that share those of keys."""
    batch, length, heads, size = gradient.shape
    if heads == kv_heads:
        return gradient
    parts = gradient.reshape(batch, length, kv_heads, heads // kv_heads, size)
    return parts.astype(jnp.float32).sum(axis=3).astype(gradient.dtype)


def _problem(
    q: Any, k: Any, v: Any, causal: bool, scale: float, soft_cap: Any, q_lengths: Any, lengths: Any
) -> BackwardProblem:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise InvalidValueError(
                f"{name} does not have the dimensions (batch, sequence, heads, head_dim)",
                got=f"shape {x.shape}",
            )
    batch, q_seq, q_heads, dim = q.shape
    _, kv_seq, kv_heads, _ = k.shape
    fits = k.shape[:3] == v.shape[:3] and v.shape[3] <= dim
    if not fits or k.shape[0] != batch or k.shape[3] != dim:
        raise InvalidValueError(
            "q, k and v do not fit together",
            got=f"q {q.shape}, k {k.shape}, v {v.shape}",
            expected="k and v alike, with the batch of q, and k with its head_dim",
        )
    if q_heads % kv_heads:
        raise InvalidValueError(
            "heads of queries cannot share those of keys evenly",
            got=f"{q_heads} and {kv_heads}",
            expected="a number of q's heads that those of k divide",
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise InvalidTypeError(
            "q, k and v have dtypes that attention does not take",
            got=f"{q.dtype}, {k.dtype}, {v.dtype}",
            expected="all bfloat16 or all float16",
        )
    if dim > LARGEST_HEAD:
        raise InvalidValueError(
            "no kernel for this size of heads",
            got=f"head_dim {dim}",
            expected=f"at most {LARGEST_HEAD}",
        )
    for name, lengths_of in (("q_lengths", q_lengths), ("kv_lengths", lengths)):
        if lengths_of is not None and lengths_of.shape != (batch,):
            raise InvalidValueError(
                f"{name} does not have one length for each sequence",
                got=f"shape {lengths_of.shape}",
                expected=f"({batch},)",
            )
    return BackwardProblem(
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_seq=q_seq,
        kv_seq=kv_seq,
        head_dim=dim,
        dtype=q.dtype,
        causal=bool(causal),
        scale=float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
        has_lengths=q_lengths is not None or lengths is not None,
    )


def _check(
    problem: BackwardProblem, q: Any, v: Any, out: Any, lse: Any, d_out: Any, biased: bool
) -> None:
    like = (*q.shape[:3], v.shape[3])
    for name, x in (("out", out), ("d_out", d_out)):
        if x.shape != like or x.dtype != q.dtype:
            raise InvalidValueError(
                f"{name} is not like q",
                got=f"{x.dtype}{list(x.shape)}",
                expected=f"{q.dtype}{list(like)}",
            )
    numbers = (2,) if biased else ()
    shape = (problem.batch, problem.q_heads, *numbers, problem.q_seq)
    fits = lse.ndim == len(shape) and lse.shape[:-1] == shape[:-1] and lse.shape[-1] >= shape[-1]
    if not fits or lse.dtype != jnp.float32:
        raise InvalidValueError(
            "lse does not have one number for each head and query",
            got=f"{lse.dtype}{list(lse.shape)}",
            expected=f"float32{list(shape)}, or more at the end",
        )
