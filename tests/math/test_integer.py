"""Integer arithmetic with the semantics of JAX, exhaustively for 8 bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from math_support import run

from pallasite.errors import InvalidTypeError
from pallasite_std.math import integer
from pallasite_std.math.table import BINARY, DTYPES, UNARY, kind

DTYPE_NAMES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


def _pairs(dtype):
    if dtype.itemsize == 1:
        values = np.arange(256).astype(dtype)
        return tuple(grid.ravel() for grid in np.meshgrid(values, values))
    info = np.iinfo(dtype)
    generator = np.random.default_rng(0)
    edges = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 100, info.max, info.max - 1, info.min, info.min + 1]
    edges = np.array(edges + ([-1, -2, -7] if info.min else []), dtype)
    grid = np.meshgrid(edges, edges)
    anything = generator.integers(info.min, info.max, (2, 4000), dtype, endpoint=True)
    small = generator.integers(0, 20, (2, 1000)).astype(dtype)
    return tuple(np.concatenate([g.ravel(), a, s, a[:1000]])
                 for g, a, s in zip(grid, anything, small[::-1], strict=True))  # fmt: skip


def _wrap(values, dtype):
    info = np.iinfo(dtype)
    span = int(info.max) - int(info.min) + 1
    low = int(info.min)
    return np.array([(v - low) % span + low for v in values], object)


def _quotient(a, b):
    if b == 0:
        return -1
    whole = abs(a) // abs(b)
    return whole if (a < 0) == (b < 0) else -whole


REFERENCES = {
    "add": lambda a, b, w: a + b,
    "sub": lambda a, b, w: a - b,
    "mul": lambda a, b, w: a * b,
    "div": lambda a, b, w: _quotient(a, b),
    "rem": lambda a, b, w: a if b == 0 else a - _quotient(a, b) * b,
    "max": lambda a, b, w: max(a, b),
    "min": lambda a, b, w: min(a, b),
    "and": lambda a, b, w: a & b,
    "or": lambda a, b, w: a | b,
    "xor": lambda a, b, w: a ^ b,
    "mul_hi": lambda a, b, w: (a * b) >> w,
    "shift_left": lambda a, b, w: a << b if 0 <= b < w else 0,
    "shift_right_logical": lambda a, b, w: (a & ((1 << w) - 1)) >> b if 0 <= b < w else 0,
}


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("name", REFERENCES)
def test_binary(name, dtype):
    dtype = np.dtype(dtype)
    x, y = _pairs(dtype)
    result = run(lambda a, b: BINARY[name](a, b, dtype, False), [x, y], dtype)
    width = dtype.itemsize * 8
    function = REFERENCES[name]
    exact = [function(int(a), int(b), width) for a, b in zip(x, y, strict=True)]
    np.testing.assert_array_equal(result.astype(object), _wrap(exact, dtype))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_arithmetic_shift(dtype):
    dtype = np.dtype(dtype)
    x, y = _pairs(dtype)
    name = "shift_right_arithmetic"
    result = run(lambda a, b: BINARY[name](a, b, dtype, False), [x, y], dtype)
    width = dtype.itemsize * 8
    signed = x.astype(f"i{dtype.itemsize}")
    exact = [int(a) >> (int(b) if 0 <= b < width else width) for a, b in
             zip(signed, y, strict=True)]  # fmt: skip
    np.testing.assert_array_equal(result.astype(object), _wrap(exact, dtype))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_comparisons(dtype):
    dtype = np.dtype(dtype)
    x, y = _pairs(dtype)
    for name, reference in (("eq", np.equal), ("ne", np.not_equal), ("lt", np.less),
                            ("le", np.less_equal), ("gt", np.greater),
                            ("ge", np.greater_equal)):  # fmt: skip
        emit = lambda a, b, n=name: BINARY[n](a, b, dtype, False)  # noqa: E731
        np.testing.assert_array_equal(run(emit, [x, y], np.dtype(bool)), reference(x, y))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_unary(dtype):
    dtype = np.dtype(dtype)
    x = _pairs(dtype)[0]
    width = dtype.itemsize * 8
    mask = (1 << width) - 1
    references = {
        "neg": lambda v: -v,
        "abs": abs,
        "sign": lambda v: (v > 0) - (v < 0),
        "square": lambda v: v * v,
        "not": lambda v: ~v,
        "population_count": lambda v: (v & mask).bit_count(),
        "clz": lambda v: width - (v & mask).bit_length(),
    }
    for name, function in references.items():
        result = run(lambda v, n=name: UNARY[n](v, dtype, False), [x], dtype)
        exact = [function(int(v)) for v in x]
        np.testing.assert_array_equal(result.astype(object), _wrap(exact, dtype), err_msg=name)


LOGICAL = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "max": np.maximum,
           "min": np.minimum, "eq": np.equal, "lt": np.less, "ge": np.greater_equal}  # fmt: skip


def test_booleans():
    x, y = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    dtype = np.dtype(bool)
    for name, reference in LOGICAL.items():
        emit = lambda a, b, n=name: BINARY[n](a, b, dtype, False)  # noqa: E731
        np.testing.assert_array_equal(run(emit, [x, y], dtype), reference(x, y))
    np.testing.assert_array_equal(run(lambda v: UNARY["not"](v, dtype), [x], dtype), ~x)
    with pytest.raises(InvalidTypeError, match="add is not defined for bool"):
        run(lambda a, b: BINARY["add"](a, b, dtype), [x, y], dtype)


def test_four_bit_integers():
    for dtype in (np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)):
        low = int(ml_dtypes.iinfo(dtype).min)
        values = np.arange(low, low + 16)
        x, y = (grid.ravel() for grid in np.meshgrid(values, values))
        for name in ("add", "mul", "div", "rem", "max", "min"):
            function = REFERENCES[name]
            exact = [(function(int(a), int(b), 4) - low) % 16 + low for a, b in
                     zip(x, y, strict=True)]  # fmt: skip
            emit = lambda a, b, n=name, d=dtype: BINARY[n](a, b, d, False)  # noqa: E731
            result = run(emit, [x.astype(dtype), y.astype(dtype)], dtype)
            np.testing.assert_array_equal(result.astype(np.int64), exact)


def test_select_and_clamp():
    dtype = np.dtype(np.int32)
    x = np.arange(-20, 20, dtype=dtype)
    low, high = np.full_like(x, -5), np.full_like(x, 7)
    result = run(lambda a, b, c: integer.clamp(a, b, c, dtype), [low, x, high], dtype)
    np.testing.assert_array_equal(result, np.clip(x, -5, 7))
    floats = np.array([1.0, np.nan, -9.0, 9.0], np.float32)
    bound = np.ones(4, np.float32)
    result = run(lambda a, b, c: integer.clamp(a, b, c, np.float32), [-bound, floats, bound],
                 np.dtype(np.float32))  # fmt: skip
    np.testing.assert_array_equal(result, [1.0, np.nan, -1.0, 1.0])
    condition = np.array([True, False, True, False])
    result = run(integer.select, [condition, x[:4], x[4:8]], dtype)
    np.testing.assert_array_equal(result, np.where(condition, x[:4], x[4:8]))


def test_the_table_says_what_it_accepts():
    assert set(DTYPES) == set(UNARY) | set(BINARY)
    for name, kinds in DTYPES.items():
        for dtype in (np.float32, np.int32, bool):
            x = np.zeros(4, dtype)
            output = np.dtype(bool) if name in {"is_finite", *integer.FLOAT_PREDICATES} else x.dtype
            table, count = (UNARY, 1) if name in UNARY else (BINARY, 2)
            if kind(dtype) not in kinds:
                with pytest.raises(InvalidTypeError):
                    run(lambda *v, t=table, n=name, d=dtype: t[n](*v, d), [x] * count, output)
