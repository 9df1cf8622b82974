"""log, log2 and log1p.

A number is written as ``m 2**e`` with m around 1, and log(m) is a minimax polynomial in ``m - 1``
(f32), or in ``s**2`` with ``s = (m - 1) / (m + 1)`` as in W. J. Cody and W. Waite, "Software Manual
for the Elementary Functions", 1980, chapter 5 (f64). Denormals are scaled first.
The approximate form of log is ``lg2.approx.ftz.f32`` times ln 2.
"""

from __future__ import annotations

import math

from pallasite_std.math.constants import LN2, LOG2_E, parts
from pallasite_std.math.hardware import Hardware
from pallasite_std.math.values import Real, Word, polynomial

# log1p(f) = f + f^2 Q(f) on |f| <= 1/3, relative error 2**-27.7 of f Q.
_LOG1P_SINGLE = (
    -0.5,
    0.333332092,
    -0.249995083,
    0.200107723,
    -0.166894943,
    0.140008152,
    -0.120782502,
    0.14006266,
    -0.133113578,
)
# 2 artanh(s) = 2 s + s^3 R(s^2) on |s| <= 0.1716, relative error 2**-58.
_ARTANH_DOUBLE = (
    0.6666666666666735,
    0.39999999999413344,
    0.2857142874272497,
    0.2222219853488537,
    0.18183566490611983,
    0.15313991035547905,
    0.14796584223369766,
)


def _split_point(double: bool) -> int:
    """The representation of the lower end of the range of m: 2/3 (f32) or sqrt(1/2) (f64)."""
    return 0x3FE6A09E667F3BCD if double else 0x3F2AAAAB


def _log_reduced(offset: Real, exponent: Real) -> Real:
    """log(1 + offset) + exponent ln 2."""
    if not offset.is_double:
        series = polynomial(offset, _LOG1P_SINGLE)
        value = (offset * offset).times_plus(series, offset)
        return exponent.times_plus(float(LN2), value)
    ratio = offset / (offset + 2.0)
    square = ratio * ratio
    series = square * polynomial(square, _ARTANH_DOUBLE)
    half_square = offset * offset * 0.5
    head, tail = parts(LN2, offset.format, 2, 42)
    correction = exponent.times_plus(tail, ratio * (half_square + series))
    return exponent.times_plus(head, offset - (half_square - correction))


def decompose(x: Real) -> tuple[Real, Real]:
    """A positive finite number as (m, e) with ``x = m 2**e`` and m between 2/3 or 0.7 and twice it.

    Other arguments give meaningless numbers.
    """
    format = x.format
    shift = format.precision
    tiny = x < format.smallest_normal
    x = tiny.choose(x * float(2**shift), x)
    bits = x.bits()
    field = (bits - _split_point(x.is_double)) & -(1 << format.fraction)
    mantissa = (bits - field).real()
    return mantissa, _exponent_value(field, x) + tiny.choose(x.constant(-float(shift)), 0.0)


def _exponent_value(field: Word, x: Real) -> Real:
    if x.is_double:
        return (field >> 52).truncate(32).to_real(x.format)
    return field.to_real(x.format) * 2.0**-23


def _with_special_cases(x: Real, value: Real) -> Real:
    """The logarithm of infinity is itself, of a negative number NaN, and of zero minus infinity."""
    infinity = x.constant(math.inf)
    special = x.bits().compare("uge", x.format.infinity_bits)
    value = special.choose(x.times_plus(infinity, infinity), value)
    return x.equals(0.0).choose(-infinity, value)


def log(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The natural logarithm. Exact: at most 1.2 ulp."""
    if approximate:
        return hardware.log2_flush(x) * float(LN2)
    mantissa, exponent = decompose(x)
    return _with_special_cases(x, _log_reduced(mantissa - 1.0, exponent))


def log2(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The logarithm to base 2. Exact: at most 2.5 ulp."""
    if approximate:
        return hardware.log2_flush(x)
    mantissa, exponent = decompose(x)
    natural = _log_reduced(mantissa - 1.0, x.constant(0.0))
    head, tail = parts(LOG2_E, x.format, 2)
    value = natural.times_plus(head, natural.times_plus(tail, exponent))
    return _with_special_cases(x, value)


def log1p(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """log(1 + x), at most 1.5 ulp also near zero.

    The exponent e is that of the rounded sum ``1 + x``; ``x 2**-e + (2**-e - 1)`` then is ``m - 1``
    with one rounding, so that nothing is lost of a small x.
    """
    format = x.format
    bits = (x + 1.0).bits()
    field = (bits - _split_point(x.is_double)) & -(1 << format.fraction)
    scale = (((format.bias + 2) << format.fraction) - field).real()
    # A quarter of the scale, which may be denormal, is what is meant.
    offset = x.times_plus(scale * 0.25, scale.times_plus(0.25, -1.0))
    value = _log_reduced(offset, _exponent_value(field, x))
    infinity = x.constant(math.inf)
    ordinary = (x > -1.0) & (x < math.inf)
    value = ordinary.choose(value, x.times_plus(infinity, infinity))
    return x.equals(-1.0).choose(-infinity, value).with_sign_of(x)
