"""Rounding, signs, classification, neighbours, division and remainder of floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from pallasite.plugin import UnsupportedError
from pallasite.plugin.ir import ops
from pallasite_std.math.conversion import has_one_zero
from pallasite_std.math.dispatch import from_compute, require_float, to_compute
from pallasite_std.math.four_bits import is_narrow_float
from pallasite_std.math.hardware import PTX, Hardware
from pallasite_std.math.scales import SCALE, SCALE_NAN
from pallasite_std.math.values import F64, Real, Word, map_elements


def floor(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The largest integer that is not above x."""
    return x.floor()


def ceil(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The smallest integer that is not below x."""
    return x.ceil()


def trunc(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The next integer in the direction of zero."""
    return x.trunc()


def round_to_even(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The nearest integer; of two, the even one."""
    return x.round_even()


def round_away_from_zero(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The nearest integer; of two, the one that is further from zero."""
    whole = x.trunc()
    step = (abs(x - whole) >= 0.5).choose(x.constant(1.0), 0.0).with_sign_of(x)
    return (whole + step).with_sign_of(x)


def sign(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """-1, 0 or 1; zeros keep their sign and NaN stays."""
    unchanged = x.compare("UEQ", 0.0)
    return unchanged.choose(x, x.constant(1.0).with_sign_of(x))


def divide(x: Real, y: Real, approximate: bool, hardware: Hardware) -> Real:
    """The quotient. Exact: correctly rounded. Approximate: ``div.full.f32``, 2 ulp."""
    return hardware.divide(x, y) if approximate else x / y


def remainder(x: Real, y: Real, approximate: bool, hardware: Hardware) -> Real:
    """The remainder of truncating division, with the sign of x; exact, as C's fmod.

    f32 goes through f64: each step takes off a multiple of y with a quotient of at most 28 bits, so
    that product and difference are exact; eleven steps cover any two numbers. f64 takes as many
    steps as it needs, one for 53 bits of the quotient.
    """
    size, divisor = abs(x).extend(F64), abs(y).extend(F64)
    defined = (size < math.inf) & (divisor > 0.0)
    if x.is_double:
        sizes, divisors = defined.choose(size, 0.0), defined.choose(divisor, 1.0)
        rest = Real(map_elements(_take_off, sizes.value, divisors.value))
    else:
        rest, inverse = size, 1.0 / divisor
        for _ in range(11):
            quotient = (rest * inverse).bits() & -(1 << 25)
            rest = (-quotient.real().trunc()).times_plus(divisor, rest)
        # What is left may reach the divisor itself.
        rest = (rest >= divisor).choose(rest - divisor, rest)
        rest = divisor.equals(math.inf).choose(size, rest)
    rest = (rest < 0.0).choose(rest + divisor, rest)
    return defined.choose(rest, math.nan).truncate(x.format).with_sign_of(x)


def _take_off(size: ir.Value, divisor: ir.Value) -> ir.Value:
    """What is left of an f64 number after multiples of a divisor, in size less than it.

    The remainder of a rounded quotient is exact. Divisors that are smaller by far are taken times a
    power of two, so that the quotient is finite.
    """
    loop = scf.WhileOp([size.type], [size])
    with ir.InsertionPoint(loop.before.blocks.append(size.type)) as point:
        (rest,) = point.block.arguments
        scf.condition((abs(Real(rest)) >= Real(divisor)).value, [rest])
    with ir.InsertionPoint(loop.after.blocks.append(size.type)) as point:
        rest, multiple = Real(point.block.arguments[0]), Real(divisor)
        for _ in range(2):
            far = abs(rest) * 2.0**-1000 >= multiple
            multiple = far.choose(multiple * 2.0**900, multiple)
        rest = (-(rest / multiple).round_even()).times_plus(multiple, rest)
        scf.yield_([rest.value])
    result: ir.Value = loop.results[0]
    return result


def is_finite(
    value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """Whether a float is neither infinite nor NaN (``i1``)."""
    require_float("is_finite", dtype)
    return (abs(to_compute(value, dtype, hardware)) < math.inf).value


def neg(
    value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """The negative of a float: its sign bit flipped, if the format has negative numbers."""
    if np.dtype(dtype) == SCALE:
        return ops.constant(SCALE_NAN, value.type)
    if is_narrow_float(dtype):
        bits = Word(value)
        sign = 1 << (bits.width - 1)
        flipped = bits ^ sign
        if has_one_zero(dtype):
            flipped = (bits & (sign - 1)).equals(0).choose(bits, flipped)
        return flipped.value
    return (-Real(value)).value


def absolute(
    value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """The magnitude of a float: its sign bit cleared, if the format has one."""
    if np.dtype(dtype) == SCALE:
        return value
    if is_narrow_float(dtype):
        bits = Word(value)
        sign = 1 << (bits.width - 1)
        cleared = bits & (sign - 1)
        if has_one_zero(dtype):
            cleared = bits.equals(sign).choose(bits, cleared)
        return cleared.value
    return abs(Real(value)).value


def square(
    value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """The square of a float."""
    if is_narrow_float(dtype):
        x = to_compute(value, dtype, hardware)
        return from_compute(x * x, dtype, hardware)
    x = Real(value)
    return (x * x).value


def nextafter(
    x: ir.Value, y: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """The neighbour of x in the direction of y; y itself if they are equal, NaN if one is."""
    require_float("nextafter", dtype)
    if is_narrow_float(dtype):
        raise UnsupportedError(f"nextafter of {np.dtype(dtype)} values")
    start, target = Real(x), Real(y)
    bits = start.bits()
    sign_bit = start.format.sign_bit
    if start.format.bits == 16:
        first, second = to_compute(x, dtype, hardware), to_compute(y, dtype, hardware)
    else:
        first, second = start, target
    up = (bits & ~sign_bit).equals(0)
    outwards = (first < second) ^ (bits < 0)
    moved = outwards.choose(bits + 1, bits - 1)
    smallest = (target.bits() & sign_bit) | 1
    moved = up.choose(smallest, moved)
    moved = first.equals(second).choose(target.bits(), moved)
    quiet = start.format.infinity_bits | 1 << (start.format.fraction - 1)
    moved = (first.is_nan() | second.is_nan()).choose(moved.constant(quiet), moved)
    return ops.bitcast(moved.value, x.type)
