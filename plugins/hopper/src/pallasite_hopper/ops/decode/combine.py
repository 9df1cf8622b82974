"""How a block combines what the ranges of tiles left of an item that they share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasite_hopper.ops.decode.schedule import Problem
from pallasite_hopper.ops.flash import softmax


def combined(
    problem: Problem, parts: tuple[Any, ...], first: Any, last: Any, head: Any
) -> tuple[Any, Any]:
    """The sum of the parts of an item, which the blocks from first to last have left.

    Args:
      problem: what is computed.
      parts: references to results, maxima and sums, see ``kernel.partial_shapes``.
      first, last: blocks; the item began in the range of the first one.
      head: which of the heads side by side.

    Returns:
      The transposed results (head_tile, columns), and the sums (columns,) to divide them by.
    """
    results, maxima, sums = parts
    lowest = softmax.lowest(1.0)
    elements = problem.head_tile * problem.columns // 128
    at_once = max(1, min(8, 64 // elements))  # Parts whose loads overlap and fit the registers.

    def step(turn: Any, carry: Any) -> Any:
        largest, total, values = carry
        loaded = []
        for number in range(at_once):
            block = lax.min(first + turn * at_once + number, last)
            place = ((block == first).astype(jnp.int32), block, head)
            exists = first + turn * at_once + number <= last
            part_maxima = jnp.where(exists, maxima[place], 2 * lowest)
            loaded.append((part_maxima, sums[place], results[place]))
        larger = largest
        for part_maxima, _, _ in loaded:
            larger = jnp.maximum(larger, part_maxima)
        shrink = jnp.exp2(largest - larger)
        total = total * shrink
        values = values * _spread(shrink, problem.head_tile)
        for part_maxima, part_sums, part in loaded:
            weight = jnp.exp2(part_maxima - larger)
            total = total + part_sums * weight
            values = values + part * _spread(weight, problem.head_tile)
        return larger, total, values

    columns = problem.columns
    start = (
        jnp.full((columns,), lowest, jnp.float32),
        jnp.zeros((columns,), jnp.float32),
        jnp.zeros((problem.head_tile, columns), jnp.float32),
    )
    turns = lax.div(last - first, at_once) + 1
    _, total, values = lax.fori_loop(0, turns, step, start)
    return values, total


def _spread(columns: Any, rows: int) -> Any:
    return lax.broadcast_in_dim(columns, (rows, columns.shape[0]), (1,))
