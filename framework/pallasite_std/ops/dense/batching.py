"""``jax.vmap`` of operations on the rows of a matrix: one of more rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallasite_std.ops.arguments import in_32_bits


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
