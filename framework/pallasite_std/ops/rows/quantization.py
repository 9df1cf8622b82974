"""Quantisation with a scale for each row."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np


def largest_number(dtype: Any) -> float:
    """The largest magnitude to which rows are scaled: finite, and the same for both signs."""
    kind = np.dtype(dtype)
    if kind.kind == "i":
        return float(np.iinfo(kind).max)
    return float(ml_dtypes.finfo(kind).max)


def row_scale(largest: Any, dtype: Any) -> tuple[Any, Any]:
    """The scale of a row from the largest magnitude in it, and its reciprocal; 1 for zeros.

    The reciprocal is finite: rows of subnormal numbers may not use all of the dtype's range.
    """
    limit = largest_number(dtype)
    largest = jnp.where(largest == 0.0, limit, largest)
    smallest = limit / float(np.finfo(np.float32).max)
    largest = jnp.maximum(largest, 1.001 * smallest)
    return largest * (1.0 / limit), limit / largest


def quantized_values(exact: Any, dtype: Any) -> Any:
    """Numbers in units of their row's scale, rounded to even, as the dtype.

    None is larger than the dtype's largest number but for the rounding of the scale, which makes no
    other number of it.
    """
    if np.dtype(dtype).kind == "i":
        return jnp.round(exact).astype(dtype)
    limit = largest_number(dtype)
    # That is one instruction for two elements.
    return jnp.clip(exact, -limit, limit).astype(dtype)
