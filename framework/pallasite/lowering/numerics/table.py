"""The functions by name: ``UNARY[name](value, dtype, approximate)`` and ``BINARY`` of two values.

Values are scalars or vectors in register types, ``dtype`` is that of the operands. Floats of 16
and 8 bits are computed in float32 and rounded once. With ``approximate``, float32 and narrower
floats use single instructions of the hardware where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxlib.mlir import ir

from pallasite.errors import UnsupportedError
from pallasite.ir import types
from pallasite.lowering.numerics import (
    comparison,
    error_function,
    exponential,
    hardware,
    hyperbolic,
    integer,
    logarithm,
    number,
    power,
    trigonometric,
)
from pallasite.lowering.numerics.elements import from_compute, to_compute
from pallasite.lowering.numerics.number import Number
from pallasite.lowering.numerics.remainder import remainder

Unary = Callable[[ir.Value, Any, bool], ir.Value]
Binary = Callable[[ir.Value, ir.Value, Any, bool], ir.Value]
FloatUnary = Callable[[Number, bool], Number]
FloatBinary = Callable[[Number, Number, bool], Number]
IntegerUnary = Callable[[Number, Any], Number]
IntegerBinary = Callable[[Number, Number, Any], Number]


def _refuse(name: str, dtype: Any) -> UnsupportedError:
    return UnsupportedError(f"{name} of {dtype}", hint="convert the operands to another dtype")


def _unary(
    name: str,
    float_: FloatUnary | None = None,
    integer_: IntegerUnary | None = None,
    *,
    native: bool = False,
    predicate: bool = False,
) -> Unary:
    """``native``: the same in every type, so that narrow floats need no float32."""

    def apply(value: ir.Value, dtype: Any, approximate: bool) -> ir.Value:
        if not types.is_float(dtype):
            if integer_ is None:
                raise _refuse(name, dtype)
            return integer_(Number(value), dtype).value
        if float_ is None:
            raise _refuse(name, dtype)
        if native and not types.is_float8(dtype):
            return float_(Number(value), approximate).value
        result = float_(to_compute(value, dtype), approximate)
        return result.value if predicate else from_compute(result, dtype)

    return apply


def _binary(
    name: str,
    float_: FloatBinary | None = None,
    integer_: IntegerBinary | None = None,
    *,
    native: bool = False,
    predicate: bool = False,
) -> Binary:
    def apply(x: ir.Value, y: ir.Value, dtype: Any, approximate: bool) -> ir.Value:
        if not types.is_float(dtype):
            if integer_ is None:
                raise _refuse(name, dtype)
            return integer_(Number(x), Number(y), dtype).value
        if float_ is None:
            raise _refuse(name, dtype)
        if native and not types.is_float8(dtype):
            return float_(Number(x), Number(y), approximate).value
        result = float_(to_compute(x, dtype), to_compute(y, dtype), approximate)
        return result.value if predicate else from_compute(result, dtype)

    return apply


def _divide(x: Number, y: Number, approximate: bool) -> Number:
    return hardware.divide(x, y) if approximate and x.width == 32 else x / y


def _next_after(x: ir.Value, y: ir.Value, dtype: Any, approximate: bool) -> ir.Value:
    if not types.is_float(dtype) or types.is_float8(dtype):
        raise _refuse("nextafter", dtype)
    return comparison.next_after(Number(x), Number(y)).value


def _exact(function: Callable[[Number], Number]) -> FloatUnary:
    return lambda x, approximate: function(x)


def _exact_binary(function: Callable[[Number, Number], Number]) -> FloatBinary:
    return lambda x, y, approximate: function(x, y)


def _integers(function: Callable[[Number, Number], Number]) -> IntegerBinary:
    return lambda x, y, dtype: function(x, y)


_APPROXIMABLE: dict[str, FloatUnary] = {
    "exp": exponential.exp,
    "exp2": exponential.exp2,
    "log": logarithm.log,
    "log1p": logarithm.log1p,
    "logistic": hyperbolic.logistic,
    "sqrt": power.sqrt,
    "rsqrt": power.rsqrt,
    "sin": trigonometric.sin,
    "cos": trigonometric.cos,
    "tan": trigonometric.tan,
    "tanh": hyperbolic.tanh,
    "erf": error_function.erf,
}
_EXACT: dict[str, Callable[[Number], Number]] = {
    "floor": number.floor,
    "ceil": number.ceil,
    "round_to_even": number.round_even,
    "round_away_from_zero": number.round_away,
    "expm1": exponential.expm1,
    "cbrt": power.cbrt,
    "asin": trigonometric.asin,
    "acos": trigonometric.acos,
    "atan": trigonometric.atan,
    "sinh": hyperbolic.sinh,
    "cosh": hyperbolic.cosh,
    "asinh": hyperbolic.asinh,
    "acosh": hyperbolic.acosh,
    "atanh": hyperbolic.atanh,
    "erfc": error_function.erfc,
    "erf_inv": error_function.erf_inv,
}

UNARY: dict[str, Unary] = {
    **{name: _unary(name, function) for name, function in _APPROXIMABLE.items()},
    **{name: _unary(name, _exact(function)) for name, function in _EXACT.items()},
    "neg": _unary("neg", _exact(lambda x: -x), lambda x, dtype: -x, native=True),
    "not": _unary("not", None, lambda x, dtype: ~x),
    "abs": _unary("abs", _exact(number.absolute), integer.absolute, native=True),
    "sign": _unary("sign", _exact(comparison.sign), integer.sign),
    "square": _unary("square", _exact(lambda x: x * x), lambda x, dtype: x * x, native=True),
    "is_finite": _unary("is_finite", _exact(comparison.is_finite), native=True, predicate=True),
    "population_count": _unary(
        "population_count", None, lambda x, dtype: integer.population_count(x)
    ),
    "clz": _unary("clz", None, lambda x, dtype: integer.count_leading_zeros(x)),
}

BINARY: dict[str, Binary] = {
    "add": _binary("add", _exact_binary(lambda x, y: x + y), lambda x, y, d: x + y, native=True),
    "sub": _binary("sub", _exact_binary(lambda x, y: x - y), lambda x, y, d: x - y, native=True),
    "mul": _binary("mul", _exact_binary(lambda x, y: x * y), lambda x, y, d: x * y, native=True),
    "div": _binary("div", _divide, integer.divide),
    "rem": _binary("rem", _exact_binary(remainder), integer.remainder),
    "max": _binary("max", _exact_binary(comparison.larger), integer.larger, native=True),
    "min": _binary("min", _exact_binary(comparison.smaller), integer.smaller, native=True),
    "pow": _binary("pow", _exact_binary(power.power)),
    "atan2": _binary("atan2", _exact_binary(trigonometric.atan2)),
    "nextafter": _next_after,
    "and": _binary("and", None, lambda x, y, dtype: x & y),
    "or": _binary("or", None, lambda x, y, dtype: x | y),
    "xor": _binary("xor", None, lambda x, y, dtype: x ^ y),
    "shift_left": _binary("shift_left", None, _integers(integer.shift_left)),
    "shift_right_logical": _binary(
        "shift_right_logical", None, _integers(integer.shift_right_logical)
    ),
    "shift_right_arithmetic": _binary(
        "shift_right_arithmetic", None, _integers(integer.shift_right_arithmetic)
    ),
}


def _comparison(name: str) -> Binary:
    function = comparison.compare(name)
    return _binary(
        name, lambda x, y, approximate: function(x, y, None), function, native=True, predicate=True
    )


for _name in comparison.COMPARISONS:
    BINARY[_name] = _comparison(_name)
