"""Attention of which gradients can be taken, made of two functions that run kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallasite.plugin import UnsupportedError
from pallasite.plugin.jax_internals import current_user_location
from pallasite_std.ops.arguments import in_32_bits, matched, without_derivatives, zeros
from pallasite_std.ops.flash.arguments import AttentionCall, Extras
from pallasite_std.ops.flash.batching import backward_of_batches, forward_of_batches
from pallasite_std.ops.flash.residuals import joined, unit

type Gradients = tuple[Any, Any, Any, Any]
"""Of q, k, v and the bias, the last one None if it is not wanted."""


def differentiable_attention(
    forward: Callable[..., tuple[Any, ...]],
    backward: Callable[..., Gradients],
    of_queries: Callable[..., Any] | None = None,
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """``attention`` and ``attention_forward``: of (q, k, v, extras, call); and
    ``attention_backward``: of (q, k, v, extras, out, lse, d_out, call).

    Args:
      forward: takes the same and whether log-sum-exp is wanted; returns the result, and it, as one
        number or two of ``residuals.py``.
      backward: takes the call, (q, k, v, extras, out, lse), the cotangent and whether the gradient
        of the bias is wanted; returns those of q, k, v and, if it is, the bias.
      of_queries: of q, k, extras and the log-sum-exp that ``forward`` returns: that of each head
        and query. ``backward`` takes both.
    """

    def split(q: Any, k: Any, extras: Extras, lse: Any) -> Any:
        if lse.ndim == 4:
            return lse[..., : q.shape[1]]
        if of_queries is None or lse.shape[2:] == q.shape[1:2]:
            return lse
        return of_queries(q, k, extras, lse)

    def any_forward(
        call: AttentionCall, residuals: bool, q: Any, k: Any, v: Any, extras: Extras
    ) -> tuple[Any, ...]:
        if 0 not in (*q.shape, *k.shape, *v.shape):

            def one(q: Any, k: Any, v: Any, extras: Extras) -> tuple[Any, ...]:
                return forward(q, k, v, extras, call, residuals)

            found: tuple[Any, ...] = forward_of_batches(one, split)(q, k, v, extras)
            return found
        batch, q_seq, q_heads, _ = q.shape
        lse = zeros((batch, q_heads, q_seq), jnp.float32, q, k, v) - jnp.inf
        return zeros((*q.shape[:3], v.shape[3]), q.dtype, q, k, v), lse

    def any_backward(call: AttentionCall, with_bias: bool, *saved: Any) -> Gradients:
        *residuals, d_out = saved
        q, k, v, extras, *_ = residuals
        if 0 not in (*q.shape, *k.shape, *v.shape):

            def one(*saved: Any) -> Gradients:
                return backward(call, saved[:-1], saved[-1], with_bias)

            if with_bias:
                return one(*residuals, d_out)
            found: Gradients = backward_of_batches(one)(*residuals, d_out)
            return found
        given = [q, k, v, *([extras.bias] if with_bias else [])]
        d_q, d_k, d_v, *d_bias = (zeros(one.shape, one.dtype, q, k, v) for one in given)
        return d_q, d_k, d_v, d_bias[0] if d_bias else None

    def attention(call: AttentionCall, *arrays: Any) -> Any:
        return any_forward(call, False, *arrays)[0]

    def run(call: AttentionCall, with_bias: bool, *arrays: Any) -> tuple[Any, Any]:
        function = functools.partial(any_forward, call, True)
        out, lse = without_derivatives(_SECOND, _INSTEAD, function)(*arrays)
        # What the structure says, no array has to: whether the gradient of the bias is wanted.
        return out, (*arrays, out, lse, () if with_bias else None)

    def pull_back(call: AttentionCall, saved: Any, d_out: Any) -> tuple[Any, ...]:
        *residuals, with_bias = saved
        function = functools.partial(any_backward, call, with_bias is not None)
        found = without_derivatives(_SECOND, _INSTEAD, function)(*residuals, d_out)
        d_q, d_k, d_v, d_bias = found
        return d_q, d_k, d_v, None if d_bias is None else Extras(bias=d_bias)

    def run_bias(call: AttentionCall, *inputs: Any) -> tuple[Any, Any]:
        """With a bias or slopes: these are told which arrays derivatives are wanted by."""
        extras = inputs[3]
        if extras.slopes is not None and extras.slopes.perturbed:
            raise UnsupportedError(
                "attention has no derivatives by alibi_slopes",
                hint="jax.lax.stop_gradient(alibi_slopes), or the slopes' distances as bias",
                location=current_user_location(),
            )
        arrays = jax.tree.map(lambda one: one.value, inputs, is_leaf=_is_primal)
        return run(call, extras.bias is not None and extras.bias.perturbed, *arrays)

    def pull_back_bias(call: AttentionCall, saved: Any, d_out: Any) -> tuple[Any, ...]:
        if isinstance(d_out, jax.custom_derivatives.SymbolicZero):
            d_out = jnp.zeros_like(saved[-3])
        return pull_back(call, saved, d_out)

    plain: Any = jax.custom_vjp(attention, nondiff_argnums=(0,))
    plain.defvjp(in_32_bits(lambda call, *arrays: run(call, False, *arrays)), in_32_bits(pull_back))
    biased: Any = jax.custom_vjp(attention, nondiff_argnums=(0,))
    biased.defvjp(in_32_bits(run_bias), in_32_bits(pull_back_bias), symbolic_zeros=True)

    def differentiable(q: Any, k: Any, v: Any, extras: Extras, call: AttentionCall) -> Any:
        with_bias = extras.bias is not None or extras.slopes is not None
        return (biased if with_bias else plain)(call, *_matched(q, k, v, extras))

    def with_logarithms(
        q: Any, k: Any, v: Any, extras: Extras, call: AttentionCall
    ) -> tuple[Any, Any]:
        function = functools.partial(any_forward, call, True)
        out, lse = without_derivatives(
            "attention_forward", "attention() has derivatives", function
        )(*_matched(q, k, v, extras))
        return out, joined(split(q, k, extras, lse), unit(call.scale, call.soft_cap, extras))

    def gradients(q: Any, k: Any, v: Any, extras: Extras, *rest: Any) -> tuple[Any, Any, Any]:
        out, lse, d_out, call = rest
        function = functools.partial(any_backward, call, False)
        q, k, v, out, lse, d_out, *others = matched(q, k, v, out, lse, d_out, *extras)
        found = without_derivatives(_SECOND, _INSTEAD, function)(
            q, k, v, Extras(*others), out, lse, d_out
        )
        return found[:3]

    return differentiable, with_logarithms, gradients


def _matched(q: Any, k: Any, v: Any, extras: Extras) -> tuple[Any, Any, Any, Extras]:
    q, k, v, *rest = matched(q, k, v, *extras)
    return q, k, v, Extras(*rest)


def _is_primal(value: Any) -> bool:
    return hasattr(value, "perturbed")


_SECOND = "the derivative of attention"
_INSTEAD = "jax.nn.dot_product_attention has second derivatives"
