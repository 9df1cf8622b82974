"""Functions of floating-point numbers that choose or change bits and round nothing: minimum,
maximum, absolute value and negation."""

from __future__ import annotations

import functools
from typing import Any

from pallasite_simulator.instructions import compiled
from pallasite_simulator.instructions.float_arithmetic import PACKED, Function, propagated
from pallasite_simulator.instructions.float_formats import F64, Format
from pallasite_simulator.instructions.rounding import (
    canonical,
    constant,
    flushed,
    is_nan,
    magnitude,
)


@functools.cache
def extremum(operation: str, kind: str, flags: frozenset[str] = frozenset(), count: int = 2) -> Any:
    """The smallest or the largest of ``count`` numbers.

    Negative zero is less than positive zero. A NaN operand is passed over, or with flag ``"NaN"``
    makes the result NaN.

    Args:
      operation: ``"min"`` or ``"max"``.
      kind: type of the operands and the result.
      flags: of ``"ftz"``, ``"NaN"``, ``"abs"`` (magnitudes are compared) and ``"xorsign"`` (the
        result gets the product of the operands' signs; together with ``"abs"``).
    """
    form, units = PACKED[kind]

    def emit(builder: Any, *operands: Any) -> Any:
        values = list(operands)
        if "ftz" in flags:
            values = [flushed(builder, one, form) for one in values]
        sign = constant(values[0], 0)
        for value in values:
            sign = builder.xor(sign, builder.and_(value, constant(value, form.sign)))
        if "abs" in flags:
            values = [magnitude(builder, one, form) for one in values]
        result = values[0]
        for value in values[1:]:
            result = _choose(builder, operation, result, value, form, "NaN" in flags)
        if "xorsign" in flags:
            result = builder.or_(result, sign)
        if form is not F64:
            return canonical(builder, result, form)
        # Of two NaNs the second one, as for sums.
        nan = propagated(builder, list(reversed(operands)))
        return builder.select(is_nan(builder, result, form), nan, result)

    return compiled.elementwise(emit, [form.bits] * count, form.bits, units=units)


def _choose(builder: Any, operation: str, a: Any, b: Any, form: Format, keep_nan: bool) -> Any:
    before = builder.icmp_signed("<", _ordered(builder, a, form), _ordered(builder, b, form))
    first = before if operation == "min" else builder.not_(before)
    chosen = builder.select(first, a, b)
    nan_a, nan_b = is_nan(builder, a, form), is_nan(builder, b, form)
    if keep_nan:
        return builder.select(nan_a, a, builder.select(nan_b, b, chosen))
    return builder.select(nan_a, b, builder.select(nan_b, a, chosen))


def _ordered(builder: Any, bits: Any, form: Format) -> Any:
    """A signed integer that orders numbers: magnitudes of negative ones are turned round."""
    negative = builder.icmp_signed("<", bits, constant(bits, 0))
    turned = builder.xor(bits, constant(bits, form.magnitude))
    return builder.select(negative, turned, bits)


@functools.cache
def sign_change(operation: str, kind: str, ftz: bool = False) -> Function:
    """``"abs"`` or ``"neg"``. A NaN of f64 keeps its sign and becomes quiet, others are replaced by
    the format's own."""
    form, units = PACKED[kind]

    def emit(builder: Any, bits: Any) -> Any:
        value = flushed(builder, bits, form) if ftz else bits
        if operation == "abs":
            result = magnitude(builder, value, form)
        else:
            result = builder.xor(value, constant(bits, form.sign))
        if form is F64:
            quiet = builder.or_(bits, constant(bits, form.quiet))
            return builder.select(is_nan(builder, bits, form), quiet, result)
        return canonical(builder, result, form)

    return compiled.elementwise(emit, [form.bits], form.bits, units=units)
