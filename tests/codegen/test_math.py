"""Elementary functions: what has an instruction, and errors for what has none."""

from __future__ import annotations

import numpy as np
import pytest
from codegen_support import check, elementwise, instructions, kernel, to_llvm, to_ptx

from pallasite.errors import CompilationError

_RANDOM = np.random.default_rng(3)

EXACT = {
    "sqrt": np.sqrt,
    "absf": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "roundeven": np.round,
    "round": lambda x: np.trunc(x + np.copysign(0.5, x)),
}


@pytest.mark.parametrize("type_", ["f32", "f64"])
@pytest.mark.parametrize("name", EXACT)
def test_exact_functions(name, type_):
    x = (_RANDOM.normal(size=100) * 10).astype(type_.replace("f", "float"))
    x[:4] = [0.5, 1.5, -0.5, 2.5]
    with np.errstate(invalid="ignore"):
        expected = EXACT[name](x)
    got = elementwise(f"%r = math.{name} %x0 : {type_}", type_, (type_, x))
    np.testing.assert_array_equal(got, expected)


APPROXIMATE = {
    "exp2": np.exp2,
    "log2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_functions(name):
    x = _RANDOM.uniform(0.1, 4, 100).astype(np.float32)
    got = elementwise(f"%r = math.{name} %x0 : f32", "f32", ("f32", x))
    np.testing.assert_allclose(got, APPROXIMATE[name](x), rtol=1e-5, atol=1e-6)


def test_integer_and_binary_functions():
    x = _RANDOM.integers(-(2**31), 2**31 - 1, 100).astype(np.int32)
    got = elementwise("%r = math.ctpop %x0 : i32", "i32", ("i32", x))
    np.testing.assert_array_equal(got, [bin(int(one) & 0xFFFFFFFF).count("1") for one in x])
    got = elementwise("%r = math.ctlz %x0 : i32", "i32", ("i32", x))
    np.testing.assert_array_equal(got, [32 - (int(one) & 0xFFFFFFFF).bit_length() for one in x])
    got = elementwise("%r = math.absi %x0 : i32", "i32", ("i32", x))
    np.testing.assert_array_equal(got, np.abs(x))
    u, v = _RANDOM.normal(size=(2, 100)).astype(np.float32)
    got = elementwise("%r = math.copysign %x0, %x1 : f32", "f32", ("f32", u), ("f32", v))
    np.testing.assert_array_equal(got, np.copysign(u, v))
    got = elementwise("%r = math.fma %x0, %x1, %x0 : f32", "f32", ("f32", u), ("f32", v))
    exact = u.astype(np.float64) * v + u
    np.testing.assert_array_equal(got, exact.astype(np.float32))


@pytest.mark.parametrize(
    ("name", "function"), [("isnan", np.isnan), ("isinf", np.isinf), ("isfinite", np.isfinite)]
)
def test_classification(name, function):
    x = np.array([0, 1, np.inf, -np.inf, np.nan, -3], np.float32)
    body = f"%c = math.{name} %x0 : f32\n%r = arith.extui %c : i1 to i32"
    np.testing.assert_array_equal(elementwise(body, "i32", ("f32", x)), function(x))


INSTRUCTIONS = [
    ("exp2", "f32", "ex2.approx.f32"),
    ("exp2", "f16", "ex2.approx.f16"),
    ("exp2", "bf16", "ex2.approx.ftz.bf16"),
    ("log2", "f32", "lg2.approx.f32"),
    ("sin", "f32", "sin.approx.f32"),
    ("cos", "f32", "cos.approx.f32"),
    ("tanh", "f32", "tanh.approx.f32"),
    ("rsqrt", "f32", "rsqrt.approx.f32"),
    ("sqrt", "f32", "sqrt.rn.f32"),
    ("sqrt", "f64", "sqrt.rn.f64"),
    ("floor", "f32", "cvt.rmi.f32.f32"),
    ("roundeven", "f32", "cvt.rni.f32.f32"),
    ("absf", "bf16", "abs.bf16"),
    ("ctpop", "i32", "popc.b32"),
    ("ctlz", "i32", "clz.b32"),
]


@pytest.mark.parametrize(("name", "type_", "instruction"), INSTRUCTIONS)
def test_instruction(name, type_, instruction):
    body = f"%r = math.{name} %x : {type_}\nllvm.store %r, %p : {type_}, !llvm.ptr<1>"
    text = to_ptx(kernel(body, f"%x: {type_}, %p: !llvm.ptr<1>"))
    assert any(one.startswith(instruction + " ") for one in instructions(text)), text


@pytest.mark.parametrize("name", ["log2", "rsqrt", "exp2"])
def test_vectors_are_taken_apart(name):
    body = f"%r = math.{name} %x : vector<2xf32>\nllvm.store %r, %p : vector<2xf32>, !llvm.ptr<1>"
    text = to_ptx(kernel(body, "%x: vector<2xf32>, %p: !llvm.ptr<1>"))
    approximations = [one for one in instructions(text) if ".approx." in one]
    assert len(approximations) == 2


@pytest.mark.parametrize(
    ("name", "type_"), [("exp2", "f64"), ("log2", "f64"), ("log2", "bf16"), ("sin", "f64")]
)
def test_types_without_instruction_are_refused(name, type_):
    body = f"%r = math.{name} %x : {type_}\nllvm.store %r, %p : {type_}, !llvm.ptr<1>"
    with pytest.raises(CompilationError, match=f"math.{name} of type .* has no instruction"):
        to_llvm(kernel(body, f"%x: {type_}, %p: !llvm.ptr<1>"))


@pytest.mark.parametrize("name", ["exp", "log", "erf", "atan", "log1p"])
def test_functions_without_instruction_are_refused(name):
    body = f"%r = math.{name} %x : f32\nllvm.store %r, %p : f32, !llvm.ptr<1>"
    with pytest.raises(CompilationError, match=f"'math.{name}' has no translation") as caught:
        to_llvm(kernel(body, "%x: f32, %p: !llvm.ptr<1>"))
    assert caught.value.location is not None
    assert caught.value.location.line == 3


def test_accuracy_flag_is_kept():
    body = (
        "%r = math.sqrt %x fastmath<afn> : f32\n%s = math.exp2 %r fastmath<contract> : f32\n"
        "llvm.store %s, %p : f32, !llvm.ptr<1>"
    )
    check(
        to_llvm(kernel(body, "%x: f32, %p: !llvm.ptr<1>")),
        """CHECK: call afn float @llvm.sqrt.f32(float %a0)
        CHECK: call contract afn float @llvm.exp2.f32""",
    )
