"""Conversions between element types, by value and by bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallasite.errors import UnsupportedError
from pallasite.ir import ops, types
from pallasite.lowering.numerics.number import Number, absolute, select, with_element

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
_FLOAT16 = np.dtype(np.float16)
_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)


def convert(value: ir.Value, from_dtype: Any, to_dtype: Any) -> ir.Value:
    """Converts every element of a scalar or vector.

    Float to integer truncates and saturates, not-a-number gives 0. Anything to bool tests for
    not zero. Integers wrap; the source's sign decides how they are extended. Floats round once to
    nearest even, also from float64; 64-bit integers go to floats of 16 and 8 bits through float32.
    """
    source, target = np.dtype(from_dtype), np.dtype(to_dtype)
    if source == target:
        return value
    for dtype in (source, target):
        if types.is_float8(dtype) and dtype not in (_E4M3, _E5M2):
            raise UnsupportedError(
                f"conversion between {source} and {target}",
                expected="float8_e4m3fn or float8_e5m2 among the floats of 8 bits",
            )
    if types.is_float(source):
        if types.is_bool(target):
            return _float_to_bool(value, source)
        if types.is_float(target):
            return _between_floats(value, source, target)
        return _float_to_integer(value, source, target)
    if types.is_bool(target):
        return arith.cmpi(arith.CmpIPredicate.ne, value, ops.constant(0, value.type))
    if types.is_float(target):
        return _integer_to_float(value, source, target)
    return _between_integers(value, source, target)


def bitcast(value: ir.Value, from_dtype: Any, to_dtype: Any) -> ir.Value:
    """Reinterprets the bits of every element as another type of the same width."""
    source, target = np.dtype(from_dtype), np.dtype(to_dtype)
    if types.is_bool(source) and not types.is_bool(target):
        value = arith.extui(_like(value, np.dtype(np.int8)), value)
    if types.is_bool(target):
        if types.is_bool(source):
            return value
        return arith.cmpi(arith.CmpIPredicate.ne, value, ops.constant(0, value.type))
    return ops.bitcast(value, _like(value, target))


def _like(value: ir.Value, dtype: Any) -> ir.Type:
    return with_element(value.type, types.element_type(dtype))


def _between_integers(value: ir.Value, source: Any, target: Any) -> ir.Value:
    have = Number(value).width
    type_ = _like(value, target)
    want = types.bit_width(target)
    if have == want:
        return value
    if want < have:
        return arith.trunci(type_, value)
    return arith.extsi(type_, value) if types.is_signed(source) else arith.extui(type_, value)


def _integer_to_float(value: ir.Value, source: Any, target: Any) -> ir.Value:
    direct = target if target in (_FLOAT32, _FLOAT64) else _FLOAT32
    cast = arith.sitofp if types.is_signed(source) else arith.uitofp
    if Number(value).width == 4:
        wider = np.dtype(np.int8)
        value = _between_integers(value, source, wider)
        cast = arith.sitofp
    return convert(cast(_like(value, direct), value), direct, target)


def _float_to_bool(value: ir.Value, source: Any) -> ir.Value:
    if types.is_float8(source):
        return (Number(value) & 0x7F).differs(0).value
    return Number(value).differs(0.0).value


def _float_to_integer(value: ir.Value, source: Any, target: Any) -> ir.Value:
    if source != _FLOAT64:
        value, source = convert(value, source, _FLOAT32), _FLOAT32
    signed, width = types.is_signed(target), types.bit_width(target)
    wide = max(width, 32)
    result = _like(value, np.dtype(f"int{wide}"))
    length = ops.vector_length(value)
    vector = f"v{length}" if isinstance(value.type, ir.VectorType) else ""
    suffix = f"{vector}i{wide}.{vector}{'f64' if source == _FLOAT64 else 'f32'}"
    # A narrow unsigned target is reached through i32, whose range holds all of its values.
    kind = "fptosi" if signed or wide > width else "fptoui"
    value = ops.intrinsic(result, f"llvm.{kind}.sat.{suffix}", value)
    if wide == width:
        return value
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
    value = arith.maxsi(value, ops.constant(low, value.type))
    value = arith.minsi(value, ops.constant(high, value.type))
    return arith.trunci(_like(value, target), value)


def _between_floats(value: ir.Value, source: Any, target: Any) -> ir.Value:
    if source in (_E4M3, _E5M2):
        decoded = _from_e4m3(Number(value)) if source == _E4M3 else _from_e5m2(Number(value))
        return convert(decoded.value, _FLOAT32 if source == _E4M3 else _FLOAT16, target)
    if target in (_E4M3, _E5M2):
        if source == _FLOAT64:
            single = _round_to_odd(Number(value))
        else:
            single = Number(convert(value, source, _FLOAT32))
        return (_to_e4m3(single) if target == _E4M3 else _to_e5m2(single)).value
    type_ = _like(value, target)
    if source == _FLOAT64:
        if target == _FLOAT32:
            return arith.truncf(type_, value)
        return arith.truncf(type_, _round_to_odd(Number(value)).value)
    if target in (_FLOAT32, _FLOAT64):
        return arith.extf(type_, value)
    if source == _FLOAT32:
        return arith.truncf(type_, value)
    # bfloat16 and float16 into one another.
    return arith.truncf(type_, arith.extf(_like(value, _FLOAT32), value))


def _round_to_odd(x: Number) -> Number:
    """float64 to float32 so that a second rounding to a narrower type rounds as from float64.

    An inexact result gets an odd last bit (Boldo and Melquiond, "Emulation of FMA and correctly
    rounded sums: proved algorithms using rounding to odd", 2008).
    """
    nearest = x.to_float("f32")
    back = nearest.to_float("f64")
    bits = nearest.bits()
    above = absolute(back) > absolute(x)
    odd = select(above, bits - 1, bits) | 1
    exact = back.equals(x) | x.is_nan()
    return select(exact, bits, odd).as_float("f32")


def _from_e4m3(x: Number) -> Number:
    """float32 of a float8_e4m3fn: its exponent and fraction moved in place, then scaled."""
    wide = Number(arith.extui(x._like("i32"), x.value))
    sign = (wide & 0x80) << 24
    magnitude = wide & 0x7F
    value = ((magnitude << 20).as_float("f32") * 2.0**120).bits()
    value = select(magnitude.equals(0x7F), 0x7FC00000, value)
    return (value | sign).as_float("f32")


def _from_e5m2(x: Number) -> Number:
    """float16 of a float8_e5m2, which is its upper half."""
    return (Number(arith.extui(x._like("i16"), x.value)) << 8).as_float("f16")


def _to_e4m3(x: Number) -> Number:
    """float8_e4m3fn of a float32; what rounds to more than 448 is not a number."""
    return _to_float8(x, fraction=3, bias=7, last=0x7E, overflow=0x7F, nan=0x7F)


def _to_e5m2(x: Number) -> Number:
    """float8_e5m2 of a float32; what rounds to more than 57,344 is infinite."""
    return _to_float8(x, fraction=2, bias=15, last=0x7B, overflow=0x7C, nan=0x7E)


def _to_float8(
    x: Number, *, fraction: int, bias: int, last: int, overflow: int, nan: int
) -> Number:
    bits = x.bits()
    sign = bits.shift_right_logical(24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    drop = 23 - fraction
    even = magnitude.shift_right_logical(drop) & 1
    normal = (magnitude + ((1 << (drop - 1)) - 1) + even).shift_right_logical(drop)
    normal = normal - ((127 - bias) << fraction)
    # Below the smallest normal number, an addition aligns the last bits and rounds.
    anchor = 2.0 ** (23 - fraction + 1 - bias)
    aligned = (magnitude.as_float("f32") + anchor).bits()
    denormal = aligned - magnitude.constant(_float32_bits(anchor))
    smallest = _float32_bits(2.0 ** (1 - bias))
    result = select(magnitude < smallest, denormal, normal)
    result = select(result > last, overflow, result)
    result = select(magnitude > 0x7F800000, nan, result)
    return (result | sign).to_integer("i8")


def _float32_bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))
