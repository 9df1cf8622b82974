"""Products of which derivatives can be taken: what an epilogue does to them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallasite_std.ops.activations import CapturingActivation
from pallasite_std.ops.arguments import in_32_bits
from pallasite_std.ops.dense.arrangement import Run, RunMany, spread, with_epilogue
from pallasite_std.ops.dense.dimensions import COLUMN, ROW, Labels, matrices
from pallasite_std.ops.dense.epilogue import Epilogue
from pallasite_std.ops.dense.problem import MatmulCall
from pallasite_std.ops.dense.product import (
    Implementation,
    Product,
    bound,
    derivative,
    product_p,
    transposed,
)

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
        some = [one for one, there in zip(tangents, given, strict=True) if there]
        function = _jitted_tangent(product, given)
        return bound(tangent_p, function, (*primals, *some), product=product, given=given)
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


tangent_p = Primitive("matmul_tangent")
"""The derivative of a product with an epilogue, by the tangents that are given.

Its operands are those of the product, then the tangents, in which it is linear. Its transpose
computes the sums again, so that no sums are kept for it.
"""


def tangent(product: Product, given: Sequence[bool], *operands: Any) -> jax.Array:
    """The derivative of a product with an epilogue.

    Args:
      product: of which it is.
      given: which operands have a tangent.
      operands: of the product, then the tangents.
    """
    primals, remaining = operands[: len(given)], iter(operands[len(given) :])
    tangents = [
        next(remaining) if there else ad.Zero(jax.typeof(one).to_tangent_aval())
        for one, there in zip(primals, given, strict=True)
    ]
    a, b, *extras = primals
    sums = sums_of(product).bind(a, b)
    terms = derivative(product, (a, b), tangents[:2], np.float32)
    change = functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(sums)
    after, varied = _after(product, extras, given[2:])
    changes = [one for one, there in zip(tangents[2:], given[2:], strict=True) if there]
    result: jax.Array = jax.jvp(after, (sums, *varied), (change, *changes))[1]
    return result


@functools.lru_cache(maxsize=256)
def _jitted_tangent(product: Product, given: tuple[bool, ...]) -> Any:
    return jax.jit(functools.partial(tangent, product, given))


def sums_of(product: Product) -> Product:
    """A product without its epilogue."""
    call = product.call
    dims = dataclasses.replace(product.dims, out=product.dims.sums, extras=())
    problem = dataclasses.replace(call.problem, out_dtype=np.dtype(np.float32))
    call = MatmulCall(problem=problem, epilogue=Epilogue(), config=None)
    return dataclasses.replace(product, call=call, dims=dims)


def _after(
    product: Product, extras: Sequence[Any], given: Sequence[bool]
) -> tuple[Callable[..., jax.Array], list[Any]]:
    """The epilogue as a function of sums and of those operands that are given, and these."""
    varied = [one for one, there in zip(extras, given, strict=True) if there]

    def after(sums: jax.Array, *varied: jax.Array) -> jax.Array:
        remaining = iter(varied)
        operands = [
            next(remaining) if there else one for one, there in zip(extras, given, strict=True)
        ]
        return with_epilogue(product.call, product.dims, sums, operands)

    return after, varied


def _impl(*operands: Any, product: Product, given: tuple[bool, ...], jaxpr: Any) -> Any:
    del product, given
    return jaxpr_as_fun(jaxpr)(*operands)[0]


def _abstract_eval(*avals: Any, product: Product, given: tuple[bool, ...], jaxpr: Any) -> Any:
    return product_p.abstract_eval(*avals, product=product, jaxpr=jaxpr)[0]


tangent_p.def_impl(_impl)
tangent_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(tangent_p, mlir.lower_fun(_impl, multiple_results=False))


@in_32_bits
def _batch(
    operands: Sequence[Any], places: Sequence[int | None], *, jaxpr: Any, **params: Any
) -> tuple[jax.Array, int]:
    del params
    return jax.vmap(jaxpr_as_fun(jaxpr), places)(*operands)[0], 0


batching.primitive_batchers[tangent_p] = _batch


@in_32_bits
def _jvp_of_tangent(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, **params: Any
) -> tuple[jax.Array, jax.Array]:
    del params
    given = [not isinstance(one, ad.Zero) for one in tangents]

    def function(*varied: Any) -> Any:
        remaining = iter(varied)
        operands = [
            next(remaining) if there else one for one, there in zip(primals, given, strict=True)
        ]
        return jaxpr_as_fun(jaxpr)(*operands)[0]

    varied, changes = (
        [one for one, there in zip(some, given, strict=True) if there]
        for some in (primals, tangents)
    )
    out, change = jax.jvp(function, varied, changes)
    return out, change


ad.primitive_jvps[tangent_p] = _jvp_of_tangent


@in_32_bits
def _transpose(
    cotangent: Any, *operands: Any, product: Product, given: tuple[bool, ...], jaxpr: Any
) -> list[Any]:
    del jaxpr
    if isinstance(cotangent, ad.Zero):
        return [None] * len(operands)
    a, b, *extras = operands[: len(given)]
    after, varied = _after(product, extras, given[2:])
    pull_back = jax.vjp(after, sums_of(product).bind(a, b), *varied)[1]
    of_sums, *of_extras = pull_back(cotangent)
    dims, found = product.dims, []
    if given[0]:
        found.append(transposed(product, dims.a, a.dtype, of_sums, b, dims.b))
    if given[1]:
        found.append(transposed(product, dims.b, b.dtype, of_sums, a, dims.a))
    return [*[None] * len(given), *found, *of_extras]


ad.primitive_transposes[tangent_p] = _transpose
