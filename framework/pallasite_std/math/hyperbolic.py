"""sinh, cosh, tanh and their inverses.

The forward functions come from ``e**|x| / 2``, which does not overflow before they do, and from odd
minimax polynomials near zero; the inverse ones from log1p (W. Kahan, "Branch cuts for complex
elementary functions", 1987, for the choice of arguments).
"""

from __future__ import annotations

import math

from pallasite_std.math.constants import LN2
from pallasite_std.math.exponential import expm1, scaled_exp
from pallasite_std.math.hardware import Hardware
from pallasite_std.math.logarithm import log1p
from pallasite_std.math.values import Mask, Real, polynomial

# sinh(x) = x + x^3 P(x^2) on |x| <= 1.5 (f32) or 1 (f64).
_SINH_SINGLE = (0.166666672, 0.00833333191, 0.000198415728, 2.75303273e-06, 2.61388919e-08)
_SINH_DOUBLE = (
    0.16666666666666666,
    0.008333333333333333,
    0.00019841269841269592,
    2.755731922411999e-06,
    2.505210834566665e-08,
    1.605905070582331e-10,
    7.646476200317062e-13,
    2.8484060977377264e-15,
)
# tanh(x) = x + x^3 P(x^2) on |x| <= 0.55.
_TANH_SINGLE = (-0.333333194, 0.133326039, -0.0538538396, 0.0210767817, -0.00628005806)


def sinh(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The hyperbolic sine, at most 3 ulp."""
    size = abs(x)
    half = scaled_exp(size, hardware, halve=True)
    large = half - _quarter_of_reciprocal(half, hardware)
    square = x * x
    series = polynomial(square, _SINH_DOUBLE if x.is_double else _SINH_SINGLE)
    small = (size * square).times_plus(series, size)
    return (size < (1.0 if x.is_double else 1.5)).choose(small, large).with_sign_of(x)


def cosh(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The hyperbolic cosine, at most 3 ulp."""
    half = scaled_exp(abs(x), hardware, halve=True)
    return half + _quarter_of_reciprocal(half, hardware)


def _quarter_of_reciprocal(x: Real, hardware: Hardware) -> Real:
    """``1 / (4 x)`` for x of at least 1/2."""
    if x.is_double:
        return 0.25 / x
    return hardware.reciprocal_flush(x) * 0.25


def tanh(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The hyperbolic tangent. Exact: at most 2 ulp in f32, 2.5 in f64. Approximate: 2**-11."""
    if approximate:
        return hardware.tanh(x)
    size = abs(x)
    if x.is_double:
        growth = expm1((size + size).at_most(44.0), False, hardware)
        return (growth / (growth + 2.0)).with_sign_of(x)
    reciprocal = hardware.reciprocal_flush(scaled_exp(size + size, hardware) + 1.0)
    large = reciprocal.times_plus(-2.0, 1.0)
    square = x * x
    small = (size * square).times_plus(polynomial(square, _TANH_SINGLE), size)
    return (size < 0.55).choose(small, large).with_sign_of(x)


def asinh(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The inverse hyperbolic sine, at most 3 ulp: ``log1p(x + x^2 / (1 + sqrt(1 + x^2)))``."""
    size = abs(x)
    huge = size > 2.0**x.format.precision
    bounded = huge.choose(x.constant(1.0), size)
    square = bounded * bounded
    argument = bounded + square / ((square + 1.0).sqrt() + 1.0)
    return _log1p_or_log(huge, size, argument, hardware).with_sign_of(x)


def acosh(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The inverse hyperbolic cosine, at most 3 ulp; NaN below 1."""
    huge = x > 2.0**x.format.precision
    excess = huge.choose(x.constant(1.0), x - 1.0)
    argument = excess + excess.times_plus(excess, excess + excess).sqrt()
    value = _log1p_or_log(huge, x, argument, hardware)
    return (x < 1.0).choose(x.constant(math.nan), value)


def _log1p_or_log(huge: Mask, size: Real, argument: Real, hardware: Hardware) -> Real:
    """``log1p(argument)``, or where huge ``log(2 size)``."""
    value = log1p(huge.choose(size, argument), False, hardware)
    return value + huge.choose(value.constant(float(LN2)), 0.0)


def atanh(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The inverse hyperbolic tangent, at most 3 ulp; infinite at 1, NaN beyond."""
    size = abs(x)
    return (log1p((size + size) / (1.0 - size), False, hardware) * 0.5).with_sign_of(x)
