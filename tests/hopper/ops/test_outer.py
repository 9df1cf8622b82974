"""Products of very few elements along k, against products in double precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallasite
from pallasite_hopper.ops import matmul
from pallasite_hopper.ops.dense import run
from pallasite_hopper.ops.dense.cost import Sizes
from pallasite_hopper.ops.dense.outer import MOST_PRODUCTS, outer_config

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)


def operands(m, n, k, dtype):
    random = np.random.default_rng(m + n + k)
    return [random.standard_normal((k, extent)).astype(dtype) for extent in (m, n)]


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "out"),
    [
        (8, 256, 1, BF16, BF16),
        (24, 1000, 3, F16, np.float32),
        (16, 2272, 4, BF16, np.float32),
        (32, 4096, MOST_PRODUCTS, BF16, BF16),
    ],
)
def test_sums_of_outer_products(monkeypatch, m, n, k, dtype, out):
    a, b = operands(m, n, k, dtype)
    assert outer_config(Sizes(m, n, k, 2, 2, True, False)) is not None
    # Of more elements along k another kernel takes less time.
    monkeypatch.setattr(run, "short_config", lambda sizes: None)
    function = jax.jit(lambda a, b: matmul(a, b, transpose_a=True, out_dtype=out))
    assert "outer_products" in str(jax.make_jaxpr(function)(a, b))
    with pallasite.config.scoped(sanitize=True):
        result = np.asarray(function(a, b)).astype(np.float64)
    expected = a.astype(np.float64).T @ b.astype(np.float64)
    tolerance = 8e-3 if out == BF16 else 2e-6
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.runs_kernels
def test_several():
    """``jax.vmap`` of the gradient of a product's weights, each by one token."""
    a, b = (np.stack([operands(16, 512, 1, BF16)[i] * scale for scale in (1, 2)]) for i in (0, 1))
    product = jax.vmap(lambda a, b: matmul(a, b, transpose_a=True, out_dtype=jnp.float32))
    expected = np.einsum("bkm,bkn->bmn", a.astype(np.float64), b.astype(np.float64))
    np.testing.assert_allclose(jax.jit(product)(a, b), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("m", "n", "k", "columns"),
    [
        (64, 5120, 4, 512),
        (64, 5120, 8, 512),
        (4096, 5120, 8, 1024),
        (64, 18944, 4, 512),
        (64, 4544, 4, 568),
        (64, 768, 4, 384),
        (64, 1000, 4, 1000),
        (64, 32064, 4, None),
        (64, 64, 4, None),
    ],
)
def test_columns_of_blocks(m, n, k, columns):
    """Equal parts of a row, a vector of which is a lane's; none where these would be too narrow."""
    found = outer_config(Sizes(m, n, k, 2, 2, True, False))
    assert (found and found.columns) == columns
    for extent in (24, 16):
        times = outer_config(Sizes(extent, 5120, 4, 2, 2, True, False)).times
        assert extent % (4 * times) == 0


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(64, 1024, MOST_PRODUCTS + 1, 2, 2, True, False),
        Sizes(3072, 8192, 13, 2, 2, True, False),  # Multiplying takes longer than writing.
        Sizes(64, 1024, 8, 2, 2, False, False),
        Sizes(64, 1024, 8, 2, 2, True, True),
        Sizes(64, 1024, 8, 4, 4, True, False),
        Sizes(63, 1024, 8, 2, 2, True, False),
        Sizes(64, 1024, 0, 2, 2, True, False),
    ],
)
def test_other_products(sizes):
    assert outer_config(sizes) is None
