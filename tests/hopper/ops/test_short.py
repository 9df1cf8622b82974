"""Products of few elements along k by tensor cores, against products in double precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallasite
from pallasite_hopper.ops import matmul
from pallasite_hopper.ops.dense.cost import Sizes
from pallasite_hopper.ops.dense.short import MOST_PRODUCTS, ShortConfig, build, short_config
from pallasite_std.api import MatmulProblem

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)


def operands(m, n, k, dtype):
    random = np.random.default_rng(m + n + k)
    return [random.standard_normal((k, extent)).astype(dtype) for extent in (m, n)]


def assert_near(result, a, b):
    expected = a.astype(np.float64).T @ b.astype(np.float64)
    tolerance = 2e-6 if result.dtype == F32 else 8e-3
    result = np.asarray(result).astype(np.float64)
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.runs_kernels
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "out"),
    [
        (200, 264, 11, BF16, BF16),  # Rows and columns beyond the end of both.
        (256, 136, 16, F16, F16),
        (72, 520, 17, BF16, F32),
        (128, 256, MOST_PRODUCTS, BF16, BF16),
    ],
)
def test_few_products(m, n, k, dtype, out):
    a, b = operands(m, n, k, dtype)
    function = jax.jit(lambda a, b: matmul(a, b, transpose_a=True, out_dtype=out))
    assert "short_products" in str(jax.make_jaxpr(function)(a, b))
    with pallasite.config.scoped(sanitize=True):
        assert_near(function(a, b), a, b)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("config", [ShortConfig(columns=64, times=3), ShortConfig(columns=256)])
def test_configurations(config):
    a, b = operands(200, 392, 9, BF16)
    problem = MatmulProblem(200, 392, 9, BF16, BF16, BF16, F32, True, False)
    assert_near(jax.jit(build(problem, config))(a, b), a, b)


@pytest.mark.runs_kernels
def test_gradient_of_weights():
    """By few tokens: it is such a product."""
    x, weights, cotangent = (
        jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)
        for seed, shape in enumerate(((10, 256), (256, 512), (10, 512)))
    )

    def loss(weights):
        return jnp.sum((matmul(x, weights) * cotangent).astype(jnp.float32))

    gradient = jax.jit(jax.grad(loss))
    assert "short_products" in str(jax.make_jaxpr(gradient)(weights))
    assert_near(gradient(weights), np.asarray(x), np.asarray(cotangent))


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        (Sizes(5120, 5120, 11, 2, 2, True, False), True),
        (Sizes(27648, 5120, 25, 2, 2, True, False), True),
        (Sizes(5120, 5120, MOST_PRODUCTS + 1, 2, 2, True, False), False),
        (Sizes(5120, 5120, 11, 2, 2, False, False), False),
        (Sizes(5120, 5120, 11, 2, 2, True, True), False),
        (Sizes(5120, 5120, 11, 4, 4, True, False), False),
        (Sizes(5120, 5116, 11, 2, 2, True, False), False),  # Rows that are no whole vectors.
        (Sizes(5120, 56, 11, 2, 2, True, False), False),
        (Sizes(5120, 5120, 0, 2, 2, True, False), False),
    ],
)
def test_which_products(sizes, chosen):
    assert (short_config(sizes) is not None) == chosen
