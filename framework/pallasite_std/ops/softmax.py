"""The softmax of attention, block by block of keys (M. Milakov and N. Gimelshein, 2018).

Scores and row maxima stay without their factor: an exponential is of the difference times the
factor. The other way round, the compiler may contract the product with the difference to a
multiply-add, in which extremes that are equal do not cancel: ``-3e38 * f - round(-3e38 * f)`` is
not zero, and its exponential is infinite.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

LOG2_E = math.log2(math.e)

_LARGEST = float(np.finfo(np.float32).max)

LOWEST = -_LARGEST
"""Where row maxima begin: no finite score is lower, and minus infinity differs from it."""


def lowest(factor: float) -> float:
    """Where row maxima begin that are multiplied by a factor first: finite after it."""
    return LOWEST / max(1.0, factor)


COARSE = float(1 << 24)
"""Size of the logarithm of a row's sum from which on float32 has no fractions: of how many keys it
is, is lost in it."""


def exponents(logarithms: Any) -> Any:
    """What is subtracted from scores, in exponents of 2, for the weights of a gradient.

    Args:
      logarithms: natural logarithms of the sums of exponentials, of rows.

    Infinite, so that the row has no weights, where it sees no key or where scores are so large, of
    either sign, that the weights cannot be told from the sum: see :func:`normalized` for these.
    """
    return jnp.where(jnp.abs(logarithms) >= COARSE, jnp.inf, logarithms * LOG2_E)


def normalized(scores: Any, factor: float, maxima: Any, logarithms: Any) -> Any:
    """The weights of a gradient, from scores that are computed again.

    Args:
      scores: of a tile; minus infinity for keys that a row does not see.
      factor: of the scores in exponents of 2.
      maxima, logarithms: of rows, as matrices: the largest score, and the logarithm to base 2 of
        the sum of weights that are relative to it; infinite for rows without weights.

    No weight is above one, even where scores are so large that another order of additions changes
    them by more than that.
    """
    return jnp.exp2(jnp.minimum((scores - maxima) * factor - logarithms, 0.0))


def broadcast_rows(rows: Any, columns: int) -> Any:
    """A value for each row as a matrix."""
    return lax.broadcast_in_dim(rows, (rows.shape[0], columns), (0,))


def cap(scores: Any, scale: float, soft_cap: float) -> Any:
    """``soft_cap * tanh(scale * scores / soft_cap)``, without loss of accuracy near zero."""
    grown = jnp.exp2(scores * (2 * LOG2_E * scale / soft_cap))
    return soft_cap - (2 * soft_cap) / (grown + 1)


def start(rows: int, columns: int) -> tuple[Any, Any, Any]:
    """What :func:`accumulate` begins with, for results of (rows, columns)."""
    return (
        jnp.zeros((rows, columns), jnp.float32),
        jnp.full((rows,), LOWEST, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )


def accumulate(
    carry: tuple[Any, Any, Any], scores: Any, factor: float, multiply: Any
) -> tuple[Any, Any, Any]:
    """Adds a block of keys to unnormalized results, row maxima and row sums.

    Args:
      carry: these three.
      scores: (rows, keys); minus infinity for keys that a row does not see.
      factor: of the scores in exponents of 2.
      multiply: ``multiply(results, weights)`` adds the product of weights and values.
    """
    acc, largest, total = carry
    larger = jnp.maximum(largest, jnp.max(scores, axis=1))
    weights = jnp.exp2((scores - broadcast_rows(larger, scores.shape[1])) * factor)
    shrink = jnp.exp2((largest - larger) * factor)
    total = total * shrink + jnp.sum(weights, axis=1)
    return multiply(acc * broadcast_rows(shrink, acc.shape[1]), weights), larger, total


def finish(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Results, row maxima, and the natural logarithms of the sums relative to them.

    Rows that see no key have zeros, zero and minus infinity.
    """
    acc, largest, total = carry
    empty = total == 0
    inverse = jnp.where(empty, 0.0, 1 / total)
    logarithm = jnp.where(empty, -jnp.inf, jnp.log(total))
    result = acc * broadcast_rows(inverse, acc.shape[1])
    return result, jnp.where(empty, 0.0, largest), logarithm
