"""Conversions of single numbers between floating-point formats and integers: functions for PTX ISA
9.7.9.21, cvt.

The functions return compiled functions of arrays of bits (:func:`compiled.elementwise`). What
becomes of NaNs is not all in the PTX ISA: it was measured on an H200.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir

from pallasite_simulator.instructions import compiled
from pallasite_simulator.instructions.compiled import integer, intrinsic
from pallasite_simulator.instructions.float_arithmetic import DIRECTIONS, Function, constrained
from pallasite_simulator.instructions.float_formats import BF16, F16, F32, F64, TF32, Format
from pallasite_simulator.instructions.rounding import (
    as_bits,
    as_float,
    canonical,
    constant,
    flush_tiny,
    flushed,
    from_f64,
    is_nan,
    narrow,
    odd_sum,
    rectified,
    saturated,
    to_f64,
    widen,
)

_INTEGRAL = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}

NONE: frozenset[str] = frozenset()


def _after(builder: Any, result: Any, target: Format, flags: frozenset[str]) -> Any:
    """What modifiers do to a result."""
    if "ftz" in flags and target is F32:
        result = flushed(builder, result, target)
    if "sat" in flags:
        result = saturated(builder, result, target)
    if "relu" in flags:
        result = rectified(builder, result, target)
    return result


@functools.cache
def between_formats(
    source: Format, target: Format, mode: str = "rn", flags: frozenset[str] = NONE
) -> Function:
    """A number rounded to another format, or given in a larger one.

    Args:
      source, target: of f16, bf16, f32 and f64; the target may be tf32.
      mode: ``"rn"``, ``"rna"``, ``"rz"``, ``"rm"`` or ``"rp"``.
      flags: of ``"ftz"`` (for f32), ``"sat"``, ``"relu"`` and ``"satfinite"``.
    """

    def emit(builder: Any, bits: Any) -> Any:
        return emit_between_formats(builder, bits, source, target, mode, flags)

    bits = 32 if target is TF32 else target.bits
    return compiled.elementwise(emit, [source.bits], bits)


def emit_between_formats(
    builder: Any, bits: Any, source: Format, target: Format, mode: str, flags: frozenset[str]
) -> Any:
    """Code of :func:`between_formats`."""
    # Where f32 becomes f16, an H200 does not look at .ftz.
    if "ftz" in flags and source is F32 and target is not F16:
        bits = canonical(builder, flushed(builder, bits, source), source)
    if target is TF32:
        return _to_tf32(builder, bits, mode, flags)
    if source.mantissa <= target.mantissa and source.exponent <= target.exponent:
        result = _larger(builder, bits, source, target)
        if source is BF16 and "ftz" in flags:
            result = canonical(builder, result, target)
    elif source.bits == 16:
        # Between f16 and bf16, by way of f32, in which both fit.
        wide = widen(builder, builder.zext(bits, integer(32)), source, F32)
        result = builder.trunc(narrow(builder, wide, F32, target, mode), integer(16))
    elif source is F64 and "ftz" in flags:
        result = narrow(builder, bits, source, target, mode, payload=True)
        result = flush_tiny(builder, bits, builder.trunc(result, integer(32)), target, mode)
    else:
        result = narrow(
            builder,
            bits,
            source,
            target,
            mode,
            finite="satfinite" in flags,
            payload=source is F64,
        )
        result = builder.trunc(result, integer(target.bits))
    return _after(builder, result, target, flags)


def _larger(builder: Any, bits: Any, source: Format, target: Format) -> Any:
    if source is target:
        return bits if source in (F32, F64) else canonical(builder, bits, target)
    if source is BF16 and target is F32:
        # NaNs stay as they are.
        return builder.shl(builder.zext(bits, integer(32)), ir.Constant(integer(32), 16))
    payload = target is F64
    return widen(builder, builder.zext(bits, integer(target.bits)), source, target, payload=payload)


def _to_tf32(builder: Any, bits: Any, mode: str, flags: frozenset[str]) -> Any:
    result = narrow(builder, bits, F32, TF32, mode, finite="satfinite" in flags)
    dropped = F32.mantissa - TF32.mantissa
    result = builder.shl(result, constant(result, dropped))
    if mode == "rna" and "satfinite" not in flags:
        # An H200 cuts the bits of a NaN.
        cut = builder.and_(bits, constant(bits, -(1 << dropped)))
        result = builder.select(is_nan(builder, bits, F32), cut, result)
    return rectified(builder, result, F32) if "relu" in flags else result


@functools.cache
def to_integral(form: Format, mode: str, flags: frozenset[str] = NONE) -> Function:
    """A number rounded to an integer, in its own format.

    Args:
      mode: ``"rni"``, ``"rzi"``, ``"rmi"`` or ``"rpi"``.
      flags: of ``"ftz"`` and ``"sat"``.
    """

    def emit(builder: Any, bits: Any) -> Any:
        if "ftz" in flags:
            bits = flushed(builder, bits, form)
        value = as_float(builder, bits) if form is F32 else to_f64(builder, bits, form)
        value = _integral(builder, value, mode)
        if form is F32:
            result = canonical(builder, as_bits(builder, value), form)
        elif form is F64:
            quiet = builder.or_(bits, constant(bits, form.quiet))
            result = builder.select(is_nan(builder, bits, form), quiet, as_bits(builder, value))
        else:
            result = from_f64(builder, value, form)
        return _after(builder, result, form, flags)

    return compiled.elementwise(emit, [form.bits], form.bits)


def _integral(builder: Any, value: Any, mode: str) -> Any:
    suffix = "f32" if value.type == compiled.F32 else "f64"
    return intrinsic(builder, f"llvm.{_INTEGRAL[mode]}.{suffix}", value.type, value)


@functools.cache
def to_integer(form: Format, bits: int, signed: bool, mode: str, ftz: bool = False) -> Function:
    """A number rounded to an integer and clamped to its range.

    NaN becomes 0, or from f64 or to 64 bits the integer of which only the highest bit is set.

    Args:
      form: of the number.
      bits, signed: of the integer.
      mode: ``"rni"``, ``"rzi"``, ``"rmi"`` or ``"rpi"``.
      ftz: whether subnormal f32 numbers count as zeros.
    """

    def emit(builder: Any, element: Any) -> Any:
        if ftz:
            element = flushed(builder, element, form)
        value = as_float(builder, element) if form is F32 else to_f64(builder, element, form)
        value = _integral(builder, value, mode)
        suffix = "f32" if value.type == compiled.F32 else "f64"
        name = f"llvm.fpto{'s' if signed else 'u'}i.sat.i{bits}.{suffix}"
        result = intrinsic(builder, name, integer(bits), value)
        if form is F64 or bits == 64:
            highest = constant(result, 1 << (bits - 1))
            result = builder.select(is_nan(builder, element, form), highest, result)
        return result

    return compiled.elementwise(emit, [form.bits], bits)


@functools.cache
def from_integer(
    bits: int, signed: bool, form: Format, mode: str, flags: frozenset[str] = NONE
) -> Function:
    """An integer rounded to a floating-point format.

    Args:
      bits, signed: of the integer.
      form: f16, bf16, f32 or f64.
      mode: ``"rn"``, ``"rz"``, ``"rm"`` or ``"rp"``.
      flags: of ``"ftz"`` and ``"sat"``; the former changes nothing.
    """

    directed = form is F64 and bits == 64 and mode != "rn"

    def emit(builder: Any, element: Any) -> Any:
        if form is F64 or (form is F32 and mode == "rn"):
            if directed:
                high, low = _halves(builder, element, signed)
                value = constrained(builder, "fadd", high, low)
            else:
                kind = compiled.F32 if form is F32 else compiled.F64
                value = (builder.sitofp if signed else builder.uitofp)(element, kind)
            result = as_bits(builder, value)
        else:
            if bits == 64:
                value = odd_sum(builder, *_halves(builder, element, signed))
            else:
                value = (builder.sitofp if signed else builder.uitofp)(element, compiled.F64)
            result = from_f64(builder, value, form, mode)
        return _after(builder, result, form, flags)

    direction = DIRECTIONS[mode] if directed else None
    return compiled.elementwise(emit, [bits], form.bits, direction=direction)


def _halves(builder: Any, element: Any, signed: bool) -> tuple[Any, Any]:
    """Two ``double`` values whose sum is a 64-bit integer."""
    shift = constant(element, 32)
    high = (builder.ashr if signed else builder.lshr)(element, shift)
    low = builder.and_(element, constant(element, (1 << 32) - 1))
    high = (builder.sitofp if signed else builder.uitofp)(high, compiled.F64)
    scale = ir.Constant(compiled.F64, 2.0**32)
    return builder.fmul(high, scale), builder.uitofp(low, compiled.F64)
