"""The arithmetic beneath floating-point instructions: rounding, widening, compiled loops."""

from __future__ import annotations

import functools
from fractions import Fraction

import exact_floats
import numpy as np
import pytest
from exact_floats import INFINITY, KINDS, NAN, patterns
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite_simulator.instructions import compiled, float_formats, rounding
from pallasite_simulator.instructions.float_arithmetic import arithmetic

MODES = ("rn", "rna", "rz", "rm", "rp")
NARROWINGS = [
    ("f32", "f16"),
    ("f32", "bf16"),
    ("f32", "tf32"),
    ("f32", "e4m3"),
    ("f32", "e5m2"),
    ("f32", "e2m3"),
    ("f32", "e3m2"),
    ("f32", "e2m1"),
    ("f64", "f32"),
    ("f64", "f16"),
    ("f64", "bf16"),
]


@functools.cache
def narrowing(source, target, mode, **options):
    of, to = float_formats.FORMATS[source], float_formats.FORMATS[target]

    def emit(builder, bits):
        return rounding.narrow(builder, bits, of, to, mode, **options)

    return compiled.elementwise(emit, [of.bits], of.bits)


def expected(bits, of, to, mode, finite):
    """The bits of a number in another format; None for NaN."""
    value = of.value(bits)
    sign = 1 << (to.bits - 1) if of.negative(bits) else 0
    if value == NAN:
        return None
    if value == INFINITY:
        return sign | (to.maximum if finite or not to.special else to.infinity)
    return to.round(value, mode, bool(sign), finite)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source,target", NARROWINGS)
@pytest.mark.parametrize("finite", [False, True])
def test_narrowing_is_exact(source, target, mode, finite):
    of, to = KINDS[source], KINDS[target]
    values = patterns(of, 300, 1)
    # Near the range of the target, too.
    middle = patterns(to, 150, 2) if to.special else np.arange(64, dtype=np.uint8)
    near = [to.value(int(one)) for one in middle]
    near = [of.round(one * Fraction(4097, 4096)) for one in near if one not in (NAN, INFINITY)]
    values = np.concatenate([values, np.array(near, of.dtype)])
    ours = narrowing(source, target, mode, finite=finite)(values)
    nan = float_formats.FORMATS[target].nan
    for bits, result in zip(values.tolist(), ours.tolist(), strict=True):
        wanted = expected(bits, of, to, mode, finite)
        assert result == (nan if wanted is None else wanted), hex(bits)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**64 - 1), st.sampled_from(["f32", "f16", "bf16"]), st.sampled_from(MODES))
def test_rounding_by_way_of_odd_is_rounding_once(bits, target, mode):
    of, between, to = KINDS["f64"], KINDS["f32"], KINDS[target]
    if of.value(bits) == NAN or target == "f32":
        return
    odd = narrowing("f64", "f32", "odd")(np.array([bits], np.uint64))
    twice = narrowing("f32", target, mode)(odd.astype(np.uint32))
    assert int(twice[0]) == expected(bits, of, to, mode, False)
    assert between.value(int(odd[0])) in (of.value(bits), between.value(int(odd[0]) | 1))


@pytest.mark.parametrize(
    "source,target",
    [
        *[(one, "f32") for one in ("f16", "bf16", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1")],
        *[(one, "f64") for one in ("f16", "bf16", "f32")],
    ],
)
def test_widening_is_exact(source, target):
    of, to = KINDS[source], KINDS[target]
    small, large = float_formats.FORMATS[source], float_formats.FORMATS[target]

    def emit(builder, bits):
        return rounding.widen(builder, bits, small, large)

    if of.bits <= 16:
        values = np.arange(1 << of.bits, dtype=to.dtype)
    else:
        values = patterns(of, 2000, 3).astype(to.dtype)
    ours = compiled.elementwise(emit, [large.bits], large.bits)(values)
    for bits, result in zip(values.tolist(), ours.tolist(), strict=True):
        value = of.value(bits)
        if value == NAN or (source == "e4m3" and bits & 0x7F == 0x7F):
            assert result == large.nan
            continue
        assert to.value(result) == value, hex(bits)
        assert to.negative(result) == of.negative(bits)


def test_widening_keeps_the_bits_of_a_nan_on_demand():
    def emit(builder, bits):
        small, large = float_formats.F32, float_formats.F64
        return rounding.widen(builder, bits, small, large, payload=True)

    widen = compiled.elementwise(emit, [64], 64)
    ours = widen(np.array([0x7F800001, 0xFFC00005], np.uint64))
    assert ours.tolist() == [0x7FF8000020000000, 0xFFF80000A0000000]


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=300, deadline=None)
@given(numbers, numbers)
def test_sums_and_quotients_rounded_to_odd(a, b):
    """The result is exact, or the neighbour of the exact one whose last bit is set."""
    cases = {
        rounding.odd_sum: Fraction(a) + Fraction(b),
        rounding.odd_quotient: Fraction(a) / Fraction(b) if b else None,
    }
    for function, exact in cases.items():
        if exact is not None:
            found = _double(function, a, b)
            _assert_odd(found, exact)


@settings(max_examples=300, deadline=None)
@given(st.floats(0, width=32, allow_infinity=False))
def test_roots_rounded_to_odd(a):
    found = _double(rounding.odd_root, a)
    square = Fraction(found) ** 2
    if square != Fraction(a):
        below, above = np.nextafter(found, 0.0), np.nextafter(found, np.inf)
        assert Fraction(below) ** 2 < Fraction(a) < Fraction(above) ** 2
        assert np.float64(found).view(np.uint64) & np.uint64(1)


_LOOPS = {}


def _double(function, *values):
    if function not in _LOOPS:

        def emit(builder, *bits):
            doubles = [rounding.as_float(builder, one) for one in bits]
            return rounding.as_bits(builder, function(builder, *doubles))

        _LOOPS[function] = compiled.elementwise(emit, [64] * len(values), 64)
    arrays = [np.array([one], np.float64) for one in values]
    return float(_LOOPS[function](*arrays).view(np.float64)[0])


def _assert_odd(found, exact):
    if Fraction(found) != exact:
        assert abs(Fraction(found) - exact) < Fraction(np.spacing(abs(found)))
        assert np.float64(found).view(np.uint64) & np.uint64(1)


# Loops --------------------------------------------------------------------------------------------


def test_loops_take_scalars_and_arrays_of_any_layout():
    add = arithmetic("add", "f32")
    a, one = np.arange(100, dtype=np.float32), np.float32(1)
    wanted = (a + 1).view(np.uint32)
    np.testing.assert_array_equal(add(a, one), wanted)
    np.testing.assert_array_equal(add(one, a), wanted)
    np.testing.assert_array_equal(add(a[::3], one), wanted[::3])
    np.testing.assert_array_equal(add(a[::-1], np.ones(100, np.float32)), wanted[::-1])
    scalar = add(one, one)
    assert scalar.ndim == 0
    assert scalar == np.float32(2).view(np.uint32)
    assert add(a[:0], one).shape == (0,)
    with pytest.raises(ValueError, match="arrays of 100 and 99 elements"):
        add(a, a[1:])


def test_loops_return_new_arrays():
    a = np.arange(10, dtype=np.float32)
    copy = a.copy()
    first = arithmetic("mul", "f32")(a, a)
    second = arithmetic("mul", "f32")(a, a)
    assert not np.shares_memory(first, a)
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(a, copy)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 31, 32, 33, 1000])
def test_loops_of_any_length(length):
    random = np.random.default_rng(length)
    a, b, c = random.normal(size=(3, length)).astype(np.float32)
    ours = arithmetic("fma", "f32")(a, b, c).view(np.float32)
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    np.testing.assert_allclose(ours, exact, rtol=2e-7)


def test_rounding_modes_do_not_outlast_a_loop():
    a = np.array([1.0], np.float64)
    tiny = np.array([2.0**-60], np.float64)
    up = arithmetic("add", "f64", "rp")(a, tiny).view(np.float64)
    assert up[0] == np.nextafter(1.0, 2.0)
    assert (a + tiny)[0] == 1.0
    assert arithmetic("add", "f64")(a, tiny).view(np.float64)[0] == 1.0
    assert 1.0 + 2.0**-60 == 1.0


def test_the_reference_rounds_as_numpy_does():
    values = patterns(exact_floats.F64, 2000, 9)
    with np.errstate(all="ignore"):
        single = values.view(np.float64).astype(np.float32).view(np.uint32)
        half = values.view(np.float64).astype(np.float16).view(np.uint16)
    for kind, theirs in ((exact_floats.F32, single), (exact_floats.F16, half)):
        for bits, result in zip(values.tolist(), theirs.tolist(), strict=True):
            wanted = expected(bits, exact_floats.F64, kind, "rn", False)
            assert wanted is None or wanted == result
