"""The exact remainder of a division of floats."""

from __future__ import annotations

import math

from jaxlib.mlir.dialects import arith

from pallasite.ir import ops
from pallasite.lowering.numerics.exponential import power_of_two
from pallasite.lowering.numerics.number import (
    Number,
    absolute,
    copy_sign,
    each,
    fma,
    select,
    truncate,
)

_STEP = 50


def remainder(x: Number, y: Number) -> Number:
    """``x - trunc(x / y) * y`` without rounding (``fmod``), with the sign of ``x``.

    Long division by 50 bits of the quotient at a time, in float64: one round for quotients up to
    2^50, at most 6 rounds for float32. Each round is exact: the quotient is at most 1 off, and
    both the difference and its correction fit a float64.
    """
    if x.width == 32:
        return remainder(x.to_float("f64"), y.to_float("f64")).to_float("f32")
    return each(_remainder, x, y)


def _remainder(x: Number, y: Number) -> Number:
    divisor = absolute(y)
    defined = (absolute(x) < math.inf) & (divisor > 0.0)
    # Denormal divisors are scaled; their exponent is then lower by 54.
    small = divisor < 2.0**-1022
    exponent = _exponent(select(small, divisor * 2.0**54, divisor))
    exponent = exponent - select(small, exponent.constant(54), 0)
    dividend = select(defined, absolute(x), 0.0)
    start = _exponent(dividend) - exponent
    rounds = select(start < 0, 0, start)
    rounds = Number(arith.divui(rounds.value, rounds.constant(_STEP).value)) + 1

    def body(index: ops.ir.Value, carried: list[ops.ir.Value]) -> list[ops.ir.Value]:
        rest = Number(carried[0])
        shift = (rounds - 1 - Number(index)) * _STEP
        half = shift.shift_right_logical(1)
        first = power_of_two(half.to_float("f64"))
        second = power_of_two((shift - half).to_float("f64"))
        scaled = divisor * first * second
        quotient = truncate(rest / scaled)
        reduced = fma(-quotient, scaled, rest)
        reduced = select(reduced < 0.0, reduced + scaled, reduced)
        reduced = select(reduced >= scaled, reduced - scaled, reduced)
        return [select(scaled <= rest, reduced, rest).value]

    zero = rounds.constant(0)
    (rest,) = ops.for_loop(zero.value, rounds.value, [dividend.value], body)
    result = copy_sign(Number(rest), x)
    result = select(divisor.equals(math.inf), x, result)
    undefined = x.is_nan() | y.is_nan() | absolute(x).equals(math.inf) | y.equals(0.0)
    return select(undefined, math.nan, result)


def _exponent(x: Number) -> Number:
    return (x.bits().shift_right_logical(52) & 0x7FF).to_integer("i32")
