"""How large results and gradients of products are if nothing cancels out.

Products are as exact as their factors, which are rounded on their way to the tensor core (float32
is cut off to tf32), gradients too that were computed before. Where the terms of a sum cancel out,
their errors do not, and what an activation makes of a product, or its derivative, is off by as much
as the product is. So each function here returns, for every result and gradient of an operation,
roots of sums of squared terms, of the same shape; some part of that is tolerated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def _identity(x: Any) -> Any:
    return x


def _with_derivatives(function: Callable[[Any], Any], x: Any) -> tuple[Any, Any, Any]:
    """A function of each element, its derivative and the derivative of that."""

    def slope(x: Any) -> Any:
        return jax.jvp(function, (x,), (jnp.ones_like(x),))[1]

    return function(x), *jax.jvp(slope, (x,), (jnp.ones_like(x),))


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
    by: tuple[str, ...] = (),
) -> list[Any]:
    """Of ``activation(a @ b * scales + bias) + residual``; ``by`` are names of operands."""
    del out_dtype
    left, right = (a.T if transpose_a else a) ** 2, (b.T if transpose_b else b) ** 2
    product, squares = (a.T if transpose_a else a) @ (b.T if transpose_b else b), left @ right
    rows = 1.0 if row_scale is None else row_scale.reshape(-1, 1)
    columns = 1.0 if column_scale is None else column_scale.reshape(1, -1)
    values = product * rows * columns + (0.0 if bias is None else bias)
    out, slope, bend = _with_derivatives(activation or _identity, values)
    own = squares * (rows * columns) ** 2
    # Of the gradient by what is activated, and by the product.
    inner = slope**2 + bend**2 * own
    outer = inner * (rows * columns) ** 2
    scaled = inner * product**2 + slope**2 * squares
    found = {
        "a": (lambda x: x.T if transpose_a else x)(outer @ right.T),
        "b": (lambda x: x.T if transpose_b else x)(left.T @ outer),
        "bias": inner.sum(0),
        "residual": jnp.ones_like(out),
    }
    if row_scale is not None:
        own_rows = (scaled * columns**2).sum(1)
        found["row_scale"] = own_rows if row_scale.shape else own_rows.sum()
    if column_scale is not None:
        own_columns = (scaled * rows**2).sum(0)
        found["column_scale"] = own_columns if column_scale.shape else own_columns.sum()
    return [jnp.sqrt(one) for one in (out**2 + slope**2 * own, *(found[name] for name in by))]


def gated_matmul(
    a: Any, gate: Any, up: Any, *, activation: Any, by: tuple[str, ...] = ()
) -> list[Any]:
    """Of ``activation(a @ gate) * (a @ up)``; ``by`` are names of operands."""
    gates, ups = a @ gate, a @ up
    # Squares of what they are off by.
    own_gates, own_ups = a**2 @ gate**2, a**2 @ up**2
    activated, slope, bend = _with_derivatives(activation, gates)
    by_gates = (slope * ups) ** 2 + (bend * ups) ** 2 * own_gates + slope**2 * own_ups
    by_ups = activated**2 + slope**2 * own_gates
    found = {
        "a": by_gates @ (gate**2).T + by_ups @ (up**2).T,
        "gate": (a**2).T @ by_gates,
        "up": (a**2).T @ by_ups,
    }
    out = (activated * ups) ** 2 + (slope * ups) ** 2 * own_gates + activated**2 * own_ups
    return [jnp.sqrt(one) for one in (out, *(found[name] for name in by))]


def of_linear(reference: Callable[..., Any], by: tuple[str, ...]) -> Callable[..., list[Any]]:
    """Of what is linear in each of two operands, a and b, whose terms are their products."""

    def terms(a: Any, b: Any, **others: Any) -> list[Any]:
        squares = {"a": a**2, "b": b**2}

        def total(chosen: dict[str, Any]) -> tuple[Any, Any]:
            out = reference(**{**squares, **chosen}, **others)
            return jnp.sum(out), out

        slopes, out = jax.grad(total, has_aux=True)({name: squares[name] for name in by})
        return [jnp.sqrt(one) for one in (out, *(slopes[name] for name in by))]

    return terms
