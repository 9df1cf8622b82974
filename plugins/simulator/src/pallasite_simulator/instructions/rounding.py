"""Exact rounding between floating-point formats and integers, as LLVM IR of one element.

All functions take ``builder`` (llvmlite's ``IRBuilder``) and integers that hold bits. A number is
rounded once, from its exact value or from one that was rounded to odd before: cut, with the last
bit set if anything was lost. With two bits more than the final format, rounding such a value gives
what rounding the exact one would give.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pallasite_simulator.instructions import compiled
from pallasite_simulator.instructions.compiled import integer, intrinsic
from pallasite_simulator.instructions.float_formats import F32, F64, Format

_FLOATS = {32: compiled.F32, 64: compiled.F64}


def constant(like: Any, value: int) -> Any:
    """An integer constant of the type of another value."""
    return ir.Constant(like.type, value)


def as_float(builder: Any, bits: Any) -> Any:
    """The ``float`` or ``double`` with these bits."""
    return builder.bitcast(bits, _FLOATS[bits.type.width])


def as_bits(builder: Any, value: Any) -> Any:
    """The bits of a ``float`` or ``double``."""
    width = 32 if value.type == compiled.F32 else 64
    return builder.bitcast(value, integer(width))


def magnitude(builder: Any, bits: Any, kind: Format) -> Any:
    """Without the sign."""
    return builder.and_(bits, constant(bits, kind.magnitude))


def is_nan(builder: Any, bits: Any, kind: Format) -> Any:
    """Whether bits of a format with infinities are a NaN."""
    absolute = magnitude(builder, bits, kind)
    return builder.icmp_unsigned(">", absolute, constant(bits, kind.infinity))


def flushed(builder: Any, bits: Any, kind: Format) -> Any:
    """Zero of the same sign for subnormal numbers."""
    absolute = magnitude(builder, bits, kind)
    small = builder.icmp_unsigned("<", absolute, constant(bits, kind.smallest_normal))
    return builder.select(small, builder.and_(bits, constant(bits, kind.sign)), bits)


def flush_tiny(builder: Any, exact: Any, result: Any, kind: Format, mode: str) -> Any:
    """Zero of the same sign for results below the normal numbers (``.ftz``).

    As measured on an H200, the result counts as it would be with any exponent: rounded to as many
    bits as normal numbers have. One that this lifts to the smallest normal number stays.

    Args:
      exact: bits of the result in f64, exact or rounded to odd.
      result: bits of the rounded result.
      kind: format of the result.
      mode: how it was rounded.
    """
    smallest = (1 - kind.bias + F64.bias) << F64.mantissa
    place = F64.mantissa - kind.mantissa
    absolute = magnitude(builder, exact, F64)
    limit: Any = constant(exact, smallest)
    if mode == "rn":
        limit = constant(exact, smallest - (1 << (place - 1)))
    elif mode != "rz":
        negative = builder.icmp_signed("<", exact, constant(exact, 0))
        lifted = negative if mode == "rm" else builder.not_(negative)
        limit = builder.select(lifted, constant(exact, smallest - (1 << place) + 1), limit)
    tiny = builder.icmp_unsigned("<", absolute, limit)
    zero = builder.and_(result, constant(result, kind.sign))
    return builder.select(tiny, zero, result)


def canonical(builder: Any, bits: Any, kind: Format) -> Any:
    """The format's own NaN for every NaN."""
    return builder.select(is_nan(builder, bits, kind), constant(bits, kind.nan), bits)


def saturated(builder: Any, bits: Any, kind: Format) -> Any:
    """Clamped to 0 ... 1; NaN and negative zero become zero (``.sat``)."""
    one, zero = constant(bits, kind.one), constant(bits, 0)
    # Positive numbers are ordered as integers are; NaN must not count as more than one.
    bits = builder.select(is_nan(builder, bits, kind), zero, bits)
    bits = builder.select(builder.icmp_signed("<", _signed(builder, bits, kind), zero), zero, bits)
    return builder.select(builder.icmp_unsigned(">", bits, one), one, bits)


def rectified(builder: Any, bits: Any, kind: Format) -> Any:
    """Zero for negative numbers and negative zero (``.relu``); NaN stays."""
    zero = constant(bits, 0)
    negative = builder.icmp_signed("<", _signed(builder, bits, kind), zero)
    number = builder.not_(is_nan(builder, bits, kind))
    return builder.select(builder.and_(negative, number), zero, bits)


def _signed(builder: Any, bits: Any, kind: Format) -> Any:
    """Bits with the sign of the format in the sign of the integer."""
    spare = bits.type.width - kind.bits
    return builder.shl(bits, constant(bits, spare)) if spare else bits


# Exact sums and the like in f64 -------------------------------------------------------------------


def odd(builder: Any, rounded: Any, error: Any) -> Any:
    """From a ``double`` rounded to the nearest and the sign of its error, the value rounded to odd.

    Args:
      rounded: the rounded result.
      error: exact result minus the rounded one, or anything of its sign; NaN counts as zero.
    """
    zero = ir.Constant(compiled.F64, 0.0)
    bits = as_bits(builder, rounded)
    error_bits = as_bits(builder, error)
    # Of the two neighbours of an inexact result, the one whose last bit is set.
    inexact = builder.fcmp_ordered("!=", error, zero)
    even = builder.icmp_signed("==", builder.and_(bits, constant(bits, 1)), constant(bits, 0))
    opposite = builder.icmp_signed("<", builder.xor(bits, error_bits), constant(bits, 0))
    step = builder.select(opposite, constant(bits, -1), constant(bits, 1))
    moved = builder.select(builder.and_(inexact, even), step, constant(bits, 0))
    return as_float(builder, builder.add(bits, moved))


def odd_sum(builder: Any, a: Any, b: Any) -> Any:
    """The sum of two ``double`` values rounded to odd, by Knuth's error-free sum."""
    total = builder.fadd(a, b)
    part = builder.fsub(total, a)
    error = builder.fadd(builder.fsub(a, builder.fsub(total, part)), builder.fsub(b, part))
    return odd(builder, total, error)


def odd_quotient(builder: Any, a: Any, b: Any) -> Any:
    """``a / b`` rounded to odd, for ``double`` values that are in the range of f32."""
    quotient = builder.fdiv(a, b)
    residue = intrinsic(builder, "llvm.fma.f64", compiled.F64, builder.fneg(quotient), b, a)
    # The residue has the sign of the error times that of the divisor.
    sign = builder.and_(as_bits(builder, b), ir.Constant(integer(64), F64.sign))
    error = as_float(builder, builder.xor(as_bits(builder, residue), sign))
    return odd(builder, quotient, error)


def odd_root(builder: Any, a: Any) -> Any:
    """The square root of a ``double`` in the range of f32, rounded to odd."""
    root = intrinsic(builder, "llvm.sqrt.f64", compiled.F64, a)
    residue = intrinsic(builder, "llvm.fma.f64", compiled.F64, builder.fneg(root), root, a)
    return odd(builder, root, residue)


# Between formats ----------------------------------------------------------------------------------


def _rounded_shift(builder: Any, value: Any, shift: Any, sign: Any, mode: str) -> Any:
    """``value >> shift``, rounded; ``shift`` is at least 1 and the value has two bits to spare."""
    one = constant(value, 1)
    cut = builder.lshr(value, shift)
    if mode == "rz":
        return cut
    if mode in ("rn", "rna"):
        half = builder.shl(one, builder.sub(shift, one))
        if mode == "rn":
            half = builder.add(builder.sub(half, one), builder.and_(cut, one))
        return builder.lshr(builder.add(value, half), shift)
    lost = builder.sub(builder.shl(one, shift), one)
    if mode == "odd":
        inexact = builder.icmp_unsigned("!=", builder.and_(value, lost), constant(value, 0))
        return builder.or_(cut, builder.zext(inexact, value.type))
    up = builder.lshr(builder.add(value, lost), shift)
    # rp goes up for positive numbers, rm for the magnitude of negative ones.
    return builder.select(sign, cut, up) if mode == "rp" else builder.select(sign, up, cut)


def _overflow(builder: Any, like: Any, target: Format, sign: Any, mode: str, finite: bool) -> Any:
    """Bits of what numbers beyond the largest one become, without the sign."""
    largest = constant(like, target.maximum)
    beyond = largest if finite or not target.infinite else constant(like, target.infinity)
    if mode in ("rn", "rna"):
        return beyond
    if mode in ("rz", "odd"):
        return largest
    if mode == "rp":
        return builder.select(sign, largest, beyond)
    return builder.select(sign, beyond, largest)


def narrow(
    builder: Any,
    bits: Any,
    source: Format,
    target: Format,
    mode: str = "rn",
    *,
    finite: bool = False,
    payload: bool = False,
) -> Any:
    """Rounds a number to a format with fewer bits.

    Args:
      bits: of the number, an integer of the source's size.
      source, target: formats; the source has infinities.
      mode: ``"rn"``, ``"rna"``, ``"rz"``, ``"rm"``, ``"rp"`` or ``"odd"``.
      finite: whether numbers that are too large, and infinities, become the largest number
        (``.satfinite``; always so for a target without infinities).
      payload: whether NaNs keep their sign and upper bits, rather than become the target's own.

    Returns:
      The bits, in an integer of the source's size.
    """
    width = bits.type
    absolute = magnitude(builder, bits, source)
    sign = builder.icmp_signed("<", bits, constant(bits, 0))
    dropped = source.mantissa - target.mantissa
    if source.exponent == target.exponent:
        result = _rounded_shift(builder, absolute, constant(bits, dropped), sign, mode)
    else:
        result = _rebiased(builder, absolute, source, target, sign, mode)
    overflow = _overflow(builder, bits, target, sign, mode, finite)
    too_large = builder.icmp_unsigned(">", result, constant(bits, target.maximum))
    result = builder.select(too_large, overflow, result)
    finite = finite or not target.infinite
    endless = constant(bits, target.maximum if finite else target.infinity)
    is_infinite = builder.icmp_unsigned("==", absolute, constant(bits, source.infinity))
    result = builder.select(is_infinite, endless, result)
    place = builder.shl(builder.zext(sign, width), constant(bits, target.bits - 1))
    result = builder.or_(result, place)
    nan: Any = constant(bits, target.nan)
    if payload:
        kept = builder.lshr(
            builder.and_(absolute, constant(bits, source.smallest_normal - 1)),
            constant(bits, dropped),
        )
        kept = builder.or_(kept, constant(bits, target.infinity | target.quiet))
        nan = builder.or_(kept, place)
    return builder.select(is_nan(builder, bits, source), nan, result)


def _rebiased(
    builder: Any, absolute: Any, source: Format, target: Format, sign: Any, mode: str
) -> Any:
    """Rounds the magnitude of a number to a format with a smaller range."""
    zero, one = constant(absolute, 0), constant(absolute, 1)
    width = absolute.type.width
    field = builder.lshr(absolute, constant(absolute, source.mantissa))
    normal = builder.icmp_unsigned("!=", field, zero)
    significand = builder.and_(absolute, constant(absolute, source.smallest_normal - 1))
    significand = builder.or_(
        significand,
        builder.select(normal, constant(absolute, source.smallest_normal), zero),
    )
    # The exponent field of the result, of which 1 is the least that a number can be scaled by.
    exponent = builder.sub(
        builder.select(normal, field, one), constant(absolute, source.bias - target.bias)
    )
    low = builder.icmp_signed("<", exponent, one)
    scale = builder.select(low, one, exponent)
    shift = builder.add(
        constant(absolute, source.mantissa - target.mantissa), builder.sub(scale, exponent)
    )
    # Beyond this everything is lost, less than a half of the last place.
    limit = constant(absolute, min(source.mantissa + 3, width - 2))
    shift = builder.select(builder.icmp_signed(">", shift, limit), limit, shift)
    rounded = _rounded_shift(builder, significand, shift, sign, mode)
    # A significand with its leading one adds one to the exponent field, and so does a carry.
    base = builder.shl(builder.sub(scale, one), constant(absolute, target.mantissa))
    return builder.add(base, rounded)


def widen(builder: Any, bits: Any, source: Format, target: Format, *, payload: bool = False) -> Any:
    """A number in a format that has more bits of both kinds, or a longer mantissa, exactly.

    Args:
      bits: of the number, an integer of the target's size (32 or 64) with zeros above.
      source, target: formats; the target is f32 or f64.
      payload: whether NaNs keep their sign and bits, and become quiet, rather than become the
        target's own.
    """
    absolute = magnitude(builder, bits, source)
    gap = target.mantissa - source.mantissa
    shifted = builder.shl(absolute, constant(bits, gap))
    sign = builder.shl(
        builder.and_(bits, constant(bits, source.sign)), constant(bits, target.bits - source.bits)
    )
    if source.exponent == target.exponent:
        result = shifted
    else:
        # The bits stand for the number times a power of two, also if it is subnormal.
        power = (2 * target.bias - source.bias) << target.mantissa
        scaled = builder.fmul(as_float(builder, shifted), as_float(builder, constant(bits, power)))
        result = as_bits(builder, scaled)
        if source.infinite:
            top = builder.icmp_unsigned(">=", absolute, constant(bits, source.infinity))
            special = builder.or_(shifted, constant(bits, target.infinity))
            result = builder.select(top, special, result)
    result = builder.or_(result, sign)
    if source.infinite:
        nan = is_nan(builder, bits, source)
        quiet = builder.or_(result, constant(bits, target.quiet))
        return builder.select(nan, quiet if payload else constant(bits, target.nan), result)
    if source.nan > source.maximum:
        nan = builder.icmp_unsigned("==", absolute, constant(bits, source.nan))
        return builder.select(nan, constant(bits, target.nan), result)
    return result


def to_f64(builder: Any, bits: Any, source: Format) -> Any:
    """A number of f16, bf16 or f32 as a ``double``, exactly; NaNs stay NaNs."""
    if source is F64:
        return as_float(builder, bits)
    if source is not F32:
        bits = widen(builder, builder.zext(bits, integer(32)), source, F32)
    return builder.fpext(as_float(builder, bits), compiled.F64)


def from_f64(builder: Any, value: Any, target: Format, mode: str = "rn") -> Any:
    """A ``double`` rounded to f16, bf16 or f32, as an integer of its size; NaN becomes the
    target's own."""
    if target is F32 and mode == "rn":
        single = as_bits(builder, builder.fptrunc(value, compiled.F32))
        return canonical(builder, single, target)
    narrowed = narrow(builder, as_bits(builder, value), F64, target, mode)
    return builder.trunc(narrowed, integer(target.bits))
