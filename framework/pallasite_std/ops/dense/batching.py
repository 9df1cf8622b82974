"""``jax.vmap`` of products: one product of more rows, or many products by one kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallasite_std.ops.arguments import in_32_bits, zeros
from pallasite_std.ops.dense.problem import MatmulCall

type Operands = tuple[jax.Array, ...]
"""Both operands of a product, then those of its epilogue."""


class Run(Protocol):
    """Computes a product from the call, both operands and the operands of the epilogue."""

    def __call__(
        self, call: MatmulCall, a: jax.Array, b: jax.Array, extras: Operands, /
    ) -> jax.Array: ...


class RunMany(Protocol):
    """Computes several products: of the operands that are marked, there are so many along a first
    dimension; the others are the same for all."""

    def __call__(
        self, call: MatmulCall, count: int, stacked: tuple[bool, ...], operands: Operands, /
    ) -> jax.Array: ...


def batched(run: Run, run_many: RunMany | None = None) -> Run:
    """A product with a rule for ``jax.vmap``.

    Where only the left operand has a batch dimension, all of its matrices are the rows of one
    product, which reads the right one once.

    Args:
      run: computes a product.
      run_many: computes several products whose operands both have a batch dimension; by default
        ``jax.vmap`` of ``run``, whose kernels then have a further grid dimension.
    """

    def one(call: MatmulCall, a: jax.Array, b: jax.Array, extras: Operands) -> jax.Array:
        def plain(*operands: jax.Array) -> jax.Array:
            return run(call, operands[0], operands[1], operands[2:])

        product = jax.custom_batching.custom_vmap(plain)

        @in_32_bits
        def rule(size: int, stacked: Sequence[bool], *operands: jax.Array) -> tuple[Any, bool]:
            if size == 0:
                problem = call.problem
                return zeros((0, problem.m, problem.n), problem.out_dtype, *operands), True
            if joins_rows(call, stacked):
                return _joined(one, call, size, stacked, operands), True
            return many(call, size, tuple(stacked), operands), True

        product.def_vmap(rule)
        return product(a, b, *extras)

    def many(
        call: MatmulCall, count: int, stacked: tuple[bool, ...], operands: Operands
    ) -> jax.Array:
        compute = run_many or functools.partial(mapped_product, run)

        def plain(*operands: jax.Array) -> jax.Array:
            return compute(call, count, stacked, operands)

        products = jax.custom_batching.custom_vmap(plain)

        @in_32_bits
        def rule(size: int, outer: Sequence[bool], *operands: jax.Array) -> tuple[Any, bool]:
            if size == 0:
                problem = call.problem
                shape = (0, count, problem.m, problem.n)
                return zeros(shape, problem.out_dtype, *operands), True
            marks = list(zip(outer, stacked, strict=True))
            whole = [
                _with_both(operand, new, old, size, count)
                for operand, (new, old) in zip(operands, marks, strict=True)
            ]
            found = many(call, size * count, tuple(new or old for new, old in marks), tuple(whole))
            return found.reshape(size, count, *found.shape[1:]), True

        products.def_vmap(rule)
        return products(*operands)

    return one


def rows_joined(
    function: Callable[..., jax.Array], otherwise: Callable[..., jax.Array] | None = None
) -> Callable[..., jax.Array]:
    """A function of a matrix and of further arrays, with a rule for ``jax.vmap``: matrices with the
    same other arrays are the rows of one.

    Args:
      function: its result has a row for each of the matrix.
      otherwise: is mapped over a batch dimension of the other arrays; by default ``function``.
    """
    joined: Any = jax.custom_batching.custom_vmap(function)

    @in_32_bits
    def rule(
        size: int, stacked: Sequence[bool], matrix: jax.Array, *others: jax.Array
    ) -> tuple[Any, bool]:
        if size and stacked[0] and not any(stacked[1:]):
            rows = matrix.shape[1]
            found = rows_joined(function, otherwise)(
                matrix.reshape(size * rows, *matrix.shape[2:]), *others
            )
            return found.reshape(size, rows, *found.shape[1:]), True
        axes = [0 if one else None for one in stacked]
        return jax.vmap(otherwise or function, axes, axis_size=size)(matrix, *others), True

    joined.def_vmap(rule)

    def call(*operands: jax.Array) -> jax.Array:
        result: jax.Array = joined(*operands)
        return result

    return call


def mapped_product(
    run: Run, call: MatmulCall, count: int, stacked: tuple[bool, ...], operands: Operands
) -> jax.Array:
    """``jax.vmap`` of a product without a rule of its own."""
    axes = [0 if one else None for one in stacked]

    def product(*operands: jax.Array) -> jax.Array:
        return run(call, operands[0], operands[1], operands[2:])

    result: jax.Array = jax.vmap(product, axes, axis_size=count)(*operands)
    return result


def joins_rows(call: MatmulCall, stacked: Sequence[bool]) -> bool:
    """Whether products are one of more rows: only the left operand, whose rows lie one after the
    other, and what belongs to rows have a batch dimension."""
    names = ["a", "b", *call.epilogue.operands]
    whose = {name for name, one in zip(names, stacked, strict=True) if one}
    return "a" in whose <= {"a"} | _by_rows(call) and not call.problem.transpose_a


def _by_rows(call: MatmulCall) -> set[str]:
    """Operands of the epilogue that have something for each row."""
    return {"residual"} | ({"row_scale"} if call.epilogue.row_scale == "vector" else set())


def _joined(
    one: Run, call: MatmulCall, size: int, stacked: Sequence[bool], operands: Operands
) -> jax.Array:
    m, n = call.problem.m, call.problem.n
    a, b, *extras = operands
    by_rows, rows = _by_rows(call), []
    for name, extra, is_stacked in zip(call.epilogue.operands, extras, stacked[2:], strict=True):
        per_row = name in by_rows
        if per_row and not is_stacked:
            extra = jnp.broadcast_to(extra, (size, *extra.shape))
        rows.append(extra.reshape(size * m, *extra.shape[2:]) if per_row else extra)
    problem = dataclasses.replace(call.problem, m=size * m)
    call = dataclasses.replace(call, problem=problem)
    return one(call, a.reshape(size * m, a.shape[2]), b, tuple(rows)).reshape(size, m, n)


def _with_both(array: jax.Array, new: bool, old: bool, size: int, count: int) -> jax.Array:
    """An operand with one dimension of all products, if it has the new dimension or the old one."""
    if not (new or old):
        return array
    if not (new and old):
        array = array[:, None] if new else array[None]
        array = jnp.broadcast_to(array, (size, count, *array.shape[2:]))
    return array.reshape(size * count, *array.shape[2:])
