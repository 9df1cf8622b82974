"""Products of any dimensions by kernels for products of matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite_std.ops.arguments import zeros
from pallasite_std.ops.dense.dimensions import (
    Dimensions,
    Group,
    Labels,
    Plan,
    plan,
    with_joined_depth,
)
from pallasite_std.ops.dense.epilogue import Epilogue
from pallasite_std.ops.dense.problem import MatmulCall

type Operands = tuple[jax.Array, ...]
"""Both operands of a product, then those of its epilogue."""

MATRIX = -1
"""A dimension of the matrices of an array that holds several."""


class Run(Protocol):
    """Computes a product from the call, both operands and the operands of the epilogue."""

    def __call__(
        self, call: MatmulCall, a: jax.Array, b: jax.Array, extras: Operands, /
    ) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Batch:
    """Where the dimensions of several products are.

    Attributes:
      sizes: their extents.
      a, b, out: for each dimension of the operands and of the result, which of these it is, or
        ``MATRIX``. Operands need not have all of them.
      extras: whether the operands of the epilogue have a first dimension of all products.
    """

    sizes: tuple[int, ...]
    a: tuple[int, ...]
    b: tuple[int, ...]
    out: tuple[int, ...]
    extras: tuple[bool, ...]

    @property
    def count(self) -> int:
        """Of the products."""
        return math.prod(self.sizes)


class RunMany(Protocol):
    """Computes several products."""

    def __call__(self, call: MatmulCall, batch: Batch, operands: Operands, /) -> jax.Array: ...


def mapped_product(run: Run, call: MatmulCall, batch: Batch, operands: Operands) -> jax.Array:
    """Several products by the function for one, whose kernels have further grid dimensions then."""

    def one(*operands: jax.Array) -> jax.Array:
        return run(call, operands[0], operands[1], operands[2:])

    a, b, *extras = operands
    extras = [
        array.reshape(*batch.sizes, *array.shape[1:]) if stacked else array
        for array, stacked in zip(extras, batch.extras, strict=True)
    ]
    first = [0 if stacked else None for stacked in batch.extras]
    function: Any = one
    for number in reversed(range(len(batch.sizes))):
        of_a, of_b, of_out = (_position(one, number) for one in (batch.a, batch.b, batch.out))
        function = jax.vmap(function, (of_a, of_b, *first), of_out, axis_size=batch.sizes[number])
    result: jax.Array = function(a, b, *extras)
    return result


def _position(places: Sequence[int], number: int) -> int | None:
    """Of a dimension, where those before it are gone."""
    left = [one for one in places if one == MATRIX or one >= number]
    return left.index(number) if number in left else None


def run_product(
    run: Run,
    run_many: RunMany | None,
    call: MatmulCall,
    dims: Dimensions,
    operands: Operands,
) -> jax.Array:
    """A product of any dimensions.

    Args:
      run: computes one of matrices.
      run_many: computes several; by default by ``jax.vmap`` of ``run``.
      call: dtypes, epilogue and configuration; extents and orders are those of the operands.
      dims: labels of the operands' dimensions.
      operands: both operands, then those of the epilogue.
    """
    sizes = dims.sizes(*(one.shape for one in operands))
    if 0 in sizes.values():
        sums = zeros(tuple(sizes[one] for one in dims.sums), jnp.float32, *operands)
        return with_epilogue(call, dims, sums, operands[2:])
    wanted = dims.out
    both = set(dims.a) & set(dims.b)
    others = set(dims.a) ^ set(dims.b)
    if wanted[-1] not in others:
        matrix = tuple(one for one in wanted if one in others)
        first = tuple(one for one in wanted if one not in others)
        dims = dataclasses.replace(dims, out=(*first, *matrix))
    if dims.out[-1] not in dims.b and not operands[2:] and call.epilogue == Epilogue():
        call, dims, operands = _swapped(call, dims, operands)
    assert dims.out[-1] in dims.b and dims.out[-1] not in both
    joined = with_joined_depth(dims, sizes)
    operands = (
        _ordered(operands[0], dims.a, joined.a),
        _ordered(operands[1], dims.b, joined.b),
        *operands[2:],
    )
    dims = joined
    kinds = [call.epilogue.extents(name) for name in call.epilogue.operands]
    found = plan(dims, sizes, [rows for rows, _ in kinds], plain=call.epilogue == Epilogue())
    result = _run_plan(run, run_many, call, dims, sizes, found, kinds, operands)
    return lax.transpose(result, [dims.out.index(one) for one in wanted])


def _swapped(
    call: MatmulCall, dims: Dimensions, operands: Operands
) -> tuple[MatmulCall, Dimensions, Operands]:
    problem = call.problem
    problem = dataclasses.replace(problem, dtype_a=problem.dtype_b, dtype_b=problem.dtype_a)
    return dataclasses.replace(call, problem=problem), dims.swapped(), operands[1::-1]


def _run_plan(
    run: Run,
    run_many: RunMany | None,
    call: MatmulCall,
    dims: Dimensions,
    sizes: Mapping[int, int],
    plan: Plan,
    kinds: Sequence[tuple[bool, bool]],
    operands: Operands,
) -> jax.Array:
    def size(group: Group) -> int:
        return math.prod(sizes[one] for one in group)

    problem = dataclasses.replace(
        call.problem,
        m=size(plan.rows),
        n=size(plan.columns),
        k=size(plan.depth),
        transpose_a=plan.transpose_a,
        transpose_b=plan.transpose_b,
    )
    out_dtype = problem.out_dtype
    if plan.summed:
        problem = dataclasses.replace(problem, out_dtype=np.dtype(problem.accumulator))
    call = dataclasses.replace(call, problem=problem)
    a = _grouped(operands[0], dims.a, plan.a, sizes)
    b = _grouped(operands[1], dims.b, plan.b, sizes)
    extras, stacked = [], []
    for array, labels, (rows, columns) in zip(operands[2:], dims.extras, kinds, strict=True):
        own = (plan.rows,) * rows + (plan.columns,) * columns
        has = any(one in labels for group in plan.batch for one in group)
        groups = (*plan.batch, *own) if has else own
        extra = _grouped(_repeated(array, labels, groups, sizes), sum(groups, ()), groups, sizes)
        if has:
            extra = extra.reshape(-1, *extra.shape[len(plan.batch) :])
        extras.append(extra)
        stacked.append(has)
    if not plan.batch:
        result = run(call, a, b, tuple(extras))
    else:
        places = {group: number for number, group in enumerate(plan.batch)}
        of_a, of_b, of_out = (
            tuple(places.get(group, MATRIX) for group in groups)
            for groups in (plan.a, plan.b, plan.out)
        )
        sizes_of_batch = tuple(map(size, plan.batch))
        batch = Batch(sizes_of_batch, of_a, of_b, of_out, tuple(stacked))
        if run_many is None:
            result = mapped_product(run, call, batch, (a, b, *extras))
        else:
            result = run_many(call, batch, (a, b, *extras))
    out = plan.out
    if plan.summed:
        summed = plan.batch[: plan.summed]
        result = result.sum([out.index(one) for one in summed]).astype(out_dtype)
        out = tuple(group for group in out if group not in summed)
    labels = sum(out, ())
    result = result.reshape([sizes[one] for one in labels])
    return lax.transpose(result, [labels.index(one) for one in dims.out])


def _ordered(array: jax.Array, labels: Labels, order: Labels) -> jax.Array:
    return lax.transpose(array, [labels.index(one) for one in order])


def _grouped(
    array: jax.Array, labels: Labels, groups: Sequence[Group], sizes: Mapping[int, int]
) -> jax.Array:
    """An array with a dimension for each group of its labels."""
    order = [labels.index(one) for group in groups for one in group]
    shape = [math.prod(sizes[one] for one in group) for group in groups]
    return lax.transpose(array, order).reshape(shape)


def _repeated(
    array: jax.Array, labels: Labels, groups: Sequence[Group], sizes: Mapping[int, int]
) -> jax.Array:
    """An array with all labels of groups, repeated along those that it does not have."""
    wanted = [one for group in groups for one in group]
    present = [one for one in wanted if one in labels]
    array = lax.transpose(array, [labels.index(one) for one in present])
    if len(present) == len(wanted):
        return array
    return lax.broadcast_in_dim(
        array, [sizes[one] for one in wanted], [wanted.index(one) for one in present]
    )


def spread(array: jax.Array, labels: Labels, out: Labels, shape: Sequence[int]) -> jax.Array:
    """An array repeated along the dimensions of a result that it does not have."""
    if labels == out:
        return array
    return lax.broadcast_in_dim(array, shape, [out.index(one) for one in labels])


def with_epilogue(
    call: MatmulCall, dims: Dimensions, sums: jax.Array, extras: Sequence[jax.Array]
) -> jax.Array:
    """The result of a product from its sums, by functions of whole arrays."""
    epilogue, remaining = call.epilogue, iter(zip(extras, dims.extras, strict=True))
    sizes: dict[int, int] = {}
    for array, labels in ((sums, dims.sums), *zip(extras, dims.extras, strict=True)):
        sizes.update(zip(labels, array.shape, strict=True))
    shape = [sizes[one] for one in dims.out]

    def following() -> jax.Array:
        array, labels = next(remaining)
        return spread(array.astype(jnp.float32), labels, dims.out, shape)

    values = spread(sums.astype(jnp.float32), dims.sums, dims.out, shape)
    if epilogue.row_scale != "none":
        values = values * following()
    if epilogue.column_scale != "none":
        values = values * following()
    if epilogue.bias:
        values = values + following()
    if epilogue.activation is not None:
        captured = [next(remaining) for _ in range(epilogue.captured)]
        values = _activated(epilogue.activation, values, dims.out, captured)
    if epilogue.residual:
        values = values + following()
    return values.astype(call.problem.out_dtype)


def _activated(
    activation: Callable[..., Any],
    values: jax.Array,
    labels: Labels,
    captured: Sequence[tuple[jax.Array, Labels]],
) -> jax.Array:
    """An activation of values, whose further arguments are numbers for each batch dimension."""
    batch = next((one for one in labels if any(one in own for _, own in captured)), None)
    if batch is None:
        return activation(values, *(array for array, _ in captured))

    def places(own: Labels) -> int | None:
        return own.index(batch) if batch in own else None

    def without(own: Labels) -> Labels:
        return tuple(one for one in own if one != batch)

    def inner(values: jax.Array, *arrays: jax.Array) -> jax.Array:
        rest = [(x, without(own)) for x, (_, own) in zip(arrays, captured, strict=True)]
        return _activated(activation, values, without(labels), rest)

    axes = places(labels), *(places(own) for _, own in captured)
    result: jax.Array = jax.vmap(inner, axes, places(labels))(values, *(x for x, _ in captured))
    return result
