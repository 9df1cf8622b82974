"""exp, exp2, expm1 and the logistic function.

Exact forms reduce the argument to ``x = n ln 2 + r`` (W. J. Cody and W. Waite, "Software Manual for
the Elementary Functions", 1980, chapter 6). In f32 the hardware's ``ex2.approx.ftz.f32`` takes the
rest; in f64 it is a minimax polynomial. Overflow gives infinity, and denormal results are kept.
Approximate forms are one or two instructions and flush denormals to zero.
"""

from __future__ import annotations

import functools

from pallasite_std.math.constants import LN2, LOG2_E, parts
from pallasite_std.math.hardware import Hardware, single
from pallasite_std.math.values import Real, polynomial, power_of_two

# expm1(r) = r + r^2 Q(r) on |r| <= ln(2) / 2; relative errors 2**-26 (of r Q) and 2**-61.
_EXPM1_SINGLE = (0.5, 0.166665435, 0.0416662805, 0.00836660154, 0.00139464834)
_EXPM1_DOUBLE = (
    0.5,
    0.16666666666666677,
    0.0416666666666667,
    0.008333333333321591,
    0.0013888888888866798,
    0.0001984126988622989,
    2.4801587360628788e-05,
    2.755724410247584e-06,
    2.755724270161459e-07,
    2.5109075006637288e-08,
    2.0924460420034694e-09,
)


def exp(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """e**x. Exact: at most 2 ulp. Approximate: relative error 2**-22 + 2**-24 |x|."""
    if approximate:
        return hardware.exp2_flush(x * float(LOG2_E))
    return scaled_exp(x, hardware)


def scaled_exp(
    x: Real, hardware: Hardware, *, low: Real | None = None, halve: bool = False
) -> Real:
    """e**(x + low), or half of that without overflow on the way; ``low`` is at most 1 ulp of x."""
    return _exp_double(x, low, halve) if x.is_double else _exp_single(x, hardware, low, halve)


def _exp_single(x: Real, hardware: Hardware, low: Real | None, halve: bool) -> Real:
    """Eight instructions: two for n clamped to [-126, 126], three for r, then ex2, scale, product.

    The sum ``x log2(e) + 126`` is clamped to [0, 252] by saturating it as a fraction of 252. A
    rounding constant then leaves the integer in the low bits of the significand, from where a
    shift makes it the exponent of the scale.
    """
    high, rest = parts(LOG2_E, x.format, 2)
    shifter = float(3 << 22) + 1
    n_at_zero = shifter + (125 if halve else 126)
    if low is None:
        found = hardware.assembled(_exp_text(high, rest, shifter, n_at_zero), x)
        if found is not None:
            return found
    fraction = hardware.fma_saturate(x, x.constant(high / 252), x.constant(0.5))
    shifted = hardware.fma_down(fraction, x.constant(252.0), x.constant(shifter))
    minus_n = x.constant(n_at_zero) - shifted
    reduced = x.times_plus(rest, x.times_plus(high, minus_n))
    if low is not None:
        reduced = low.times_plus(high, reduced)
    scale = (shifted.bits() << 23).real()
    return hardware.exp2_flush(reduced) * scale


@functools.cache
def _exp_text(high: float, rest: float, shifter: float, n_at_zero: float) -> str:
    """The instructions of :func:`_exp_single`."""
    steps = (
        f"fma.rn.sat.f32 s, $1, {single(high / 252)}, {single(0.5)};",
        f"fma.rm.f32 s, s, {single(252.0)}, {single(shifter)};",
        f"sub.rn.f32 r, {single(n_at_zero)}, s;",
        f"fma.rn.f32 r, $1, {single(high)}, r;",
        f"fma.rn.f32 r, $1, {single(rest)}, r;",
        "shl.b32 s, s, 23;",
        "ex2.approx.ftz.f32 r, r;",
        "mul.rn.f32 $0, r, s;",
    )
    return "\n\t".join(("{", ".reg .f32 r, s;", *steps, "}"))


def _exp_double(x: Real, low: Real | None, halve: bool) -> Real:
    """Relative error 1.1 ulp; the scale is applied in two steps, so that denormals round once."""
    limited = x.at_most(711.0).at_least(-760.0)
    count = (limited * float(LOG2_E)).round_even()
    head, tail = parts(LN2, x.format, 2)
    reduced = (-count).times_plus(head, limited)
    reduced = (-count).times_plus(tail, reduced)
    if low is not None:
        reduced = reduced + low
    return _scaled_series(reduced, count, -1 if halve else 0)


def _scaled_series(reduced: Real, count: Real, more: int) -> Real:
    """``e**reduced 2**(count + more)`` in f64."""
    series = polynomial(reduced, _EXPM1_DOUBLE)
    value = (reduced * reduced).times_plus(series, reduced) + 1.0
    exponent = count.to_word(32)
    if more:
        exponent = exponent + more
    half = exponent >> 1
    return value * power_of_two(half, value.format) * power_of_two(exponent - half, value.format)


def exp2(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """2**x. f32: one instruction, 2.2 ulp; the approximate one flushes denormals. f64: 1.1 ulp."""
    if not x.is_double:
        return hardware.exp2_flush(x) if approximate else hardware.exp2(x)
    limited = x.at_most(1025.0).at_least(-1100.0)
    count = limited.round_even()
    head, tail = parts(LN2, x.format, 2)
    rest = limited - count
    return _scaled_series(rest.times_plus(head, rest * tail), count, 0)


def expm1(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """e**x - 1, at most 2 ulp also near zero."""
    double = x.is_double
    limited = x.at_most(710.0 if double else 89.0).at_least(-60.0 if double else -30.0)
    count = (limited * float(LOG2_E)).round_even()
    head, tail = parts(LN2, x.format, 2)
    reduced = (-count).times_plus(head, limited)
    reduced = (-count).times_plus(tail, reduced)
    series = polynomial(reduced, _EXPM1_DOUBLE if double else _EXPM1_SINGLE)
    value = (reduced * reduced).times_plus(series, reduced)
    half_scale = power_of_two(count.to_word(32) - 1, x.format)
    total = value.times_plus(half_scale, half_scale - 0.5)
    return (total + total).with_sign_of(x)


def logistic(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """1 / (1 + e**-x). Exact: at most 3.5 ulp, small results included. Approximate: 2**-20."""
    if approximate:
        return hardware.reciprocal_flush(hardware.exp2_flush(x * -float(LOG2_E)) + 1.0)
    tail = scaled_exp(-abs(x), hardware)
    if x.is_double:
        return (x < 0.0).choose(tail, tail.constant(1.0)) / (tail + 1.0)
    reciprocal = hardware.reciprocal_flush(tail + 1.0)
    return (x < 0.0).choose(tail * reciprocal, reciprocal)
