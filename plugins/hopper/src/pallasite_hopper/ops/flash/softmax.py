"""The softmax of attention, block by block of keys (M. Milakov and N. Gimelshein, 2018).

Scores stay as the products give them; their factor goes into the exponential's multiply-add. Row
sums are kept for groups of 8 columns and added up across lanes in the end.

A product in a multiply-add is exact, but that of the largest score, which is subtracted, is
rounded. What is lost is common to all weights of a row, and cancels when they are divided by their
sum, as long as they are neither too large nor too small for their type. Rows of larger scores have
a power of two as their factor, with which both products are exact: two scores of such a row differ
by so much, unless they are equal, that the smaller one has next to no weight with either factor.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasite_std.api import LOG2_E as LOG2_E
from pallasite_std.api import LOWEST as LOWEST
from pallasite_std.api import broadcast_rows as broadcast_rows
from pallasite_std.api import cap as cap
from pallasite_std.api import exponents as exponents
from pallasite_std.api import lowest as lowest_of_factor
from pallasite_std.api import normalized as normalized

COLUMNS = 8
"""Columns for which row sums are kept apart."""

_ROUNDED = float(1 << 27)
"""Exponents of 2 up to which rounding the largest changes weights by a factor of 2**8 at most, and
beyond which different ones of float32 are at least 8 apart."""

NOTHING = 2.0**-100
"""Sums of rows that see no key are below: a polynomial has 2**-126 for what is hidden, and the
largest score of other rows 2**-8 at least."""

_EXP2 = (0.99992808, 0.69326099, 0.24261094, 0.05517149)
"""Of 2**x on [-1/2, 1/2], with the least relative error for this degree: 7.5e-5."""


def lowest(factor: float) -> float:
    """Where maxima begin of scores that have a factor of :func:`factors`."""
    return lowest_of_factor(_power(factor))


def factors(maxima: Any, factor: float) -> Any:
    """The factors of scores, for rows with these maxima: see above."""
    return jnp.where(jnp.abs(maxima) > _ROUNDED / factor, _power(factor), factor)


def _power(factor: float) -> float:
    """The next power of two."""
    return 2.0 ** math.ceil(math.log2(factor))


def exponentials(scores: Any, factor: Any, maxima: Any, polynomial: int) -> Any:
    """``2 ** (factor * (scores - maxima))``, with maxima for each row.

    With one factor for all rows, the difference comes first, as scores with a bias need it: it is
    exact. With factors for rows, see :func:`factors`, there is one operation less for each score.

    One of ``polynomial`` groups of 8 columns, if that is not 0, is computed by a polynomial.
    """
    columns = scores.shape[1]
    large = isinstance(factor, float)
    scaled = maxima if large else maxima * factor

    def exponent(part: Any) -> Any:
        subtracted = broadcast_rows(scaled, part.shape[1])
        if large:
            return (part - subtracted) * factor
        return part * broadcast_rows(factor, part.shape[1]) - subtracted

    if polynomial == 0:
        return jnp.exp2(exponent(scores))
    parts = []
    for group, start in enumerate(range(0, columns, COLUMNS)):
        part = exponent(scores[:, start : start + COLUMNS])
        chosen = group % polynomial == polynomial - 1
        parts.append(exp2_polynomial(part) if chosen else jnp.exp2(part))
    return jnp.concatenate(parts, axis=1)


def exp2_polynomial(x: Any) -> Any:
    """``2 ** x`` for x <= 0 by additions and multiplications; relative error 8e-5.

    The sum with 1.5 * 2**23 has the integer next to x in its last bits; they become the exponent.
    What is below 2**-126 is raised to that.
    """
    shifter = float(3 << 22)
    x = jnp.maximum(x, -126.0)
    shifted = x + shifter
    rest = x - (shifted - shifter)
    value = rest * _EXP2[3] + _EXP2[2]
    value = value * rest + _EXP2[1]
    value = value * rest + _EXP2[0]
    exponent = lax.bitcast_convert_type(shifted, jnp.int32) << 23
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.int32) + exponent, x.dtype)


def partial_sums(values: Any) -> Any:
    """Row sums for groups of 8 columns: (rows, columns) to (rows, 8), without other lanes."""
    parts = [values[:, start : start + COLUMNS] for start in range(0, values.shape[1], COLUMNS)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
