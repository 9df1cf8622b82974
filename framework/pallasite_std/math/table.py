"""All functions by name, for rules that are registered in a loop.

``UNARY[name](value, dtype, approximate)`` and ``BINARY[name](x, y, dtype, approximate)`` take
scalars or vectors in the register representation of ``dtype`` and return a value of the same
dtype, or ``i1`` for predicates. ``dtype`` is that of the operands. ``DTYPES[name]`` says which
kinds a function accepts.

The error bounds that the functions state, in units of the last place, hold with the errors of the
hardware's instructions included; they were checked on an H200 with millions of arguments each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallasite.plugin.ir import types
from pallasite_std.math import (
    error_function,
    exponential,
    hyperbolic,
    integer,
    logarithm,
    power,
    special,
    trigonometric,
)
from pallasite_std.math.dispatch import (
    BinaryFunction,
    RealFunction1,
    RealFunction2,
    UnaryFunction,
    float_binary,
    float_unary,
)
from pallasite_std.math.hardware import PTX, Hardware
from pallasite_std.math.scales import SCALE, divide_scales

FLOAT, INTEGER, BOOL = "float", "integer", "bool"

_REAL_UNARY: dict[str, RealFunction1] = {
    "exp": exponential.exp,
    "exp2": exponential.exp2,
    "expm1": exponential.expm1,
    "logistic": exponential.logistic,
    "log": logarithm.log,
    "log2": logarithm.log2,
    "log1p": logarithm.log1p,
    "sin": trigonometric.sin,
    "cos": trigonometric.cos,
    "tan": trigonometric.tan,
    "asin": trigonometric.asin,
    "acos": trigonometric.acos,
    "atan": trigonometric.atan,
    "sinh": hyperbolic.sinh,
    "cosh": hyperbolic.cosh,
    "tanh": hyperbolic.tanh,
    "asinh": hyperbolic.asinh,
    "acosh": hyperbolic.acosh,
    "atanh": hyperbolic.atanh,
    "sqrt": power.sqrt,
    "rsqrt": power.rsqrt,
    "cbrt": power.cbrt,
    "erf": error_function.erf,
    "erfc": error_function.erfc,
    "erf_inv": error_function.erf_inv,
    "floor": special.floor,
    "ceil": special.ceil,
    "trunc": special.trunc,
    "round_to_even": special.round_to_even,
    "round_away_from_zero": special.round_away_from_zero,
}

_REAL_BINARY: dict[str, RealFunction2] = {
    "atan2": trigonometric.atan2,
}

_MIXED_UNARY: dict[str, tuple[UnaryFunction, UnaryFunction]] = {
    "neg": (special.neg, integer.negative),
    "abs": (special.absolute, integer.absolute),
    "sign": (float_unary("sign", special.sign), integer.sign),
    "square": (special.square, integer.square),
}

UNARY: dict[str, UnaryFunction] = {
    **{name: float_unary(name, function) for name, function in _REAL_UNARY.items()},
    **{name: integer.unary_by_kind(name, *both) for name, both in _MIXED_UNARY.items()},
    "is_finite": special.is_finite,
    "not": integer.invert,
    "population_count": integer.population_count,
    "clz": integer.clz,
}
"""Functions of one value."""

_number_divide = float_binary("div", special.divide)


def _float_divide(
    x: ir.Value, y: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
) -> ir.Value:
    if np.dtype(dtype) == SCALE:
        return divide_scales(x, y)
    return _number_divide(x, y, dtype, approximate, hardware)


_float_remainder = float_binary("rem", special.remainder)


BINARY: dict[str, BinaryFunction] = {
    **{name: float_binary(name, function) for name, function in _REAL_BINARY.items()},
    "add": integer.arithmetic("add", arith.addf, arith.addi),
    "sub": integer.arithmetic("sub", arith.subf, arith.subi),
    "mul": integer.arithmetic("mul", arith.mulf, arith.muli),
    "div": integer.division("div", _float_divide, integer.divide),
    "rem": integer.division("rem", _float_remainder, integer.remainder),
    "max": integer.maximum,
    "min": integer.minimum,
    "pow": power.power,
    "nextafter": special.nextafter,
    "and": integer.bitwise("and", arith.andi),
    "or": integer.bitwise("or", arith.ori),
    "xor": integer.bitwise("xor", arith.xori),
    "shift_left": integer.shift("shift_left", False, arith.shli),
    "shift_right_logical": integer.shift("shift_right_logical", False, arith.shrui),
    "shift_right_arithmetic": integer.shift("shift_right_arithmetic", True, arith.shrsi),
    "mul_hi": integer.multiply_high,
    **{name: integer.comparison(name) for name in integer.FLOAT_PREDICATES},
}
"""Functions of two values of one dtype (``pow`` also takes an integer exponent)."""

DTYPES: dict[str, frozenset[str]] = {
    **dict.fromkeys([*_REAL_UNARY, *_REAL_BINARY, "is_finite", "pow", "nextafter"],
                    frozenset({FLOAT})),
    **dict.fromkeys([*_MIXED_UNARY, "add", "sub", "mul", "div", "rem"],
                    frozenset({FLOAT, INTEGER})),
    **dict.fromkeys(["max", "min", *integer.FLOAT_PREDICATES], frozenset({FLOAT, INTEGER, BOOL})),
    **dict.fromkeys(["and", "or", "xor", "not"], frozenset({INTEGER, BOOL})),
    **dict.fromkeys(
        ["population_count", "clz", "mul_hi", "shift_left", "shift_right_logical",
         "shift_right_arithmetic"],
        frozenset({INTEGER}),
    ),
}  # fmt: skip
"""The kinds of dtype that each function accepts."""


def kind(dtype: object) -> str:
    """``"float"``, ``"integer"`` or ``"bool"``."""
    if types.is_float(dtype):
        return FLOAT
    return BOOL if types.is_bool(dtype) else INTEGER
