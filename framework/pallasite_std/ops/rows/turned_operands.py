"""What operands of operations on rows are the transposes of, where a program says so.

``x.T``, ``jnp.moveaxis(x, 1, -1)`` and ``jax.vmap`` with an axis of rows make arrays whose rows lie
across memory. XLA copies them for a kernel that takes rows; kernels that read them as they lie
(:mod:`.turned`) get what was transposed instead, and XLA drops the copy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallasite_std.ops.rows.turned import Turned


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TurnedOperands:
    """Matrices as they lie, in what a function keeps for its gradients.

    Attributes:
      problem: which of them lie across their rows.
      shape: (..., columns), of each as the program has it.
      given: those that lie across (batch, columns, rows), others (batch * rows, columns).
    """

    problem: Turned = dataclasses.field(metadata=dict(static=True))
    shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
    given: tuple[Any, ...]

    def in_program(self, results: Sequence[Any]) -> list[Any]:
        """What lies as the operands do, in the shape that the program has."""
        return [one.reshape(self.shape) for one in in_rows(self.problem, results)]


def _source(array: Any) -> tuple[Any, int] | None:
    """What an array is the transpose of, and how many leading axes both have in common, if the axis
    behind these has become the last one."""
    # JAX's tracers know the equation that they are a result of.
    equation = getattr(array, "parent", None)
    if getattr(getattr(equation, "primitive", None), "name", None) != "transpose":
        return None
    assert equation is not None
    permutation = tuple(equation.params["permutation"])
    lead = next(place for place, axis in enumerate(permutation) if place != axis)
    if permutation[lead:] != (*range(lead + 1, len(permutation)), lead):
        return None
    return equation.in_tracers[0], lead


def turned_operands(*arrays: Any) -> TurnedOperands | None:
    """Matrices, of one shape (..., columns), as they lie; None if none lies across its rows."""
    if any(isinstance(one, jax.core.Tracer) and not hasattr(one, "parent") for one in arrays):
        return None  # Rules of the transformation that such an array is of may know more.
    found = [_source(one) for one in arrays]
    lead = next((one[1] for one in found if one is not None), None)
    if lead is None:
        return None
    shape = arrays[0].shape
    batch, rows, columns = math.prod(shape[:lead]), math.prod(shape[lead:-1]), shape[-1]
    across = tuple(one is not None and one[1] == lead for one in found)
    if min(batch, rows, columns) == 0 or 1 in (rows, columns):
        return None
    given = tuple(
        jnp.reshape(one[0], (batch, columns, rows))
        if one is not None and turned
        else jnp.reshape(array, (batch * rows, columns))
        for array, one, turned in zip(arrays, found, across, strict=True)
    )
    return TurnedOperands(Turned(batch, rows, columns, across), tuple(shape), given)


def in_rows(problem: Turned, operands: Sequence[Any]) -> list[Any]:
    """Operands as matrices of rows: those that lie across are transposed."""
    shape = (problem.batch * problem.rows, problem.columns)
    return [
        jnp.swapaxes(one, 1, 2).reshape(shape) if across else one
        for one, across in zip(operands, problem.across, strict=True)
    ]


def as_given(problem: Turned, matrices: Sequence[Any]) -> list[Any]:
    """Matrices of rows as operands lie: the inverse of :func:`in_rows`."""
    shape = (problem.batch, problem.rows, problem.columns)
    return [
        jnp.swapaxes(one.reshape(shape), 1, 2) if across else one.reshape(-1, problem.columns)
        for one, across in zip(matrices, problem.across, strict=True)
    ]


def with_rows_where_mapped(
    turned: Callable[..., Any], plain: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that calls a kernel of turned operands, and under ``jax.vmap`` another one of the
    same operands, which takes what it wants as rows."""
    mapped: Any = jax.custom_batching.custom_vmap(turned)

    def rule(size: int, stacked: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda one: 0 if one else None, tuple(stacked))
        found = jax.vmap(plain, axes, axis_size=size)(*operands)
        return found, jax.tree.map(lambda _: True, found)

    mapped.def_vmap(rule)
    called: Callable[..., Any] = mapped
    return called
