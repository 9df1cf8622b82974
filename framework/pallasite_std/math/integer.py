"""Integer arithmetic, comparisons, minima and maxima, selection: for all dtypes.

Arithmetic on 8-bit floats goes through f32. Integer division follows XLA: it truncates, ``x / 0``
has all bits set (-1, or the largest unsigned number), ``x % 0`` is x, and the smallest number
divided by -1 is itself with remainder 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as mlir_math

from pallasite.plugin import InvalidTypeError
from pallasite.plugin.ir import types
from pallasite_std.math.dispatch import BinaryFunction, UnaryFunction, from_compute, to_compute
from pallasite_std.math.four_bits import is_narrow_float
from pallasite_std.math.hardware import PTX, Hardware
from pallasite_std.math.values import Word

type Operation = Callable[..., ir.Value]

FLOAT_PREDICATES = {
    "eq": "OEQ",
    "ne": "UNE",
    "lt": "OLT",
    "le": "OLE",
    "gt": "OGT",
    "ge": "OGE",
}
"""Predicates of floats: all are false for NaN but ``ne``, so that NaN differs from itself."""

SIGNED_PREDICATES = {
    "eq": "eq",
    "ne": "ne",
    "lt": "slt",
    "le": "sle",
    "gt": "sgt",
    "ge": "sge",
}
"""Predicates of signed integers."""

UNSIGNED_PREDICATES = {
    "eq": "eq",
    "ne": "ne",
    "lt": "ult",
    "le": "ule",
    "gt": "ugt",
    "ge": "uge",
}
"""Predicates of unsigned integers and of bool."""


def _refuse(name: str, dtype: Any) -> InvalidTypeError:
    return InvalidTypeError(f"{name} is not defined for {np.dtype(dtype)} values")


def _require_integer(name: str, dtype: Any) -> None:
    if not types.is_integer(dtype):
        raise _refuse(name, dtype)


def arithmetic(name: str, real: Operation, integer: Operation) -> BinaryFunction:
    """A function of two values that is one operation for floats and another for integers."""

    def call(
        x: ir.Value,
        y: ir.Value,
        dtype: Any,
        approximate: bool = False,
        hardware: Hardware = PTX,
    ) -> ir.Value:
        if is_narrow_float(dtype):
            a, b = to_compute(x, dtype, hardware), to_compute(y, dtype, hardware)
            return from_compute(type(a)(real(a.value, b.value)), dtype, hardware)
        if types.is_bool(dtype):
            raise _refuse(name, dtype)
        if not types.is_float(dtype):
            return integer(x, y)
        if approximate:
            # A product and a sum that it goes into may become one instruction.
            return real(x, y, fastmath=arith.FastMathFlags.contract)
        return real(x, y)

    return call


def by_sign(
    name: str, real: Operation | None, signed: Operation, unsigned: Operation
) -> BinaryFunction:
    """A function with one operation for floats, signed and unsigned integers; bool is unsigned."""

    def call(
        x: ir.Value,
        y: ir.Value,
        dtype: Any,
        approximate: bool = False,
        hardware: Hardware = PTX,
    ) -> ir.Value:
        if types.is_float(dtype):
            if real is None:
                raise _refuse(name, dtype)
            if not is_narrow_float(dtype):
                return real(x, y)
            a, b = to_compute(x, dtype, hardware), to_compute(y, dtype, hardware)
            return from_compute(type(a)(real(a.value, b.value)), dtype, hardware)
        return signed(x, y) if types.is_signed(dtype) else unsigned(x, y)

    return call


def bitwise(name: str, operation: Operation) -> BinaryFunction:
    """An operation of integers and bool."""
    return by_sign(name, None, operation, operation)


def comparison(name: str) -> BinaryFunction:
    """``eq``, ``ne``, ``lt``, ``le``, ``gt`` or ``ge``; the result is ``i1``."""

    def call(
        x: ir.Value,
        y: ir.Value,
        dtype: Any,
        approximate: bool = False,
        hardware: Hardware = PTX,
    ) -> ir.Value:
        if types.is_float(dtype):
            a, b = (
                (to_compute(x, dtype, hardware).value, to_compute(y, dtype, hardware).value)
                if is_narrow_float(dtype)
                else (x, y)
            )
            return arith.cmpf(getattr(arith.CmpFPredicate, FLOAT_PREDICATES[name]), a, b)
        table = SIGNED_PREDICATES if types.is_signed(dtype) else UNSIGNED_PREDICATES
        return arith.cmpi(getattr(arith.CmpIPredicate, table[name]), x, y)

    return call


def divide(x: ir.Value, y: ir.Value, signed: bool) -> ir.Value:
    """The quotient, truncated."""
    a, b = Word(x), Word(y)
    zero = b.equals(0)
    divisor = _safe_divisor(a, b, signed)
    quotient = Word((arith.divsi if signed else arith.divui)(x, divisor.value))
    return zero.choose(quotient.constant(-1), quotient).value


def remainder(x: ir.Value, y: ir.Value, signed: bool) -> ir.Value:
    """The remainder of truncating division."""
    a, b = Word(x), Word(y)
    divisor = _safe_divisor(a, b, signed)
    rest = Word((arith.remsi if signed else arith.remui)(x, divisor.value))
    return b.equals(0).choose(a, rest).value


def _safe_divisor(x: Word, y: Word, signed: bool) -> Word:
    """The divisor, with 1 in place of one for which LLVM's instruction is undefined."""
    undefined = y.equals(0)
    if signed:
        smallest = -(1 << (x.width - 1))
        undefined = undefined | (x.equals(smallest) & y.equals(-1))
    return undefined.choose(y.constant(1), y)


def division(
    name: str, real: BinaryFunction, whole: Callable[[ir.Value, ir.Value, bool], ir.Value]
) -> BinaryFunction:
    """Quotient or remainder for all dtypes but bool."""

    def call(
        x: ir.Value,
        y: ir.Value,
        dtype: Any,
        approximate: bool = False,
        hardware: Hardware = PTX,
    ) -> ir.Value:
        if types.is_float(dtype):
            return real(x, y, dtype, approximate, hardware)
        if types.is_bool(dtype):
            raise _refuse(name, dtype)
        return whole(x, y, types.is_signed(dtype))

    return call


def multiply_high(
    x: ir.Value, y: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """The upper half of the product of two integers."""
    _require_integer("mul_hi", dtype)
    signed = types.is_signed(dtype)
    operation = arith.MulSIExtendedOp if signed else arith.MulUIExtendedOp
    return operation(x, y).high


def shift(name: str, arithmetic_shift: bool, operation: Operation) -> BinaryFunction:
    """A shift in which a count of the width or more (as an unsigned number) shifts all bits out."""

    def call(
        x: ir.Value,
        y: ir.Value,
        dtype: Any,
        approximate: bool = False,
        hardware: Hardware = PTX,
    ) -> ir.Value:
        _require_integer(name, dtype)
        count = Word(y)
        last = count.width - 1
        fits = count.compare("ule", last)
        limited = fits.choose(count, last)
        shifted = Word(operation(x, limited.value))
        return shifted.value if arithmetic_shift else fits.choose(shifted, 0).value

    return call


def population_count(
    value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """The number of bits that are set."""
    _require_integer("population_count", dtype)
    return mlir_math.ctpop(value)


def clz(
    value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """The number of leading zeros; the width for zero."""
    _require_integer("clz", dtype)
    return mlir_math.ctlz(value)


def unary_by_kind(name: str, real: UnaryFunction, integer: UnaryFunction) -> UnaryFunction:
    """A function with one implementation for floats and one for integers."""

    def call(
        value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
    ) -> ir.Value:
        if types.is_float(dtype):
            return real(value, dtype, approximate, hardware)
        if not types.is_integer(dtype):
            raise _refuse(name, dtype)
        return integer(value, dtype, approximate, hardware)

    return call


def negative(
    value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """``0 - x``, wrapping."""
    return (0 - Word(value)).value


def absolute(
    value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """The magnitude; the smallest signed number stays, as do unsigned ones."""
    if not types.is_signed(dtype):
        return value
    return mlir_math.absi(value)


def sign(
    value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """-1, 0 or 1."""
    x = Word(value)
    one = x.constant(1)
    if not types.is_signed(dtype):
        return x.equals(0).choose(x, one).value
    return ((x >> (x.width - 1)) | x.differs(0).choose(one, 0)).value


def square(
    value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """``x * x``, wrapping."""
    return arith.muli(value, value)


def invert(
    value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    """All bits inverted; for bool, the negation."""
    if types.is_float(dtype):
        raise _refuse("not", dtype)
    return (Word(value) ^ (1 if types.is_bool(dtype) else -1)).value


def select(condition: ir.Value, yes: ir.Value, no: ir.Value) -> ir.Value:
    """``yes`` where the condition (``i1``) holds, else ``no``."""
    return arith.select(condition, yes, no)


def clamp(low: ir.Value, x: ir.Value, high: ir.Value, dtype: Any) -> ir.Value:
    """``min(max(x, low), high)``; NaN stays."""
    return minimum(maximum(x, low, dtype), high, dtype)


maximum = by_sign("max", arith.maximumf, arith.maxsi, arith.maxui)
"""The larger; NaN if either is."""

minimum = by_sign("min", arith.minimumf, arith.minsi, arith.minui)
"""The smaller; NaN if either is."""
