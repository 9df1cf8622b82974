"""Hyperbolic functions and their inverses, and the logistic function."""

from __future__ import annotations

import math
from collections.abc import Callable

from pallasite.lowering.numerics import hardware
from pallasite.lowering.numerics.exponential import exp, expm1
from pallasite.lowering.numerics.logarithm import log, log1p
from pallasite.lowering.numerics.number import (
    Number,
    absolute,
    copy_sign,
    fma,
    polynomial,
    select,
    square_root,
)

# (tanh(x) - x) / x^3 in x^2 for |x| <= 0.56, error of tanh 2^-27.
_TANH_32 = (0.00236538099, -0.0083888825, 0.0217752215, -0.0539586172, 0.133332878, -0.333333313)


def in_float64(function: Callable[[Number], Number]) -> Callable[[Number], Number]:
    """A function of float32 or float64 that is always evaluated in float64."""

    def apply(x: Number) -> Number:
        return function(x.to_float("f64")).to_float("f32") if x.width == 32 else function(x)

    apply.__doc__ = function.__doc__
    return apply


def tanh(x: Number, approximate: bool = False) -> Number:
    """Hyperbolic tangent: 2 ulp in float32 and float64."""
    magnitude = absolute(x)
    if x.width == 64:
        limited = select(magnitude > 30.0, 30.0, magnitude)
        minus_one = expm1(limited * 2.0)
        return copy_sign(minus_one / (minus_one + 2.0), x)
    if approximate:
        return hardware.tangent_hyperbolic(x)
    square = x * x
    small = fma(polynomial(square, _TANH_32), square * x, x)
    large = fma(hardware.reciprocal(exp(magnitude * 2.0) + 1.0), -2.0, 1.0)
    return select(magnitude < 0.55, small, copy_sign(large, x))


def logistic(x: Number, approximate: bool = False) -> Number:
    """1 / (1 + exp(-x)): 3 ulp, with denormal results."""
    if approximate and x.width == 32:
        return hardware.reciprocal(exp(-x, approximate=True) + 1.0)
    small = exp(-absolute(x))
    return select(x < 0.0, small, 1.0) / (small + 1.0)


@in_float64
def sinh(x: Number) -> Number:
    """Hyperbolic sine, in float64: 3 ulp."""
    magnitude = absolute(x)
    minus_one = expm1(magnitude)
    moderate = 0.5 * (minus_one + minus_one / (minus_one + 1.0))
    root = exp(magnitude * 0.5)
    result = select(magnitude > 700.0, (0.5 * root) * root, moderate)
    return copy_sign(result, x)


@in_float64
def cosh(x: Number) -> Number:
    """Hyperbolic cosine, in float64: 3 ulp."""
    magnitude = absolute(x)
    value = exp(magnitude)
    root = exp(magnitude * 0.5)
    return select(magnitude > 700.0, (0.5 * root) * root, 0.5 * value + 0.5 / value)


@in_float64
def asinh(x: Number) -> Number:
    """Inverse hyperbolic sine, in float64: 3 ulp."""
    magnitude = absolute(x)
    square = magnitude * magnitude
    moderate = log1p(magnitude + square / (square_root(square + 1.0) + 1.0))
    result = select(magnitude > 1e9, log(magnitude) + math.log(2), moderate)
    return copy_sign(result, x)


@in_float64
def acosh(x: Number) -> Number:
    """Inverse hyperbolic cosine, in float64: 3 ulp; not a number below 1."""
    above = x - 1.0
    moderate = log1p(above + square_root(above * (above + 2.0)))
    return select(x > 1e9, log(x) + math.log(2), moderate)


@in_float64
def atanh(x: Number) -> Number:
    """Inverse hyperbolic tangent, in float64: 3 ulp."""
    magnitude = absolute(x)
    value = 0.5 * log1p(2.0 * magnitude / (1.0 - magnitude))
    return copy_sign(value, x)
