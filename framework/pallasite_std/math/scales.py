"""Floats that are powers of two: float8_e8m0fnu, an exponent of 8 bits and nothing else.

The representation n stands for 2**(n - 127), and 255 for NaN. There is no sign, no zero and no
infinity: zero, negative numbers and what is too large become NaN.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from pallasite_std.math.values import Real, Word

SCALE: np.dtype[Any] = np.dtype(ml_dtypes.float8_e8m0fnu)
SCALE_NAN = 255
"""The representation of NaN."""
_FRACTION = 23


def scale_to_single(value: ir.Value) -> Real:
    """A power of two as f32, where the smallest one is a denormal number."""
    exponent = Word(value).extend_unsigned(32)
    number = (exponent << _FRACTION).real()
    number = exponent.equals(0).choose(number.constant(2.0**-127), number)
    return exponent.equals(SCALE_NAN).choose(number.constant(math.nan), number)


def single_to_scale(number: Real) -> ir.Value:
    """The nearest power of two, in the middle between two the larger one.

    Denormal numbers beyond the smallest power of two become the next one, as in ml_dtypes.
    """
    bits, half = number.bits(), 1 << (_FRACTION - 1)
    rounded = (bits + half).shift_logical(_FRACTION)
    rounded = bits.equals(half).choose(rounded.constant(0), rounded)
    # The representations of zero and negative numbers, and beyond infinity those of NaN.
    fits = (number > 0.0) & (rounded < SCALE_NAN)
    return fits.choose(rounded, rounded.constant(SCALE_NAN)).truncate(8).value


def divide_scales(x: ir.Value, y: ir.Value) -> ir.Value:
    """The quotient of two powers of two, by a difference; as f32 rounds it where it is small."""
    left, right = Word(x).extend_unsigned(32), Word(y).extend_unsigned(32)
    exponent = left - right + 127
    smallest = -22  # 2**-149, the smallest number of f32
    result = (exponent < 0).choose(exponent.constant(0), exponent)
    wrong = (
        (exponent < smallest)
        | (exponent > SCALE_NAN)
        | left.equals(SCALE_NAN)
        | right.equals(SCALE_NAN)
    )
    return wrong.choose(result.constant(SCALE_NAN), result).truncate(8).value
