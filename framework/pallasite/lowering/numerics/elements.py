"""The float types in which functions are computed, and the way there and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.lowering.numerics import conversion
from pallasite.lowering.numerics.number import Number

_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)


def compute_dtype(dtype: Any) -> np.dtype[Any]:
    """float64 for itself, float32 for all narrower floats."""
    return _FLOAT64 if np.dtype(dtype) == _FLOAT64 else _FLOAT32


def to_compute(value: ir.Value, dtype: Any) -> Number:
    """A float in the type in which functions of its dtype are computed."""
    return Number(conversion.convert(value, dtype, compute_dtype(dtype)))


def from_compute(number: Number, dtype: Any) -> ir.Value:
    """Rounds a computed result to its dtype."""
    return conversion.convert(number.value, compute_dtype(dtype), dtype)
