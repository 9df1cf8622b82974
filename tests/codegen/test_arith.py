"""Arithmetic: numeric results on the host, and the shape of what is emitted."""

# ruff: noqa: E501

from __future__ import annotations

import numpy as np
import pytest
from codegen_support import TYPES, call_host, check, elementwise, kernel, to_llvm, to_ptx

_RANDOM = np.random.default_rng(7)


def _integers(type_: str, size: int = 200) -> np.ndarray:
    info = np.iinfo(TYPES[type_])
    values = _RANDOM.integers(info.min, info.max, size, dtype=TYPES[type_], endpoint=True)
    values[:6] = [info.min, info.max, 0, 1, -1, 2]
    return values


def _floats(type_: str, size: int = 200) -> np.ndarray:
    values = _RANDOM.normal(size=size).astype(TYPES[type_]) * 100
    values[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0]
    return values


def _unsigned(array: np.ndarray) -> np.ndarray:
    return array.view(array.dtype.name.replace("int", "uint"))


BINARY = {
    "addi": lambda x, y: x + y,
    "subi": lambda x, y: x - y,
    "muli": lambda x, y: x * y,
    "andi": lambda x, y: x & y,
    "ori": lambda x, y: x | y,
    "xori": lambda x, y: x ^ y,
    "maxsi": np.maximum,
    "minsi": np.minimum,
    "maxui": lambda x, y: np.maximum(_unsigned(x), _unsigned(y)).view(x.dtype),
    "minui": lambda x, y: np.minimum(_unsigned(x), _unsigned(y)).view(x.dtype),
}


@pytest.mark.parametrize("type_", ["i8", "i16", "i32", "i64"])
@pytest.mark.parametrize("name", BINARY)
def test_integer_binary(name, type_):
    x, y = _integers(type_), _RANDOM.permutation(_integers(type_))
    with np.errstate(over="ignore"):
        expected = BINARY[name](x, y)
    got = elementwise(f"%r = arith.{name} %x0, %x1 : {type_}", type_, (type_, x), (type_, y))
    np.testing.assert_array_equal(got, expected)


DIVISIONS = {
    "divsi": lambda x, y: np.trunc(x / y).astype(np.int64),
    "remsi": np.fmod,
    "floordivsi": lambda x, y: x // y,
    "ceildivsi": lambda x, y: -((-x) // y),
    "divui": lambda x, y: _unsigned(x) // _unsigned(y),
    "remui": lambda x, y: _unsigned(x) % _unsigned(y),
    "ceildivui": lambda x, y: -(-_unsigned(x).astype(object) // _unsigned(y).astype(object)),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_integer_division(name):
    x = _RANDOM.integers(-1000, 1000, 300).astype(np.int32)
    y = _RANDOM.integers(-30, 30, 300).astype(np.int32)
    y[y == 0] = 7
    expected = np.asarray(DIVISIONS[name](x, y)).astype(np.int64).astype(np.int32)
    got = elementwise(f"%r = arith.{name} %x0, %x1 : i32", "i32", ("i32", x), ("i32", y))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["shli", "shrsi", "shrui"])
def test_shifts(name):
    x = _integers("i32")
    y = _RANDOM.integers(0, 32, x.size).astype(np.int32)
    functions = {
        "shli": lambda: x << y,
        "shrsi": lambda: x >> y,
        "shrui": lambda: (_unsigned(x) >> _unsigned(y)).view(np.int32),
    }
    got = elementwise(f"%r = arith.{name} %x0, %x1 : i32", "i32", ("i32", x), ("i32", y))
    np.testing.assert_array_equal(got, functions[name]())


FLOAT_BINARY = {
    "addf": np.add,
    "subf": np.subtract,
    "mulf": np.multiply,
    "divf": np.divide,
    "remf": np.fmod,
    "maximumf": np.maximum,
    "minimumf": np.minimum,
    "maxnumf": np.fmax,
    "minnumf": np.fmin,
}


@pytest.mark.parametrize("type_", ["f32", "f64"])
@pytest.mark.parametrize("name", FLOAT_BINARY)
def test_float_binary(name, type_):
    x, y = _floats(type_), _RANDOM.permutation(_floats(type_))
    with np.errstate(all="ignore"):
        expected = FLOAT_BINARY[name](x, y)
    got = elementwise(f"%r = arith.{name} %x0, %x1 : {type_}", type_, (type_, x), (type_, y))
    np.testing.assert_array_equal(got, expected)


COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "slt": np.less,
    "sle": np.less_equal,
    "sgt": np.greater,
    "sge": np.greater_equal,
    "ult": lambda x, y: _unsigned(x) < _unsigned(y),
    "ule": lambda x, y: _unsigned(x) <= _unsigned(y),
    "ugt": lambda x, y: _unsigned(x) > _unsigned(y),
    "uge": lambda x, y: _unsigned(x) >= _unsigned(y),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_integer_comparison(name):
    x = _RANDOM.integers(-3, 3, 200).astype(np.int32)
    y = _RANDOM.integers(-3, 3, 200).astype(np.int32)
    body = f"%c = arith.cmpi {name}, %x0, %x1 : i32\n%r = arith.extui %c : i1 to i32"
    got = elementwise(body, "i32", ("i32", x), ("i32", y))
    np.testing.assert_array_equal(got, COMPARISONS[name](x, y).astype(np.int32))


ORDERED = {
    "eq": np.equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "ne": lambda x, y: (x < y) | (x > y),
}


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("kind", ["o", "u"])
def test_float_comparison(kind, name):
    x = _RANDOM.integers(-2, 2, 300).astype(np.float32)
    y = _RANDOM.integers(-2, 2, 300).astype(np.float32)
    x[::7] = np.nan
    y[::5] = np.nan
    expected = ORDERED[name](x, y)
    if kind == "u":
        expected = expected | np.isnan(x) | np.isnan(y)
    body = f"%c = arith.cmpf {kind}{name}, %x0, %x1 : f32\n%r = arith.extui %c : i1 to i32"
    got = elementwise(body, "i32", ("f32", x), ("f32", y))
    np.testing.assert_array_equal(got, expected.astype(np.int32))


@pytest.mark.parametrize(("name", "invert"), [("ord", True), ("uno", False)])
def test_nan_comparison(name, invert):
    x = _floats("f32")
    body = f"%c = arith.cmpf {name}, %x0, %x0 : f32\n%r = arith.extui %c : i1 to i32"
    got = elementwise(body, "i32", ("f32", x))
    np.testing.assert_array_equal(got, (np.isnan(x) ^ invert).astype(np.int32))


CONVERSIONS = [
    ("extsi", "i8", "i32"),
    ("extui", "i8", "i32"),
    ("trunci", "i64", "i16"),
    ("sitofp", "i32", "f32"),
    ("uitofp", "i32", "f64"),
    ("extf", "f32", "f64"),
    ("truncf", "f64", "f32"),
]


@pytest.mark.parametrize(("name", "source", "result"), CONVERSIONS)
def test_conversion(name, source, result):
    x = _floats(source) if source[0] == "f" else _integers(source)
    given = _unsigned(x) if "ui" in name else x
    got = elementwise(f"%r = arith.{name} %x0 : {source} to {result}", result, (source, x))
    np.testing.assert_array_equal(got, given.astype(TYPES[result]))


@pytest.mark.parametrize("name", ["fptosi", "fptoui"])
def test_float_to_integer(name):
    x = _RANDOM.uniform(0 if name == "fptoui" else -1e6, 1e6, 100).astype(np.float32)
    got = elementwise(f"%r = arith.{name} %x0 : f32 to i32", "i32", ("f32", x))
    np.testing.assert_array_equal(got, x.astype(np.int32))


def test_bitcast_select_negate_and_index():
    x = _floats("f32")
    got = elementwise("%r = arith.bitcast %x0 : f32 to i32", "i32", ("f32", x))
    np.testing.assert_array_equal(got, x.view(np.int32))
    got = elementwise("%r = arith.negf %x0 : f32", "f32", ("f32", x))
    np.testing.assert_array_equal(got.view(np.int32), (-x).view(np.int32))
    flags = _RANDOM.integers(0, 2, x.size).astype(np.int32)
    body = "%c = arith.trunci %x0 : i32 to i1\n%r = arith.select %c, %x1, %x2 : f32"
    got = elementwise(body, "f32", ("i32", flags), ("f32", x), ("f32", x[::-1]))
    np.testing.assert_array_equal(got, np.where(flags, x, x[::-1]))
    y = _integers("i32")
    for name, expected in (("index_cast", y), ("index_castui", _unsigned(y))):
        body = f"%c = arith.{name} %x0 : i32 to index\n%r = arith.index_cast %c : index to i64"
        np.testing.assert_array_equal(elementwise(body, "i64", ("i32", y)), expected.astype("i8"))


@pytest.mark.parametrize("sign", ["s", "u"])
def test_extended_multiplication(sign):
    x, y = _integers("i32"), _RANDOM.permutation(_integers("i32"))
    wide = [
        (one if sign == "s" else _unsigned(one)).astype(np.int64 if sign == "s" else np.uint64)
        for one in (x, y)
    ]
    product = (wide[0] * wide[1]).view(np.int64)
    body = f"%low, %r = arith.mul{sign}i_extended %x0, %x1 : i32"
    got = elementwise(body, "i32", ("i32", x), ("i32", y))
    np.testing.assert_array_equal(got, (product >> 32).astype(np.int32))
    body = f"%r, %high = arith.mul{sign}i_extended %x0, %x1 : i32"
    got = elementwise(body, "i32", ("i32", x), ("i32", y))
    np.testing.assert_array_equal(got, product.astype(np.int32))


def test_extended_addition():
    x, y = _integers("i32"), _RANDOM.permutation(_integers("i32"))
    total = _unsigned(x).astype(np.uint64) + _unsigned(y)
    body = "%s, %c = arith.addui_extended %x0, %x1 : i32, i1\n%r = arith.extui %c : i1 to i32"
    got = elementwise(body, "i32", ("i32", x), ("i32", y))
    np.testing.assert_array_equal(got, (total >> np.uint64(32)).astype(np.int32))


CONSTANTS = [
    ("f32", "1.5", "float", "1.500000e+00"),
    ("f32", "0.1", "float", "0x3FB99999A0000000"),
    ("f32", "0x7F800000", "float", "0x7FF0000000000000"),
    ("f32", "0xFF800000", "float", "0xFFF0000000000000"),
    ("f32", "0x7FC00000", "float", "0x7FF8000000000000"),
    ("f32", "-0.0", "float", "-0.000000e+00"),
    ("f64", "0.1", "double", "1.000000e-01"),
    ("f16", "0.1", "half", "0xH2E66"),
    ("bf16", "0.1", "bfloat", "0xR3DCD"),
    ("i1", "true", "i1", "true"),
    ("i8", "-3", "i8", "-3"),
    ("i64", "9223372036854775807", "i64", "9223372036854775807"),
    ("vector<2xf32>", "dense<1.0>", "<2 x float>", "<float 1.000000e+00, float 1.000000e+00>"),
    ("vector<2xf32>", "dense<[1.0, 2.0]>", "<2 x float>", "<float 1.000000e+00, float 2.000000e+00>"),
    ("vector<2xbf16>", "dense<[1.0, 0x7F80]>", "<2 x bfloat>", "<bfloat 0xR3F80, bfloat 0xR7F80>"),
    ("vector<2xf16>", "dense<[1.0, 2.5]>", "<2 x half>", "<half 0xH3C00, half 0xH4100>"),
    ("vector<2xi16>", "dense<[1, -2]>", "<2 x i16>", "<i16 1, i16 -2>"),
    ("vector<2xi1>", "dense<[true, false]>", "<2 x i1>", "<i1 true, i1 false>"),
    ("vector<4xi32>", "dense<0>", "<4 x i32>", "zeroinitializer"),
]  # fmt: skip


@pytest.mark.parametrize(("type_", "value", "spelling", "text"), CONSTANTS)
def test_constants(type_, value, spelling, text):
    suffix = "" if type_ == "i1" else f" : {type_}"
    body = f"%c = arith.constant {value}{suffix}\nllvm.store %c, %p : {type_}, !llvm.ptr<1>"
    source = kernel(body, "%p: !llvm.ptr<1>")
    assert f"store {spelling} {text}, ptr addrspace(1)" in to_llvm(source)
    to_ptx(source)


def test_nan_and_infinity_are_exact():
    source = """llvm.func @f() -> f32 {
      %c = arith.constant 0xFF800000 : f32
      llvm.return %c : f32 }"""
    assert call_host(source, "f32") == -np.inf


def test_flags_reach_llvm():
    source = kernel(
        """%a = arith.addf %x, %y fastmath<nnan,contract> : f32
        %b = arith.addi %i, %i overflow<nsw,nuw> : i32
        %c = arith.cmpf olt, %a, %y fastmath<fast> : f32
        %d = arith.select %c, %b, %i : i32
        llvm.store %d, %p : i32, !llvm.ptr<1>""",
        "%x: f32, %y: f32, %i: i32, %p: !llvm.ptr<1>",
    )
    check(
        to_llvm(source),
        """CHECK: fadd nnan contract float %a0, %a1
        CHECK-NEXT: add nsw nuw i32 %a2, %a2
        CHECK-NEXT: fcmp fast olt float
        CHECK-NEXT: select i1""",
    )


def test_float_instructions_in_ptx():
    source = kernel(
        """%a = arith.mulf %x, %y : bf16
        %b = arith.addf %a, %y : bf16
        %m = arith.maximumf %u, %v : f32
        %n = arith.maxnumf %m, %v : f32
        %o = arith.divf %n, %u : f32
        llvm.store %b, %p : bf16, !llvm.ptr<1>
        llvm.store %o, %q : f32, !llvm.ptr<1>""",
        "%x: bf16, %y: bf16, %u: f32, %v: f32, %p: !llvm.ptr<1>, %q: !llvm.ptr<1>",
    )
    check(
        to_ptx(source),
        """CHECK-DAG: mul.rn.bf16
        CHECK-DAG: add.rn.bf16
        CHECK-DAG: max.NaN.f32
        CHECK-DAG: max.f32
        CHECK-DAG: div.rn.f32""",
    )
