"""Attention of which gradients can be taken, made of two functions that run kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from pallasite_std.ops.arguments import matched
from pallasite_std.ops.flash.arguments import AttentionCall


def differentiable_attention(
    forward: Callable[..., tuple[Any, ...]], backward: Callable[..., tuple[Any, Any, Any]]
) -> Callable[..., Any]:
    """A function of (q, k, v, q_lengths, kv_lengths, call).

    Args:
      forward: takes the same and whether log-sum-exp is wanted; returns the result, and it.
      backward: takes the call, (q, k, v, q_lengths, kv_lengths, out, lse) and the cotangent;
        returns those of q, k and v.
    """

    def attention(q: Any, k: Any, v: Any, q_lengths: Any, kv_lengths: Any, call: Any) -> Any:
        return forward(q, k, v, q_lengths, kv_lengths, call, False)[0]

    def run(
        q: Any, k: Any, v: Any, q_lengths: Any, kv_lengths: Any, call: AttentionCall
    ) -> tuple[Any, Any]:
        out, lse = forward(q, k, v, q_lengths, kv_lengths, call, True)
        return out, (q, k, v, q_lengths, kv_lengths, out, lse)

    def pull_back(call: AttentionCall, saved: Any, d_out: Any) -> tuple[Any, ...]:
        return (*backward(call, saved, d_out), None, None)

    wrapped: Any = jax.custom_vjp(attention, nondiff_argnums=(5,))
    wrapped.defvjp(run, pull_back)

    def differentiable(*arguments: Any) -> Any:
        *arrays, call = arguments
        return wrapped(*matched(*arrays), call)

    return differentiable
