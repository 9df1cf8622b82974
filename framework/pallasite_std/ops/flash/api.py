"""``attention``: the function that programs call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallasite
from pallasite.plugin import InvalidValueError, select_target
from pallasite_std.ops.arguments import random_array
from pallasite_std.ops.flash import forward
from pallasite_std.ops.flash.arguments import AttentionCall, attention_call, check_residuals
from pallasite_std.ops.flash.config import (
    LARGEST_HEAD,
    AttentionConfig,
    attention_configs,
    default_config,
)
from pallasite_std.ops.flash.gradient import differentiable_attention
from pallasite_std.ops.flash.problem import Problem
from pallasite_std.ops.padding import padded

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

HEAD_STEP = 16
"""Heads are filled up with zeros to multiples of this."""

_VERSION = 1
"""Of the kernel, for what was measured."""


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    config: AttentionConfig | None = None,
) -> jax.Array:
    """``softmax(scale * q @ k.T) @ v`` for each batch and head, in one kernel.

    It can be differentiated with respect to q, k and v.

    Args:
      q: (batch, q_seq, q_heads, head_dim), bfloat16, float16 or float32 (multiplied as tf32);
        head_dim up to 256.
      k, v: (batch, kv_seq, kv_heads, head_dim), of the same dtype. kv_heads divides q_heads; query
        head h uses head ``h // (q_heads // kv_heads)``.
      causal: query i sees keys up to ``i + (keys - queries)``: the last query sees all keys, as in
        FlashAttention. ``jax.nn.dot_product_attention`` lets the first query see the first key
        instead, which differs if there are not as many queries as keys.
      scale: positive factor of the scores; ``head_dim ** -0.5`` by default.
      soft_cap: if given, scores are ``soft_cap * tanh(scores / soft_cap)``, after the scale.
      q_lengths, kv_lengths: (batch,), integers: how many queries and keys of each batch exist. They
        also take the place of q_seq and kv_seq in ``causal``. What the arrays hold beyond must be
        finite.
      config: how to cut the work up, of the type that the implementation for the target takes. By
        default it is chosen from the shapes, or by measuring if the option ``autotune`` says so
        (see :func:`pallasite.choose`).

    Returns:
      An array like q; zeros for queries that do not exist or see no key.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.

    Source: T. Dao, "FlashAttention-2", arXiv 2307.08691.
    """
    call, lengths = _checked(q, k, v, causal, scale, soft_cap, q_lengths, kv_lengths, config)
    result: jax.Array = _attention(q, k, v, *lengths, call)
    return result


def attention_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    config: AttentionConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """:func:`attention` with log-sum-exp, for programs that combine results for parts of the keys.

    Args: as of :func:`attention`.

    Returns:
      The result, an array like q, and the natural logarithms of the sums of exponentials, float32
      (batch, q_heads, q_seq); minus infinity for queries that do not exist or see no key. Neither
      has derivatives.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    call, lengths = _checked(q, k, v, causal, scale, soft_cap, q_lengths, kv_lengths, config)
    out, lse = _with_logarithms(q, k, v, *lengths, call)
    return out, lse


def attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of :func:`attention`, for programs that combine results for parts of the keys.

    With ``out`` and ``lse`` of all keys, the gradients of the queries for parts of the keys add up
    to the whole, and those of the keys and values of each part are complete.

    Args:
      q, k, v, causal, scale, soft_cap, q_lengths, kv_lengths: as of :func:`attention`.
      out: its result.
      lse: (batch, q_heads, q_seq), float32: its log-sum-exp, as of :func:`attention_forward`.
      d_out: the gradient with respect to ``out``, an array like q.

    Returns:
      The gradients with respect to q, k and v, arrays like these. They have no derivatives.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.
    """
    call, lengths = _checked(q, k, v, causal, scale, soft_cap, q_lengths, kv_lengths, None)
    check_residuals(q, out, lse, d_out)
    d_q, d_k, d_v = _gradients(q, k, v, *lengths, out, lse, d_out, call)
    return d_q, d_k, d_v


def _checked(
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    scale: Any,
    soft_cap: Any,
    q_lengths: Any,
    kv_lengths: Any,
    config: Any,
) -> tuple[AttentionCall, tuple[Any, Any]]:
    call, lengths = attention_call(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        soft_cap=soft_cap,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        config=config,
        config_type=AttentionConfig,
        dtypes=DTYPES,
    )
    if q.shape[3] > LARGEST_HEAD:
        raise InvalidValueError(
            "heads of this size are not supported",
            got=f"head_dim {q.shape[3]}",
            expected=f"at most {LARGEST_HEAD}",
        )
    return call, lengths


# Derivatives --------------------------------------------------------------------------------------


def _backward(call: AttentionCall, saved: Any, d_out: Any) -> tuple[Any, Any, Any]:
    from pallasite_std.ops.flash.backward import gradients

    q, k, v, q_lengths, kv_lengths, out, lse = saved
    head_dim = q.shape[3]
    arrays = (q, k, v, out, d_out.astype(q.dtype))
    q, k, v, out, d_out = (padded(array, 3, HEAD_STEP) for array in arrays)
    lengths = [given for given in (q_lengths, kv_lengths) if given is not None]
    problem = _problem(q, k, q_lengths, kv_lengths, call)
    results = gradients(problem, q, k, v, out, d_out, lse, lengths)
    d_q, d_k, d_v = (one[..., :head_dim] for one in results)
    return d_q, d_k, d_v


# The kernel ---------------------------------------------------------------------------------------


def _problem(q: Any, k: Any, q_lengths: Any, kv_lengths: Any, call: AttentionCall) -> Problem:
    batch, q_seq, q_heads, head_dim = q.shape
    return Problem(
        batch=batch,
        q_seq=q_seq,
        kv_seq=k.shape[1],
        q_heads=q_heads,
        kv_heads=k.shape[2],
        head_dim=head_dim,
        dtype=np.dtype(q.dtype),
        causal=call.causal,
        scale=call.scale,
        soft_cap=call.soft_cap,
        q_lengths=q_lengths is not None,
        kv_lengths=kv_lengths is not None,
    )


def _forward(
    q: Any,
    k: Any,
    v: Any,
    q_lengths: Any,
    kv_lengths: Any,
    call: AttentionCall,
    residuals: bool,
) -> tuple[Any, ...]:
    head_dim = q.shape[3]
    q, k, v = (padded(array, 3, HEAD_STEP) for array in (q, k, v))
    problem = _problem(q, k, q_lengths, kv_lengths, call)
    operands = [q, k, v, *(given for given in (q_lengths, kv_lengths) if given is not None)]
    config = call.config or _choose(problem, residuals, operands)
    out, *lse = _run(problem, residuals, config, *operands)
    return (out[..., :head_dim], *lse)


_attention, _with_logarithms, _gradients = differentiable_attention(_forward, _backward)


def _choose(problem: Problem, residuals: bool, operands: list[Any]) -> AttentionConfig:
    q_seq, head_dim, size = problem.q_seq, problem.head_dim, problem.dtype.itemsize
    shared_memory = select_target().max_shared_memory

    def make_inputs(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, 3)
        arrays = [random_array(*pair) for pair in zip(keys, operands[:3], strict=True)]
        most = [q_seq] * problem.q_lengths + [problem.kv_seq] * problem.kv_lengths
        return arrays + [jnp.full((problem.batch,), n, jnp.int32) for n in most]

    chosen: AttentionConfig = pallasite.choose(
        "standard.attention",
        _VERSION,
        operands,
        lambda: attention_configs(q_seq, head_dim, size, shared_memory),
        default_config(q_seq, head_dim, size, shared_memory),
        functools.partial(_run, problem, residuals),
        key=(
            problem.causal,
            problem.soft_cap is not None,
            problem.q_lengths,
            problem.kv_lengths,
            residuals,
        ),
        make_inputs=make_inputs,
    )
    return chosen


def _run(
    problem: Problem, residuals: bool, config: AttentionConfig, *operands: Any
) -> tuple[Any, ...]:
    out, *lse = _kernel(problem, config, residuals)(*operands)
    return (out, *(one[:, :, : problem.q_seq] for one in lse))


_kernel = functools.lru_cache(maxsize=256)(forward.build)
