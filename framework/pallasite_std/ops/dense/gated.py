"""``gated_matmul``: two products and what joins them; the function that programs call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from pallasite.plugin import InvalidTypeError, InvalidValueError
from pallasite_std.ops.activations import CapturingActivation, captured_values
from pallasite_std.ops.arguments import in_32_bits, matched, zeros
from pallasite_std.ops.dense.api import matmul
from pallasite_std.ops.dense.batching import rows_joined
from pallasite_std.ops.recomputed import recomputed_tangent
from pallasite_std.ops.rows.arguments import FLOATS, names
from pallasite_std.ops.rows.gated import Activation, gated_activation

type Products = Callable[[Activation, jax.Array, jax.Array, jax.Array], jax.Array]
"""Of activation, a, gate and up."""


@in_32_bits
def gated_matmul(
    a: jax.Array, gate: jax.Array, up: jax.Array, *, activation: Activation = jax.nn.silu
) -> jax.Array:
    """``activation(a @ gate) * (a @ up)``: the first half of a gated feed-forward layer (SwiGLU).

    Where the target has a kernel for it, the two products never reach memory, except that the
    gradient computes them again.

    Args:
      a: (m, k), bfloat16, float16 or float32 (multiplied as tf32).
      gate, up: (k, n), of the same dtype.
      activation: a function of float32 arrays that is applied to each element; the same function
        object for each call.

    Returns:
      (m, n), of the dtype of a.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not fit together.

    Source: N. Shazeer, "GLU variants improve transformer", arXiv 2002.05202.
    """
    return _portable(a, gate, up, activation)


def _run(activation: Activation, a: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return gated_activation(matmul(a, gate), matmul(a, up), activation)


@dataclasses.dataclass(frozen=True)
class _Bound:
    """Products with an activation, as a function of arrays and of what the activation captures."""

    products: Products
    activation: Activation

    def __call__(self, a: Any, gate: Any, up: Any, *captured: Any) -> jax.Array:
        activation = self.activation
        if captured:
            activation = lambda values: self.activation(values, *captured)  # noqa: E731
        return self.products(activation, a, gate, up)


def gated_product(
    run: Products, composition: Products, product: Callable[..., jax.Array]
) -> Callable[[Any, Any, Any, Activation], jax.Array]:
    """``gated_matmul`` of (a, gate, up, activation), with checks and derivatives.

    Args:
      run: the operation.
      composition: the same of operations that have gradients.
      product: ``matmul``.
    """

    def by_parts(activation: Activation, a: Any, gate: Any, up: Any) -> jax.Array:
        gates, ups = (product(a, one).astype(jnp.float32) for one in (gate, up))
        return (activation(gates) * ups).astype(a.dtype)

    def joined(activation: Activation, *arrays: Any) -> jax.Array:
        # Of many weights, products have a kernel for all of them.
        ways = (_Bound(one, activation) for one in (run, _composition(activation)))
        return rows_joined(*ways)(*arrays)

    def _composition(activation: Activation) -> Products:
        return by_parts if isinstance(activation, CapturingActivation) else composition

    wrapped: Any = jax.custom_jvp(joined, nondiff_argnums=(0,))

    def derivative(activation: Activation, primals: Any, tangents: Any) -> tuple[Any, Any]:
        given = [None if isinstance(one, SymbolicZero) else one for one in tangents]
        out = wrapped(activation, *primals)
        if all(one is None for one in given):
            return out, jnp.zeros_like(out)
        function, forward = (_Bound(x, activation) for x in (_composition(activation), by_parts))
        return out, recomputed_tangent(function, primals, given, forward)

    wrapped.defjvp(in_32_bits(derivative), symbolic_zeros=True)

    def operation(a: Any, gate: Any, up: Any, activation: Activation) -> jax.Array:
        captured = captured_values(activation)
        a, gate, up, *values = matched(*_checked(a, gate, up), *captured)
        if 0 in (*a.shape, *gate.shape):
            out = zeros((a.shape[0], gate.shape[1]), np.dtype(a.dtype), a, gate, up)
            if 0 in out.shape:
                return out
            return gated_activation(out, out, activation)
        if captured:
            activation = CapturingActivation(activation, captured)
        result: jax.Array = wrapped(activation, a, gate, up, *values)
        return result

    return operation


def _checked(a: Any, gate: Any, up: Any) -> tuple[Any, Any, Any]:
    a, gate, up = (
        jnp.asarray(one) if isinstance(one, np.ndarray) else one for one in (a, gate, up)
    )
    for what, array in (("a", a), ("gate", gate), ("up", up)):
        shape, dtype = getattr(array, "shape", ()), getattr(array, "dtype", None)
        if len(shape) != 2 or dtype is None or np.dtype(dtype) not in FLOATS:
            raise InvalidTypeError(
                f"{what} does not fit",
                got=f"{type(array).__name__}" if dtype is None else f"{dtype}{list(shape)}",
                expected=f"a matrix of {names(FLOATS)}",
            )
    if gate.shape != up.shape or a.shape[1] != gate.shape[0]:
        raise InvalidValueError(
            "a, gate and up do not fit together",
            got=f"shapes {a.shape}, {gate.shape} and {up.shape}",
            expected="(m, k), (k, n) and (k, n)",
        )
    if not a.dtype == gate.dtype == up.dtype:
        raise InvalidTypeError(
            "a, gate and up do not have one dtype", got=f"{a.dtype}, {gate.dtype}, {up.dtype}"
        )
    return a, gate, up


_portable = gated_product(_run, _run, matmul)
