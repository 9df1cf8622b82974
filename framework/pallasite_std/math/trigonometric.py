"""sin, cos, tan and their inverses.

f32 arguments are reduced exactly over the whole range with 96 bits of 2/pi chosen by the exponent
(M. H. Payne and R. N. Hanek, "Radian reduction for trigonometric functions", ACM SIGNUM Newsletter
18, 1983). f64 arguments are reduced by three fused multiply-adds with 159 bits of pi/2 (Cody and
Waite), which is exact enough up to 2**48; larger ones by :mod:`.large_angles`.
Approximate forms of sin and cos are ``sin.approx.f32`` and ``cos.approx.f32``.
"""

from __future__ import annotations

import math

from pallasite_std.math.constants import HALF_PI, TWO_OVER_PI, parts
from pallasite_std.math.hardware import Hardware
from pallasite_std.math.large_angles import reduce_large
from pallasite_std.math.values import F32, Mask, Real, Word, polynomial

# sin(r) = r + r^3 S(r^2), cos(r) = 1 - r^2/2 + r^4 C(r^2) on |r| <= 1 (f32) or 0.8 (f64).
_SIN_SINGLE = (-0.166666672, 0.008333317, -0.000198362119, 2.69531051e-06)
_COS_SINGLE = (0.0416665822, -0.00138849148, 2.42155038e-05)
_SIN_DOUBLE = (
    -0.16666666666666666,
    0.008333333333333321,
    -0.00019841269841252188,
    2.7557319212688663e-06,
    -2.5052104519209053e-08,
    1.6058316555309097e-10,
    -7.576214415934335e-13,
)
_COS_DOUBLE = (
    0.04166666666666658,
    -0.0013888888888871293,
    2.480158728764441e-05,
    -2.755731380481006e-07,
    2.0875646961045187e-09,
    -1.1355614288404283e-11,
)
# asin(x) = x + x^3 P(x^2) on |x| <= 9/16.
_ASIN_SINGLE = (
    0.166666701,
    0.074997209,
    0.0447166003,
    0.0294713732,
    0.0282559637,
    -0.00268859463,
    0.0457664728,
)
_ASIN_DOUBLE = (
    0.16666666666666693,
    0.07499999999990747,
    0.044642857153814205,
    0.030381943800767565,
    0.02237218133144411,
    0.017352268396700243,
    0.013972395070024264,
    0.011470596313926183,
    0.010390564122039675,
    0.004855601376275333,
    0.021662674272757743,
    -0.03484248300087292,
    0.08649918938724828,
    -0.09324573095839873,
    0.06456173610746363,
)
# atan(x) = x + x^3 P(x^2) on |x| <= sqrt(2) - 1.
_ATAN_SINGLE = (-0.333333164, 0.199985266, -0.142444059, 0.105993554, -0.0609053858)
_ATAN_DOUBLE = (
    -0.3333333333333333,
    0.19999999999998122,
    -0.14285714285433,
    0.1111111109049694,
    -0.09090908215853548,
    0.076922841634319,
    -0.06666245124030361,
    0.05877183088035855,
    -0.05219345141765708,
    0.04507045070429026,
    -0.033549356956755955,
    0.015265588768866354,
)
_NEAR = 2.0**48
"""Up to which three parts of pi/2 are enough for f64."""

_LEADING_ZEROS = 33
_WORDS = 7
_BITS = int(TWO_OVER_PI * 2 ** (32 * _WORDS - _LEADING_ZEROS))
# The bits of 2/pi after the binary point, behind some zeros, 32 at a time.
_TWO_OVER_PI_WORDS = tuple(_BITS >> 32 * i & 0xFFFFFFFF for i in reversed(range(_WORDS)))


def _reduce(x: Real, hardware: Hardware) -> tuple[Real, Real, Word]:
    """(r, low, q) with ``x = q pi/2 + r + low`` modulo 2 pi; q counts modulo 4.

    |r| is at most about pi/4 (f32: below 1 it may be x itself); ``low`` is below 1 ulp of r.
    """
    return _reduce_double(x) if x.is_double else _reduce_single(x, hardware)


def _reduce_double(x: Real) -> tuple[Real, Real, Word]:
    count = (x * float(TWO_OVER_PI)).round_even()
    first, second, third = parts(HALF_PI, x.format, 3)
    head = (-count).times_plus(first, x)
    reduced = (-count).times_plus(second, head)
    low = (-count).times_plus(third, (-count).times_plus(second, head - reduced))
    # 1.5 * 2**52 leaves the integer in the low bits.
    quarter = (count + 1.5 * 2.0**52).bits().truncate(32)
    return reduce_large(x, abs(x) > _NEAR, (reduced, low, quarter))


def _reduce_single(x: Real, hardware: Hardware) -> tuple[Real, Real, Word]:
    """Payne and Hanek. The significand times a window of 96 bits of 2/pi is the angle in quarter
    turns, whose top two bits (of 64) count whole ones; bits above the window are multiples of 4.
    """
    bits = x.bits()
    start = (bits.shift_logical(23) & 0xFF) - (160 - _LEADING_ZEROS)
    significand = ((bits & 0x007FFFFF) | 0x00800000) << 8
    # Not by another bit of the same number, either, for the sake of ptxas.
    upper, middle = start > 63, (start & 32).differs(0)
    table = [bits.constant(word) for word in _TWO_OVER_PI_WORDS]
    table = [upper.choose(table[i + 2], table[i]) for i in range(5)]
    table = [middle.choose(table[i + 1], table[i]) for i in range(4)]
    window = [hardware.funnel_left(table[i], table[i + 1], start) for i in range(3)]
    factor = significand.extend_unsigned(64)
    carried = (factor * window[2].extend_unsigned(64)).shift_logical(32)
    high = (significand * window[0]).extend_unsigned(64) << 32
    turns = factor * window[1].extend_unsigned(64) + carried + high
    fraction = turns << 2
    quarter = turns.shift_logical(62).truncate(32) + fraction.shift_logical(63).truncate(32)
    negative = bits < 0
    size = fraction.to_real(F32)
    angle = negative.choose(-size, size)
    quarter = negative.choose(0 - quarter, quarter)
    head, tail = parts(HALF_PI / 2**64, x.format, 2)
    reduced = angle * head
    low = angle.times_plus(tail, angle.times_plus(head, -reduced))
    # Angles below 1 need no reduction, and the window does not reach them.
    small = abs(x) < 1.0
    reduced = small.choose(x, (abs(x) < math.inf).choose(reduced, math.nan))
    return reduced, small.choose(x.constant(0.0), low), small.choose(quarter.constant(0), quarter)


def _sin_polynomial(r: Real, low: Real, square: Real) -> Real:
    series = polynomial(square, _SIN_DOUBLE if r.is_double else _SIN_SINGLE)
    return r + (r * square).times_plus(series, low)


def _cos_polynomial(r: Real, low: Real, square: Real) -> Real:
    series = polynomial(square, _COS_DOUBLE if r.is_double else _COS_SINGLE)
    half = square * -0.5
    whole = half + 1.0
    # What the rounding of 1 - r^2/2 and of r lost, and the series.
    lost = (-r).times_plus(low, half - (whole - 1.0))
    return whole + (square * square).times_plus(series, lost)


def _quarter_turns(x: Real, hardware: Hardware, turn: int) -> Real:
    reduced, low, quarter = _reduce(x, hardware)
    if turn:
        quarter = quarter + turn
    square = reduced * reduced
    odd = (quarter & 1).differs(0)
    value = odd.choose(_cos_polynomial(reduced, low, square), _sin_polynomial(reduced, low, square))
    # Not by a second condition on the same number: of a choice between the value and its negative,
    # ptxas (12.9 to 13.5) keeps the condition in one predicate for several elements.
    sign = (quarter & 2).extend_unsigned(value.format.bits) if value.is_double else quarter & 2
    return (value.bits() ^ (sign << (value.format.bits - 2))).real()


def _keep_zero(x: Real, value: Real) -> Real:
    """The value, or x where it is a zero of either sign."""
    return x.equals(0.0).choose(x, value)


def sin(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The sine. Exact: at most 1.5 ulp. Approximate: absolute error 2**-20.5 for |x| <= 2 pi."""
    if approximate:
        return hardware.sin(x)
    return _keep_zero(x, _quarter_turns(x, hardware, 0))


def cos(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The cosine. Exact: at most 1.5 ulp. Approximate: absolute error 2**-20.5 for |x| <= 2 pi."""
    return hardware.cos(x) if approximate else _quarter_turns(x, hardware, 1)


def tan(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The tangent. Exact: at most 3 ulp. Approximate: the quotient of approximate sin and cos."""
    if approximate:
        return hardware.divide(hardware.sin(x), hardware.cos(x))
    reduced, low, quarter = _reduce(x, hardware)
    square = reduced * reduced
    sine, cosine = _sin_polynomial(reduced, low, square), _cos_polynomial(reduced, low, square)
    odd = (quarter & 1).differs(0)
    return _keep_zero(x, odd.choose(-cosine, sine) / odd.choose(sine, cosine))


def _arcsine_parts(x: Real) -> tuple[Mask, Real]:
    """Whether |x| is above 9/16, and asin of |x| or, above, of sqrt((1 - |x|) / 2)."""
    size = abs(x)
    large = size > 0.5625
    square = large.choose((-size).times_plus(0.5, 0.5), size * size)
    root = large.choose(square.sqrt(), size)
    series = square * polynomial(square, _ASIN_DOUBLE if x.is_double else _ASIN_SINGLE)
    return large, root.times_plus(series, root)


def asin(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The arcsine, at most 2 ulp: beyond 9/16 it is ``pi/2 - 2 asin(sqrt((1 - x) / 2))``."""
    large, value = _arcsine_parts(x)
    head, tail = parts(HALF_PI, x.format, 2)
    turned = value.times_plus(-2.0, tail) + head
    return large.choose(turned, value).with_sign_of(x)


def acos(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The arccosine, at most 2 ulp."""
    large, value = _arcsine_parts(x)
    head, tail = parts(HALF_PI, x.format, 2)
    twice = value + value
    negative = x < 0.0
    outer = negative.choose((2.0 * tail - twice) + 2.0 * head, twice)
    inner = (tail - negative.choose(-value, value)) + head
    return large.choose(outer, inner)


def _arctangent(numerator: Real, denominator: Real) -> Real:
    """atan of a quotient of two numbers that are not negative; at most 2.2 ulp.

    The quotient q is reduced to ``-1/q`` beyond sqrt(2) + 1, to ``(q - 1) / (q + 1)`` beyond
    sqrt(2) - 1, with a single division.
    """
    ratio = math.sqrt(2.0) - 1.0
    steep = numerator * ratio > denominator
    diagonal = (numerator > denominator * ratio) & ~steep
    upper = steep.choose(-denominator, diagonal.choose(numerator - denominator, numerator))
    lower = steep.choose(numerator, diagonal.choose(numerator + denominator, denominator))
    tangent = upper / lower
    square = tangent * tangent
    series = polynomial(square, _ATAN_DOUBLE if tangent.is_double else _ATAN_SINGLE)
    value = (tangent * square).times_plus(series, tangent)
    head, tail = parts(HALF_PI, numerator.format, 2)
    constant = tangent.constant
    zero = constant(0.0)
    base = steep.choose(constant(head), diagonal.choose(constant(head / 2), zero))
    rest = steep.choose(constant(tail), diagonal.choose(constant(tail / 2), zero))
    return base + (value + rest)


def atan(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The arctangent, at most 2.2 ulp."""
    # A limit keeps infinity out of the quotient; atan is pi/2 from there on.
    size = abs(x).at_most(2.0 ** (x.format.bias // 2))
    return _arctangent(size, x.constant(1.0)).with_sign_of(x)


def atan2(y: Real, x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The angle of the point (x, y), at most 2.5 ulp; signs of zeros and infinities as in C99."""
    rise, run = abs(y), abs(x)
    one, zero = x.constant(1.0), x.constant(0.0)
    tall, long = rise.equals(math.inf), run.equals(math.inf)
    nothing = rise.equals(0.0) & run.equals(0.0)
    # A scale keeps sums of huge numbers finite, and products of tiny ones exact.
    limit, far = 2.0 ** (x.format.bias - 3), 2.0 ** (x.format.bias // 2)
    tiny = (rise < 1 / far) & (run < 1 / far)
    huge = (rise > limit) | (run > limit)
    scale = huge.choose(x.constant(0.25), tiny.choose(x.constant(far), 1.0))
    # Infinities count as 1 beside 0, or beside another 1.
    rise = tall.choose(one, long.choose(zero, rise * scale))
    run = long.choose(one, tall.choose(zero, nothing.choose(one, run * scale)))
    angle = _arctangent(rise, run)
    head, tail = parts(HALF_PI, x.format, 2)
    opposite = 2.0 * head - (angle - 2.0 * tail)
    angle = x.sign_set().choose(opposite, angle).with_sign_of(y)
    return (x.is_nan() | y.is_nan()).choose(x.constant(math.nan), angle)
