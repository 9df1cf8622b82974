"""Arrays as the copy engine reads them: rows begin at multiples of 16 bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

ROW_BYTES = 16
"""Rows in global memory that the copy engine reads begin at multiples of this."""


def padded_columns(columns: int, size: int) -> int:
    """So many columns of elements of ``size`` bytes that a row is a multiple of 16 bytes."""
    multiple = max(1, ROW_BYTES // size)
    return -(-columns // multiple) * multiple


def aligned(array: jax.Array) -> jax.Array:
    """An array whose rows the copy engine can read: padded by zeros if they are not aligned."""
    columns = padded_columns(array.shape[-1], np.dtype(array.dtype).itemsize)
    return padded(array, array.ndim - 1, columns)


def padded(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    """An array with zeros at the end of an axis, to a multiple of an extent."""
    rest = -array.shape[axis] % multiple
    if not rest:
        return array
    return jnp.pad(array, [(0, rest if one == axis else 0) for one in range(array.ndim)])


def whole_vector(vector: jax.Array, multiple: int) -> jax.Array:
    """A vector that can be read in whole tiles."""
    return padded(vector, 0, multiple)
