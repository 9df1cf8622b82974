"""Attention of which gradients can be taken, made of two functions that run kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallasite_std.ops.arguments import matched, without_derivatives, zeros
from pallasite_std.ops.flash.arguments import AttentionCall


def differentiable_attention(
    forward: Callable[..., tuple[Any, ...]], backward: Callable[..., tuple[Any, Any, Any]]
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """``attention`` and ``attention_forward``: of (q, k, v, q_lengths, kv_lengths, call); and
    ``attention_backward``: of (q, k, v, q_lengths, kv_lengths, out, lse, d_out, call).

    Args:
      forward: takes the same and whether log-sum-exp is wanted; returns the result, and it.
      backward: takes the call, (q, k, v, q_lengths, kv_lengths, out, lse) and the cotangent;
        returns those of q, k and v.
    """

    def any_forward(call: AttentionCall, residuals: bool, *arrays: Any) -> tuple[Any, ...]:
        q, k, *_ = arrays
        if 0 not in (*q.shape, *k.shape):
            return forward(*arrays, call, residuals)
        batch, q_seq, q_heads, _ = q.shape
        lse = zeros((batch, q_heads, q_seq), jnp.float32, *arrays) - jnp.inf
        return zeros(q.shape, q.dtype, *arrays), lse

    def any_backward(call: AttentionCall, *saved: Any) -> tuple[Any, Any, Any]:
        *residuals, d_out = saved
        q, k, v, *_ = residuals
        if 0 not in (*q.shape, *k.shape):
            return backward(call, tuple(residuals), d_out)
        d_q, d_k, d_v = (zeros(one.shape, one.dtype, *residuals) for one in (q, k, v))
        return d_q, d_k, d_v

    def attention(call: AttentionCall, *arrays: Any) -> Any:
        return any_forward(call, False, *arrays)[0]

    def run(call: AttentionCall, *arrays: Any) -> tuple[Any, Any]:
        function = functools.partial(any_forward, call, True)
        out, lse = without_derivatives(_SECOND, _INSTEAD, function)(*arrays)
        return out, (*arrays, out, lse)

    def pull_back(call: AttentionCall, saved: Any, d_out: Any) -> tuple[Any, ...]:
        function = functools.partial(any_backward, call)
        return (*without_derivatives(_SECOND, _INSTEAD, function)(*saved, d_out), None, None)

    wrapped: Any = jax.custom_vjp(attention, nondiff_argnums=(0,))
    wrapped.defvjp(run, pull_back)

    def differentiable(*arguments: Any) -> Any:
        *arrays, call = arguments
        return wrapped(call, *matched(*arrays))

    def with_logarithms(*arguments: Any) -> Any:
        *arrays, call = arguments
        function = functools.partial(any_forward, call, True)
        out, lse = without_derivatives(
            "attention_forward", "attention() has derivatives", function
        )(*matched(*arrays))
        return out, lse

    def gradients(*arguments: Any) -> tuple[Any, Any, Any]:
        *arrays, call = arguments
        function = functools.partial(any_backward, call)
        d_q, d_k, d_v = without_derivatives(_SECOND, _INSTEAD, function)(*matched(*arrays))
        return d_q, d_k, d_v

    return differentiable, with_logarithms, gradients


_SECOND = "the derivative of attention"
_INSTEAD = "jax.nn.dot_product_attention has second derivatives"
