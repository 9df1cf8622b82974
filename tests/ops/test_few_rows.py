"""Norms and quotients of few rows, which warpgroups share, against formulas in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from norm_reference import norm_and_reference

from pallasite import ops
from pallasite_std.ops.rows import norm_kernels, tiling
from pallasite_std.ops.rows.tiling import Registers, few_rows_tiling, row_tiling

pytestmark = pytest.mark.runs_kernels

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "centered", "residual"),
    [(3, 10181, BF16, True, False), (2, 9001, F32, False, True)],
)
def test_norms(rows, columns, dtype, centered, residual, ragged, monkeypatch):
    """Of columns that do not divide, the last warpgroup has fewer; else rows are read again."""
    monkeypatch.setattr(tiling, "RAGGED", ragged)
    found = few_rows_tiling(rows, row_tiling(rows, columns, dtype.itemsize, Registers()), 2)
    assert found.resident == found.ragged == ragged
    norm_kernels.forward.cache_clear()
    value, exact = norm_and_reference(
        rows, columns, dtype, centered=centered, residual=residual, quantize=None
    )
    norm_kernels.forward.cache_clear()
    tolerance = 1e-6 if dtype == F32 else 6e-3
    assert np.linalg.norm(value - exact) / np.linalg.norm(exact) < tolerance


def test_quotients():
    x = np.random.default_rng(1).normal(size=(3, 5723)).astype(np.float32)
    values, scales = ops.quantize(jnp.asarray(x), np.int8)
    back = np.asarray(values, np.float64) * np.asarray(scales, np.float64)[:, None]
    assert np.abs(back - x).max() <= np.abs(x).max() / 127


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tilings(itemsize):
    """Every column has a warpgroup, of which all have some."""
    for columns in range(100, 40_000, 173):
        for rows in (1, 60, 500, 600):
            found = few_rows_tiling(
                rows, row_tiling(rows, columns, itemsize, Registers()), itemsize
            )
            if found.ragged:
                assert rows < tiling.BUSY_ROWS and 1 < found.threads <= 8
                assert 0 < columns - (found.threads - 1) * found.chunk < found.chunk
                assert found.chunk <= 32 * tiling.LANES
