"""Comparisons and functions of the order of numbers: they give the same in every float type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallasite.ir import types
from pallasite.lowering.numerics.number import Number, absolute, copy_sign, select

_ORDERED = {
    "eq": arith.CmpFPredicate.OEQ,
    "ne": arith.CmpFPredicate.UNE,
    "lt": arith.CmpFPredicate.OLT,
    "le": arith.CmpFPredicate.OLE,
    "gt": arith.CmpFPredicate.OGT,
    "ge": arith.CmpFPredicate.OGE,
}
_SIGNED = {name: getattr(arith.CmpIPredicate, name) for name in ("eq", "ne")} | {
    name: getattr(arith.CmpIPredicate, f"s{name}") for name in ("lt", "le", "gt", "ge")
}
_UNSIGNED = {name: getattr(arith.CmpIPredicate, name) for name in ("eq", "ne")} | {
    name: getattr(arith.CmpIPredicate, f"u{name}") for name in ("lt", "le", "gt", "ge")
}
COMPARISONS = tuple(_ORDERED)


def compare(name: str) -> Callable[[Number, Number, Any], Number]:
    """A comparison: ``ne`` of floats holds for not-a-number, the others do not."""

    def apply(x: Number, y: Number, dtype: Any) -> Number:
        result: ir.Value
        if x.is_float:
            result = arith.cmpf(_ORDERED[name], x.value, y.value)
        else:
            predicates = _SIGNED if types.is_signed(dtype) else _UNSIGNED
            result = arith.cmpi(predicates[name], x.value, y.value)
        return Number(result)

    return apply


def larger(x: Number, y: Number) -> Number:
    """The larger float; not a number if one of them is; 0 is larger than -0."""
    return Number(arith.maximumf(x.value, y.value))


def smaller(x: Number, y: Number) -> Number:
    """The smaller float; not a number if one of them is; -0 is smaller than 0."""
    return Number(arith.minimumf(x.value, y.value))


def is_finite(x: Number) -> Number:
    """Whether a float is neither infinite nor not a number."""
    return absolute(x) < float("inf")


def sign(x: Number) -> Number:
    """-1, 0, 1 of a float; zeros keep their sign and not-a-number stays."""
    unchanged = x.equals(0.0) | x.is_nan()
    return select(unchanged, x, copy_sign(x.constant(1.0), x))


def next_after(x: Number, y: Number) -> Number:
    """The float that follows ``x`` in the direction of ``y``, in ``x``'s own type."""
    text = str(x.element)
    bits = x.bits()
    away = (y > x) ^ (x < 0.0)
    step = select(away, bits.constant(1), -1)
    smallest = copy_sign(bits.constant(1).as_float(text), y)
    result = select(x.equals(0.0), smallest, (bits + step).as_float(text))
    result = select(x.equals(y), y, result)
    return select(x.is_nan() | y.is_nan(), float("nan"), result)
