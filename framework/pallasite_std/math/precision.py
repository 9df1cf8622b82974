"""Rounding to fewer bits of exponent and significand, within a dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin.ir import ops
from pallasite_std.math.conversion import convert
from pallasite_std.math.four_bits import is_narrow_float
from pallasite_std.math.hardware import PTX, Hardware
from pallasite_std.math.values import Real


def reduce_precision(
    value: ir.Value,
    dtype: Any,
    exponent_bits: int,
    fraction_bits: int,
    hardware: Hardware = PTX,
) -> ir.Value:
    """A float as the nearest number with so many bits, ties to even; what XLA's operation is.

    With fewer exponent bits than the dtype has, numbers beyond the largest become infinite, and
    those below the smallest normal one zeros. The representation of NaN stays.

    Args:
      value: a scalar or vector.
      dtype: its dtype.
      exponent_bits: at least 1; as many as the dtype has, or more, leave the range as it is.
      fraction_bits: stored bits of the significand; more than the dtype has change nothing.
      hardware: the table of instructions.
    """
    if is_narrow_float(dtype):
        # As XLA does, in the next wider dtype with as many exponent bits, if there is one.
        wide = np.dtype(np.float16 if np.dtype(dtype).name == "float8_e5m2" else np.float32)
        number = convert(value, dtype, wide, hardware=hardware)
        number = reduce_precision(number, wide, exponent_bits, fraction_bits, hardware)
        return convert(number, wide, dtype, hardware=hardware)
    real = Real(value)
    format, bits = real.format, real.bits()
    size, sign = bits & (format.sign_bit - 1), bits & -format.sign_bit
    dropped = format.fraction - fraction_bits
    if dropped > 0:
        odd = size.shift_logical(dropped) & 1
        size = (size + odd + ((1 << (dropped - 1)) - 1)) & -(1 << dropped)
    if exponent_bits < format.bits - 1 - format.fraction:
        bias = (1 << (exponent_bits - 1)) - 1
        exponent = size.shift_logical(format.fraction)
        beyond = exponent > format.bias + bias
        size = beyond.choose(size.constant(format.infinity_bits), size)
        size = (exponent < format.bias - bias + 1).choose(size.constant(0), size)
    result = real.is_nan().choose(bits, size | sign)
    return ops.bitcast(result.value, value.type)
