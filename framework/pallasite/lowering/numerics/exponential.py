"""Exponential functions in float32 and float64.

Polynomial coefficients are minimax fits; series in float64 are Taylor's, long enough for 2^-56.
"""

from __future__ import annotations

import math

from pallasite.lowering.numerics import hardware
from pallasite.lowering.numerics.number import (
    Number,
    absolute,
    fma,
    maximum,
    minimum,
    polynomial,
    round_even,
    select,
)

_LOG2_E = math.log2(math.e)
# ln 2 as sums of two numbers; multiples of the first by small integers are exact.
_LN2_32 = (0.693145751953125, 1.42860682030941723e-06)
_LN2_64 = (6.93147180369123816490e-01, 1.90821492927058770002e-10)
# (exp(r) - 1 - r) / r^2 for |r| <= 0.3475, error of expm1 2^-28.
_EXPM1_32 = (
    (0.000199121176, 0.00139413436, 0.00833327696, 0.0416663513, 0.166666672, 0.5)
)  # fmt: skip
_EXPM1_64 = tuple(1 / math.factorial(n) for n in range(14, 1, -1))


def exp(x: Number, approximate: bool = False) -> Number:
    """e to the power x.

    float32: 2 ulp more than the error of ``ex2.approx``; denormal results are rounded once.
    float64: 1 ulp; 2 for denormal results.
    """
    if x.width == 64:
        return _exp_64(x)
    if approximate:
        return hardware.exp2(x * _LOG2_E, flush=True)
    exponent = maximum(minimum(round_even(x * _LOG2_E), 127.0), -150.0)
    rest = fma(exponent, -_LN2_32[1], fma(exponent, -_LN2_32[0], x))
    return hardware.exp2(rest * _LOG2_E) * hardware.exp2(exponent)


def exp2(x: Number, approximate: bool = False) -> Number:
    """2 to the power x; float32 has the error of ``ex2.approx``, float64 1 ulp."""
    if x.width == 32:
        return hardware.exp2(x, flush=approximate)
    limited = _limit(x, -1100.0, 1100.0)
    exponent = round_even(limited)
    rest = (limited - exponent) * math.log(2)
    return _scale(rest + rest * rest * polynomial(rest, _EXPM1_64), exponent)


def expm1(x: Number) -> Number:
    """exp(x) - 1: 2 ulp in float32, 2 ulp in float64."""
    wide = x.width == 64
    limited = _limit(x, -40.0, 710.0 if wide else 89.0)
    high, low = _LN2_64 if wide else _LN2_32
    exponent = round_even(limited * _LOG2_E)
    rest = fma(exponent, -high, limited)
    correction = exponent * low
    reduced = rest - correction
    lost = (rest - reduced) - correction
    tail = polynomial(reduced, _EXPM1_64 if wide else _EXPM1_32)
    fraction = reduced + fma(reduced * reduced, tail, lost)
    half = power_of_two(exponent - 1.0)
    scaled = 2.0 * fma(fraction, half, half - 0.5)
    return select(exponent.equals(0.0), fraction, scaled)


def exp_64_pair(high: Number, low: Number) -> Number:
    """exp(high + low) in float64, for a ``low`` that is small next to 1."""
    value = exp(high)
    # An infinite or zero result stays what it is.
    return select(absolute(value).equals(math.inf), value, fma(value, low, value))


def _exp_64(x: Number) -> Number:
    limited = _limit(x, -800.0, 800.0)
    exponent = round_even(limited * _LOG2_E)
    rest = fma(exponent, -_LN2_64[1], fma(exponent, -_LN2_64[0], limited))
    return _scale(fma(rest * rest, polynomial(rest, _EXPM1_64), rest), exponent)


def _limit(x: Number, low: float, high: float) -> Number:
    """Clamps to a range; not-a-number stays."""
    inside = select(x > high, high, x)
    return select(inside < low, low, inside)


def _scale(minus_one: Number, exponent: Number) -> Number:
    """``(1 + minus_one) * 2**exponent`` in float64, in two steps for exponents out of range."""
    first = round_even(exponent * 0.5)
    scaled = (1.0 + minus_one) * power_of_two(first)
    return scaled * power_of_two(exponent - first)


def power_of_two(exponent: Number) -> Number:
    """2 to an integral power that a normal number can have, through the exponent's bits."""
    if exponent.width == 64:
        return ((exponent.to_integer("i64") + 1023) << 52).as_float("f64")
    return ((exponent.to_integer("i32") + 127) << 23).as_float("f32")
