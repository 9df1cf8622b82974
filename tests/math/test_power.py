"""Powers: general, with integer exponents, and with static ones."""

from __future__ import annotations

import numpy as np
import pytest
from math_support import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    HOST,
    long_double,
    run,
    samples,
    ulp_errors,
)

from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite_std.math import power

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def _pow(dtype, approximate=False):
    return lambda x, y: power.power(x, y, dtype, approximate, HOST)


@pytest.mark.parametrize(("dtype", "bound"), [(FLOAT32, 1.5), (FLOAT64, 1.5)], ids=str)
def test_power_in_ulp(dtype, bound):
    generator = np.random.default_rng(0)
    count = 20000
    x = np.exp(generator.normal(0, 1, count) * 10 ** generator.uniform(-6, 1.5, count))
    y = generator.normal(0, 1, count) * 10 ** generator.uniform(-3, 3, count)
    x, y = x.astype(dtype), y.astype(dtype)
    result = run(_pow(dtype), [x, y], dtype)
    exact = np.power(long_double(x), long_double(y))
    errors = ulp_errors(result, exact)
    worst = np.argmax(errors)
    assert errors[worst] < bound, (x[worst], y[worst], result[worst], exact[worst])


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64, BFLOAT16, FLOAT16], ids=str)
def test_special_cases_are_those_of_c(dtype):
    special = np.array(
        [0.0, 1.0, 0.5, 2.0, 3.0, 4.0, 2.5, 0.75, 1e-7, 65504.0, 1e30, 9.0, np.inf], np.float64
    ).astype(dtype)
    values = np.concatenate([special, -special, np.array([np.nan], dtype)])
    x, y = (grid.ravel() for grid in np.meshgrid(values, values))
    result = run(_pow(dtype), [x, y], dtype)
    exact = np.power(long_double(x), long_double(y))
    errors = ulp_errors(result, exact)
    worst = np.argmax(errors)
    assert errors[worst] < 1.5, (x[worst], y[worst], result[worst], exact[worst])
    numbers = ~np.isnan(exact)
    assert (np.signbit(result) == np.signbit(exact))[numbers].all()


def test_any_bits():
    x, y = samples(FLOAT32, 20000, 5), samples(FLOAT32, 20000, 6)
    result = run(_pow(FLOAT32), [x, y], FLOAT32)
    assert ulp_errors(result, np.power(long_double(x), long_double(y))).max() < 1.5


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("integer", [np.int8, np.int32, np.int64])
def test_integer_exponents(dtype, integer):
    generator = np.random.default_rng(0)
    x = generator.normal(0, 2, 4000).astype(dtype)
    y = generator.integers(-40, 40, 4000).astype(integer)
    x = np.concatenate([x, np.array([-0.0, -0.0, -np.inf, -1.0, np.nan], dtype)])
    y = np.concatenate([y, np.array([-3, 4, 3, 7, 0], integer)])
    result = run(_pow(dtype), [x, y], dtype)
    exact = np.power(long_double(x), y.astype(long_double(x).dtype))
    assert ulp_errors(result, exact).max() < 1.5


def test_parity_of_large_integer_exponents():
    x = np.array([-1.0, -1.0], np.float32)
    y = np.array([2**31 - 1, 2**31 - 2], np.int32)
    np.testing.assert_array_equal(run(_pow(FLOAT32), [x, y], FLOAT32, 0), [-1.0, 1.0])


def test_approximate_power():
    generator = np.random.default_rng(0)
    x = generator.uniform(0.1, 10, 2000).astype(np.float32)
    x[::2] *= -1
    y = generator.uniform(-8, 8, 2000).astype(np.float32)
    y[::2] = np.rint(y[::2])
    result = run(_pow(FLOAT32, True), [x, y], FLOAT32)
    np.testing.assert_allclose(result, np.power(x.astype(np.float64), y), rtol=1e-5)


@pytest.mark.parametrize("exponent", [-5, -2, -1, 0, 1, 2, 3, 7, 10, 31])
def test_static_exponents(exponent):
    for dtype in (FLOAT32, FLOAT64, BFLOAT16, FLOAT16):
        x = np.random.default_rng(0).normal(0, 1.5, 500).astype(dtype)
        emit = lambda v, d=dtype: power.integer_pow(v, exponent, d, False, HOST)  # noqa: E731
        result = run(emit, [x], dtype)
        exact = long_double(x) ** exponent
        narrow = dtype in (BFLOAT16, FLOAT16)
        bound = 0.51 if narrow else 0.5 * abs(exponent) + 1
        assert ulp_errors(result, exact).max() < bound, dtype
    for dtype in (np.int32, np.uint8, np.int64):
        if exponent < 0:
            with pytest.raises(InvalidValueError, match="negative power"):
                power.integer_pow(None, exponent, dtype)  # type: ignore[arg-type]
            continue
        x = np.arange(-20, 20).astype(dtype)
        emit = lambda v, d=dtype: power.integer_pow(v, exponent, d)  # noqa: E731
        np.testing.assert_array_equal(run(emit, [x], np.dtype(dtype)), x**exponent)


def test_power_refuses_integers():
    x = np.arange(4, dtype=np.int32)
    with pytest.raises(InvalidTypeError, match="pow of int32"):
        run(lambda a, b: power.power(a, b, np.int32), [x, x], np.int32)
