"""Lowering a JAX function from within a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pallasite import _jax
from pallasite.lowering.context import RuleContext, Value
from pallasite.lowering.retracing import retracing


def lower_function(
    ctx: RuleContext,
    function: Callable[..., Any],
    *args: Value,
    avals: Sequence[Any] | None = None,
) -> list[Value]:
    """Lowers what a JAX function computes, at the current insertion point.

    Args:
      ctx: the rule's context.
      function: a function of arrays, traced here; it returns an array or a tree of arrays.
      *args: values of its arguments, as rules get them.
      avals: their abstract values; by default those of the rule's own operands.

    Returns:
      A value for each array of the result, in the order of ``jax.tree.leaves``.

    Raises:
      PallasiteError: whatever the rules of the function's primitives raise.
    """
    with retracing(ctx.kernel, ctx.mode):
        jaxpr, _ = _jax.trace_to_jaxpr(function, ctx.avals_in if avals is None else avals)
    return ctx.lower(jaxpr, args)
