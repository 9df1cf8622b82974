"""Sine, cosine, tangent and their inverses in float32 and float64."""

from __future__ import annotations

import math
from fractions import Fraction

from pallasite.lowering.numerics import hardware
from pallasite.lowering.numerics.number import (
    Number,
    absolute,
    any_of,
    branch,
    copy_sign,
    fma,
    polynomial,
    round_even,
    select,
    square_root,
)

# 2 / pi to 200 bits, in pieces of 28 bits: their products with a float32 are exact in float64.
_TWO_OVER_PI = Fraction(
    0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561, 1 << 256
)
# pi / 2 in three parts of which the first two have trailing zeros (Cody and Waite).
_HALF_PI_32 = (1.57079601287841796875, 3.1391647326017846353352069854736328e-07,
               5.390302529957764765e-15)  # fmt: skip
_HALF_PI_64 = (1.57079632679489655800e00, 6.12323399573676603587e-17, -1.4973849048591833e-33)
_LIMIT_32 = 71476.0
# (sin(r) - r) / r^3 and (cos(r) - 1 + r^2 / 2) / r^4 in r^2, |r| <= pi / 4.
_SIN_32 = (2.71735848e-06, -0.000198392343, 0.00833332911, -0.166666672)
_COS_32 = (2.44292005e-05, -0.00138872885, 0.0416666456)
_SIN_64 = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(9, 0, -1))
_COS_64 = tuple((-1) ** n / math.factorial(2 * n) for n in range(9, 1, -1))
# (atan(x) - x) / x^3 in x^2 for |x| <= tan(pi / 8); error 2^-52.
_ATAN_64 = (
    *(-0.31341359658620649, 0.43922784066830567, -0.28049772712128179, 0.12664007817809322),
    *(-0.069073046858351708, 0.061045482293967682, -0.066861966823994159, 0.076933790085127268),
    *(-0.090909409403642311, 0.11111111306236764, -0.14285714268799635, 0.19999999999523899),
    -0.33333333333329418,
)


def sin(x: Number, approximate: bool = False) -> Number:
    """Sine: 2 ulp in float32 over the whole range; float64: see :func:`_reduce_64`."""
    if approximate and x.width == 32:
        return hardware.sine(x)
    sine, cosine, quadrant = _sine_cosine(x)
    value = select((quadrant & 1).differs(0), cosine, sine)
    result = select((quadrant & 2).differs(0), -value, value)
    return select(x.equals(0.0), x, result)


def cos(x: Number, approximate: bool = False) -> Number:
    """Cosine, as accurate as the sine."""
    if approximate and x.width == 32:
        return hardware.cosine(x)
    sine, cosine, quadrant = _sine_cosine(x)
    value = select((quadrant & 1).differs(0), sine, cosine)
    return select(((quadrant + 1) & 2).differs(0), -value, value)


def tan(x: Number, approximate: bool = False) -> Number:
    """Tangent: 4 ulp in float32."""
    if approximate and x.width == 32:
        return hardware.divide(hardware.sine(x), hardware.cosine(x))
    sine, cosine, quadrant = _sine_cosine(x)
    odd = (quadrant & 1).differs(0)
    result = select(odd, -cosine, sine) / select(odd, sine, cosine)
    return select(x.equals(0.0), x, result)


def _sine_cosine(x: Number) -> tuple[Number, Number, Number]:
    """Sine and cosine of x minus the nearest multiple of pi / 2, and that multiple mod 4."""
    rest, quadrant = _reduce_64(x) if x.width == 64 else _reduce_32(x)
    square = rest * rest
    sine_series, cosine_series = (_SIN_64, _COS_64) if x.width == 64 else (_SIN_32, _COS_32)
    sine = fma(polynomial(square, sine_series), square * rest, rest)
    cosine = fma(polynomial(square, cosine_series), square * square, fma(square, -0.5, 1.0))
    return sine, cosine, quadrant


def _reduce_32(x: Number) -> tuple[Number, Number]:
    """Three parts of pi / 2 up to 71,476; beyond, the products with pieces of 2 / pi."""
    multiple = round_even(x * (2 / math.pi))
    rest = x
    for part in _HALF_PI_32:
        rest = fma(multiple, -part, rest)
    # The integer of a number out of range is not defined, and not used.
    quadrant = select(absolute(x) <= _LIMIT_32, multiple, 0.0).to_integer("i32")
    large = any_of(absolute(x) > _LIMIT_32)

    def slow() -> list[Number]:
        accurate, its_quadrant = _reduce_large_32(x)
        is_large = absolute(x) > _LIMIT_32
        return [select(is_large, accurate, rest), select(is_large, its_quadrant, quadrant)]

    result = branch(large, slow, lambda: [rest, quadrant], [rest, quadrant])
    return result[0], result[1]


def _reduce_large_32(x: Number) -> tuple[Number, Number]:
    """x mod pi / 2 for any float32, in float64.

    Multiples of 4 are dropped from each exact product, so that the sum keeps its low bits; the
    pieces reach to 2^-196, those of the largest float32 thus to 2^-68 quadrants.
    """
    wide = x.to_float("f64")
    total = quadrants = wide.constant(0.0)
    for number in range(7):
        scale = 1 << (28 * (number + 1))
        piece = int(_TWO_OVER_PI * scale) & 0xFFFFFFF
        product = wide * (piece / scale)
        product = fma(round_even(product * 0.25), -4.0, product)
        total = total + product
        nearest = round_even(total)
        total, quadrants = total - nearest, quadrants + nearest
    rest = (total * (math.pi / 2)).to_float("f32")
    finite = absolute(x) < math.inf
    return select(finite, rest, math.nan), select(finite, quadrants, 0.0).to_integer("i32")


def _reduce_64(x: Number) -> tuple[Number, Number]:
    """Three parts of pi / 2 and fused steps: relative error 2^-52 up to about 2^30.

    Beyond, the absolute error grows as |x| 2^-106 - what one multiplication keeps; magnitudes
    above 2^52 give results of no accuracy.
    """
    multiple = round_even(x * (2 / math.pi))
    rest = x
    for part in _HALF_PI_64:
        rest = fma(multiple, -part, rest)
    quadrant = fma(round_even(multiple * 0.25), -4.0, multiple)
    inside = absolute(quadrant) <= 4.0
    rest = select(absolute(rest) <= 1.0, rest, rest * 0.0)
    return rest, select(inside, quadrant, 0.0).to_integer("i32")


def atan2(y: Number, x: Number) -> Number:
    """Angle of the point (x, y), evaluated in float64: 1 ulp in float32, 2 ulp in float64."""
    if x.width == 32:
        return atan2(y.to_float("f64"), x.to_float("f64")).to_float("f32")
    height, width = absolute(y), absolute(x)
    steep = height > width
    numerator, divisor = select(steep, width, height), select(steep, height, width)
    ratio = numerator / divisor
    ratio = select(numerator.equals(0.0), 0.0, ratio)
    ratio = select(numerator.equals(math.inf), 1.0, ratio)
    ratio = select(numerator.is_nan(), numerator, ratio)
    ratio = select(divisor.is_nan(), divisor, ratio)
    angle = _atan_of_ratio(ratio)
    angle = select(steep, (math.pi / 2 - angle) + 6.123233995736766e-17, angle)
    left = x.bits() < 0
    angle = select(left, (math.pi - angle) + 1.2246467991473532e-16, angle)
    return copy_sign(angle, y)


def _atan_of_ratio(ratio: Number) -> Number:
    """Arcus tangent of a float64 in [0, 1]."""
    upper = ratio > math.tan(math.pi / 8)
    reduced = select(upper, (ratio - 1.0) / (ratio + 1.0), ratio)
    square = reduced * reduced
    angle = fma(polynomial(square, _ATAN_64), square * reduced, reduced)
    return angle + select(upper, angle.constant(math.pi / 4), 0.0)


def atan(x: Number) -> Number:
    """Arcus tangent, through :func:`atan2`."""
    return atan2(x, x.constant(1.0))


def asin(x: Number) -> Number:
    """Arcus sine as atan2(x, sqrt((1 - x) (1 + x))), in float64."""
    if x.width == 32:
        return asin(x.to_float("f64")).to_float("f32")
    return atan2(x, square_root((1.0 - x) * (1.0 + x)))


def acos(x: Number) -> Number:
    """Arcus cosine as atan2(sqrt((1 - x) (1 + x)), x), in float64."""
    if x.width == 32:
        return acos(x.to_float("f64")).to_float("f32")
    return atan2(square_root((1.0 - x) * (1.0 + x)), x)
