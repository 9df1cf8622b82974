"""The PTX of the default hardware table: it assembles, and short functions stay short."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from jaxlib.mlir import ir
from math_support import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, FLOAT64

from pallasite.codegen import assembler, ptx
from pallasite.codegen.llvm_ir import translate
from pallasite.codegen.tools import find_tool
from pallasite.ir import ops, types
from pallasite.ir.context import make_context
from pallasite.targets import Target
from pallasite_std.math import conversion, integer, power
from pallasite_std.math.table import BINARY, DTYPES, FLOAT, INTEGER, UNARY, kind

HOPPER = Target(name="sm_90a", ptx_version=86, compute_capability=(9, 0))
BLACKWELL = Target(name="sm_100a", ptx_version=86, compute_capability=(10, 0))
_NAMES = ("int8", "uint16", "int32", "uint32", "int64", "bool")
DTYPES_OF_KERNELS = [BFLOAT16, FLOAT16, FLOAT32, FLOAT64, *FLOAT8, *map(np.dtype, _NAMES)]
PREDICATES = {"is_finite", *integer.FLOAT_PREDICATES}


class Kernels:
    """A module of kernels ``k0``, ``k1``, ... that apply one function each to one register."""

    def __init__(self):
        with make_context(), ir.Location.unknown():
            self.module = ir.Module.create()
        self.count = 0

    def add(self, emit, inputs, output, length):
        with self.module.context, ir.Location.unknown():
            pointers = len(inputs) + 1
            text = f"!llvm.func<void ({', '.join(['ptr<1>'] * pointers)})>"
            from jaxlib.mlir.dialects import llvm

            with ir.InsertionPoint(self.module.body):
                type_ = ir.TypeAttr.get(ir.Type.parse(text))
                function = llvm.LLVMFuncOp(f"k{self.count}", type_)
                function.attributes["nvvm.kernel"] = ir.UnitAttr.get()
            block = function.body.blocks.append(*[types.pointer_type(1)] * pointers)
            with ir.InsertionPoint(block):
                values = []
                for argument, dtype in zip(list(block.arguments)[1:], inputs, strict=True):
                    memory = types.memory_type(dtype)
                    loaded = ops.load(types.vector_type(memory, length), argument)
                    if types.is_bool(dtype):
                        result = types.vector_type(ops.i1(), length)
                        loaded = ops.arith.trunci(result, loaded)
                    values.append(loaded)
                result = emit(*values)
                if types.is_bool(output):
                    result = ops.arith.extui(types.vector_type(ops.i8(), length), result)
                ops.store(result, block.arguments[0])
                llvm.return_()
        self.count += 1

    def ptx(self, target=HOPPER):
        with self.module.context:
            self.module.operation.verify()
            llvm = translate(self.module, debug_info=False)
        with ptx.parsed(llvm) as module:
            ptx.optimize(module, target)
            return ptx.emit(module, target)

    def check(self):
        for target in (HOPPER, BLACKWELL):
            text = self.ptx(target)
            assert ".extern .func" not in text, "a call to a library"
            if find_tool("ptxas").path is None:
                pytest.skip("ptxas is not installed")
            assembler.assemble(text, "k0")


def _instructions(text):
    found = re.findall(r"^\t(?!\.|//)(.*?)[ \t;]", text, re.MULTILINE)
    return [i for i in found if i.split(".")[0] not in ("ld", "st", "ret", "mov", "cvta")]


@pytest.mark.parametrize("dtype", DTYPES_OF_KERNELS, ids=str)
def test_every_function_assembles(dtype):
    kernels = Kernels()
    for name, kinds in DTYPES.items():
        if kind(dtype) not in kinds or (name == "nextafter" and dtype in FLOAT8):
            continue
        output = np.dtype(bool) if name in PREDICATES else dtype
        table, operands = (UNARY, 1) if name in UNARY else (BINARY, 2)
        for approximate in (False, True) if dtype in (FLOAT32, BFLOAT16) else (False,):
            length = 1 if dtype == FLOAT64 else 2
            emit = lambda *v, t=table, n=name, a=approximate: t[n](*v, dtype, a)  # noqa: E731
            kernels.add(emit, [dtype] * operands, output, length)
    kernels.check()


def test_every_conversion_assembles():
    kernels = Kernels()
    for source in DTYPES_OF_KERNELS:
        for target in DTYPES_OF_KERNELS:
            for length in (1, 4):
                emit = lambda v, s=source, t=target: conversion.convert(v, s, t)  # noqa: E731
                kernels.add(emit, [source], target, length)
    kernels.check()


def test_powers_assemble():
    kernels = Kernels()
    for dtype in (BFLOAT16, FLOAT32, FLOAT64):
        integer_dtype = np.dtype(np.int32)
        emit = lambda x, y, d=dtype: power.power(x, y, d)  # noqa: E731
        kernels.add(emit, [dtype, integer_dtype], dtype, 2)
        for exponent in (-3, 0, 5):
            emit = lambda x, d=dtype, e=exponent: power.integer_pow(x, e, d)  # noqa: E731
            kernels.add(emit, [dtype], dtype, 2)
    kernels.check()


def _one(emit, inputs, output, length=1):
    kernels = Kernels()
    kernels.add(emit, inputs, output, length)
    return _instructions(kernels.ptx())


@pytest.mark.parametrize(
    ("name", "approximate", "limit"),
    [("exp", False, 8), ("exp", True, 2), ("exp2", False, 1), ("exp2", True, 1), ("log", True, 2),
     ("logistic", True, 4), ("tanh", True, 1), ("rsqrt", False, 1), ("sin", True, 1),
     ("log", False, 30), ("tanh", False, 26), ("sin", False, 80)],
)  # fmt: skip
def test_instruction_counts(name, approximate, limit):
    found = _one(lambda v: UNARY[name](v, FLOAT32, approximate), [FLOAT32], FLOAT32)
    assert len(found) <= limit, found


def test_exp_is_eight_instructions():
    found = _one(lambda v: UNARY["exp"](v, FLOAT32), [FLOAT32], FLOAT32)
    assert found == [
        "fma.rn.sat.f32", "fma.rm.f32", "sub.rn.f32", "fma.rn.f32", "fma.rn.f32", "shl.b32",
        "ex2.approx.ftz.f32", "mul.rn.f32",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_no_number_is_tested_for_two_bits(name, dtype):
    # Of choices by two bits of one number, ptxas (12.9 to 13.5) loses some in long kernels.
    kernels = Kernels()
    kernels.add(lambda v: UNARY[name](v, dtype, False), [dtype], dtype, 3)
    test = r"and\.b32 \t%r\d+, (%r\d+), (\d+);\s+setp\.(?:eq|ne)\.b32"
    tested = re.findall(test, kernels.ptx())
    assert tested
    assert len({number for number, _ in tested}) == len(tested)


def test_maximum_keeps_nan_in_one_instruction():
    for dtype, name in ((FLOAT32, "max.NaN.f32"), (BFLOAT16, "max.NaN.bf16")):
        assert _one(lambda a, b, d=dtype: BINARY["max"](a, b, d), [dtype] * 2, dtype) == [name]


def test_pairs_of_narrow_floats_are_one_instruction():
    for target, name in (
        (BFLOAT16, "cvt.rn.bf16x2.f32"),
        (FLOAT16, "cvt.rn.f16x2.f32"),
        (FLOAT8[0], "cvt.rn.satfinite.e4m3x2.f32"),
        (FLOAT8[1], "cvt.rn.satfinite.e5m2x2.f32"),
    ):
        emit = lambda v, t=target: conversion.convert(v, FLOAT32, t, saturate=True)  # noqa: E731
        found = _one(emit, [FLOAT32], target, 2)
        assert found == [name], found


@pytest.mark.parametrize("target", FLOAT8[:2], ids=str)
def test_what_is_clamped_to_the_largest_numbers_is_one_instruction(target):
    largest = float(ml_dtypes.finfo(target).max)

    def emit(value, bound=largest, scale=1.0):
        low, high = (ops.constant(n, value.type) for n in (-bound, bound * scale))
        clamped = integer.minimum(high, integer.maximum(value, low, FLOAT32), FLOAT32)
        return conversion.convert(clamped, FLOAT32, target)

    (name,) = _one(emit, [FLOAT32], target, 2)
    assert name.startswith("cvt.rn.satfinite.e")
    for options in (dict(bound=0.5 * largest), dict(scale=0.5), dict(scale=2.0)):
        found = _one(lambda v, o=options: emit(v, **o), [FLOAT32], target, 2)
        assert any(one.startswith("min.") for one in found)


def test_kinds():
    assert kind(FLOAT8[0]) == FLOAT and kind(np.int8) == INTEGER
