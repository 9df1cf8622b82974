"""Derivatives of products: two more products, and the epilogue's own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import UnsupportedError
from pallasite_std.ops.arguments import in_32_bits, matched, zeros
from pallasite_std.ops.dense.batching import RunMany, batched
from pallasite_std.ops.dense.epilogue import Epilogue
from pallasite_std.ops.dense.problem import MatmulCall, MatmulProblem

type Extras = tuple[jax.Array, ...]
type Run = Callable[[MatmulCall, jax.Array, jax.Array, Extras], jax.Array]


def differentiable_product(run: Run, run_many: RunMany | None = None) -> Run:
    """A product of which gradients can be taken, also of many at once by ``jax.vmap``.

    Args:
      run: computes a product; its arguments are the call, both operands and the operands of the
        epilogue. Derivatives are computed by the same function.
      run_many: computes several products; see :func:`pallasite_std.ops.dense.batching.batched`.
    """
    single = batched(run, run_many)

    def product(call: MatmulCall, a: jax.Array, b: jax.Array, extras: Extras) -> jax.Array:
        m, n, k = call.problem.m, call.problem.n, call.problem.k
        if 0 not in (m, n, k):
            return single(call, a, b, extras)
        sums = zeros((m, n), jnp.float32, a)
        return reference_epilogue(call.epilogue, sums, extras).astype(call.problem.out_dtype)

    def forward(
        call: MatmulCall, a: jax.Array, b: jax.Array, extras: Extras
    ) -> tuple[jax.Array, Any]:
        return wrapped(call, a, b, extras), (a, b, extras)

    wrapped = jax.custom_vjp(product, nondiff_argnums=(0,))
    # Derivatives are made of products that have some themselves.
    wrapped.defvjp(in_32_bits(forward), in_32_bits(functools.partial(_backward, wrapped)))

    def differentiable(call: MatmulCall, a: jax.Array, b: jax.Array, extras: Extras) -> jax.Array:
        a, b, *others = matched(a, b, *extras)
        result: jax.Array = wrapped(call, a, b, tuple(others))
        return result

    return differentiable


def _backward(run: Run, call: MatmulCall, saved: Any, cotangent: jax.Array) -> tuple[Any, Any, Any]:
    a, b, extras = saved
    problem, epilogue = call.problem, call.epilogue
    if not jnp.issubdtype(problem.dtype_a, jnp.floating):
        raise UnsupportedError(
            "the gradient of a product of integers", expected="floating-point operands"
        )
    plain = epilogue == Epilogue(bias=epilogue.bias, residual=epilogue.residual)
    if plain:
        # Sums and residuals pass the cotangent on as it is.
        d_sums = cotangent
        d_extras: list[Any] = []
        if epilogue.bias:
            d_extras.append(jnp.sum(cotangent.astype(jnp.float32), 0).astype(extras[0].dtype))
        if epilogue.residual:
            d_extras.append(cotangent)
    else:
        sums = run(_sums_only(call), a, b, ())

        def after(sums: jax.Array, extras: Extras) -> jax.Array:
            return reference_epilogue(epilogue, sums, extras).astype(problem.out_dtype)

        _, pullback = jax.vjp(after, sums, extras)
        d_sums, d_extras = pullback(cotangent)
    d_a, d_b = _operands(run, problem, a, b, d_sums)
    return d_a, d_b, tuple(d_extras)


def _sums_only(call: MatmulCall) -> MatmulCall:
    problem = dataclasses.replace(call.problem, out_dtype=np.dtype(np.float32))
    return MatmulCall(problem=problem, epilogue=Epilogue(), config=None)


def reference_epilogue(epilogue: Epilogue, sums: jax.Array, extras: Extras) -> jax.Array:
    """What an epilogue computes, as a function of whole arrays."""
    remaining = iter(extras)
    values = sums.astype(jnp.float32)
    if epilogue.row_scale != "none":
        values = values * next(remaining).astype(jnp.float32).reshape(-1, 1)
    if epilogue.column_scale != "none":
        values = values * next(remaining).astype(jnp.float32).reshape(1, -1)
    if epilogue.bias:
        values = values + next(remaining).astype(jnp.float32)[None, :]
    if epilogue.activation is not None:
        values = epilogue.activation(values)
    if epilogue.residual:
        values = values + next(remaining).astype(jnp.float32)
    return values


def _operands(
    run: Run, problem: MatmulProblem, a: jax.Array, b: jax.Array, d_sums: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of a and b. 8-bit operands are multiplied as bfloat16."""
    dtype = jnp.bfloat16 if problem.size == 1 else problem.dtype_a
    wide_a, wide_b, d = a.astype(dtype), b.astype(dtype), d_sums.astype(dtype)
    # a = d @ b.T, or its transpose b @ d.T; and so on.
    product = functools.partial(_product, run)
    d_a = (
        product(wide_b, d, problem.transpose_b, True, a.dtype)
        if problem.transpose_a
        else product(d, wide_b, False, not problem.transpose_b, a.dtype)
    )
    d_b = (
        product(d, wide_a, True, problem.transpose_a, b.dtype)
        if problem.transpose_b
        else product(wide_a, d, not problem.transpose_a, False, b.dtype)
    )
    return d_a, d_b


def _product(
    run: Run, a: jax.Array, b: jax.Array, transpose_a: bool, transpose_b: bool, out_dtype: Any
) -> jax.Array:
    k, m = a.shape if transpose_a else a.shape[::-1]
    n = b.shape[0] if transpose_b else b.shape[1]
    problem = MatmulProblem(
        m=m,
        n=n,
        k=k,
        dtype_a=np.dtype(a.dtype),
        dtype_b=np.dtype(b.dtype),
        out_dtype=np.dtype(out_dtype),
        accumulator=np.dtype(np.float32),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
    )
    return run(MatmulCall(problem=problem, epilogue=Epilogue(), config=None), a, b, ())
