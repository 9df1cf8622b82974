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
    ],
)
def test_rows(shape, dtype):
    """Rows that begin at any element, also of a batch; zeros follow them."""
    generator = np.random.default_rng(shape[1])
    x = generator.integers(-999, 999, (3, *shape)).astype(
        np.dtype(getattr(ml_dtypes, dtype, dtype))
    )
    with config.scoped(sanitize=True):
        found = np.asarray(jax.vmap(with_longer_rows)(jnp.asarray(x)))
        np.testing.assert_array_equal(np.asarray(aligned(jnp.asarray(x[0]))), found[0])
    np.testing.assert_array_equal(found, np.pad(x, ((0, 0), (0, 0), (0, -shape[1] % 8))))
