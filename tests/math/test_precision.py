"""``reduce_precision`` against XLA, and signs of 8-bit floats against ml_dtypes."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from math_support import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, FLOAT64, HOST, run

from pallasite_std.math.conversion import convert
from pallasite_std.math.precision import reduce_precision
from pallasite_std.math.table import UNARY

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _numbers(dtype: np.dtype, generator: np.random.Generator) -> np.ndarray:
    """All numbers of a dtype, or random ones of all sizes."""
    if dtype.itemsize <= 2:
        return np.arange(1 << 8 * dtype.itemsize, dtype=UNSIGNED[dtype.itemsize]).view(dtype)
    anything = generator.integers(0, 256, 2048 * dtype.itemsize, np.uint8).view(dtype)
    usual = generator.standard_normal(2048) * 2.0 ** generator.integers(-40, 40, 2048)
    return np.concatenate([anything, usual.astype(dtype)])


@pytest.mark.parametrize("dtype", [*FLOAT8, FLOAT16, BFLOAT16, FLOAT32, FLOAT64], ids=str)
def test_reduce_precision(dtype):
    generator = np.random.default_rng(0)
    x = _numbers(dtype, generator)
    formats = [(5, 10), (8, 7), (8, 23)]
    formats += [(int(generator.integers(1, 12)), int(generator.integers(0, 24))) for _ in range(3)]
    for exponent, fraction in formats:
        result = run(
            lambda v, e=exponent, f=fraction: reduce_precision(v, dtype, e, f, HOST), [x], dtype
        )
        with jax.enable_x64(True):
            reduced = jax.jit(lambda v, e=exponent, f=fraction: lax.reduce_precision(v, e, f))(x)
        expected = np.asarray(reduced)
        numbers = ~np.isnan(x.astype(np.float32)) if dtype.itemsize < 8 else ~np.isnan(x)
        bits = [array[numbers].view(UNSIGNED[dtype.itemsize]) for array in (result, expected)]
        np.testing.assert_array_equal(*bits, err_msg=str((exponent, fraction)))
        assert np.isnan(result[~numbers].astype(np.float32)).all()


@pytest.mark.parametrize(
    "name",
    ["e4m3fn", "e5m2", "e4m3b11fnuz", "e4m3fnuz", "e5m2fnuz", "e8m0fnu"],
)
def test_signs_of_8_bit_floats(name):
    """There are formats without negative zero, and without a sign at all."""
    dtype = np.dtype(getattr(ml_dtypes, "float8_" + name))
    x = _numbers(dtype, np.random.default_rng(0))
    wide = x.astype(np.float32)
    for operation, reference in (("neg", np.negative), ("abs", np.abs)):
        result = run(lambda v, n=operation: UNARY[n](v, dtype), [x], dtype)
        expected = reference(wide).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(result.astype(np.float32), expected)
        zeros = expected == 0
        np.testing.assert_array_equal(
            np.signbit(result.astype(np.float32))[zeros], np.signbit(expected)[zeros]
        )
    truths = run(lambda v: convert(v, dtype, np.dtype(bool)), [x], np.dtype(bool))
    np.testing.assert_array_equal(truths, wide != 0)
