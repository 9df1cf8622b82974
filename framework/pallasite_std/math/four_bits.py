"""Floats of 4 bits: float4_e2m1fn, with 2 bits of exponent and 1 of fraction.

There are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with both signs, no infinity and no NaN. What is beyond
becomes 6, and NaN negative zero, as XLA does it.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin.ir import types
from pallasite_std.math.values import Real, Word

FLOAT4: np.dtype[Any] = np.dtype(ml_dtypes.float4_e2m1fn)
_SIGN = 8
_LARGEST = 7
_DROPPED = 22
"""Bits by which the fraction of f32 is longer."""
_BIAS = 127 - 1
"""By how much the exponent of f32 has another bias."""


def is_narrow_float(dtype: Any) -> bool:
    """Whether a dtype is a float of 8 or of 4 bits, which registers hold as integers."""
    return types.is_float8(dtype) or np.dtype(dtype) == FLOAT4


def four_bits_to_half(value: ir.Value) -> Real:
    """As float16, exactly: the fields are moved to their places, where the exponent has another
    bias, so a power of two is missing."""
    bits = Word(value).extend_unsigned(16)
    return (((bits & _LARGEST) << 9) | ((bits & _SIGN) << 12)).real() * 2.0**14


def single_to_four_bits(number: Real) -> ir.Value:
    """The nearest one to f32, of two the even one."""
    bits = number.bits()
    size_bits = bits & 0x7FFFFFFF
    size = size_bits.real()
    tie = size_bits.shift_logical(_DROPPED) & 1
    rounded = (size_bits + tie + ((1 << (_DROPPED - 1)) - 1)).shift_logical(_DROPPED)
    # Below 1 the addition rounds to multiples of 0.5, whose number is in the last bits then.
    shifter = size.constant(2.0**_DROPPED)
    shifted = (size + shifter).bits() - shifter.bits()
    result = (size < 1.0).choose(shifted, rounded - (_BIAS << 1))
    result = (size > 5.0).choose(result.constant(_LARGEST), result)
    result = result | (bits.shift_logical(28) & _SIGN)
    return number.is_nan().choose(result.constant(_SIGN), result).truncate(4).value
