"""Errors of the functions of floats, measured against references of a higher precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
from math_support import (
    BFLOAT16,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    HOST,
    long_double,
    run,
    samples,
    ulp_errors,
)

from pallasite.errors import InvalidTypeError
from pallasite_std.math.table import BINARY, UNARY

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ONE_SIDED = {"asin", "acos", "atanh", "erf_inv"}


def _logistic(x):
    small = np.exp(np.minimum(x, 0))
    return np.where(x < 0, small / (1 + small), 1 / (1 + np.exp(-np.where(x < 0, 0, x))))


def _erfc(x):
    return np.vectorize(math.erfc)(x.astype(np.float64)).astype(x.dtype)


def _erf(x):
    return np.vectorize(math.erf)(x.astype(np.float64)).astype(x.dtype)


def _erf_inv(x):
    return scipy.special.erfinv(x.astype(np.float64)).astype(x.dtype)


# Reference, largest error in ulp in f32, and in f64 (the hardware's own error excluded; in f64 that
# of the reference included where it has no higher precision).
FUNCTIONS = {
    "exp": (np.exp, 1.1, 1.1),
    "exp2": (np.exp2, 0.6, 1.1),
    "expm1": (np.expm1, 1.7, 1.9),
    "logistic": (_logistic, 2.4, 2.0),
    "log": (np.log, 1.0, 1.0),
    "log2": (np.log2, 2.0, 1.6),
    "log1p": (np.log1p, 1.5, 1.5),
    "sin": (np.sin, 1.5, 1.0),
    "cos": (np.cos, 1.5, 1.0),
    "tan": (np.tan, 2.8, 2.3),
    "asin": (np.arcsin, 1.6, 1.8),
    "acos": (np.arccos, 1.4, 1.4),
    "atan": (np.arctan, 2.0, 2.5),
    "sinh": (np.sinh, 2.0, 2.0),
    "cosh": (np.cosh, 1.6, 1.6),
    "tanh": (np.tanh, 1.6, 2.5),
    "asinh": (np.arcsinh, 2.0, 2.0),
    "acosh": (np.arccosh, 2.0, 2.0),
    "atanh": (np.arctanh, 2.4, 2.4),
    "sqrt": (np.sqrt, 0.5, 0.501),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 0.501, 1.5),
    "cbrt": (np.cbrt, 1.1, 0.6),
    "erf": (_erf, 1.2, 2.0),
    "erfc": (_erfc, 3.6, 4.5),
    "erf_inv": (_erf_inv, 3.0, 8.0),
    "floor": (np.floor, 0, 0),
    "ceil": (np.ceil, 0, 0),
    "trunc": (np.trunc, 0, 0),
    "round_to_even": (np.rint, 0, 0),
    "sign": (np.sign, 0, 0),
    "neg": (np.negative, 0, 0),
    "abs": (np.abs, 0, 0),
    "square": (np.square, 0.5, 0.501),
}


def _arguments(name, dtype):
    generator = np.random.default_rng(1)
    arrays = [samples(dtype)]
    if name in ONE_SIDED:
        arrays.append(generator.uniform(-1, 1, 10000).astype(dtype))
    if name in ONE_SIDED | {"acosh", "log", "log1p", "log2"}:
        around = generator.normal(0, 1, 5000) * 10 ** generator.uniform(-9, -1, 5000)
        arrays.append((1 + around).astype(dtype))
    return np.concatenate(arrays)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_in_ulp(name, dtype):
    reference, single, double = FUNCTIONS[name]
    x = _arguments(name, dtype)
    result = run(lambda v: UNARY[name](v, dtype, False, HOST), [x], dtype)
    exact = reference(long_double(x))
    errors = ulp_errors(result, exact)
    if dtype == FLOAT64 and name in ("sin", "cos", "tan"):
        errors = errors[np.abs(x) <= 2.0**48]  # Of larger ones the reference is not exact.
    worst = np.argmax(errors)
    bound = single if dtype == FLOAT32 else double
    assert errors[worst] <= bound, (x[worst], result[worst], exact[worst])


ODD = ["sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "expm1", "log1p", "sqrt",
       "cbrt", "erf", "erf_inv", "floor", "ceil", "trunc", "round_to_even", "round_away_from_zero",
       "sign"]  # fmt: skip


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64, BFLOAT16, FLOAT16], ids=str)
def test_zeros_keep_their_sign(dtype):
    zeros = np.array([0.0, -0.0], dtype)
    for name in ODD:
        result = run(lambda v, n=name: UNARY[n](v, dtype, False, HOST), [zeros], dtype, 2)
        assert np.signbit(result).tolist() == [False, True], name
        assert (result == 0).all(), name


def test_round_away_from_zero():
    x = np.concatenate([samples(FLOAT32), np.arange(-10, 10, 0.25, np.float32),
                        np.float32([0.49999997, 8388607.5, -8388607.5])])  # fmt: skip
    result = run(lambda v: UNARY["round_away_from_zero"](v, FLOAT32), [x], FLOAT32)
    wide = x.astype(np.float64)
    expected = np.copysign(np.floor(np.abs(wide) + 0.5), wide)
    np.testing.assert_array_equal(result, expected.astype(np.float32))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_every_16_bit_number(dtype):
    """One rounding of an f32 result: never more than a little over half an ulp."""
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for name in ("exp", "exp2", "expm1", "log", "log1p", "logistic", "sin", "cos", "tan", "tanh",
                 "erf", "erfc", "sqrt", "rsqrt", "cbrt", "atan"):  # fmt: skip
        result = run(lambda v, n=name: UNARY[n](v, dtype, False, HOST), [x], dtype)
        exact = FUNCTIONS[name][0](x.astype(np.float64))
        errors = ulp_errors(result, exact)
        assert errors.max() < 0.51, (name, x[np.argmax(errors)], errors.max())


def test_8_bit_floats_go_through_f32():
    for dtype in FLOAT8:
        x = np.arange(256, dtype=np.uint8).view(dtype)
        for name in ("exp", "neg", "abs", "square", "tanh"):
            result = run(lambda v, n=name, d=dtype: UNARY[n](v, d, False, HOST), [x], dtype)
            expected = FUNCTIONS[name][0](x.astype(np.float32)).astype(dtype)
            np.testing.assert_array_equal(result.astype(np.float32), expected.astype(np.float32))


def test_is_finite_of_scalars_and_vectors():
    for dtype in (*FLOAT8, BFLOAT16, FLOAT16, FLOAT32, FLOAT64):
        x = np.array([0, 1, -2, np.inf, -np.inf, np.nan], np.float64).astype(dtype)
        expected = np.isfinite(x.astype(np.float64))
        for length in (0, 2):
            emit = lambda v, d=dtype: UNARY["is_finite"](v, d, False, HOST)  # noqa: E731
            np.testing.assert_array_equal(run(emit, [x], np.dtype(bool), length), expected)


APPROXIMATE = {
    # Reference, range of x, relative error (the host's instructions are almost exact).
    "exp": (np.exp, (-80, 80), 2e-5),
    "exp2": (np.exp2, (-120, 120), 1e-6),
    "log": (np.log, (0, 1e6), 1e-6),
    "log2": (np.log2, (0, 1e6), 1e-6),
    "sin": (np.sin, (-6, 6), 1e-6),
    "cos": (np.cos, (-6, 6), 1e-6),
    "tan": (np.tan, (-1, 1), 1e-6),
    "tanh": (np.tanh, (-9, 9), 1e-6),
    "logistic": (_logistic, (-80, 80), 2e-5),
    "sqrt": (np.sqrt, (0, 1e6), 1e-6),
    "rsqrt": (lambda x: 1 / np.sqrt(x), (0, 1e6), 1e-6),
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_forms(name):
    reference, (low, high), bound = APPROXIMATE[name]
    x = np.random.default_rng(0).uniform(low, high, 4000).astype(np.float32)
    result = run(lambda v: UNARY[name](v, FLOAT32, True, HOST), [x], FLOAT32)
    np.testing.assert_allclose(result, reference(x.astype(np.float64)), rtol=bound)


def test_approximation_is_ignored_for_f64():
    x = samples(FLOAT64, 1000)
    exact = run(lambda v: UNARY["exp"](v, FLOAT64, False, HOST), [x], FLOAT64)
    flagged = run(lambda v: UNARY["exp"](v, FLOAT64, True, HOST), [x], FLOAT64)
    np.testing.assert_array_equal(exact, flagged)


def _pairs(dtype, seed=0):
    special = np.array([0.0, -0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan], dtype)
    grid = np.meshgrid(special, special)
    x, y = samples(dtype, 5000, seed), samples(dtype, 5000, seed + 1)
    return np.concatenate([x, grid[0].ravel()]), np.concatenate([y, grid[1].ravel()])


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_atan2(dtype):
    kind = np.finfo(dtype)
    tiny = np.array([0, 1, 2, 3, 1000], dtype) * kind.smallest_subnormal
    tiny = np.concatenate([tiny, -tiny, [kind.tiny, kind.tiny * 2]]).astype(dtype)
    few = [grid.ravel() for grid in np.meshgrid(tiny, tiny)]
    y, x = (np.concatenate(pair) for pair in zip(_pairs(dtype), few, strict=True))
    result = run(lambda a, b: BINARY["atan2"](a, b, dtype, False, HOST), [y, x], dtype)
    exact = np.arctan2(long_double(y), long_double(x))
    errors = ulp_errors(result, exact)
    worst = np.argmax(errors)
    assert errors[worst] < 2.6, (y[worst], x[worst], result[worst], exact[worst])
    numbers = ~np.isnan(exact)
    assert (np.signbit(result) == np.signbit(exact))[numbers].all()


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64, BFLOAT16, FLOAT16], ids=str)
def test_quotient_is_correctly_rounded(dtype):
    x, y = _pairs(dtype)
    result = run(lambda a, b: BINARY["div"](a, b, dtype, False, HOST), [x, y], dtype)
    if dtype == FLOAT64:
        np.testing.assert_array_equal(result, x / y)
    else:
        expected = (x.astype(np.float64) / y.astype(np.float64)).astype(dtype)
        np.testing.assert_array_equal(result.astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64, BFLOAT16, FLOAT16], ids=str)
def test_float_remainder_is_exact(dtype):
    bits = np.random.default_rng(0).integers(0, 256, (2, 4096 * dtype.itemsize), np.uint8)
    pairs = zip(_pairs(dtype), bits.view(dtype), strict=True)
    x, y = (np.concatenate([special, anything]) for special, anything in pairs)
    result = run(lambda a, b: BINARY["rem"](a, b, dtype, False, HOST), [x, y], dtype)
    wide = np.float64
    with np.errstate(invalid="ignore"):
        expected = np.fmod(x.astype(wide), y.astype(wide))
    np.testing.assert_array_equal(result.astype(wide), expected.astype(dtype).astype(wide))
    zeros = result == 0
    assert (np.signbit(result) == np.signbit(x))[zeros].all()


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64, BFLOAT16, FLOAT16], ids=str)
def test_nextafter(dtype):
    x, y = _pairs(dtype)
    result = run(lambda a, b: BINARY["nextafter"](a, b, dtype, False, HOST), [x, y], dtype)
    np.testing.assert_array_equal(result.astype(np.float64), np.nextafter(x, y).astype(np.float64))


@pytest.mark.parametrize("dtype", [*FLOAT8, FLOAT32, FLOAT64, BFLOAT16, FLOAT16], ids=str)
def test_comparisons_minima_and_maxima_of_floats(dtype):
    special = np.array([0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan], np.float64).astype(dtype)
    x, y = (grid.ravel() for grid in np.meshgrid(special, special))
    wide = [x.astype(np.float64), y.astype(np.float64)]
    for name, reference in (("eq", np.equal), ("ne", np.not_equal), ("lt", np.less),
                            ("le", np.less_equal), ("gt", np.greater),
                            ("ge", np.greater_equal)):  # fmt: skip
        emit = lambda a, b, n=name: BINARY[n](a, b, dtype, False, HOST)  # noqa: E731
        np.testing.assert_array_equal(run(emit, [x, y], np.dtype(bool)), reference(*wide))
    for name, reference in (("max", np.maximum), ("min", np.minimum)):
        emit = lambda a, b, n=name: BINARY[n](a, b, dtype, False, HOST)  # noqa: E731
        np.testing.assert_array_equal(run(emit, [x, y], dtype).astype(np.float64), reference(*wide))


@pytest.mark.parametrize("dtype", [*FLOAT8, FLOAT32, FLOAT64, BFLOAT16, FLOAT16], ids=str)
def test_sums_and_products(dtype):
    generator = np.random.default_rng(0)
    x, y = (generator.normal(0, 4, 500).astype(dtype) for _ in range(2))
    for name, reference in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        emit = lambda a, b, n=name: BINARY[n](a, b, dtype, False, HOST)  # noqa: E731
        result = run(emit, [x, y], dtype).astype(np.float64)
        wide = np.float64 if dtype == FLOAT64 else np.float32
        expected = reference(x.astype(wide), y.astype(wide)).astype(dtype).astype(np.float64)
        np.testing.assert_array_equal(result, expected)


def test_functions_of_floats_refuse_integers():
    with pytest.raises(InvalidTypeError, match="exp of int32"):
        run(lambda v: UNARY["exp"](v, np.int32), [np.arange(4, dtype=np.int32)], np.int32)
