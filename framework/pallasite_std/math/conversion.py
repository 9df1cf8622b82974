"""Conversions between all dtypes, with the semantics of JAX.

* float to integer truncates, saturates, and takes NaN to 0;
* anything to bool tests for a difference from zero (NaN is true);
* integer to integer wraps, and keeps the value when it widens, by the sign of the source;
* float to float and integer to float round to nearest, ties to even. Integers of 32 and 64 bits
  go to 8 and 16-bit floats by way of f32, as in NumPy and ml_dtypes;
* float8_e4m3fn has no infinity: what rounds beyond 448 becomes NaN. float8_e5m2 overflows to
  infinity. With ``saturate``, both take the largest finite number instead, which is one instruction
  for two elements, as is what was clamped to the finite numbers before;
* float8_e8m0fnu has powers of two only: see :mod:`pallasite_std.math.scales`; float4_e2m1fn
  saturates: see :mod:`pallasite_std.math.four_bits`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallasite.plugin import InvalidTypeError, UnsupportedError
from pallasite.plugin.ir import ops, types
from pallasite_std.math.four_bits import (
    FLOAT4,
    four_bits_to_half,
    is_narrow_float,
    single_to_four_bits,
)
from pallasite_std.math.hardware import PTX, Hardware, float_to_integer
from pallasite_std.math.narrow import from_narrow
from pallasite_std.math.scales import SCALE, scale_to_single, single_to_scale
from pallasite_std.math.values import BF16, F16, F32, F64, Real, Word, length

_SINGLE = np.dtype(np.float32)
_FORMATS = {
    np.dtype(np.float16): F16,
    np.dtype(ml_dtypes.bfloat16): BF16,
    _SINGLE: F32,
    np.dtype(np.float64): F64,
}


@dataclasses.dataclass(frozen=True)
class Float8:
    """An 8-bit float format.

    Attributes:
      instruction: its name in PTX.
      fraction: stored bits of the significand.
      bias: what is added to the exponent.
      largest: the representation of the largest finite number.
      overflow: the representation that takes its place beyond.
      nan: the representation of NaN, without sign.
      limit: numbers of at least this size round beyond the largest; the number itself only if
        ``limit_overflows``.
    """

    instruction: str
    fraction: int
    bias: int
    largest: int
    overflow: int
    nan: int
    limit: float
    limit_overflows: bool


_FLOAT8 = {
    np.dtype(ml_dtypes.float8_e4m3fn): Float8("e4m3", 3, 7, 0x7E, 0x7F, 0x7F, 464.0, False),
    np.dtype(ml_dtypes.float8_e5m2): Float8("e5m2", 2, 15, 0x7B, 0x7C, 0x7E, 61440.0, True),
}
_CONVERTIBLE = frozenset({SCALE, FLOAT4, *_FORMATS, *_FLOAT8})


def convert(
    value: ir.Value,
    from_dtype: Any,
    to_dtype: Any,
    *,
    saturate: bool = False,
    hardware: Hardware = PTX,
) -> ir.Value:
    """A scalar or vector of one dtype as another dtype.

    Args:
      value: in the register representation of ``from_dtype``.
      from_dtype: the dtype of ``value``.
      to_dtype: the dtype of the result.
      saturate: for 8-bit float results, take the largest finite number on overflow.
      hardware: the table of instructions.
    """
    source, target = np.dtype(from_dtype), np.dtype(to_dtype)
    if source == target:
        return value
    if types.is_bool(target):
        return _to_bool(value, source)
    if types.is_float(source):
        if types.is_float(target):
            return _float_to_float(value, source, target, saturate, hardware)
        return _float_to_integer(value, source, target, hardware)
    if types.is_float(target):
        return _integer_to_float(value, source, target, saturate, hardware)
    return _resize(value, source, types.register_type(target, 1), hardware)


def has_one_zero(dtype: Any) -> bool:
    """Whether an 8-bit float has no negative zero, whose representation stands for NaN."""
    return str(np.dtype(dtype).name).endswith("fnuz")


def bitcast(value: ir.Value, from_dtype: Any, to_dtype: Any) -> ir.Value:
    """The bits of a scalar or vector as another dtype of the same width."""
    source, target = np.dtype(from_dtype), np.dtype(to_dtype)
    if types.bit_width(source) != types.bit_width(target) or (
        types.is_bool(source) != types.is_bool(target)
    ):
        raise InvalidTypeError(
            f"a bitcast from {source} to {target}", expected="two dtypes of the same width"
        )
    result = _vector(value, types.element_type(target))
    return value if value.type == result else arith.bitcast(result, value)


def _vector(value: ir.Value, element: ir.Type) -> ir.Type:
    """As many elements as a value has, of another type (a vector of one stays a vector)."""
    if isinstance(value.type, ir.VectorType):
        return ir.VectorType.get((length(value),), element)
    return element


def _to_bool(value: ir.Value, source: np.dtype[Any]) -> ir.Value:
    if source == SCALE:
        return ops.constant(True, _vector(value, ops.i1()))  # There is no zero.
    if is_narrow_float(source):
        bits = Word(value)
        magnitude = (1 << (bits.width - 1)) - 1
        return (bits if has_one_zero(source) else bits & magnitude).differs(0).value
    if types.is_float(source):
        return Real(value).differs(0.0).value
    return Word(value).differs(0).value


def _resize(
    value: ir.Value, source: np.dtype[Any], element: ir.Type, hardware: Hardware
) -> ir.Value:
    """Integer (or bool) to an integer type, extended by the sign of the source."""
    before, after = Word(value).width, int(element.width)
    result = _vector(value, element)
    if before == after:
        return value
    if (before, after) == (8, 16) and not types.is_signed(source) and length(value) % 2 == 0:
        return hardware.below_byte(value, 0).value  # One instruction for two.
    if after < before:
        return arith.trunci(result, value)
    return arith.extsi(result, value) if types.is_signed(source) else arith.extui(result, value)


def _integer_to_float(
    value: ir.Value,
    source: np.dtype[Any],
    target: np.dtype[Any],
    saturate: bool,
    hardware: Hardware,
) -> ir.Value:
    signed = types.is_signed(source)
    fast = from_narrow(value, signed, target, hardware)
    if fast is not None:
        return fast
    if Word(value).width < 32:
        # Wide enough that the hardware converts it; exact in f32.
        value = _resize(value, source, ops.i32(), hardware)
        signed = True
    wide = F64 if target == np.dtype(np.float64) else F32
    result = _vector(value, types.parse_type(wide.name))
    number = arith.sitofp(result, value) if signed else arith.uitofp(result, value)
    through = np.dtype(np.float64) if wide is F64 else _SINGLE
    return convert(number, through, target, saturate=saturate, hardware=hardware)


def _float_to_integer(
    value: ir.Value, source: np.dtype[Any], target: np.dtype[Any], hardware: Hardware
) -> ir.Value:
    width, signed = types.bit_width(target), types.is_signed(target)
    if source.itemsize < 4:
        value = convert(value, source, _SINGLE, hardware=hardware)
    number = Real(value)
    if number.is_double or width == 64:
        return float_to_integer(number, width, signed).value
    if width == 32:
        return hardware.to_int32(number, signed).value
    # Saturate in the range of 32 bits first, then as integers.
    whole = hardware.to_int32(number, True).value
    low = -(1 << (width - 1)) if signed else 0
    high = (1 << (width - 1)) - 1 if signed else (1 << width) - 1
    whole = arith.minsi(whole, ops.constant(high, whole.type))
    whole = arith.maxsi(whole, ops.constant(low, whole.type))
    return Word(whole).truncate(width).value


def _float_to_float(
    value: ir.Value,
    source: np.dtype[Any],
    target: np.dtype[Any],
    saturate: bool,
    hardware: Hardware,
) -> ir.Value:
    if not {source, target} <= _CONVERTIBLE:
        raise UnsupportedError(
            f"a conversion from {source} to {target}",
            expected="float4_e2m1fn, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, bfloat16,"
            " float16, float32 or float64",
        )
    if source == SCALE:
        number = scale_to_single(value).value
        return convert(number, _SINGLE, target, saturate=saturate, hardware=hardware)
    if target == SCALE:
        if source.itemsize < 4:
            value = convert(value, source, _SINGLE, hardware=hardware)
        return single_to_scale(_single(Real(value)))
    if source == FLOAT4:
        half, between = four_bits_to_half(value).value, np.dtype(np.float16)
        return convert(half, between, target, saturate=saturate, hardware=hardware)
    if target == FLOAT4:
        if source.itemsize < 4:
            value = convert(value, source, _SINGLE, hardware=hardware)
        return single_to_four_bits(_single(Real(value)))
    if source in _FLOAT8:
        return _from_float8(value, source, target, saturate, hardware)
    if target in _FLOAT8:
        return _to_float8(value, source, target, saturate, hardware)
    before, after = _FORMATS[source], _FORMATS[target]
    number = Real(value)
    if before.bits == after.bits:
        return number.extend(F32).truncate(after).value
    return (number.extend(after) if before.bits < after.bits else number.truncate(after)).value


def _from_float8(
    value: ir.Value,
    source: np.dtype[Any],
    target: np.dtype[Any],
    saturate: bool,
    hardware: Hardware,
) -> ir.Value:
    format, count = _FLOAT8[source], length(value)
    if hardware.float8_pairs and count % 2:
        both = convert(_even(value), source, target, saturate=saturate, hardware=hardware)
        return ops.slice_vector(both, 0, count)
    if hardware.float8_pairs:
        half = hardware.float8_to_half(value, format.instruction)
        between = np.dtype(np.float16)
        return convert(half.value, between, target, saturate=saturate, hardware=hardware)
    bits = Word(value).extend_unsigned(32)
    if format.instruction == "e5m2":
        half = (Word(value).extend_unsigned(16) << 8).real()
        between = np.dtype(np.float16)
        return convert(half.value, between, target, saturate=saturate, hardware=hardware)
    # The fields moved to their places in f32, where the exponent has another bias: a power of two.
    size = ((bits & 0x7F) << (23 - format.fraction)).real() * 2.0 ** (127 - format.bias)
    size = (bits & 0x7F).equals(format.nan).choose(size.constant(math.nan), size)
    number = ((size.bits() & 0x7FFFFFFF) | ((bits & 0x80) << 24)).real()
    return convert(number.value, _SINGLE, target, saturate=saturate, hardware=hardware)


def _to_float8(
    value: ir.Value,
    source: np.dtype[Any],
    target: np.dtype[Any],
    saturate: bool,
    hardware: Hardware,
) -> ir.Value:
    format, count = _FLOAT8[target], length(value)
    if hardware.float8_pairs:
        if source == _SINGLE and not saturate:
            value, saturate = _without_clamp(value, float(ml_dtypes.finfo(target).max))
        number = _single(Real(_even(value)))
        both = _to_float8_pairs(number, format, saturate, hardware)
        return ops.slice_vector(both, 0, count)
    number = _single(Real(value))
    bits = number.bits()
    size_bits = bits & 0x7FFFFFFF
    size = size_bits.real()
    # Normal results: round the fraction to nearest even as an integer, carrying into the exponent.
    dropped = 23 - format.fraction
    tie = size_bits.shift_logical(dropped) & 1
    rounded = (size_bits + tie + ((1 << (dropped - 1)) - 1)).shift_logical(dropped)
    normal = rounded - ((127 - format.bias) << format.fraction)
    # Denormal results: the addition rounds to multiples of the smallest denormal.
    smallest_exponent = 1 - format.bias
    shifter = 2.0 ** (smallest_exponent - format.fraction + 23)
    shifted = (size + shifter).bits() - _bits_of(shifter)
    result = (size < 2.0**smallest_exponent).choose(shifted, normal)
    beyond = size > format.limit
    if format.limit_overflows:
        beyond = size >= format.limit
    result = beyond.choose(result.constant(format.largest if saturate else format.overflow), result)
    result = size.is_nan().choose(result.constant(format.nan), result)
    result = result | ((bits.shift_logical(24)) & 0x80)
    return result.truncate(8).value


def _without_clamp(value: ir.Value, largest: float) -> tuple[ir.Value, bool]:
    """What was clamped, if nothing else, to the largest finite numbers of both signs, which is what
    saturation does; and whether saturation makes no other difference: NaN stays in both."""
    number, wanted = value, {"arith.minimumf": largest, "arith.maximumf": -largest}
    while wanted:
        owner = number.owner
        if isinstance(owner, ir.Block) or owner.name not in wanted:
            return value, False
        bound = wanted.pop(owner.name)
        others = [one for one in owner.operands if _number_of(one) != bound]
        if len(others) != 1:
            return value, False
        (number,) = others
    return number, True


def _number_of(value: ir.Value) -> float | None:
    """Of a constant, which all elements may be."""
    owner = value.owner
    if not isinstance(owner, ir.Block) and owner.name == "vector.broadcast":
        owner = owner.operands[0].owner
    if isinstance(owner, ir.Block) or owner.name != "arith.constant":
        return None
    attribute = owner.attributes["value"]
    if isinstance(attribute, ir.DenseElementsAttr):
        if not attribute.is_splat:
            return None
        attribute = attribute.get_splat_value()
    return float(ir.FloatAttr(attribute).value) if isinstance(attribute, ir.FloatAttr) else None


def _even(value: ir.Value) -> ir.Value:
    """An even number of elements: the last one once more, if need be."""
    count = length(value)
    if count % 2 == 0:
        return value
    return ops.concatenate([value, ops.slice_vector(value, count - 1, 1)])


def _to_float8_pairs(number: Real, format: Float8, saturate: bool, hardware: Hardware) -> ir.Value:
    """The instruction saturates; without infinities, NaN takes the place of what is beyond first.

    With infinities, they are put in afterwards. NaN loses its sign.
    """
    if saturate:
        return hardware.float8_from_single(number, format.instruction)
    if not format.limit_overflows:
        number = (abs(number) > format.limit).choose(number.constant(math.nan), number)
        return hardware.float8_from_single(number, format.instruction)
    packed = Word(hardware.float8_from_single(number, format.instruction))
    infinity = (packed & 0x80) | format.overflow
    return (abs(number) >= format.limit).choose(infinity, packed).value


def _bits_of(number: float) -> int:
    return int(np.float32(number).view(np.int32))


def _single(number: Real) -> Real:
    """A number as f32, ready to be rounded once more."""
    return _to_single_odd(number) if number.is_double else number.extend(F32)


def _to_single_odd(number: Real) -> Real:
    """f64 to f32, rounded to odd, so that rounding once more gives the right result.

    S. Boldo and G. Melquiond, "When double rounding is odd", IMACS 2005.
    """
    single = number.truncate(F32)
    back = single.extend(F64)
    bits = single.bits()
    inexact = back.differs(number) & ~number.is_nan()
    # Step towards zero if the magnitude was rounded up, then make the last bit one.
    down = (abs(back) > abs(number)).choose(bits - 1, bits)
    return inexact.choose(down | 1, bits).real()
