"""Powers and roots.

pow follows the scheme of C99 libraries: a logarithm with twice the precision, an exact product with
the exponent, and an exponential (T. J. Dekker, "A floating-point technique for extending the
available precision", Numerische Mathematik 18, 1971, for the arithmetic with pairs).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallasite.plugin import InvalidValueError
from pallasite.plugin.ir import ops, types
from pallasite_std.math.constants import LN2, parts
from pallasite_std.math.dispatch import from_compute, require_float, to_compute
from pallasite_std.math.exponential import scaled_exp
from pallasite_std.math.hardware import PTX, Hardware
from pallasite_std.math.logarithm import decompose
from pallasite_std.math.values import F32, F64, Mask, Real, Word, polynomial, power_of_two

# 2 artanh(u/2) = u + u^3 (1/12 + u^2 Q(u^2)) on |u| <= 0.4 (f32) or 0.3432 (f64).
_ARTANH_SINGLE = (0.0124999983, 0.00223223004, 0.000432674598, 9.74051873e-05)
_ARTANH_DOUBLE = (
    0.0125,
    0.0022321428571428522,
    0.00043402777777839635,
    8.877840905494192e-05,
    1.8780049224059978e-05,
    4.0689885883444434e-06,
    8.978301546246915e-07,
    1.9899821085457775e-07,
    5.217646511653872e-08,
)
_TWELFTH = Fraction(1, 12)


def _extended_log(x: Real, hardware: Hardware) -> tuple[Real, Real]:
    """The natural logarithm of a positive finite number as a pair; relative error about 2**-1.5p.

    With u = 2 (m - 1) / (m + 1), log(m) is u + u^3 (1/12 + ...), each product kept as a pair.
    """
    format = x.format
    mantissa, exponent = decompose(x)
    offset, total = mantissa - 1.0, mantissa + 1.0
    # Near m = 1, where all digits of the logarithm are those of u, the sum is exact or has an
    # error that u_low takes up.
    total_low = offset - (total - 2.0)
    reciprocal = 1.0 / total if x.is_double else hardware.reciprocal_flush(total)
    u = (offset + offset) * reciprocal
    gap = (-u).times_plus(total, offset + offset)
    u_low = (-u).times_plus(total_low, gap) * reciprocal
    square = u * u
    square_low = (u + u).times_plus(u_low, u.times_plus(u, -square))
    series = square * polynomial(square, _ARTANH_DOUBLE if x.is_double else _ARTANH_SINGLE)
    twelfth, twelfth_low = parts(_TWELFTH, format, 2)
    factor = series + twelfth
    factor_low = (twelfth - factor) + series + twelfth_low
    product = square * factor
    product_low = square.times_plus(factor, -product) + square.times_plus(
        factor_low, square_low * factor
    )
    cubic = u * product
    cubic_low = u.times_plus(product, -cubic) + u.times_plus(product_low, u_low * product)
    log_m = u + cubic
    log_m_low = (u - log_m) + cubic + (cubic_low + u_low)
    head, tail = parts(LN2, format, 2, format.precision - 12)
    scaled = exponent * head
    high = scaled + log_m
    low = (scaled - high) + log_m + exponent.times_plus(tail, log_m_low)
    result = high + low
    return result, (high - result) + low


def _positive_power(x: Real, y: Real, hardware: Hardware) -> Real:
    """x**y for x positive and finite."""
    log_high, log_low = _extended_log(x, hardware)
    product = y * log_high
    low = y.times_plus(log_high, -product) + y * log_low
    bound = 4000.0 if x.is_double else 400.0
    inside = abs(product) < bound
    product = product.at_most(bound).at_least(-bound)
    return scaled_exp(product, hardware, low=inside.choose(low, 0.0))


def real_power(x: Real, y: Real, approximate: bool, hardware: Hardware) -> Real:
    """x**y with the special cases of C99. Exact: at most 2.5 ulp in f32, 1.5 in f64.

    Approximate: ``ex2.approx(y * lg2.approx(|x|))``, relative error 2**-22 times the logarithm of
    the result.
    """
    whole = y.trunc().equals(y)
    half = y * 0.5
    odd = whole & half.trunc().differs(half) & (abs(y) < math.inf)
    return _power(x, y, whole, odd, approximate, hardware)


def integer_exponent_power(
    x: Real, y: Word, signed: bool, approximate: bool, hardware: Hardware
) -> Real:
    """x**y for an integer y; its parity is that of the integer, however large."""
    convert = arith.sitofp if signed else arith.uitofp
    exponent = Real(convert(x.value.type, y.value))
    odd = (y & 1).differs(0)
    return _power(x, exponent, None, odd, approximate, hardware)


def _power(
    x: Real, y: Real, whole: Mask | None, odd: Mask, approximate: bool, hardware: Hardware
) -> Real:
    size = abs(x)
    if approximate:
        value = hardware.exp2_flush(y * hardware.log2_flush(size))
    else:
        value = _positive_power(size, y, hardware)
        zero, infinite = size.equals(0.0), size.equals(math.inf)
        vanishes = zero ^ (y < 0.0)
        edge = vanishes.choose(x.constant(0.0), math.inf)
        value = (zero | infinite).choose(edge, value)
    value = (x.sign_set() & odd).choose(-value, value)
    nan = x.is_nan() | y.is_nan()
    one = x.equals(1.0) | y.equals(0.0)
    if whole is not None:
        nan = nan | ((x < 0.0) & ~whole & (size < math.inf))
        one = one | (size.equals(1.0) & abs(y).equals(math.inf))
    value = nan.choose(x.constant(math.nan), value)
    return one.choose(x.constant(1.0), value)


def power(
    x: ir.Value,
    y: ir.Value,
    dtype: Any,
    approximate: bool = False,
    hardware: Hardware = PTX,
    exponent_dtype: Any = None,
) -> ir.Value:
    """``x ** y`` for floats x of ``dtype`` and y either of the same dtype or an integer.

    Integer exponents are signed unless ``exponent_dtype`` says otherwise.
    """
    require_float("pow", dtype)
    dtype = np.dtype(dtype)
    base = to_compute(x, dtype, hardware)
    approximate = approximate and not base.is_double
    same = exponent_dtype is None or np.dtype(exponent_dtype) == dtype
    if same and y.type == x.type:
        exponent = to_compute(y, dtype, hardware)
        result = real_power(base, exponent, approximate, hardware)
    else:
        signed = exponent_dtype is None or types.is_signed(exponent_dtype)
        result = integer_exponent_power(base, Word(y), signed, approximate, hardware)
    return from_compute(result, dtype, hardware)


def integer_pow(
    value: ir.Value,
    exponent: int,
    dtype: Any,
    approximate: bool = False,
    hardware: Hardware = PTX,
) -> ir.Value:
    """``value ** exponent`` for a static exponent, by squaring; integers wrap.

    The error is about half an ulp for each product; 8 and 16-bit floats are computed in f32. A
    negative exponent takes the reciprocal of the positive power.
    """
    dtype = np.dtype(dtype)
    if not types.is_float(dtype):
        if exponent < 0:
            raise InvalidValueError(
                "an integer to a negative power", got=exponent, expected="an exponent of at least 0"
            )
        if exponent == 0:
            return ops.constant(1, value.type)
        return _by_squaring(value, exponent, arith.muli)
    if exponent == 1:
        return value
    x = to_compute(value, dtype, hardware)
    if exponent == 0:
        return from_compute(x.constant(1.0), dtype, hardware)
    result = Real(_by_squaring(x.value, abs(exponent), arith.mulf))
    if exponent < 0:
        one = x.constant(1.0)
        fast = approximate and not x.is_double
        result = hardware.divide(one, result) if fast else one / result
    return from_compute(result, dtype, hardware)


def _by_squaring(value: ir.Value, exponent: int, multiply: Any) -> ir.Value:
    result = value
    for bit in bin(exponent)[3:]:
        result = multiply(result, result)
        if bit == "1":
            result = multiply(result, value)
    return result


def sqrt(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The square root. Exact: correctly rounded. Approximate: 2**-23, denormals flushed."""
    return hardware.sqrt_flush(x) if approximate else x.sqrt()


def rsqrt(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """1 / sqrt(x). Exact: at most 2 ulp (``rsqrt.approx.f32``) or 1.5 (f64)."""
    if x.is_double:
        return 1.0 / x.sqrt()
    return hardware.rsqrt_flush(x) if approximate else hardware.rsqrt(x)


def cbrt(x: Real, approximate: bool, hardware: Hardware) -> Real:
    """The cube root, at most 1.5 ulp: an estimate in f32, then a step of Newton or Halley."""
    size = abs(x)
    value = _cbrt_double(size, hardware) if x.is_double else _cbrt_single(size, hardware)
    unchanged = size.equals(0.0) | ~(size < math.inf)
    return unchanged.choose(x, value.with_sign_of(x))


def _cbrt_single(size: Real, hardware: Hardware) -> Real:
    tiny = size < 2.0**-100
    scaled = tiny.choose(size * 2.0**54, size)
    estimate = hardware.exp2_flush(hardware.log2_flush(scaled) * (1.0 / 3.0))
    quotient = hardware.reciprocal_flush(estimate * estimate)
    error = quotient.times_plus(scaled, -estimate)
    root = error.times_plus(1.0 / 3.0, estimate)
    return tiny.choose(root * 2.0**-18, root)


def _cbrt_double(size: Real, hardware: Hardware) -> Real:
    """The fraction in [1, 8) goes through f32; Halley's step triples its 22 bits."""
    tiny = size < F64.smallest_normal
    scaled = tiny.choose(size * 2.0**54, size)
    bits = scaled.bits()
    exponent = bits.shift_logical(52).truncate(32) - 1023
    third = (exponent + 3 * 1024).divide_unsigned(3) - 1024
    rest = (exponent - third * 3 + 1023).extend(64) << 52
    fraction = ((bits & ((1 << 52) - 1)) | rest).real()
    estimate = _cbrt_single(fraction.truncate(F32), hardware).extend(F64)
    square = estimate * estimate
    residual = square.times_plus(estimate, -fraction)
    slope = square.times_plus(estimate + estimate, fraction)
    root = (-estimate).times_plus(residual / slope, estimate)
    root = root * power_of_two(third, F64)
    return tiny.choose(root * 2.0**-18, root)
