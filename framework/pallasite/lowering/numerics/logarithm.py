"""Logarithms in float32 and float64.

The argument is split into ``2**exponent * (1 + f)`` with ``1 + f`` in [2/3, 4/3) for float32 or
around [sqrt(1/2), sqrt(2)) for float64.
"""

from __future__ import annotations

import math

from pallasite.lowering.numerics import hardware
from pallasite.lowering.numerics.number import Number, absolute, fma, polynomial, select

# (log(1 + f) - f) / f^2 for |f| <= 1/3, error 2^-26 relative to log.
_LOG_32 = (
    *(-0.133109212, 0.140062869, -0.120783441, 0.140008122, -0.166894883),
    *(0.200107723, -0.249995083, 0.333332092, -0.5),
)
# atanh(s) / s - 1 = s^2 / 3 + s^4 / 5 + ..., for s^2 <= 0.0295.
_ATANH_64 = tuple(1 / (2 * n + 1) for n in range(12, 0, -1))
_LN2_64 = (6.93147180369123816490e-01, 1.90821492927058770002e-10)


def log(x: Number, approximate: bool = False) -> Number:
    """Natural logarithm: 1 ulp in float32 and float64."""
    if x.width == 64:
        high, low = log_64_pair(x)
        return _special(x, high + low)
    if approximate:
        return hardware.log2(x) * math.log(2)
    small = x < 2.0**-126
    normal = select(small, x * 2.0**23, x)
    bits = normal.bits()
    above = (bits - 0x3F2AAAAB) & 0xFF800000
    fraction = (bits - above).as_float("f32") - 1.0
    exponent = above.to_float("f32") * 2.0**-23
    exponent = exponent - select(small, exponent.constant(23.0), 0.0)
    square = fraction * fraction
    result = fma(polynomial(fraction, _LOG_32), square, fraction)
    result = fma(exponent, math.log(2), result)
    return _special(x, result)


def log1p(x: Number, approximate: bool = False) -> Number:
    """log(1 + x): 2 ulp; the rounding error of ``1 + x`` is added back to first order."""
    total = x + 1.0
    value = log(total)
    correction = (x - (total - 1.0)) / total
    return select(absolute(value).equals(math.inf), value, value + correction)


def log_64_pair(x: Number) -> tuple[Number, Number]:
    """log of a positive finite float64 as an unevaluated sum, relative error about 2^-66."""
    small = x < 2.0**-1022
    bits = select(small, x * 2.0**54, x).bits()
    above = (bits - 0x3FE6A09E667F3BCD) & (0xFFF << 52)
    fraction = (bits - above).as_float("f64") - 1.0
    exponent = (above >> 52).to_float("f64")
    exponent = exponent - select(small, exponent.constant(54.0), 0.0)
    # log(1 + f) = 2 atanh(s), s = f / (2 + f); the quotient has a remainder of its own.
    divisor = fraction + 2.0
    divisor_lost = fraction - (divisor - 2.0)
    quotient = fraction / divisor
    remainder = fma(-quotient, divisor, fraction) - quotient * divisor_lost
    quotient_lost = remainder / divisor
    square = quotient * quotient
    series = polynomial(square, _ATANH_64) * square * quotient
    low = 2.0 * (series + quotient_lost)
    first = quotient * 2.0
    whole = exponent * _LN2_64[0]
    high = whole + first
    lost = first - (high - whole)
    lost = select(absolute(whole) >= absolute(first), lost, whole - (high - first))
    rest = lost + fma(exponent, _LN2_64[1], low)
    total = high + rest
    return total, rest - (total - high)


def _special(x: Number, result: Number) -> Number:
    """The results for 0, infinity, negative numbers and not-a-number."""
    result = select(x < math.inf, result, x)
    result = select(x < 0.0, math.nan, result)
    return select(x.equals(0.0), -math.inf, result)
