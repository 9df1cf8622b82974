"""Checks of the arguments of operations on rows."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallasite.plugin import InvalidTypeError, InvalidValueError, select_target
from pallasite_std.ops.arguments import as_array, dtype_of

FLOATS = tuple(np.dtype(one) for one in (jnp.bfloat16, jnp.float16, jnp.float32))
QUANTIZED = tuple(np.dtype(one) for one in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8))


def names(dtypes: tuple[np.dtype[Any], ...]) -> str:
    """For messages."""
    return ", ".join(one.name for one in dtypes)


def integer(value: Any, what: str) -> int:
    """An integer of 32 bits that is known while tracing.

    Raises:
      InvalidTypeError: it is none.
      InvalidValueError: it has more bits.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidTypeError(
            f"{what} must be an integer that is known while tracing", got=type(value).__name__
        ) from None
    limits = np.iinfo(np.int32)
    if not limits.min <= number <= limits.max:
        raise InvalidValueError(
            f"{what} is out of range", got=number, expected="an integer of 32 bits"
        )
    return number


def float_array(array: Any, what: str, *, rank: int = 1) -> jax.Array:
    """An array of at least ``rank`` axes of a dtype that kernels compute with.

    Raises:
      InvalidTypeError: it has another dtype, or too few axes.
    """
    array = as_array(array, what)
    if np.dtype(array.dtype) not in FLOATS or array.ndim < rank:
        raise InvalidTypeError(
            f"{what} does not fit",
            got=f"{array.dtype}{list(array.shape)}",
            expected=f"at least {rank} axes of {names(FLOATS)}",
        )
    return array


def per_column(array: Any, what: str, columns: int) -> jax.Array | None:
    """A vector with an element for each column, or None.

    Raises:
      InvalidTypeError: it has another shape, or is not floating-point.
    """
    if array is None:
        return None
    array = as_array(array, what)
    if array.shape != (columns,) or np.dtype(array.dtype) not in FLOATS:
        raise InvalidTypeError(
            f"{what} does not fit the rows",
            got=f"{array.dtype}{list(array.shape)}",
            expected=f"shape ({columns},) of {names(FLOATS)}",
        )
    return array


def same_type(array: Any, other: Any, what: str, others: str) -> jax.Array:
    """An array of the shape and dtype of another.

    Raises:
      InvalidTypeError: it differs.
    """
    array = as_array(array, what)
    if (array.shape, array.dtype) != (other.shape, other.dtype):
        raise InvalidTypeError(
            f"{what} and {others} are not of the same type",
            got=f"{array.dtype}{list(array.shape)}",
            expected=f"{other.dtype}{list(other.shape)}, as {others}",
        )
    return array


def quantized_dtype(dtype: Any) -> np.dtype[Any]:
    """A dtype to quantise to.

    Raises:
      InvalidTypeError: it is none of those.
    """
    kind = dtype_of(dtype, "the dtype of quotients")
    if kind not in QUANTIZED:
        raise InvalidTypeError(
            "rows are not quantised to this dtype", got=kind.name, expected=names(QUANTIZED)
        )
    return kind


def small_number(value: Any, what: str) -> float:
    """A number known while tracing that is finite and not negative.

    Raises:
      InvalidTypeError, InvalidValueError: it is not.
    """
    if isinstance(value, jax.core.Tracer) or not isinstance(value, int | float | np.number):
        raise InvalidTypeError(
            f"{what} must be known while tracing",
            got=type(value).__name__,
            expected="a Python number",
        )
    if not (value >= 0 and math.isfinite(value)):
        raise InvalidValueError(
            f"{what} is negative or not finite", got=value, expected="a number of at least 0"
        )
    return float(value)


def as_rows(array: jax.Array) -> jax.Array:
    """(rows, columns): all axes but the last are one."""
    return array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def machine() -> tuple[int, int]:
    """Multiprocessors of the target, and shared memory into which its copy engine writes."""
    target = select_target()
    staging = target.max_shared_memory if "tma" in target.features else 0
    return max(1, target.multiprocessors), staging
