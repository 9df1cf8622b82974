"""Conversions between all dtypes, exhaustively where the source has at most 16 bits."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from math_support import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, FLOAT64, HOST, run, samples

from pallasite.errors import InvalidTypeError, UnsupportedError
from pallasite.ir import types
from pallasite_std.math.conversion import bitcast, convert

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SCALE = np.dtype(ml_dtypes.float8_e8m0fnu)
FLOAT4 = np.dtype(ml_dtypes.float4_e2m1fn)
FLOATS = [*FLOAT8, BFLOAT16, FLOAT16, FLOAT32, FLOAT64, SCALE, FLOAT4]
INTEGERS = [np.dtype(d) for d in (ml_dtypes.int4, ml_dtypes.uint4, "int8", "uint8", "int16",
                                  "uint16", "int32", "uint32", "int64", "uint64")]  # fmt: skip
BOOL = np.dtype(bool)


def _limits(dtype):
    info = ml_dtypes.iinfo(dtype)
    return int(info.min), int(info.max)


def _integers(dtype):
    low, high = _limits(dtype)
    if high - low < 1 << 16:
        return np.arange(low, high + 1).astype(dtype)
    generator = np.random.default_rng(0)
    spread = [int(s) * (1 << int(b)) + int(d) for s, b, d in zip(
        generator.choice([-1, 1], 6000), generator.integers(0, 64, 6000),
        generator.integers(-3, 4, 6000), strict=True)]  # fmt: skip
    anything = generator.integers(low, high, 6000, dtype=dtype, endpoint=True)
    inside = [v for v in [*spread, low, low + 1, high, high - 1, 0, 1] if low <= v <= high]
    return np.concatenate([anything, np.array(inside, dtype)])


def _floats(dtype):
    if dtype == FLOAT4:
        return np.arange(16, dtype=np.uint8).view(dtype)
    if dtype.itemsize <= 2:
        return np.arange(1 << (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype)
    # All midpoints between neighbours of the narrower formats, and their neighbours.
    narrow = [_floats(d).astype(np.float64) for d in (*FLOATS[:4], FLOAT4)]
    values = np.unique(np.concatenate([n[np.isfinite(n)] for n in narrow]))
    middle = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(dtype)
    near = [np.nextafter(middle, dtype.type(s * np.inf)) for s in (-1, 1)]
    edges = np.array([2.0**k + d for k in range(66) for d in (-1, -0.5, 0, 0.5)]).astype(dtype)
    return np.concatenate([samples(dtype), middle, *near, edges, -edges])


def _run(x, source, target, length=4, **options):
    return run(lambda v: convert(v, source, target, hardware=HOST, **options), [x], target, length)


def _same_floats(result, expected):
    result, expected = result.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(result, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(result)[numbers], np.signbit(expected)[numbers])


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(FLOATS, 2)), ids=str)
def test_float_to_float(source, target):
    x = _floats(source)
    expected = _round(x, target)
    _same_floats(_run(x, source, target), expected)
    few = np.random.default_rng(0).choice(len(x), 500)
    _same_floats(_run(x[few], source, target, 0), expected[few])


def _round(x, target):
    """One rounding to nearest even, whatever the two formats."""
    if x.dtype == FLOAT64 and target.itemsize <= 2:
        # ml_dtypes and NumPy may round twice on the way from float64.
        single = x.astype(np.float32)
        back = single.astype(np.float64)
        bits = single.view(np.int32) - (np.abs(back) > np.abs(x))
        odd = np.where((back != x) & ~np.isnan(x), bits | 1, bits).astype(np.int32)
        x = odd.view(np.float32)
    if x.dtype.itemsize <= 2:
        x = x.astype(np.float32)
    if target == FLOAT4:  # XLA takes all NaN to negative zero, ml_dtypes some of them to zero.
        x = np.where(np.isnan(x), x.dtype.type(-0.0), x)
    return x.astype(target)


@pytest.mark.parametrize("target", FLOAT8, ids=str)
def test_saturation_of_8_bit_floats(target):
    x = _floats(FLOAT32)
    largest = float(ml_dtypes.finfo(target).max)
    expected = np.clip(x, -largest, largest).astype(target)
    _same_floats(_run(x, FLOAT32, target, saturate=True), expected)


@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", INTEGERS, ids=str)
def test_float_to_integer(source, target):
    x = _floats(source)
    low, high = _limits(target)
    wide = x.astype(np.float64)
    whole = [0 if np.isnan(v) else low if v <= low else high if v >= high else int(v)
             for v in wide[::7]]  # fmt: skip
    result = _run(x, source, target)[::7]
    np.testing.assert_array_equal(result.astype(object), np.array(whole, object))


@pytest.mark.parametrize("source", [*INTEGERS, BOOL], ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_integer_to_float(source, target):
    x = np.array([False, True, True, False]) if source == BOOL else _integers(source)
    if target == FLOAT64:
        expected = x.astype(np.float64)
    else:
        wide = x if source.kind in "iu" and source.itemsize > 2 else x.astype(np.int32)
        expected = wide.astype(np.float32).astype(target)
    _same_floats(_run(x, source, target), expected)


@pytest.mark.parametrize("source", [*INTEGERS, BOOL], ids=str)
@pytest.mark.parametrize("target", INTEGERS, ids=str)
def test_integer_to_integer(source, target):
    x = np.array([False, True, True, False]) if source == BOOL else _integers(source)
    low, high = _limits(target)
    span = high - low + 1
    expected = [(int(v) - low) % span + low for v in x]
    result = _run(x, source, target)
    np.testing.assert_array_equal(result.astype(object), np.array(expected, object))
    np.testing.assert_array_equal(_run(x[:9], source, target, 0), result[:9])


@pytest.mark.parametrize("source", [*FLOATS, *INTEGERS, BOOL], ids=str)
def test_to_bool(source):
    if source == BOOL:
        x = np.array([False, True])
    else:
        x = _floats(source) if source in FLOATS else _integers(source)
    expected = x.astype(np.float64) != 0
    np.testing.assert_array_equal(_run(x, source, BOOL), expected)


def test_bitcast():
    x = samples(FLOAT32, 1000)
    emit = lambda v: bitcast(v, FLOAT32, np.int32)  # noqa: E731
    np.testing.assert_array_equal(run(emit, [x], np.dtype(np.int32)), x.view(np.int32))
    y = np.arange(256, dtype=np.uint8)
    emit = lambda v: bitcast(v, np.uint8, FLOAT8[0])  # noqa: E731
    np.testing.assert_array_equal(run(emit, [y], FLOAT8[0]).view(np.uint8), y)
    z = np.arange(1 << 16, dtype=np.uint16)
    emit = lambda v: bitcast(v, np.uint16, BFLOAT16)  # noqa: E731
    np.testing.assert_array_equal(run(emit, [z], BFLOAT16, 2).view(np.uint16), z)
    with pytest.raises(InvalidTypeError, match="bitcast from float32 to int16"):
        bitcast(None, FLOAT32, np.int16)


def test_formats_without_conversions():
    """An error, whatever the other dtype is: no instruction is looked for that does not exist."""
    for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"):
        other = np.dtype(getattr(ml_dtypes, name))
        for dtype in FLOATS:
            for pair in ((other, dtype), (dtype, other)):
                with pytest.raises(UnsupportedError, match=f"from {pair[0]} to {pair[1]}"):
                    convert(None, *pair)


def test_the_same_dtype_emits_nothing():
    marker = object()
    for dtype in (FLOAT32, BOOL, FLOAT8[0]):
        assert convert(marker, dtype, dtype) is marker
    assert types.bit_width(BOOL) == 8
