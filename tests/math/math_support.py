"""Runs functions of the math library on this machine, and measures their errors in ulp."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf
from jaxlib.mlir.dialects import llvm as llvm_dialect

from pallasite.codegen.llvm_ir import translate
from pallasite.ir import ops, types
from pallasite.ir.context import make_context
from pallasite_std.math.hardware import Hardware
from pallasite_std.math.values import F32, F64, Real, Word

FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)


class Host(Hardware):
    """The hardware's instructions, from what the host's C library and LLVM have."""

    float8_pairs = False

    def _intrinsic(self, name: str, *operands: Real) -> Real:
        value = operands[0].value
        count = types_length(value)
        suffix = f"v{count}f32" if count else "f32"
        return Real(
            ops.intrinsic(value.type, f"llvm.{name}.{suffix}", *(o.value for o in operands))
        )

    @staticmethod
    def _flush(x: Real) -> Real:
        return (abs(x) < F32.smallest_normal).choose(x.constant(0.0).with_sign_of(x), x)

    def exp2(self, x):
        return self._intrinsic("exp2", x)

    def exp2_flush(self, x):
        return self._flush(self._intrinsic("exp2", x))

    def log2_flush(self, x):
        return self._intrinsic("log2", self._flush(x))

    def sin(self, x):
        return self._intrinsic("sin", x)

    def cos(self, x):
        return self._intrinsic("cos", x)

    def tanh(self, x):
        return self._intrinsic("tanh", x)

    def rsqrt(self, x):
        return (1.0 / x.extend(F64).sqrt()).truncate(F32)

    def rsqrt_flush(self, x):
        return self.rsqrt(self._flush(x))

    def sqrt_flush(self, x):
        return self._flush(x).sqrt()

    def reciprocal_flush(self, x):
        return self._flush(1.0 / self._flush(x))

    def divide(self, x, y):
        return x / y

    def fma_saturate(self, x, y, z):
        total = x.times_plus(y, z)
        above = Real(arith.maxnumf(total.value, total.lift(0.0)))
        return Real(arith.minnumf(above.value, total.lift(1.0)))

    def fma_down(self, x, y, z):
        # Only for sums whose last place counts whole numbers.
        total = x.extend(F64).times_plus(y.extend(F64), z.extend(F64))
        return total.floor().truncate(F32)

    def to_int32(self, x, signed):
        from pallasite_std.math.hardware import float_to_integer

        return float_to_integer(x, 32, signed)

    def below_byte(self, x, above):
        return Word(x).extend_unsigned(16) | (above << 8)

    def mask_and_flip(self, x, mask, flipped):
        return (x & mask) ^ flipped

    def funnel_left(self, high: Word, low: Word, count: Word) -> Word:
        return super().funnel_left(high, low, count)


HOST = Host()


def types_length(value: ir.Value) -> int:
    """Number of elements of a vector, 0 for a scalar."""
    return int(value.type.shape[0]) if isinstance(value.type, ir.VectorType) else 0


@functools.cache
def _host() -> tuple[str, str]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.get_default_triple()
    machine = llvm.Target.from_triple(triple).create_target_machine()
    return triple, str(machine.target_data)


def _machine() -> Any:
    features = llvm.get_host_cpu_features()
    for name in ("avx512bf16", "avxneconvert"):
        # Their conversions to bf16 flush denormals.
        if name in features:
            features[name] = False
    return llvm.Target.from_triple(_host()[0]).create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=1
    )


# What LLVM calls for conversions that the host has no instruction for.
_ROUNDING = """
define bfloat @__truncsfbf2(float %x) {
  %b = bitcast float %x to i32
  %s = lshr i32 %b, 16
  %t = and i32 %s, 1
  %h = add i32 %t, 32767
  %r = add i32 %b, %h
  %q = lshr i32 %r, 16
  %n = or i32 %s, 64
  %nan = fcmp uno float %x, 0.0
  %v = select i1 %nan, i32 %n, i32 %q
  %i = trunc i32 %v to i16
  %f = bitcast i16 %i to bfloat
  ret bfloat %f
}
define float @odd(double %x) {
  %f = fptrunc double %x to float
  %d = fpext float %f to double
  %b = bitcast float %f to i32
  %inexact = fcmp one double %d, %x
  %ad = call double @llvm.fabs.f64(double %d)
  %ax = call double @llvm.fabs.f64(double %x)
  %up = fcmp ogt double %ad, %ax
  %one = zext i1 %up to i32
  %c = sub i32 %b, %one
  %o = or i32 %c, 1
  %v = select i1 %inexact, i32 %o, i32 %b
  %r = bitcast i32 %v to float
  ret float %r
}
define bfloat @__truncdfbf2(double %x) {
  %f = call float @odd(double %x)
  %r = call bfloat @__truncsfbf2(float %f)
  ret bfloat %r
}
define half @__truncdfhf2(double %x) {
  %f = call float @odd(double %x)
  %r = fptrunc float %f to half
  ret half %r
}
"""

_kept: list[Any] = []

Emit = Callable[..., ir.Value]


def to_register(value: ir.Value, dtype: Any) -> ir.Value:
    """From the one or more bytes in which tests store an element to its register type."""
    element = types.element_type(dtype)
    if isinstance(element, ir.IntegerType) and element.width < 8:
        return Word(value).truncate(element.width).value
    return value


def to_memory(value: ir.Value, dtype: Any) -> ir.Value:
    """The inverse of :func:`to_register`; narrow integers are extended by their sign."""
    word = types.element_type(dtype)
    if isinstance(word, ir.IntegerType) and word.width < 8:
        extended = Word(value)
        return (extended.extend(8) if types.is_signed(dtype) else extended.extend_unsigned(8)).value
    return value


def build(emit: Emit, inputs: Sequence[Any], output: Any, length: int) -> ir.Module:
    """A function ``f(out, in..., count)`` that applies ``emit`` to vectors of some length."""
    context = make_context()
    with context, ir.Location.unknown():
        module = ir.Module.create()
        pointer = types.pointer_type()
        arguments = [pointer] * (1 + len(inputs)) + [ops.i64()]
        text = f"!llvm.func<void ({', '.join(['ptr'] * (1 + len(inputs)) + ['i64'])})>"
        with ir.InsertionPoint(module.body):
            function = llvm_dialect.LLVMFuncOp("f", ir.TypeAttr.get(ir.Type.parse(text)))
        block = function.body.blocks.append(*arguments)
        with ir.InsertionPoint(block):
            zero = ops.i64_constant(0)
            loop = scf.ForOp(zero, block.arguments[-1], ops.i64_constant(max(length, 1)))
            with ir.InsertionPoint(loop.body):
                values = []
                for argument, dtype in zip(list(block.arguments)[1:-1], inputs, strict=True):
                    memory = _memory_type(dtype)
                    place = ops.element_pointer(argument, loop.induction_variable, memory)
                    type_ = ir.VectorType.get((length,), memory) if length else memory
                    values.append(to_register(ops.load(type_, place, alignment=1), dtype))
                result = to_memory(emit(*values), output)
                memory = _memory_type(output)
                place = ops.element_pointer(block.arguments[0], loop.induction_variable, memory)
                ops.store(result, place, alignment=1)
                scf.yield_([])
            llvm_dialect.return_()
        module.operation.verify()
        return module


def _memory_type(dtype: Any) -> ir.Type:
    element = types.element_type(dtype)
    if isinstance(element, ir.IntegerType) and element.width < 8:
        return ops.i8()
    return element


def run(emit: Emit, arrays: Sequence[np.ndarray], output: Any, length: int = 4) -> np.ndarray:
    """Applies an emitter to arrays on this machine; ``length`` 0 means scalars."""
    inputs = [array.dtype for array in arrays]
    count = max(array.size for array in arrays)
    step = max(length, 1)
    padded = -(-count // step) * step
    # Every element in whole bytes: 4-bit types and bool are stored as one byte already.
    buffers = []
    for array in arrays:
        whole = np.resize(np.ascontiguousarray(array).ravel(), padded)
        buffers.append(np.ascontiguousarray(whole))
    result = np.zeros(padded, output)
    module = build(emit, inputs, output, length)
    triple, layout = _host()
    with module.context, ir.Location.unknown():
        text = translate(module, triple=triple, data_layout=layout, debug_info=False)
    compiled = llvm.parse_assembly(text + _ROUNDING)
    compiled.verify()
    engine = llvm.create_mcjit_compiler(compiled, _machine())
    engine.finalize_object()
    _kept.append(engine)
    address = engine.get_function_address("f")
    kinds = [ctypes.c_void_p] * (1 + len(buffers)) + [ctypes.c_int64]
    function = ctypes.CFUNCTYPE(None, *kinds)(address)
    function(result.ctypes.data, *[b.ctypes.data for b in buffers], padded)
    return result[:count]


def ulp_errors(result: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Distances in units of the last place of the reference, which has a higher precision.

    Where one is infinite or NaN, the distance is 0 if the rounded reference is the same, else
    infinity; an overflow that rounding to nearest would also give is none.
    """
    dtype = result.dtype
    info = ml_dtypes.finfo(dtype) if dtype not in (FLOAT32, FLOAT64) else np.finfo(dtype)
    wide = reference.dtype.type
    digits, smallest = int(info.nmant), int(info.minexp)
    with np.errstate(all="ignore"):
        rounded = reference.astype(dtype)
        _, exponent = np.frexp(np.abs(reference))
        place = np.ldexp(wide(1), np.maximum(exponent - 1, smallest) - digits)
        errors = np.abs(result.astype(wide) - reference) / place
        finite = np.isfinite(rounded.astype(wide)) & np.isfinite(result.astype(wide))
        same = (result == rounded) | (np.isnan(result) & np.isnan(rounded))
    return np.where(finite, errors, np.where(same, 0.0, np.inf)).astype(np.float64)


def samples(dtype: Any, count: int = 20000, seed: int = 0) -> np.ndarray:
    """Numbers over the whole range (random bits), around 1, and the special ones."""
    generator = np.random.default_rng(seed)
    bits = np.dtype(dtype).itemsize * 8
    unsigned = np.dtype(f"u{bits // 8}")
    anything = generator.integers(0, 2**bits, count, dtype=unsigned, endpoint=False)
    near = generator.normal(0, 1, count) * 10 ** generator.uniform(-3, 2.5, count)
    info = np.finfo(dtype) if np.dtype(dtype) in (FLOAT32, FLOAT64) else ml_dtypes.finfo(dtype)
    tiny, largest = float(info.smallest_normal), float(info.max)
    least = float(info.smallest_subnormal)
    with np.errstate(all="ignore"):
        special = np.array(
            [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 10.0, 88.7, 89.0, 104.0, 709.7, 710.0, 745.2,
             tiny, tiny / 2, least, largest, np.inf, np.nan, np.pi, np.pi / 2, 1 + info.eps,
             1 - info.eps / 2, 0.55, 1e-3, 1e4, 100000.0, 105616.0]
        ).astype(dtype)  # fmt: skip
        parts = [anything.view(dtype), near.astype(dtype), special, -special]
    return np.concatenate(parts)


def long_double(values: np.ndarray) -> np.ndarray:
    """The type in which references are computed: float64, or for that the 80-bit one."""
    return values.astype(np.longdouble if values.dtype == FLOAT64 else np.float64)
