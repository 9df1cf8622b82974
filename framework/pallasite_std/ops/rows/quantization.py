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


def row_scale(largest: Any, dtype: Any) -> Any:
    """The scale of a row from the largest magnitude in it; 1 for a row of zeros."""
    return jnp.where(largest == 0.0, 1.0, largest * (1.0 / largest_number(dtype)))


def quantized_values(exact: Any, dtype: Any) -> Any:
    """Numbers divided by their scale, rounded to even and saturated, as the dtype."""
    limit = largest_number(dtype)
    exact = jnp.clip(exact, -limit, limit)
    if np.dtype(dtype).kind == "i":
        exact = jnp.round(exact)
    return exact.astype(dtype)
