"""From functions of f32 and f64 to functions of every float dtype.

8 and 16-bit floats are computed in f32 and rounded once, at the end. There are no approximate
forms of f64: the flag is ignored there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidTypeError
from pallasite.plugin.ir import types
from pallasite_std.math.conversion import convert
from pallasite_std.math.hardware import PTX, Hardware
from pallasite_std.math.values import Real

_SINGLE = np.dtype(np.float32)
_DOUBLE = np.dtype(np.float64)

type RealFunction1 = Callable[[Real, bool, Hardware], Real]
type RealFunction2 = Callable[[Real, Real, bool, Hardware], Real]


class UnaryFunction(Protocol):
    """A function of one value; ``approximate`` allows faster and less accurate instructions."""

    def __call__(
        self, value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
    ) -> ir.Value: ...


class BinaryFunction(Protocol):
    """A function of two values of one dtype."""

    def __call__(
        self,
        x: ir.Value,
        y: ir.Value,
        dtype: Any,
        approximate: bool = False,
        hardware: Hardware = PTX,
    ) -> ir.Value: ...


def compute_type(dtype: Any) -> np.dtype[Any]:
    """The dtype in which functions of a float dtype are computed: float32 or float64."""
    return _DOUBLE if np.dtype(dtype) == _DOUBLE else _SINGLE


def to_compute(value: ir.Value, dtype: Any, hardware: Hardware) -> Real:
    """A value of a float dtype as f32 or f64."""
    return Real(convert(value, dtype, compute_type(dtype), hardware=hardware))


def from_compute(value: Real, dtype: Any, hardware: Hardware) -> ir.Value:
    """The result of a computation in f32 or f64, rounded to a float dtype."""
    return convert(value.value, compute_type(dtype), dtype, hardware=hardware)


def require_float(name: str, dtype: Any) -> None:
    """Raises InvalidTypeError unless ``dtype`` is a float."""
    if not types.is_float(dtype):
        raise InvalidTypeError(
            f"{name} of {np.dtype(dtype)} values", expected="a floating-point dtype"
        )


def float_unary(name: str, function: RealFunction1) -> UnaryFunction:
    """A function for every float dtype, from one for f32 and f64."""

    def call(
        value: ir.Value, dtype: Any, approximate: bool = False, hardware: Hardware = PTX
    ) -> ir.Value:
        require_float(name, dtype)
        x = to_compute(value, dtype, hardware)
        result = function(x, approximate and not x.is_double, hardware)
        return from_compute(result, dtype, hardware)

    call.__doc__ = function.__doc__
    return call


def float_binary(name: str, function: RealFunction2) -> BinaryFunction:
    """A function of two values for every float dtype, from one for f32 and f64."""

    def call(
        x: ir.Value,
        y: ir.Value,
        dtype: Any,
        approximate: bool = False,
        hardware: Hardware = PTX,
    ) -> ir.Value:
        require_float(name, dtype)
        a, b = to_compute(x, dtype, hardware), to_compute(y, dtype, hardware)
        result = function(a, b, approximate and not a.is_double, hardware)
        return from_compute(result, dtype, hardware)

    call.__doc__ = function.__doc__
    return call
