"""cvt and cvt.pack, run as PTX and held against exact rational arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import exact_floats
import ml_dtypes
import numpy as np
import pytest
from exact_floats import INFINITY, KINDS, NAN, flushed, patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_support import run_body, run_elementwise

from pallasite_simulator.errors import PtxError

COUNT = 384
INTEGERS = tuple(f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64))
FLOATS = ("f16", "bf16", "f32", "f64")
DIRECTIONS = ("rn", "rz", "rm", "rp")
INTEGRAL = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
NANS = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "tf32": 0x7FFFE000}


def register(kind):
    """The dtype of a register of a type; 8-bit ones are in 16 bits."""
    bits = {"bf16": 16, "tf32": 32}.get(kind) or int(kind[1:])
    return np.dtype(f"u{max(bits, 16) // 8}")


def convert(name, *inputs, result=None):
    """The results of ``cvt.name d, a, b``."""
    operands = ", ".join(["{d}", "{a}", "{b}", "{c}"][: 1 + len(inputs)])
    result = register(name.split(".")[-2]) if result is None else result
    return run_elementwise(f"cvt.{name} {operands};", inputs, result, target="sm_100a")


def range_of(kind):
    bits = int(kind[1:])
    return (0, 2**bits - 1) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def integers(kind, seed=0):
    """Integers of a type as Python's, of all magnitudes, and as they are in registers."""
    low, high = range_of(kind)
    bits = int(kind[1:])
    random = np.random.default_rng([seed, bits, ord(kind[0])])
    values = [0, 1, 2, low, low + 1, high, high - 1, high // 2, high // 2 + 1, -1, -2]
    for _ in range(COUNT - len(values) - 12):
        length = int(random.integers(1, bits + 1))
        value = int(random.integers(0, 2**63)) >> (63 - length) if length < 64 else None
        value = int(random.integers(0, 2**64 - 1, dtype=np.uint64)) if value is None else value
        # Ties of narrower formats.
        cleared = int(random.integers(0, length + 1)) if random.random() < 0.5 else 0
        value = value >> cleared << cleared
        values.append(-value if kind[0] == "s" and random.random() < 0.5 else value)
    values += [2**24 + 1, 2**24 + 3, 2**53 + 1, 2**53 + 3, 65504, 65519, 65520, 2049, 2051, 257]
    values += [259, 2**63 + 1025]
    values = [min(max(value, low), high) for value in values]
    dtype = register(kind)
    return values, np.array([value % 2 ** (8 * dtype.itemsize) for value in values], dtype)


def in_register(value, dtype):
    """An integer extended into a register."""
    return value % 2 ** (8 * dtype.itemsize)


# Integers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", INTEGERS)
def test_integers(target, source):
    values, bits = integers(source)
    low, high = range_of(target)
    dtype = register(target)
    size = int(target[1:])

    def cut(value):
        value %= 2**size
        return value - 2**size if target[0] == "s" and value >= 2 ** (size - 1) else value

    ours = convert(f"{target}.{source}", bits)
    assert ours.tolist() == [in_register(cut(value), dtype) for value in values]
    superset = range_of(source)[0] >= low and range_of(source)[1] <= high
    if superset:
        with pytest.raises(PtxError, match="modifier .sat does not fit"):
            convert(f"sat.{target}.{source}", bits)
        return
    ours = convert(f"sat.{target}.{source}", bits)
    clamped = [min(max(value, low), high) for value in values]
    assert ours.tolist() == [in_register(value, dtype) for value in clamped]


def test_the_lower_bits_of_wide_registers_are_converted():
    wide = np.array([0xDEADBEEF01020384, 0xFFFFFFFFFFFF7FFF], np.uint64)
    assert convert("s32.s8", wide, result=np.uint32).tolist() == [0xFFFFFF84, 0xFFFFFFFF]
    assert convert("u64.u16", wide, result=np.uint64).tolist() == [0x0384, 0x7FFF]
    assert convert("rn.f32.u8", wide, result=np.uint32).view(np.float32).tolist() == [132.0, 255.0]
    half = np.array([0xABCD3C00, 0xFFFF4000], np.uint32)
    assert convert("f32.f16", half, result=np.uint32).view(np.float32).tolist() == [1.0, 2.0]


def test_results_are_extended_into_wide_registers():
    values = np.array([-3.0, 300.0], np.float32).view(np.uint32)
    assert convert("rni.s8.f32", values, result=np.uint64).tolist() == [2**64 - 3, 127]
    assert convert("rni.u8.f32", values, result=np.uint32).tolist() == [0, 255]
    assert convert("rn.f16.f32", values, result=np.uint32).tolist() == [0xC200, 0x5CB0]
    integers = np.array([0x18000, 0x17FFF], np.uint32)
    assert convert("s16.s32", integers, result=np.uint32).tolist() == [0xFFFF8000, 0x7FFF]
    assert convert("u16.s32", integers, result=np.uint32).tolist() == [0x8000, 0x7FFF]


# Integers and floats ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", DIRECTIONS)
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", INTEGERS)
def test_integers_to_floats(source, target, mode):
    values, bits = integers(source, 1)
    form = KINDS[target]
    ours = convert(f"{mode}.{target}.{source}", bits)
    assert ours.tolist() == [form.round(Fraction(value), mode) for value in values]


def rounded_to_integer(value, mode):
    below = math.floor(value)
    if mode == "rn":
        return round(value)
    if mode == "rz":
        return math.trunc(value)
    return below if mode == "rm" else math.ceil(value)


@pytest.mark.parametrize("mode", INTEGRAL)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", INTEGERS)
def test_floats_to_integers(target, source, mode):
    form = KINDS[source]
    bits = patterns(form, COUNT, 7)
    # Near the limits of the range, and halves.
    low, high = range_of(target)
    near = [Fraction(one) + half for one in (low, high, 0, 7) for half in HALVES]
    bits[: len(near)] = [form.round(one, finite=True) for one in near]
    ours = convert(f"{mode}.{target}.{source}", bits)
    dtype = register(target)
    nan = 1 << (int(target[1:]) - 1) if source == "f64" or target.endswith("64") else 0
    if target[0] == "s" and nan:
        nan = -nan
    for one, result in zip(bits.tolist(), ours.tolist(), strict=True):
        value = form.value(one)
        if value == NAN:
            wanted = nan
        elif value == INFINITY:
            wanted = low if form.negative(one) else high
        else:
            wanted = min(max(rounded_to_integer(value, INTEGRAL[mode]), low), high)
        assert result == in_register(wanted, dtype), hex(one)


HALVES = [Fraction(n, 2) for n in range(-5, 6)]


def test_floats_to_integers_saturate_and_flush():
    values = np.array([1, 0x80000001, 0x7F800000, 0xFF800000, 0x3F000000], np.uint32)
    assert convert("rpi.u32.f32", values).tolist() == [1, 0, 2**32 - 1, 0, 1]
    assert convert("rpi.ftz.u32.f32", values).tolist() == [0, 0, 2**32 - 1, 0, 1]
    assert convert("rmi.s32.f32", values)[1] == 2**32 - 1
    assert convert("rmi.ftz.sat.s32.f32", values)[1] == 0


def test_integers_to_floats_saturate():
    values = np.array([-5, 0, 1, 2, 70000], np.int32).view(np.uint32)
    assert convert("rn.sat.f32.s32", values).view(np.float32).tolist() == [0, 0, 1, 1, 1]
    assert convert("rn.sat.f16.u32", values).view(np.float16).tolist() == [1, 0, 1, 1, 1]


# Between floats -----------------------------------------------------------------------------------


def reference(target, source, bits, mode, flags=()):
    """Bits of a number in another format; None for NaN."""
    to, of = KINDS[target], KINDS[source]
    # Where f32 becomes f16, .ftz does nothing.
    if "ftz" in flags and source == "f32" and target != "f16":
        bits = flushed(of, bits)
    value, negative = of.value(bits), of.negative(bits)
    if value == NAN:
        return 0 if "sat" in flags else None
    if value == INFINITY:
        result = (to.maximum if "satfinite" in flags else to.infinity) | negative << (to.bits - 1)
    else:
        result = to.round(value, mode, negative, "satfinite" in flags)
    if "ftz" in flags and target == "f32":
        boundless = exact_floats.Kind("boundless", 15, to.mantissa)
        tiny = value != INFINITY and (
            abs(boundless.value(boundless.round(value, mode))) < to.smallest_normal
        )
        result = negative << 31 if tiny else result
    if negative and ("relu" in flags or "sat" in flags):
        return 0
    return min(result, to.bias << to.mantissa) if "sat" in flags else result


def check(name, target, source, mode, flags=()):
    of, to = KINDS[source], KINDS[target]
    bits = patterns(of, COUNT, len(name))
    if of.mantissa > to.mantissa:
        # Ties and their neighbours in the range of the target.
        near = [to.value(one) for one in patterns(to, 200, 3).tolist()]
        near = [one for one in near if one not in (NAN, INFINITY)]
        tie = Fraction(2 ** (to.mantissa + 2) + 1, 2 ** (to.mantissa + 2))
        near = [of.round(one * tie) + step for one in near for step in (0, 1)]
        bits = np.concatenate([bits, np.array(near, of.dtype)])
    ours = convert(name, bits)
    for one, result in zip(bits.tolist(), ours.tolist(), strict=True):
        wanted = reference(target, source, one, mode, flags)
        if wanted is None:
            assert to.is_nan(result), hex(one)
        else:
            assert result == wanted, (hex(one), hex(result), hex(wanted))


NARROWING = [("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("bf16", "f64"), ("f32", "f64")]
NARROWING += [("f16", "bf16"), ("bf16", "f16")]
WIDENING = [("f32", "f16"), ("f32", "bf16"), ("f64", "f16"), ("f64", "bf16"), ("f64", "f32")]


@pytest.mark.parametrize("mode", DIRECTIONS)
@pytest.mark.parametrize("target,source", NARROWING)
def test_narrowing(target, source, mode):
    check(f"{mode}.{target}.{source}", target, source, mode)


@pytest.mark.parametrize("target,source", [*WIDENING, *[(one, one) for one in FLOATS]])
def test_widening(target, source):
    check(f"{target}.{source}", target, source, "rn")


@pytest.mark.parametrize(
    "name,flags",
    [
        ("rn.ftz.f32.f64", ("ftz",)),
        ("rp.ftz.f32.f64", ("ftz",)),
        ("rm.ftz.f32.f64", ("ftz",)),
        ("rz.sat.f32.f64", ("sat",)),
        ("rn.ftz.sat.f32.f64", ("ftz", "sat")),
        ("rn.sat.f16.f64", ("sat",)),
        ("rn.sat.f16.f32", ("sat",)),
        ("rp.ftz.f16.f32", ("ftz",)),
        ("rn.relu.f16.f32", ("relu",)),
        ("rz.satfinite.f16.f32", ("satfinite",)),
        ("rn.satfinite.relu.f16.f32", ("satfinite", "relu")),
        ("rp.ftz.bf16.f32", ("ftz",)),
        ("rn.relu.bf16.f32", ("relu",)),
        ("rn.satfinite.bf16.f32", ("satfinite",)),
        ("ftz.f32.f16", ("ftz",)),
        ("ftz.sat.f32.f16", ("ftz", "sat")),
        ("ftz.f32.bf16", ("ftz",)),
        ("ftz.f64.f32", ("ftz",)),
        ("sat.f64.f32", ("sat",)),
        ("sat.f64.f16", ("sat",)),
        ("ftz.f32.f32", ("ftz",)),
        ("sat.f32.f32", ("sat",)),
        ("sat.f16.f16", ("sat",)),
        ("sat.f64.f64", ("sat",)),
    ],
)
def test_modifiers(name, flags):
    *_, target, source = name.split(".")
    mode = name[:2] if name[:2] in DIRECTIONS else "rn"
    check(name, target, source, mode, flags)


@pytest.mark.parametrize("mode", ["rn", "rz", "rna"])
@pytest.mark.parametrize("flags", [(), ("satfinite",), ("relu",), ("satfinite", "relu")])
def test_tf32(mode, flags):
    if mode == "rna" and "relu" in flags:
        return
    bits = patterns(KINDS["f32"], 2 * COUNT, 2)
    bits[::3] &= 0xFFFFF000
    ours = convert(".".join((mode, *flags, "tf32", "f32")), bits)
    assert not (ours & 0x1FFF).any()
    for one, result in zip(bits.tolist(), ours.tolist(), strict=True):
        if KINDS["f32"].is_nan(one):
            cut = mode == "rna" and not flags
            assert result == (one & 0xFFFFE000 if cut else NANS["tf32"])
        else:
            assert result == reference("tf32", "f32", one, mode, flags) << 13


@pytest.mark.parametrize("mode", INTEGRAL)
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("flag", ["", "sat", "ftz"])
def test_rounding_to_integers_in_the_same_format(kind, mode, flag):
    if (flag == "ftz" and kind != "f32") or (flag == "sat" and kind == "bf16"):
        return
    form = KINDS[kind]
    bits = patterns(form, COUNT, 5)
    bits[:11] = [form.round(one) for one in HALVES]
    name = ".".join(filter(None, (mode, flag, kind, kind)))
    ours = convert(name, bits)
    for one, result in zip(bits.tolist(), ours.tolist(), strict=True):
        value = form.value(flushed(form, one) if flag == "ftz" else one)
        if value == NAN:
            assert result == 0 if flag == "sat" else form.is_nan(result)
            continue
        if value == INFINITY:
            wanted = one
        else:
            whole = Fraction(rounded_to_integer(value, INTEGRAL[mode]))
            wanted = form.round(whole, negative_zero=form.negative(one))
        if flag == "sat":
            wanted = 0 if form.negative(one) else min(wanted, form.bias << form.mantissa)
        assert result == wanted, hex(one)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=16, max_size=16))
def test_any_bits_of_f64(bits):
    values = np.array(bits, np.uint64)
    for target in ("f16", "bf16", "f32"):
        ours = convert(f"rn.{target}.f64", values)
        for one, result in zip(bits, ours.tolist(), strict=True):
            wanted = reference(target, "f64", one, "rn")
            assert KINDS[target].is_nan(result) if wanted is None else result == wanted


# NaNs, of which the PTX ISA says little, as an H200 converts them.
MEASURED = [
    ("f32.f16", 0xFE01, 0x7FFFFFFF),
    ("f32.bf16", 0x7F81, 0x7F810000),
    ("ftz.f32.bf16", 0x7FC5, 0x7FFFFFFF),
    ("f32.f32", 0x7F800001, 0x7F800001),
    ("ftz.f32.f32", 0xFFC00000, 0x7FFFFFFF),
    ("f64.f64", 0xFFF0000000000001, 0xFFF0000000000001),
    ("rni.f64.f64", 0xFFF0000000000001, 0xFFF8000000000001),
    ("rni.f32.f32", 0x7F800001, 0x7FFFFFFF),
    ("f64.f32", 0x7F800001, 0x7FF8000020000000),
    ("f64.f32", 0xFFC00005, 0xFFF80000A0000000),
    ("ftz.f64.f32", 0x7F800001, 0x7FFFFFFFE0000000),
    ("rn.f32.f64", 0xFFF8000000000000, 0xFFC00000),
    ("rn.ftz.f32.f64", 0x7FF0000000000001, 0x7FC00000),
    ("rn.f16.f64", 0xFFF8000000000000, 0xFE00),
    ("rn.f16.f32", 0xFFC00005, 0x7FFF),
    ("rn.satfinite.f16.f32", 0x7F800001, 0x7FFF),
    ("rn.bf16.f16", 0x7E00, 0x7FFF),
    ("rna.tf32.f32", 0x7F800001, 0x7F800000),
    ("rn.tf32.f32", 0x7F800001, 0x7FFFE000),
    ("rp.ftz.f16.f32", 0x00000001, 0x0001),
    ("rn.ftz.f32.f64", 0xB80FFFFFFFF6515C, 0x80800000),
    ("rn.ftz.f32.f64", 0x380FFFFF9248ADCC, 0),
]


@pytest.mark.parametrize("name,bits,wanted", MEASURED)
def test_measured(name, bits, wanted):
    value = np.array([bits], register(name.split(".")[-1]))
    assert hex(convert(name, value)[0]) == hex(wanted)


# Packed formats -----------------------------------------------------------------------------------

BYTES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def narrow(target, bits, relu, source="f32", mode="rn", finite=True):
    """Bits of a number in a narrow format."""
    of, to = KINDS[source], KINDS[target]
    value, negative = of.value(bits), of.negative(bits)
    sign = negative << (to.bits - 1)
    if value == NAN:
        # NaN is the largest number where there is none.
        return 0x7FFF if to.bits == 16 else 0x7F if to.bits == 8 else to.maximum
    if relu and negative:
        return 0
    if value == INFINITY:
        return sign | (to.maximum if finite else to.infinity)
    return to.round(value, mode, negative, finite)


def pair_inputs(target):
    a, b = patterns(KINDS["f32"], COUNT, 1), patterns(KINDS["f32"], COUNT, 2)
    to = KINDS[target]
    every = [to.value(one) for one in range(min(1 << to.bits, 256))]
    every = [one for one in every if one not in (NAN, INFINITY)]
    # Ties between neighbours, and a little more.
    ties = [KINDS["f32"].round((x + y) / 2) for x, y in zip(every, every[1:], strict=False)]
    b[: len(ties)] = ties[:COUNT]
    a[: len(ties)] = [one + 1 for one in ties[:COUNT]]
    return a, b


@pytest.mark.parametrize("target", ["e4m3", "e5m2", "e2m3", "e3m2"])
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_pairs_of_f32_to_bytes(target, relu):
    a, b = pair_inputs(target)
    ours = convert(f"rn.satfinite{relu}.{target}x2.f32", a, b, result=np.uint16)
    for x, y, result in zip(a.tolist(), b.tolist(), ours.tolist(), strict=True):
        high, low = narrow(target, x, bool(relu)), narrow(target, y, bool(relu))
        assert result == high << 8 | low, (hex(x), hex(y))


@pytest.mark.parametrize("relu", ["", ".relu"])
def test_pairs_of_f32_to_nibbles(relu):
    a, b = pair_inputs("e2m1")
    code = f".reg .b8 %byte; cvt.rn.satfinite{relu}.e2m1x2.f32 %byte, {{a}}, {{b}};"
    code += "cvt.u16.u8 {d}, %byte;"
    ours = run_elementwise(code, [a, b], np.uint16, target="sm_100a")
    for x, y, result in zip(a.tolist(), b.tolist(), ours.tolist(), strict=True):
        assert result == narrow("e2m1", x, bool(relu)) << 4 | narrow("e2m1", y, bool(relu))


@pytest.mark.parametrize("target", ["e4m3", "e5m2"])
@pytest.mark.parametrize("source", ["f16", "bf16"])
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_packed_halves_to_bytes(source, target, relu):
    halves = patterns(KINDS[source], 2 * COUNT, 4)
    name = f"rn.satfinite{relu}.{target}x2.{source}x2"
    ours = convert(name, halves.view(np.uint32), result=np.uint16)
    each = [narrow(target, one, bool(relu), source) for one in halves.tolist()]
    assert ours.view(np.uint8).tolist() == each


@pytest.mark.parametrize("source", ["e4m3", "e5m2", "e2m3", "e3m2"])
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_bytes_to_packed_halves(source, relu):
    size = 1 << KINDS[source].bits
    pairs = np.arange(size * size, dtype=np.uint32)
    packed = (pairs // size << 8 | pairs % size).astype(np.uint16)
    ours = convert(f"rn{relu}.f16x2.{source}x2", packed, result=np.uint32).view(np.uint16)
    values = np.arange(size, dtype=np.uint8).view(BYTES[source]).astype(np.float32)
    halves = values.astype(np.float16)
    if relu:
        halves = np.where(halves <= 0, np.float16(0), halves)
    halves = np.where(np.isnan(halves), np.uint16(0x7FFF), halves.view(np.uint16))
    wanted = np.stack([halves[pairs % size], halves[pairs // size]], 1).reshape(-1)
    np.testing.assert_array_equal(ours, wanted)


def test_nibbles_to_packed_halves():
    bytes_ = np.arange(256, dtype=np.uint16)
    code = ".reg .b8 %byte; cvt.u8.u16 %byte, {a}; cvt.rn.f16x2.e2m1x2 {d}, %byte;"
    ours = run_elementwise(code, [bytes_], np.uint32, target="sm_100a").view(np.float16)
    values = np.arange(16, dtype=np.uint8).view(BYTES["e2m1"]).astype(np.float16)
    wanted = np.stack([values[bytes_ & 15], values[bytes_ >> 4]], 1).reshape(-1)
    np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("target", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("flags", ["", ".relu", ".satfinite", ".relu.satfinite"])
def test_pairs_of_f32_to_halves(target, mode, flags):
    a, b = patterns(KINDS["f32"], COUNT, 1), patterns(KINDS["f32"], COUNT, 2)
    ours = convert(f"{mode}{flags}.{target}x2.f32", a, b, result=np.uint32)
    options = ("relu" in flags, "f32", mode, "satfinite" in flags)
    for x, y, result in zip(a.tolist(), b.tolist(), ours.tolist(), strict=True):
        assert result == narrow(target, x, *options) << 16 | narrow(target, y, *options)


def scale(bits, mode, finite):
    """Bits of an f32 number as a power of two without a sign."""
    f32 = KINDS["f32"]
    value = f32.value(bits)
    if value == NAN:
        return 255
    if value == INFINITY:
        return 254 if finite else 255
    value = abs(value)
    exponent = -127
    while Fraction(2) ** (exponent + 1) <= value:
        exponent += 1
    exact = Fraction(2) ** exponent == value or value < Fraction(2) ** -127
    field = exponent + 127 + (mode == "rp" and not exact)
    return min(field, 254) if finite else field


@pytest.mark.parametrize("mode", ["rz", "rp"])
@pytest.mark.parametrize("finite", ["", ".satfinite"])
def test_scales(mode, finite):
    a, b = patterns(KINDS["f32"], COUNT, 1), patterns(KINDS["f32"], COUNT, 2)
    b[:8] = [0x00400000, 0x00400001, 0x003FFFFF, 0, 1, 0x7F000001, 0x7F7FFFFF, 0x80000000]
    ours = convert(f"{mode}{finite}.ue8m0x2.f32", a, b, result=np.uint16)
    for x, y, result in zip(a.tolist(), b.tolist(), ours.tolist(), strict=True):
        assert result == scale(x, mode, bool(finite)) << 8 | scale(y, mode, bool(finite)), hex(y)
    halves = patterns(KINDS["bf16"], 2 * COUNT, 4)
    ours = convert(f"{mode}{finite}.ue8m0x2.bf16x2", halves.view(np.uint32), result=np.uint16)
    each = [scale(one << 16, mode, bool(finite)) for one in halves.tolist()]
    assert ours.view(np.uint8).tolist() == each


def test_scales_to_packed_halves():
    fields = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    ours = convert("rn.bf16x2.ue8m0x2", fields, result=np.uint32).view(np.uint16)
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    halves = values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    halves[255] = 0x7FFF
    np.testing.assert_array_equal(ours, halves[fields.view(np.uint8)])


# cvt.pack -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [f"{sign}{bits}" for sign in "us" for bits in (2, 4, 8, 16)])
def test_pack(kind):
    low, high = range_of(kind)
    bits = int(kind[1:])
    (a, a_bits), (b, b_bits) = integers("s32", 1), integers("s32", 2)
    c = np.random.default_rng(3).integers(0, 2**32, len(a), np.uint32)
    name = f"pack.sat.{kind}.s32" + (".b32" if bits < 16 else "")
    inputs = [a_bits, b_bits] + ([c] if bits < 16 else [])
    ours = convert(name, *inputs, result=np.uint32)
    for x, y, above, result in zip(a, b, c.tolist(), ours.tolist(), strict=True):
        parts = [min(max(one, low), high) % 2**bits for one in (x, y)]
        rest = above << 2 * bits if bits < 16 else 0
        assert result == (rest | parts[0] << bits | parts[1]) % 2**32


# Operands -----------------------------------------------------------------------------------------


def test_immediates_and_special_registers():
    out = np.zeros(128, np.uint64)
    body = """
        .reg .b16 %h; .reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .b64 %at;
        cvt.rzi.s32.f32 %r0, 0f40E66666;
        cvt.rn.f16.f32 %h, 1.5;
        cvt.u32.u16 %r1, %h;
        shl.b32 %r1, %r1, 8;
        cvt.s32.s8 %r2, 0x1ff;
        cvt.u64.u32 %rd0, %tid.x;
        add.u32 %r0, %r0, %r1;
        add.u32 %r0, %r0, %r2;
        cvt.u64.u32 %rd1, %r0;
        shl.b64 %rd0, %rd0, 32;
        or.b64 %rd0, %rd0, %rd1;
        add.s64 %at, %array0, %offset8;
        st.global.b64 [%at], %rd0;
    """
    run_body(body, out)
    low = 7 + (0x3E00 << 8) - 1
    np.testing.assert_array_equal(out, np.arange(128, dtype=np.uint64) << 32 | low)


@pytest.mark.parametrize(
    "code,message",
    [
        ("cvt.u32 {d}, {a};", "needs the type"),
        ("cvt.rn.f32 {d}, {a};", "needs the type"),
        ("cvt.rn.u32.u16 {d}, {a};", "modifier .rn does not fit"),
        ("cvt.f32.u32 {d}, {a};", "a modifier is missing"),
        ("cvt.rni.f32.u32 {d}, {a};", "modifier .rni does not fit"),
        ("cvt.u32.f32 {d}, {a};", "a modifier is missing"),
        ("cvt.rn.u32.f32 {d}, {a};", "modifier .rn does not fit"),
        ("cvt.f16.f32 {d}, {a};", "a modifier is missing"),
        ("cvt.rn.f32.f16 {d}, {a};", "modifier .rn does not fit"),
        ("cvt.rn.rz.f16.f32 {d}, {a};", "exclude each other"),
        ("cvt.rm.relu.f16.f32 {d}, {a};", "does not go with rounding .rm"),
        ("cvt.rn.relu.sat.f16.f32 {d}, {a};", "exclude each other"),
        ("cvt.rn.sat.bf16.f32 {d}, {a};", "modifier .sat does not fit"),
        ("cvt.ftz.f64.f16 {d}, {a};", "modifier .ftz does not fit"),
        ("cvt.tf32.f32 {d}, {a};", "a modifier is missing"),
        ("cvt.rna.relu.tf32.f32 {d}, {a};", "does not go with rounding .rna"),
        ("cvt.rn.tf32.f64 {d}, {a};", "no conversion to .tf32 from .f64"),
        ("cvt.f32.tf32 {d}, {a};", "no conversion to .f32 from .tf32"),
        ("cvt.b32.u16 {d}, {a};", "no conversion to .b32"),
        ("cvt.rn.e4m3x2.f32 {d}, {a}, {a};", "needs modifier .satfinite"),
        ("cvt.rz.satfinite.e4m3x2.f32 {d}, {a}, {a};", "modifier .rz does not fit"),
        ("cvt.rn.bf16x2.e4m3x2 {d}, {a};", "no conversion to .bf16x2 from .e4m3x2"),
        ("cvt.rn.ue8m0x2.f32 {d}, {a}, {a};", "modifier .rn does not fit"),
        ("cvt.rs.f16x2.f32 {d}, {a}, {a}, {a};", "no stochastic rounding"),
        ("cvt.rs.satfinite.e4m3x4.f32 {d}, {a}, {a};", "no stochastic rounding"),
        ("cvt.rn.f16x2.f32 {d}, {a};", "wrong number of operands"),
        ("cvt.rzi.u32.f32 {d}, {a}, {a};", "wrong number of operands"),
        ("cvt.rn.f64.u32 {d}, {a};", "cannot hold"),
        ("cvt.u64.u64 {d}, {a};", "cannot hold"),
        ("cvt.u32.u64 {d}, {a};", "cannot be read"),
        ("cvt.pack.u16.s32 {d}, {a}, {a};", "malformed cvt.pack"),
        ("cvt.pack.sat.u8.s32 {d}, {a}, {a};", "malformed cvt.pack"),
        ("cvt.pack.sat.u32.s32 {d}, {a}, {a};", "malformed cvt.pack"),
        ("cvt.pack.sat.u16.s32 {d}, {a}, {a}, {a};", "wrong number of operands"),
    ],
)
def test_errors(code, message):
    with pytest.raises(PtxError, match=message):
        run_elementwise(code, [np.zeros(1, np.uint32)], np.uint32, target="sm_100a")
