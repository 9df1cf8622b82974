"""The softmax of attention, block by block of keys (M. Milakov and N. Gimelshein, 2018).

Scores stay as the products give them; their factor goes into the exponential's multiply-add. Row
sums are kept for groups of 8 columns and added up across lanes in the end.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasite_std.api import LOG2_E as LOG2_E
from pallasite_std.api import broadcast_rows as broadcast_rows
from pallasite_std.api import cap as cap
from pallasite_std.api import exponents as exponents
from pallasite_std.api import lowest as lowest

COLUMNS = 8
"""Columns for which row sums are kept apart."""

_EXP2 = (0.99992808, 0.69326099, 0.24261094, 0.05517149)
"""Of 2**x on [-1/2, 1/2], with the least relative error for this degree: 7.5e-5."""


def exponentials(
    scores: Any, factor: float, maxima: Any, polynomial: int, large: bool = False
) -> Any:
    """``2 ** (factor * (scores - maxima))``, with maxima for each row.

    With ``large`` scores, the difference comes first: a product in a multiply-add is exact, and the
    largest score would not cancel its own product, which is rounded.

    One of ``polynomial`` groups of 8 columns, if that is not 0, is computed by a polynomial.
    """
    columns = scores.shape[1]
    scaled = maxima if large else maxima * factor

    def exponent(part: Any) -> Any:
        subtracted = broadcast_rows(scaled, part.shape[1])
        return (part - subtracted) * factor if large else part * factor - subtracted

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
