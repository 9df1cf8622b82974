"""Products of one row with matrices whose rows lie along k: which are left to XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallasite_hopper.ops import matmul
from pallasite_hopper.ops.dense.cost import Sizes
from pallasite_hopper.ops.dense.vector import vector_left_to_xla

BF16 = np.dtype(ml_dtypes.bfloat16)
F8 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("m", "n", "k", "size", "along_k", "left"),
    [
        (1, 400, 1824, 1, True, True),
        (1, 455, 352, 1, True, True),
        (1, 741, 999, 1, True, True),  # Rows that are no whole vectors.
        (1, 3048, 2240, 2, True, True),
        (1, 2768, 1248, 1, True, False),  # Our kernel is faster.
        (1, 8192, 8192, 2, True, False),  # XLA has another kernel.
        (2, 400, 1824, 1, True, False),
        (1, 3048, 2240, 2, False, False),
        (1, 0, 2240, 2, True, False),
        (1, 64, 0, 2, True, False),
    ],
)
def test_which_are_left_to_xla(m, n, k, size, along_k, left):
    assert vector_left_to_xla(Sizes(m, n, k, size, 2, False, along_k)) == left


@pytest.mark.runs_kernels
@pytest.mark.parametrize("activation", [None, jax.nn.relu])
@pytest.mark.parametrize("dtype", [BF16, F8])
def test_products_by_xla(dtype, activation):
    """The result is that of the operands, without a kernel of ours; with an epilogue it has one."""
    random = np.random.default_rng(3)
    a, b = (random.standard_normal(shape).astype(dtype) for shape in ((1, 256), (96, 256)))
    options = {"transpose_b": True, "out_dtype": jnp.float32, "activation": activation}
    product = jax.jit(lambda a, b: matmul(a, b, **options))
    assert ("pallasite_kernel" in str(jax.make_jaxpr(product)(a, b))) == (activation is not None)
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    if activation is not None:
        expected = np.maximum(expected, 0)
    np.testing.assert_allclose(product(a, b), expected, rtol=1e-5, atol=1e-4)
