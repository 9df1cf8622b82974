"""``jax.vmap`` of operations on rows: rows of more leading axes are more rows of one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallasite_std.ops.arguments import in_32_bits


def over_leading_axes(
    function: Callable[..., Any], count: int, turned: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A function of arrays with a rule for ``jax.vmap``.

    A kernel with a further grid dimension would have few rows for each of its indices, and begin
    each of these matrices anywhere in vectors.

    Args:
      function: of arrays, tuples of them, or None. The first ``count`` have rows along any number
        of leading axes, as the results have; the others are the same for all rows.
      count: of operands with rows.
      turned: of the same arrays, if it serves operands whose rows ``jax.vmap`` has turned; None
        where it does not.
    """
    mapped: Any = jax.custom_batching.custom_vmap(function)

    @in_32_bits
    def rule(size: int, stacked: Sequence[Any], *operands: Any) -> tuple[Any, Any]:
        if size and not any(jax.tree.leaves(stacked[count:])):

            def repeated(one: Any, whole: bool) -> Any:
                return one if whole else jnp.broadcast_to(one, (size, *one.shape))

            rows = jax.tree.map(repeated, operands[:count], tuple(stacked[:count]))
            found = None if turned is None else turned(*rows, *operands[count:])
            if found is None:
                found = over_leading_axes(function, count)(*rows, *operands[count:])
        else:
            axes = jax.tree.map(lambda one: 0 if one else None, tuple(stacked))
            found = jax.vmap(function, axes, axis_size=size)(*operands)
        return found, jax.tree.map(lambda _: True, found)

    mapped.def_vmap(rule)
    with_rule: Callable[..., Any] = mapped
    return with_rule
