"""Sums, products, quotients and roots of floating-point numbers, each rounded once.

The functions return compiled functions of arrays (:func:`compiled.elementwise`). NaNs are those of
an H200, on which they were measured, as the PTX ISA leaves them open: f16, bf16 and f32 have one
each; in f64 the NaN of an operand goes through, as a quiet one, and invalid operations give
``0xfff8000000000000``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from pallasite_simulator.instructions import compiled
from pallasite_simulator.instructions.compiled import Emit, integer, intrinsic
from pallasite_simulator.instructions.float_formats import BF16, F16, F32, F64, Format
from pallasite_simulator.instructions.rounding import (
    as_bits,
    as_float,
    canonical,
    constant,
    flush_tiny,
    flushed,
    from_f64,
    is_nan,
    magnitude,
    odd_quotient,
    odd_root,
    odd_sum,
    rectified,
    saturated,
    to_f64,
    widen,
)
from pallasite_simulator.types import Values

type Function = Callable[..., Values]

PACKED: dict[str, tuple[Format, int]] = {
    "f16": (F16, 1),
    "f16x2": (F16, 2),
    "bf16": (BF16, 1),
    "bf16x2": (BF16, 2),
    "f32": (F32, 1),
    "f32x2": (F32, 2),
    "f64": (F64, 1),
}
"""Types and how many numbers of which format they hold."""

_ARITY = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "div": 2, "rcp": 1, "sqrt": 1}
DIRECTIONS = {"rz": 0, "rp": 2, "rm": 3}
"""Roundings and LLVM's numbers of them."""

# Operands in the order in which their NaNs are preferred.
_NAN_ORDER = {"add": (1, 0), "sub": (1, 0), "mul": (1, 0), "fma": (1, 2, 0), "div": (0, 1)}

# The bit pattern that TMA writes beyond a tensor's bounds, for .oob; the same in f16 and bf16.
_OUT_OF_BOUNDS = 0x7FF7


@functools.cache
def arithmetic(
    operation: str,
    kind: str,
    mode: str = "rn",
    flags: frozenset[str] = frozenset(),
    narrow: str = "",
) -> Function:
    """A function that rounds once.

    Args:
      operation: ``"add"``, ``"sub"``, ``"mul"``, ``"fma"``, ``"div"``, ``"rcp"`` or ``"sqrt"``.
      kind: type of the operands and the result.
      mode: ``"rn"``, ``"rz"``, ``"rm"`` or ``"rp"``.
      flags: of ``"ftz"``, ``"sat"``, ``"relu"`` and ``"oob"``.
      narrow: type of the operands other than the last, if it is another one (f16 or bf16).
    """
    form, units = PACKED[kind]
    inputs = [form.bits] * _ARITY[operation]
    if form is F64:
        emit = _emit_f64(operation, mode)
        direction = DIRECTIONS.get(mode)
        return compiled.elementwise(emit, inputs, 64, units=units, direction=direction)
    emit = _emit(operation, form, mode, flags)
    if narrow:
        small = PACKED[narrow][0]
        inputs = [small.bits] * (len(inputs) - 1) + [32]
        emit = _widening(emit, small)
    return compiled.elementwise(emit, inputs, form.bits, units=units)


def _widening(emit: Emit, small: Format) -> Emit:
    def widened(builder: Any, *elements: Any) -> Any:
        *narrow, last = elements
        wide = [widen(builder, builder.zext(one, integer(32)), small, F32) for one in narrow]
        return emit(builder, *wide, last)

    return widened


def _emit(operation: str, form: Format, mode: str, flags: frozenset[str]) -> Emit:
    """f16, bf16 and f32."""
    plain = form is F32 and mode == "rn"

    def emit(builder: Any, *elements: Any) -> Any:
        operands = list(elements)
        if "ftz" in flags:
            operands = [flushed(builder, one, form) for one in operands]
        if plain and "ftz" not in flags:
            values = [as_float(builder, one) for one in operands]
            result = as_bits(builder, _native(builder, operation, values))
            result = canonical(builder, result, form)
        else:
            exact = _exact(builder, operation, [to_f64(builder, x, form) for x in operands], mode)
            result = from_f64(builder, exact, form, mode)
            if "ftz" in flags:
                result = flush_tiny(builder, as_bits(builder, exact), result, form, mode)
        if "sat" in flags:
            result = saturated(builder, result, form)
        if "relu" in flags:
            result = rectified(builder, result, form)
        if "oob" in flags:
            result = _out_of_bounds(builder, elements[:2], result, form)
        return result

    return emit


def _native(builder: Any, operation: str, values: list[Any]) -> Any:
    """The processor's own operation, rounded to the nearest."""
    kind = values[0].type
    suffix = "f32" if kind == compiled.F32 else "f64"
    if operation == "add":
        return builder.fadd(*values)
    if operation == "sub":
        return builder.fsub(*values)
    if operation == "mul":
        return builder.fmul(*values)
    if operation == "div":
        return builder.fdiv(*values)
    if operation == "rcp":
        return builder.fdiv(ir.Constant(kind, 1.0), *values)
    if operation == "sqrt":
        return intrinsic(builder, f"llvm.sqrt.{suffix}", kind, *values)
    return intrinsic(builder, f"llvm.fma.{suffix}", kind, *values)


def _exact(builder: Any, operation: str, values: list[Any], mode: str) -> Any:
    """The result in ``double``: exact, or rounded to odd."""
    if operation == "mul":
        return builder.fmul(*values)
    if operation == "div":
        return odd_quotient(builder, *values)
    if operation == "rcp":
        return odd_quotient(builder, ir.Constant(compiled.F64, 1.0), values[0])
    if operation == "sqrt":
        return odd_root(builder, values[0])
    if operation == "fma":
        values = [builder.fmul(values[0], values[1]), values[2]]
    elif operation == "sub":
        values = [values[0], builder.fneg(values[1])]
    if mode != "rm":
        return odd_sum(builder, *values)
    # Rounding down, the zero that a difference of equal numbers gives is negative.
    return builder.fneg(odd_sum(builder, *[builder.fneg(one) for one in values]))


def _out_of_bounds(builder: Any, factors: Any, result: Any, form: Format) -> Any:
    for factor in factors:
        absolute = magnitude(builder, factor, form)
        beyond = builder.icmp_unsigned("==", absolute, constant(factor, _OUT_OF_BOUNDS))
        result = builder.select(beyond, constant(result, 0), result)
    return result


# f64 ----------------------------------------------------------------------------------------------


def _emit_f64(operation: str, mode: str) -> Emit:
    def emit(builder: Any, *operands: Any) -> Any:
        values = [as_float(builder, one) for one in operands]
        if mode == "rn":
            value = _native(builder, operation, values)
        else:
            value = _directed(builder, operation, values)
        result = as_bits(builder, value)
        nan = propagated(builder, [operands[n] for n in _NAN_ORDER.get(operation, (0,))])
        return builder.select(is_nan(builder, result, F64), nan, result)

    return emit


def propagated(builder: Any, operands: list[Any]) -> Any:
    """Bits of the first NaN among f64 operands, made quiet, or of the NaN of invalid operations."""
    nan: Any = constant(operands[0], F64.nan)
    for operand in reversed(operands):
        quiet = builder.or_(operand, constant(operand, F64.quiet))
        nan = builder.select(is_nan(builder, operand, F64), quiet, nan)
    return nan


def _directed(builder: Any, operation: str, values: list[Any]) -> Any:
    name = {"rcp": "div"}.get(operation, operation)
    name = name if name in ("fma", "sqrt") else f"f{name}"
    if operation == "rcp":
        values = [ir.Constant(compiled.F64, 1.0), *values]
    return constrained(builder, name, *values)


def constrained(builder: Any, name: str, *values: Any) -> Any:
    """An operation of ``double`` values in the rounding mode that is set while it runs."""
    strings = ("round.dynamic", "fpexcept.ignore")
    extra = [ir.MetaDataString(builder.module, one) for one in strings]
    full = f"llvm.experimental.constrained.{name}.f64"
    return intrinsic(builder, full, compiled.F64, *values, *extra)
