"""Floating-point arithmetic, run as PTX and held against exact rational arithmetic."""

from __future__ import annotations

import functools
from fractions import Fraction

import exact_floats
import numpy as np
import pytest
from exact_floats import INFINITY, KINDS, NAN, flushed, patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_support import run_elementwise

from pallasite_simulator.errors import PtxError

NANS = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0xFFF8000000000000}
ARITY = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3, "div": 2, "rcp": 1, "sqrt": 1}
COUNT = 512
ONE = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000}


def run(name, *inputs, result=None, target="sm_100a"):
    """The results of ``name d, a, b, ...``."""
    operands = ", ".join(["{d}", "{a}", "{b}", "{c}"][: 1 + len(inputs)])
    dtype = inputs[0].dtype if result is None else result
    return run_elementwise(f"{name} {operands};", inputs, dtype, target=target)


def inputs_of(kind, count, seed=0):
    return [patterns(kind, COUNT, seed + number) for number in range(count)]


# The exact result ---------------------------------------------------------------------------------


def signed_infinity(kind, negative):
    return kind.infinity | (1 << (kind.bits - 1) if negative else 0)


def sum_of(kind, a, b, mode):
    """``a + b``, each a value with the sign of a zero or an infinity: (value, negative)."""
    (x, x_negative), (y, y_negative) = a, b
    if INFINITY in (x, y):
        if x == y and x_negative != y_negative:
            return NAN, False
        return INFINITY, x_negative if x == INFINITY else y_negative
    total = x + y
    if total:
        return total, total < 0
    # A zero is negative if both are; of opposite ones if rounded down.
    opposite = x_negative != y_negative if x == y == 0 else True
    return Fraction(0), (mode == "rm") if opposite else x_negative


def product_of(a, b):
    (x, x_negative), (y, y_negative) = a, b
    negative = x_negative != y_negative
    if INFINITY in (x, y):
        return (NAN, False) if 0 in (x, y) else (INFINITY, negative)
    return x * y, negative


def quotient_of(a, b):
    (x, x_negative), (y, y_negative) = a, b
    negative = x_negative != y_negative
    if x == y == INFINITY or x == y == 0:
        return NAN, False
    if x == INFINITY or y == 0:
        return INFINITY, negative
    return (Fraction(0) if y == INFINITY else x / y), negative


def exact(operation, kind, mode, values):
    """(value, negative) of an operation on such pairs."""
    if operation in ("add", "sub"):
        a, (y, negative) = values
        flip = operation == "sub"
        b = (-y if flip and isinstance(y, Fraction) else y, negative != flip)
        return sum_of(kind, a, b, mode)
    if operation == "mul":
        return product_of(*values)
    if operation in ("fma", "mad"):
        product = product_of(*values[:2])
        return product if product[0] == NAN else sum_of(kind, product, values[2], mode)
    if operation == "div":
        return quotient_of(*values)
    return quotient_of((Fraction(1), False), values[0])


def reference(operation, kind, bits, mode="rn", flags=()):
    """Bits of the result; None for NaN, whose bits are tested apart."""
    if "oob" in flags and any(kind.magnitude(one) == 0x7FF7 for one in bits[:2]):
        return 0
    if "ftz" in flags:
        bits = [flushed(kind, one) for one in bits]
    values = [(kind.value(one), kind.negative(one)) for one in bits]
    if any(value == NAN for value, _ in values):
        return 0 if "sat" in flags else None
    if operation == "sqrt":
        value, negative = values[0]
        if value == 0 or (value == INFINITY and not negative):
            return bits[0]
        return None if negative else exact_floats.root(value, kind, mode)
    value, negative = exact(operation, kind, mode, values)
    if value == NAN:
        return 0 if "sat" in flags else None
    if value == INFINITY:
        result = signed_infinity(kind, negative)
    elif "ftz" in flags and is_tiny(kind, value, mode):
        result = 1 << (kind.bits - 1) if negative else 0
    else:
        result = kind.round(value, mode, negative)
    if "relu" in flags or "sat" in flags:
        result = 0 if negative else result
    if "sat" in flags:
        result = min(result, kind.bias << kind.mantissa)
    return result


def is_tiny(kind, value, mode):
    """Whether .ftz flushes a result: one that is subnormal if rounded with any exponent."""
    boundless = exact_floats.Kind("boundless", 15, kind.mantissa)
    return abs(boundless.value(boundless.round(value, mode))) < kind.smallest_normal


def check(name, operation, kind, mode="rn", flags=(), inputs=None):
    if inputs is None:
        inputs = inputs_of(kind, ARITY[operation], seed=len(name))
    ours = run(name, *inputs)
    nan = NANS[kind.name]
    for *bits, result in zip(*[one.tolist() for one in (*inputs, ours)], strict=True):
        wanted = reference(operation, kind, bits, mode, flags)
        if wanted is None:
            agrees = kind.is_nan(result) if kind.name == "f64" else result == nan
            assert agrees, list(map(hex, bits))
        else:
            assert result == wanted, (list(map(hex, bits)), hex(result), hex(wanted))


# Arithmetic ---------------------------------------------------------------------------------------

MODES = ("rn", "rz", "rm", "rp")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flags", [(), ("ftz",), ("sat",), ("ftz", "sat")])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
def test_f32(operation, flags, mode):
    name = ".".join((operation, mode, *flags, "f32"))
    check(name, operation, KINDS["f32"], mode, flags)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flags", [(), ("ftz",)])
@pytest.mark.parametrize("operation", ["div", "rcp", "sqrt"])
def test_f32_quotients_and_roots(operation, flags, mode):
    name = ".".join((operation, mode, *flags, "f32"))
    check(name, operation, KINDS["f32"], mode, flags)


@pytest.mark.parametrize(
    "kind,mode", [*[("f32", mode) for mode in ("rn", "rz", "rm", "rp")], ("f16", "rn")]
)
def test_products_near_the_smallest_normal_number(kind, mode):
    form = KINDS[kind]
    random = np.random.default_rng(6)
    one = form.bias << form.mantissa
    a = one - random.integers(1, 1 << form.mantissa, COUNT)
    smallest = [form.smallest_normal / form.value(int(bits)) for bits in a]
    b = [form.round(exact) + int(step) for exact, step in zip(smallest, a % 3 - 1, strict=True)]
    sign = random.integers(0, 2, COUNT) << (form.bits - 1)
    inputs = [(a | sign).astype(form.dtype), np.array(b, form.dtype)]
    check(f"mul.{mode}.ftz.{kind}", "mul", form, mode, ("ftz",), inputs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma", "div", "rcp", "sqrt"])
def test_f64(operation, mode):
    check(f"{operation}.{mode}.f64", operation, KINDS["f64"], mode)


@pytest.mark.parametrize("flags", [(), ("ftz",), ("sat",), ("ftz", "sat")])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
def test_f16(operation, flags):
    check(".".join((operation, "rn", *flags, "f16")), operation, KINDS["f16"], "rn", flags)


@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma"])
def test_bf16(operation):
    check(f"{operation}.rn.bf16", operation, KINDS["bf16"])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("flags", [("relu",), ("oob",), ("oob", "relu")])
def test_fma_of_halves(kind, flags):
    inputs = inputs_of(KINDS[kind], 3, 50)
    inputs[0][::7] = 0x7FF7
    inputs[1][::11] = 0xFFF7
    inputs[2][::5] = 0x7FF7
    check(f"fma.rn.{'.'.join(flags)}.{kind}", "fma", KINDS[kind], "rn", flags, inputs)


def test_fma_of_f16_flushed_and_rectified():
    check("fma.rn.ftz.relu.f16", "fma", KINDS["f16"], "rn", ("ftz", "relu"))


@pytest.mark.parametrize(
    "name,operation,kind",
    [
        ("add.f32", "add", "f32"),
        ("mul.f64", "mul", "f64"),
        ("sub.f16", "sub", "f16"),
        ("mul.bf16", "mul", "bf16"),
        ("mad.rn.f32", "mad", "f32"),
        ("mad.rn.f64", "mad", "f64"),
    ],
)
def test_the_default_rounding_and_mad(name, operation, kind):
    check(name, operation, KINDS[kind])


@pytest.mark.parametrize(
    "name,single,kind",
    [
        ("add.rn.ftz.f16x2", "add.rn.ftz.f16", "f16"),
        ("fma.rn.relu.f16x2", "fma.rn.relu.f16", "f16"),
        ("sub.bf16x2", "sub.bf16", "bf16"),
        ("fma.rn.bf16x2", "fma.rn.bf16", "bf16"),
        ("min.NaN.bf16x2", "min.NaN.bf16", "bf16"),
        ("max.ftz.f16x2", "max.ftz.f16", "f16"),
        ("neg.f16x2", "neg.f16", "f16"),
        ("abs.bf16x2", "abs.bf16", "bf16"),
        ("add.rz.ftz.f32x2", "add.rz.ftz.f32", "f32"),
        ("mul.f32x2", "mul.f32", "f32"),
        ("fma.rp.f32x2", "fma.rp.f32", "f32"),
        ("ex2.approx.f16x2", "ex2.approx.f16", "f16"),
        ("tanh.approx.bf16x2", "tanh.approx.bf16", "bf16"),
    ],
)
def test_packed_types_are_two_numbers(name, single, kind):
    operands = 3 if name[:3] == "fma" else 1 if name[:3] in ("neg", "abs", "ex2", "tan") else 2
    inputs = inputs_of(KINDS[kind], operands)
    wide = np.dtype(f"u{2 * inputs[0].itemsize}")
    packed = run(name, *[one.view(wide) for one in inputs])
    np.testing.assert_array_equal(packed.view(inputs[0].dtype), run(single, *inputs))


@pytest.mark.parametrize("narrow", ["f16", "bf16"])
@pytest.mark.parametrize(
    "operation,mode,sat",
    [("add", "rn", ""), ("sub", "rz", ""), ("fma", "rp", ""), ("add", "rm", ".sat")],
)
def test_mixed_precision(operation, mode, sat, narrow):
    small, f32 = KINDS[narrow], KINDS["f32"]
    count = ARITY[operation] - 1
    inputs = [*inputs_of(small, count, 5), patterns(f32, COUNT, 9)]
    ours = run(f"{operation}.{mode}{sat}.f32.{narrow}", *inputs, result=np.uint32)
    for *bits, last, result in zip(*[one.tolist() for one in (*inputs, ours)], strict=True):
        wide = [NANS["f32"] if small.is_nan(one) else widened(small, one) for one in bits]
        wanted = reference(operation, f32, [*wide, last], mode, ("sat",) if sat else ())
        assert result == (NANS["f32"] if wanted is None else wanted)


def widened(kind, bits):
    value, f32 = kind.value(bits), KINDS["f32"]
    if value == INFINITY:
        return signed_infinity(f32, kind.negative(bits))
    return f32.round(value, negative_zero=kind.negative(bits))


numbers = st.one_of(
    st.integers(0, 2**32 - 1), st.sampled_from(patterns(KINDS["f32"], 200, 3).tolist())
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=8, max_size=8))
def test_fma_of_any_bits(triples):
    arrays = [np.array(one, np.uint32) for one in zip(*triples, strict=True)]
    check("fma.rn.f32", "fma", KINDS["f32"], inputs=arrays)


# What the PTX ISA leaves open, as an H200 does it -------------------------------------------------

MEASURED = [
    # In f32, f16 and bf16 every NaN becomes the same one.
    ("add.rn.f32", [0x7F800001, 0xFF000000], 0x7FFFFFFF),
    ("mul.rn.f32", [0xFF800000, 0], 0x7FFFFFFF),
    ("neg.f32", [0xFFC00005], 0x7FFFFFFF),
    ("abs.f32", [0xFFC00005], 0x7FFFFFFF),
    ("min.f32", [0xFFC00000, 0x7FC00005], 0x7FFFFFFF),
    ("min.NaN.xorsign.abs.f32", [0x7F800001, 0xFF000000], 0x7FFFFFFF),
    ("fma.rn.f16", [0x7C01, 0x8401, 0xE85E], 0x7FFF),
    ("neg.f16", [0xFE00], 0x7FFF),
    ("abs.bf16", [0x7F81], 0x7FFF),
    # In f64 the NaN of an operand goes through, as a quiet one: the second one's before the first,
    # of three the second, the third, the first; of a quotient the first one's.
    ("add.rn.f64", [0x7FF0000000000001, 0xBFF0000000000000], 0x7FF8000000000001),
    ("sub.rn.f64", [0x8000000000000001, 0xFFF0000000000001], 0xFFF8000000000001),
    ("add.rm.f64", [0x7FF8000000000000, 0xFFF8000000000005], 0xFFF8000000000005),
    ("mul.rn.f64", [0x7FF8000000000000, 0xFFF8000000000005], 0xFFF8000000000005),
    ("fma.rn.f64", [0xFFF8000000000003, 0x7FF0000000000001, 0], 0x7FF8000000000001),
    ("fma.rn.f64", [0, 0x7FF8000000000002, 0xFFF8000000000003], 0x7FF8000000000002),
    ("fma.rn.f64", [0x7FF8000000000002, 0, 0xFFF8000000000003], 0xFFF8000000000003),
    (
        "fma.rn.f64",
        [0x7FF0000000000000, 0x8000000000000000, 0xFFF8000000000003],
        0xFFF8000000000003,
    ),
    ("div.rn.f64", [0x7FF8000000000000, 0xFFF8000000000005], 0x7FF8000000000000),
    ("min.f64", [0x7FF8000000000000, 0xFFF8000000000005], 0xFFF8000000000005),
    ("sqrt.rn.f64", [0x8000000000000001], 0xFFF8000000000000),
    ("mul.rz.f64", [0x7FF0000000000000, 0], 0xFFF8000000000000),
    ("abs.f64", [0xFFF0000000000001], 0xFFF8000000000001),
    ("neg.f64", [0x7FF8000000000005], 0x7FF8000000000005),
    ("rsqrt.approx.f64", [0x8000000000000001], 0xFFF8000000000000),
    ("rsqrt.approx.f64", [0x8000000000000000], 0xFFF0000000000000),
    # Only the upper half of these counts, so this NaN is an infinity.
    ("rcp.approx.ftz.f64", [0x7FF0000000000001], 0),
    ("rcp.approx.ftz.f64", [0xFFF8000000000005], 0x7FFFFFFF00000000),
    ("rcp.approx.ftz.f64", [0x800FFFFFFFFFFFFF], 0xFFF0000000000000),
    ("rcp.approx.ftz.f64", [0xFFEFFFFFFFFFFFFF], 0x8000000000000000),
    ("rsqrt.approx.ftz.f64", [0xBFF0000000000000], 0x7FFFFFFF00000000),
    # Results are flushed that are too small as rounded with any exponent.
    ("mul.rn.ftz.f32", [0xBF670A55, 0x008DD3FA], 0x80800000),
    ("mul.rn.ftz.f32", [0x3F55DC72, 0x0099388E], 0),
    ("mul.rp.ftz.f32", [0x3F02E64C, 0x00FA544A], 0x00800000),
    ("fma.rm.ftz.f32", [0x3FB605D6, 0x01DAA68E, 0x820B7765], 0),
    ("div.rn.ftz.f32", [0x00FFFFFF, 0xC0000000], 0x80000000),
    ("mul.rn.ftz.f16", [0xB9E4, 0x056F], 0x8400),
    ("mul.rn.ftz.f16", [0x3B16, 0x0483], 0),
    ("fma.rn.ftz.f16", [0x3D93, 0x0D15, 0x8E15], 0x0400),
    # Saturation and .relu make no negative zeros.
    ("add.rn.sat.f16", [0x8000, 0x8000], 0),
    ("fma.rn.relu.f16", [0x83FE, 0x0559, 0x8000], 0),
    # Divisors above 2**126.
    ("div.approx.f32", [0xBF7FFFFF, 0x7F4DFDD3], 0x80000000),
    ("div.full.f32", [0xCB000000, 0xFF000000], 0x0B800000),
    # Sine and cosine of numbers so large that they are whole turns in f32.
    ("sin.approx.f32", [0xFF7FFFFF], 0x80000000),
    ("cos.approx.f32", [0x7F7FFFFE], 0x3F800000),
]


@pytest.mark.parametrize("name,bits,wanted", MEASURED)
def test_measured(name, bits, wanted):
    size = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}[name.split(".")[-1]]
    inputs = [np.array([one], f"u{size}") for one in bits]
    assert hex(run(name, *inputs)[0]) == hex(wanted)


# Signs, order, tests ------------------------------------------------------------------------------


def ordered(kind, bits):
    """A number that orders bits; negative zero before positive zero."""
    value = kind.magnitude(bits)
    return -value - 1 if kind.negative(bits) else value


def extremum(name, kind, bits, flags):
    if "ftz" in flags:
        bits = [flushed(kind, one) for one in bits]
    sign = functools.reduce(lambda a, b: a ^ b, [kind.negative(one) for one in bits])
    if "abs" in flags:
        bits = [kind.magnitude(one) for one in bits]
    found = [one for one in bits if not kind.is_nan(one)]
    if not found or ("NaN" in flags and len(found) < len(bits)):
        return NANS[kind.name]
    chosen = (min if name == "min" else max)(found, key=lambda one: ordered(kind, one))
    return chosen | (sign << (kind.bits - 1)) if "xorsign" in flags else chosen


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(
    "flags", [(), ("ftz",), ("NaN",), ("xorsign", "abs"), ("NaN", "xorsign", "abs")]
)
def test_minimum_and_maximum(name, kind, flags):
    if kind == "bf16" and "ftz" in flags:
        return
    form = KINDS[kind]
    a, b = inputs_of(form, 2)
    ours = run(".".join((name, *flags, kind)), a, b)
    for x, y, result in zip(a.tolist(), b.tolist(), ours.tolist(), strict=True):
        assert result == extremum(name, form, [x, y], flags)


@pytest.mark.parametrize("flags", [(), ("ftz", "NaN"), ("abs",), ("NaN", "abs")])
def test_minimum_of_three(flags):
    form = KINDS["f32"]
    inputs = inputs_of(form, 3)
    for name in ("min", "max"):
        ours = run(".".join((name, *flags, "f32")), *inputs)
        for *bits, result in zip(*[one.tolist() for one in (*inputs, ours)], strict=True):
            assert result == extremum(name, form, bits, flags)


@pytest.mark.parametrize("name", ["min", "max"])
def test_minimum_and_maximum_of_f64(name):
    form = KINDS["f64"]
    a, b = inputs_of(form, 2)
    ours = run(f"{name}.f64", a, b)
    for x, y, result in zip(a.tolist(), b.tolist(), ours.tolist(), strict=True):
        wanted = extremum(name, form, [x, y], ())
        assert form.is_nan(result) if form.is_nan(x) and form.is_nan(y) else result == wanted


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("ftz", [False, True])
def test_signs(kind, ftz):
    if ftz and kind in ("bf16", "f64"):
        return
    form, middle = KINDS[kind], ".ftz" if ftz else ""
    (a,) = inputs_of(form, 1)
    absolute, negated = run(f"abs{middle}.{kind}", a), run(f"neg{middle}.{kind}", a)
    for bits, one, other in zip(a.tolist(), absolute.tolist(), negated.tolist(), strict=True):
        if form.is_nan(bits):
            assert form.is_nan(one)
            assert form.is_nan(other)
            continue
        bits = flushed(form, bits) if ftz else bits
        assert one == form.magnitude(bits)
        assert other == bits ^ 1 << (form.bits - 1)


@pytest.mark.parametrize("kind,dtype", [("f32", np.float32), ("f64", np.float64)])
def test_copysign(kind, dtype):
    a, b = inputs_of(KINDS[kind], 2)
    wanted = np.copysign(b.view(dtype), a.view(dtype)).view(a.dtype)
    np.testing.assert_array_equal(run(f"copysign.{kind}", a, b), wanted)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_testp(kind):
    form = KINDS[kind]
    (a,) = inputs_of(form, 1)

    def holds(name, bits):
        value = form.value(bits)
        finite = value not in (NAN, INFINITY)
        subnormal = finite and value != 0 and abs(value) < form.smallest_normal
        return {
            "finite": finite,
            "infinite": value == INFINITY,
            "number": value != NAN,
            "notanumber": value == NAN,
            "normal": finite and not subnormal,
            "subnormal": subnormal,
        }[name]

    for name in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        ours = run(f"testp.{name}.{kind}", a, result=bool)
        assert ours.tolist() == [holds(name, bits) for bits in a.tolist()]


# Approximations -----------------------------------------------------------------------------------


def relative(ours, exact):
    return np.abs(ours.astype(np.float64) - exact) / np.abs(exact)


def any_f32(lowest, highest, seed=0):
    random = np.random.default_rng(seed)
    values = np.exp2(random.uniform(lowest, highest, 4000)) * random.choice([-1, 1], 4000)
    return values.astype(np.float32)


@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_approximations_within_their_documented_error(ftz):
    def compute(name, x):
        return run(f"{name}.approx{ftz}.f32", x.view(np.uint32)).view(np.float32)

    x = any_f32(-100, 100)
    wide = x.astype(np.float64)
    assert (relative(compute("rcp", x), 1 / wide) <= 2.0**-23).all()
    assert (relative(compute("sqrt", np.abs(x)), np.sqrt(np.abs(wide))) <= 2.0**-23).all()
    assert (relative(compute("rsqrt", np.abs(x)), np.abs(wide) ** -0.5) <= 2.0**-22.9).all()
    angles = np.linspace(-np.pi, np.pi, 5001).astype(np.float32)
    for name, function in (("sin", np.sin), ("cos", np.cos)):
        error = np.abs(compute(name, angles) - function(angles.astype(np.float64)))
        assert (error <= 2.0**-20.5).all()
    near = np.linspace(0.5, 2, 5001).astype(np.float32)
    assert (np.abs(compute("lg2", near) - np.log2(near.astype(np.float64))) <= 2.0**-22).all()
    positive = np.abs(x)
    far = positive[(positive < 0.5) | (positive > 2)]
    assert (relative(compute("lg2", far), np.log2(far.astype(np.float64))) <= 2.0**-22).all()
    powers = np.linspace(-126, 127.9, 5001).astype(np.float32)
    assert (
        relative(compute("ex2", powers), np.exp2(powers.astype(np.float64))) <= 2.0**-22.5
    ).all()


def test_quotients_within_their_documented_error():
    a, b = any_f32(-60, 60, 1), any_f32(-60, 60, 2)
    exact = a.astype(np.float64) / b
    for name in ("div.approx.f32", "div.full.f32", "div.approx.ftz.f32", "div.full.ftz.f32"):
        ours = run(name, a.view(np.uint32), b.view(np.uint32)).view(np.float32)
        assert (np.abs(ours - exact) <= 2 * np.spacing(np.abs(exact).astype(np.float32))).all()


def test_tanh_within_its_documented_error():
    x = any_f32(-20, 6)
    ours = run("tanh.approx.f32", x.view(np.uint32)).view(np.float32)
    assert (relative(ours, np.tanh(x.astype(np.float64))) <= 2.0**-11).all()


def halves_of(kind):
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    if kind == "f16":
        return bits, bits.view(np.float16).astype(np.float64)
    return bits, values_of(kind, bits)


def values_of(kind, bits):
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize(
    "name,function,error",
    [
        ("ex2.approx.f16", np.exp2, 2.0**-9.9),
        ("ex2.approx.ftz.bf16", np.exp2, 2.0**-7),
        ("tanh.approx.f16", np.tanh, 2.0**-10.987),
        ("tanh.approx.bf16", np.tanh, 2.0**-8),
    ],
)
def test_functions_of_halves_within_their_documented_error(name, function, error):
    kind = name.split(".")[-1]
    bits, x = halves_of(kind)
    ours = run(name, bits)
    assert (ours[np.isnan(x)] == 0x7FFF).all()
    smallest = float(KINDS[kind].smallest_normal)
    with np.errstate(all="ignore"):
        exact = function(x)
        bound = error * np.abs(exact) if name[:3] == "ex2" else error
        largest = float(KINDS[kind].value(KINDS[kind].maximum))
        normal = (np.abs(exact) >= smallest) & (np.abs(exact) <= largest)
        assert (np.abs(values_of(kind, ours) - exact) <= bound)[normal].all()


@pytest.mark.parametrize("root", ["rcp", "rsqrt"])
def test_coarse_reciprocals_of_f64(root):
    random = np.random.default_rng(4)
    x = np.exp2(random.uniform(-900, 900, 4000))
    bits = x.view(np.uint64)
    ours = run(f"{root}.approx.ftz.f64", bits)
    assert not (ours & np.uint64(0xFFFFFFFF)).any()
    cut = (bits & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
    exact = 1 / cut if root == "rcp" else cut**-0.5
    assert (relative(ours.view(np.float64), exact) <= 2.0**-20).all()


def test_reciprocal_root_of_f64():
    x = np.exp2(np.random.default_rng(5).uniform(-900, 900, 4000))
    ours = run("rsqrt.approx.f64", x.view(np.uint64)).view(np.float64)
    assert (relative(ours, x**-0.5) <= 2.0**-50).all()


def test_limits_of_approximations():
    infinity, zero, nan = 0x7F800000, 0, 0x7FFFFFFF
    minus = 0x80000000
    cases = {
        "rcp.approx.f32": {zero: infinity, minus: minus | infinity, infinity: zero},
        "rsqrt.approx.f32": {zero: infinity, minus: minus | infinity, 0xBF800000: nan},
        "sqrt.approx.f32": {zero: zero, minus: minus, 0xBF800000: nan, infinity: infinity},
        "lg2.approx.f32": {zero: infinity | minus, minus: infinity | minus, 0xBF800000: nan},
        "ex2.approx.f32": {zero: 0x3F800000, minus | infinity: zero, infinity: infinity},
        "sin.approx.f32": {zero: zero, minus: minus, infinity: nan},
        "cos.approx.f32": {zero: 0x3F800000, infinity: nan},
        "tanh.approx.f32": {zero: zero, infinity: 0x3F800000, minus | infinity: 0xBF800000},
        "lg2.approx.ftz.f32": {0x00000001: infinity | minus},
        "rcp.approx.ftz.f32": {0x80000001: infinity | minus, 0x7F000000: zero},
        "ex2.approx.ftz.f32": {0xC2FE0000: zero},
    }
    for name, table in cases.items():
        ours = run(name, np.array(list(table), np.uint32))
        assert ours.tolist() == list(table.values()), name


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code,message",
    [
        ("add.rx.f32 {d}, {a}, {a};", "modifier .rx does not fit"),
        ("add.rn.rz.f32 {d}, {a}, {a};", ".rn and .rz exclude each other"),
        ("add.ftz.ftz.f32 {d}, {a}, {a};", ".ftz is given twice"),
        ("add.relu.f32 {d}, {a}, {a};", "modifier .relu does not fit"),
        ("add.rz.f16x2 {d}, {a}, {a};", "modifier .rz does not fit"),
        ("add.sat.bf16x2 {d}, {a}, {a};", "modifier .sat does not fit"),
        ("fma.f32 {d}, {a}, {a}, {a};", "a modifier is missing"),
        ("fma.rn.sat.relu.f16x2 {d}, {a}, {a}, {a};", ".sat and .relu exclude each other"),
        ("fma.rz.bf16x2 {d}, {a}, {a}, {a};", "modifier .rz does not fit"),
        ("mad.rn.f16x2 {d}, {a}, {a}, {a};", "wrong type"),
        ("div.f32 {d}, {a}, {a};", "a modifier is missing"),
        ("div.rn.f16x2 {d}, {a}, {a};", "wrong type"),
        ("min.xorsign.f32 {d}, {a}, {a};", "belong together"),
        ("min.f16x2 {d}, {a}, {a}, {a};", "three numbers"),
        ("min.NaN.xorsign.abs.f32 {d}, {a}, {a}, {a};", "modifier .xorsign does not fit"),
        ("neg.sat.f32 {d}, {a};", "modifier .sat does not fit"),
        ("rcp.f32 {d}, {a};", "a modifier is missing"),
        ("sqrt.rn.approx.f32 {d}, {a};", "exclude each other"),
        ("rsqrt.rn.f32 {d}, {a};", "modifier .rn does not fit"),
        ("ex2.approx.ftz.f16x2 {d}, {a};", "only with or only without .ftz"),
        ("ex2.approx.bf16x2 {d}, {a};", "only with or only without .ftz"),
        ("tanh.f32 {d}, {a};", "a modifier is missing"),
        ("tanh.approx.ftz.f32 {d}, {a};", "modifier .ftz does not fit"),
        ("sin.approx.f16x2 {d}, {a};", "wrong type"),
        ("copysign.ftz.f32 {d}, {a}, {a};", "modifier .ftz does not fit"),
        ("add.rn.f32 {d}, {a};", "wrong number of operands"),
        ("add.rn.f16 {d}, {a}, {a};", "cannot hold a .f16"),
    ],
)
def test_errors(code, message):
    with pytest.raises(PtxError, match=message):
        run_elementwise(code, [np.zeros(1, np.uint32)], np.uint32, target="sm_100a")
