"""Powers and roots."""

from __future__ import annotations

import math
from typing import Any

from jaxlib.mlir import ir

from pallasite.ir import types
from pallasite.lowering.numerics import hardware
from pallasite.lowering.numerics.elements import from_compute, to_compute
from pallasite.lowering.numerics.exponential import exp, exp_64_pair
from pallasite.lowering.numerics.hyperbolic import in_float64
from pallasite.lowering.numerics.logarithm import log, log_64_pair
from pallasite.lowering.numerics.number import (
    Number,
    absolute,
    copy_sign,
    floor,
    fma,
    select,
    square_root,
)


def integer_pow(value: ir.Value, exponent: int, dtype: Any, approximate: bool) -> ir.Value:
    """A power with a constant exponent, by repeated squaring; narrow floats in float32.

    Up to ``log2(exponent) + 1`` roundings; a negative exponent takes a reciprocal of the power.
    """
    number = to_compute(value, dtype) if types.is_float(dtype) else Number(value)
    result, base, rest = None, number, abs(exponent)
    while rest:
        if rest & 1:
            result = base if result is None else result * base
        rest >>= 1
        if rest:
            base = base * base
    if result is None:
        result = number.constant(1)
    if exponent < 0:
        if not types.is_float(dtype):
            # 1 / power, truncated: 1 and -1 are their own inverses, all else gives 0.
            unit = result.equals(1) | result.equals(-1)
            result = select(unit, result, 0)
        elif approximate and result.width == 32:
            result = hardware.divide(result.constant(1.0), result)
        else:
            result = 1.0 / result
    return from_compute(result, dtype) if types.is_float(dtype) else result.value


def sqrt(x: Number, approximate: bool = False) -> Number:
    """Square root, correctly rounded."""
    return hardware.root(x) if approximate and x.width == 32 else square_root(x)


def rsqrt(x: Number, approximate: bool = False) -> Number:
    """1 / sqrt(x): 2 ulp in float32 (``rsqrt.approx``), 1 ulp in float64."""
    if x.width == 64:
        return 1.0 / square_root(x)
    return hardware.reciprocal_root(x, flush=approximate)


@in_float64
def cbrt(x: Number) -> Number:
    """Cube root, in float64: exp(log(x) / 3) and a step of Newton's method, 1 ulp."""
    magnitude = absolute(x)
    guess = exp(log(magnitude) * (1 / 3))
    square = guess * guess
    better = guess - (guess - magnitude / square) * (1 / 3)
    regular = (magnitude > 0.0) & (magnitude < math.inf)
    return copy_sign(select(regular, better, magnitude), x)


def power(x: Number, y: Number) -> Number:
    """x to the power y with the special cases of IEEE 754 (``pow``).

    float32 is evaluated in float64, to 1 ulp. float64: the logarithm as a sum of two numbers, to
    about 4 ulp.
    """
    if x.width == 32:
        return power(x.to_float("f64"), y.to_float("f64")).to_float("f32")
    magnitude = absolute(x)
    log_high, log_low = log_64_pair(magnitude)
    high = y * log_high
    low = fma(y, log_high, -high) + y * log_low
    # Not-a-number in low comes from infinities, for which high alone decides.
    high_special = y * log(magnitude)
    ordinary = absolute(low) < math.inf
    irregular = magnitude.equals(math.inf) | magnitude.equals(0.0) | magnitude.is_nan()
    high = select(irregular, high_special, high)
    low = select(ordinary, select(irregular, 0.0, low), 0.0)
    result = exp_64_pair(high, low)
    result = select(magnitude.equals(1.0) & ~y.is_nan(), 1.0, result)

    half = y * 0.5
    integral = floor(y).equals(y)
    odd = integral & floor(half).differs(half) & (absolute(y) < 2.0**53)
    negative = x.bits() < 0
    result = select(negative & odd, -result, result)
    undefined = (x < 0.0) & ~integral & (magnitude < math.inf)
    result = select(undefined, math.nan, result)
    return select(x.equals(1.0) | y.equals(0.0), 1.0, result)
