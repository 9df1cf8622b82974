"""Integer functions with JAX's semantics, signed or unsigned by the dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as math_dialect

from pallasite.ir import types
from pallasite.lowering.numerics.number import Number, select


def _is_signed(dtype: Any) -> bool:
    return types.is_signed(dtype)


def _unsigned_compare(predicate: Any, x: Number, y: Number) -> Number:
    return Number(arith.cmpi(predicate, x.value, y.value))


def absolute(x: Number, dtype: Any) -> Number:
    """The magnitude; the most negative number is its own, as in NumPy."""
    return select(x < 0, 0 - x, x) if _is_signed(dtype) else x


def sign(x: Number, dtype: Any) -> Number:
    """-1, 0 or 1."""
    if not _is_signed(dtype):
        return select(x.equals(0), x, x.constant(1))
    return select(x > 0, x.constant(1), select(x < 0, x.constant(-1), x.constant(0)))


def population_count(x: Number) -> Number:
    """The number of bits that are set."""
    return Number(math_dialect.ctpop(x.value))


def count_leading_zeros(x: Number) -> Number:
    """The number of zero bits above the highest bit that is set; the width for 0."""
    return Number(math_dialect.ctlz(x.value))


def divide(x: Number, y: Number, dtype: Any) -> Number:
    """The quotient, truncated toward zero.

    As in XLA, division by zero gives all bits set (-1), and the most negative number divided by -1
    is itself.
    """
    zero = y.equals(0)
    if not _is_signed(dtype):
        safe = select(zero, y.constant(1), y)
        return select(zero, x.constant(-1), Number(arith.divui(x.value, safe.value)))
    minus = y.equals(-1)
    # Neither zero nor -1 reaches the instruction, whose result would be undefined.
    safe = select(_either(zero, minus), y.constant(1), y)
    quotient = Number(arith.divsi(x.value, safe.value))
    return select(zero, x.constant(-1), select(minus, 0 - x, quotient))


def remainder(x: Number, y: Number, dtype: Any) -> Number:
    """What the truncating division leaves; it has the sign of ``x``. By zero, it is ``x``."""
    zero = y.equals(0)
    if not _is_signed(dtype):
        safe = select(zero, y.constant(1), y)
        return select(zero, x, Number(arith.remui(x.value, safe.value)))
    minus = y.equals(-1)
    safe = select(_either(zero, minus), y.constant(1), y)
    rest = Number(arith.remsi(x.value, safe.value))
    return select(zero, x, rest)


def _either(x: Number, y: Number) -> Number:
    return Number(arith.ori(x.value, y.value))


def larger(x: Number, y: Number, dtype: Any) -> Number:
    """The larger integer; of booleans, whether one is true."""
    function = arith.maxsi if _is_signed(dtype) else arith.maxui
    return Number(function(x.value, y.value))


def smaller(x: Number, y: Number, dtype: Any) -> Number:
    """The smaller integer; of booleans, whether both are true."""
    function = arith.minsi if _is_signed(dtype) else arith.minui
    return Number(function(x.value, y.value))


def _shift(function: Callable[..., ir.Value], x: Number, amount: Number, beyond: Number) -> Number:
    """Shifts by amounts below the width; larger ones (also negative ones) give ``beyond``."""
    inside = _unsigned_compare(arith.CmpIPredicate.ult, amount, amount.constant(x.width))
    safe = select(inside, amount, amount.constant(0))
    return select(inside, Number(function(x.value, safe.value)), beyond)


def shift_left(x: Number, amount: Number) -> Number:
    """``x << amount``; 0 if no bit is left."""
    return _shift(arith.shli, x, amount, x.constant(0))


def shift_right_logical(x: Number, amount: Number) -> Number:
    """Shifts to the right, filling with zeros."""
    return _shift(arith.shrui, x, amount, x.constant(0))


def shift_right_arithmetic(x: Number, amount: Number) -> Number:
    """Shifts to the right, filling with the sign."""
    filled = Number(arith.shrsi(x.value, x.constant(x.width - 1).value))
    return _shift(arith.shrsi, x, amount, filled)
