"""Products of which derivatives can be taken: what an epilogue does to them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from pallasite_std.ops.activations import CapturingActivation
from pallasite_std.ops.arguments import in_32_bits
from pallasite_std.ops.dense.arrangement import Run, RunMany, spread, with_epilogue
from pallasite_std.ops.dense.dimensions import COLUMN, ROW, Labels, matrices
from pallasite_std.ops.dense.epilogue import Epilogue
from pallasite_std.ops.dense.problem import MatmulCall
from pallasite_std.ops.dense.product import Implementation, Product, derivative, product_p
from pallasite_std.ops.recomputed import Composition, recomputed_tangent

type Extras = tuple[jax.Array, ...]


def differentiable_product(run: Run, run_many: RunMany | None = None) -> Run:
    """A product with rules for JAX's transformations.

    Args:
      run: computes a product of matrices; its arguments are the call, both operands and the
        operands of the epilogue. Derivatives are computed by the same function.
      run_many: computes several; see :class:`pallasite_std.ops.dense.arrangement.RunMany`.
    """
    implementation = Implementation(run, run_many)

    def product(call: MatmulCall, a: jax.Array, b: jax.Array, extras: Extras) -> jax.Array:
        activation = call.epilogue.activation
        if isinstance(activation, CapturingActivation) and activation.captures_arrays:
            return _unfused(product, call, a, b, extras)
        problem, names = call.problem, call.epilogue.operands
        labels = tuple(_labels(call.epilogue, name) for name in names)
        given = [
            one if of_one else one.reshape(()) for one, of_one in zip(extras, labels, strict=True)
        ]
        dims = matrices(problem.transpose_a, problem.transpose_b, labels)
        return Product(implementation, call, dims).bind(a, b, *given)

    return product


def _unfused(
    product: Run, call: MatmulCall, a: jax.Array, b: jax.Array, extras: Extras
) -> jax.Array:
    """A product whose activation captures more than numbers: it is applied to the sums."""
    epilogue, problem = call.epilogue, call.problem
    plain = dataclasses.replace(epilogue, activation=None, captured=0, residual=False)
    wide = dataclasses.replace(problem, out_dtype=np.dtype(np.float32))
    inner = dataclasses.replace(call, problem=wide, epilogue=plain)
    values = product(inner, a, b, extras[: plain.count])
    assert isinstance(epilogue.activation, CapturingActivation)
    values = epilogue.activation.function(values)
    if epilogue.residual:
        values = values + extras[-1].astype(jnp.float32)
    return values.astype(problem.out_dtype)


def _labels(epilogue: Epilogue, name: str) -> Labels:
    """The dimensions of an operand of the epilogue."""
    rows, columns = epilogue.extents(name)
    return (ROW,) * rows + (COLUMN,) * columns


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, product: Product, jaxpr: Any
) -> tuple[jax.Array, Any]:
    out = product_p.bind(*primals, product=product, jaxpr=jaxpr)
    given = tuple(not isinstance(one, ad.Zero) for one in tangents)
    if not any(given) or not jnp.issubdtype(out.dtype, jnp.floating):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, _tangent(product, primals, tangents, given, out.shape)


ad.primitive_jvps[product_p] = in_32_bits(_jvp)


def _tangent(
    product: Product,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    given: tuple[bool, ...],
    shape: tuple[int, ...],
) -> jax.Array:
    epilogue, dtype = product.call.epilogue, product.call.problem.out_dtype
    if epilogue != Epilogue(bias=epilogue.bias, residual=epilogue.residual):
        some = [one if there else None for one, there in zip(tangents, given, strict=True)]
        return recomputed_tangent(Composition(_with_sums, product), primals, some)
    # Bias and residual are added.
    dims, terms = product.dims, derivative(product, primals[:2], tangents[:2], dtype)
    labels = [dims.sums for _ in terms]
    for one, own, there in zip(tangents[2:], dims.extras, given[2:], strict=True):
        if there:
            terms.append(one.astype(jnp.float32))
            labels.append(own)
    return functools.reduce(
        jnp.add,
        (
            spread(one, own, dims.out, shape).astype(dtype)
            for one, own in zip(terms, labels, strict=True)
        ),
    )


def _with_sums(product: Product, a: jax.Array, b: jax.Array, *extras: jax.Array) -> jax.Array:
    """The same product by functions that have derivatives: from its sums."""
    call, dims = product.call, product.dims
    problem = dataclasses.replace(call.problem, out_dtype=np.dtype(np.float32))
    sums = Product(
        product.implementation,
        MatmulCall(problem=problem, epilogue=Epilogue(), config=None),
        dataclasses.replace(dims, out=dims.sums, extras=()),
    )
    return with_epilogue(call, dims, sums.bind(a, b), extras)
