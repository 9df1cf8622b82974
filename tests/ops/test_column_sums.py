"""Sums of matrices by columns, against NumPy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallasite_std.ops.rows.column_sums import column_sums

pytestmark = pytest.mark.runs_kernels


@pytest.mark.parametrize(
    ("rows", "columns", "dtypes"),
    [
        (2, 40, [np.float32]),  # Fewer rows than a warpgroup takes at a time.
        (197, 131, [jnp.bfloat16, np.float32]),  # Some are left behind whole tiles, in both.
        (70, 3101, [np.float32, jnp.float16]),  # Blocks of 32 columns, of which one has fewer.
        (1030, 6, [np.float32]),
        (33, 70_000, [jnp.bfloat16, jnp.bfloat16]),  # Blocks of 128 columns.
    ],
)
def test_sums(rows, columns, dtypes):
    draw = np.random.default_rng(rows)
    given = [draw.normal(size=(rows, columns)).astype(np.float32) + 1 for _ in dtypes]
    found = column_sums([jnp.asarray(one) for one in given], dtypes, 132)
    for one, dtype, array in zip(found, dtypes, given, strict=True):
        assert one.dtype == dtype and one.shape == (columns,)
        exact = np.sum(array, axis=0, dtype=np.float64)
        error = np.linalg.norm(np.asarray(one, np.float64) - exact) / np.linalg.norm(exact)
        assert error < (1e-6 if dtype == np.float32 else 3e-3)


def test_sums_of_nothing():
    assert column_sums([], [], 132) == []
