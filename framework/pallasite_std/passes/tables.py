"""Small constant arrays that jitted functions hold, such as coefficients of a polynomial."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from pallasite.plugin import jax_internals as _jax

LARGEST = 64
"""Elements of a table, each of which takes a comparison and a selection."""


def with_computed_tables(jaxpr: Any, operands: int) -> Any:
    """The jaxpr, with equations that make its small constant arrays.

    Args:
      jaxpr: of a call, which may hold constants.
      operands: of the call; with as many as it has inputs, the constants are its own.
    """
    if not jaxpr.constvars or not jaxpr.eqns or operands != len(jaxpr.invars):
        return jaxpr
    pairs = list(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    tables = [pair for pair in pairs if is_table(pair[1])]
    if not tables:
        return jaxpr
    others = [pair for pair in pairs if not is_table(pair[1])]
    made = [_equation(jaxpr.eqns[0], *pair) for pair in tables]
    return jaxpr.replace(
        constvars=[variable for variable, _ in others],
        consts=[value for _, value in others],
        eqns=[*made, *jaxpr.eqns],
    )


def is_table(value: Any) -> bool:
    """Whether it is a known array of few elements."""
    aval = _jax.typeof(value)
    if isinstance(value, _jax.Tracer) or not isinstance(aval, _jax.ShapedArray):
        return False
    # Random keys have no numbers.
    return aval.shape != () and math.prod(aval.shape) <= LARGEST and aval.dtype.kind in "biufV"


def _equation(like: Any, variable: Any, value: Any) -> Any:
    """What makes a table, at the place of an equation."""
    with _jax.location_of_equation(like):
        traced, _ = _jax.trace_to_jaxpr(lambda: [computed(np.asarray(value))], [])
    return like.replace(
        primitive=primitives.closed_call_p,
        invars=[],
        outvars=[variable],
        params={"call_jaxpr": traced},
        effects=traced.effects,
    )


def computed(table: np.ndarray[Any, Any]) -> Any:
    """An array of the current trace: the table, selected from its elements by their places."""
    if table.size == 0:
        return jnp.zeros(table.shape, table.dtype)
    strides = [math.prod(table.shape[d + 1 :]) for d in range(table.ndim)]
    place: Any = sum(
        lax.broadcasted_iota(np.int32, table.shape, d) * np.int32(stride)
        for d, stride in enumerate(strides)
    )
    first, *others = table.reshape(-1)
    result = jnp.full(table.shape, first, table.dtype)
    for number, element in enumerate(others, 1):
        if element.tobytes() != first.tobytes():
            chosen = place == np.int32(number)
            result = jnp.where(chosen, jnp.full(table.shape, element, table.dtype), result)
    return result
