"""Copies of matrices to rows that the copy engine can read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallasite import config
from pallasite_hopper.ops.dense.padding import aligned, with_longer_rows

pytestmark = pytest.mark.runs_kernels


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((5, 13), "bfloat16"),
        ((33, 98), "float16"),  # Rows that begin at words.
        ((130, 67), "bfloat16"),
        ((3, 1030), "float16"),
        ((1, 9), "bfloat16"),
        ((17, 1001), "int16"),
        ((9, 36), "float16"),
        ((2, 40), "float16"),  # Rows that are multiples of vectors.
        ((4, 3), "float16"),  # Less than a vector.
        ((7, 13), "int8"),
        ((33, 99), "float8_e4m3fn"),
        ((130, 70), "float8_e5m2"),
        ((3, 2060), "int8"),
        ((1, 5), "int8"),
        ((17, 1001), "float8_e4m3fn"),
    ],
)
def test_rows(shape, dtype):
    """Rows that begin at any element, also of a batch; zeros follow them."""
    generator = np.random.default_rng(shape[1])
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    least, most = (-999, 999) if dtype.itemsize == 2 else (-99, 99)
    x = generator.integers(least, most, (3, *shape)).astype(dtype)
    with config.scoped(sanitize=True):
        found = np.asarray(jax.vmap(with_longer_rows)(jnp.asarray(x)))
        np.testing.assert_array_equal(np.asarray(aligned(jnp.asarray(x[0]))), found[0])
    wanted = np.pad(x, ((0, 0), (0, 0), (0, -shape[1] % (16 // dtype.itemsize))))
    np.testing.assert_array_equal(found, wanted)
