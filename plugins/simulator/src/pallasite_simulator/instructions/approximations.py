"""Approximate functions of PTX: computed in f64 and rounded, so well within the error that the PTX
ISA allows, but not bit by bit what a chip gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from pallasite_simulator.instructions import compiled
from pallasite_simulator.instructions.compiled import intrinsic
from pallasite_simulator.instructions.float_arithmetic import Function, arithmetic
from pallasite_simulator.instructions.float_conversions import between_formats
from pallasite_simulator.instructions.float_formats import F32, F64, FORMATS, flush
from pallasite_simulator.instructions.rounding import (
    as_bits,
    as_float,
    constant,
    flush_tiny,
    flushed,
    from_f64,
    is_nan,
    to_f64,
)
from pallasite_simulator.types import Array, Values

# One turn divided by 2 pi, as f32.
_TURNS = float(np.float32(1 / (2 * np.pi)))


def _periodic(wave: Callable[[Array], Array], angles: Array) -> Array:
    """Sine or cosine of f32 angles.

    As on an H200, the angle is first divided by 2 pi, in f32 and rounded towards zero, which
    decides what becomes of large angles.
    """
    turns = _truncate(angles * _TURNS).view(np.float32).astype(np.float64)
    fraction = np.copysign(turns - np.trunc(turns), turns)
    return wave(2 * np.pi * fraction)


_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "sin": functools.partial(_periodic, np.sin),
    "cos": functools.partial(_periodic, np.cos),
    "lg2": np.log2,
    "ex2": np.exp2,
    "tanh": np.tanh,
}

# Divisors above this, and below infinity, make quotients zero.
_LARGE_DIVISOR = 253 << F32.mantissa


@functools.cache
def divide(mode: str, ftz: bool) -> Function:
    """The quotient of f32 numbers by ``div.approx`` or ``div.full``.

    ``div.approx`` multiplies with the reciprocal: for divisors above 2**126 the result is zero, or
    NaN if the dividend is infinite.
    """
    flags = frozenset({"ftz"} if ftz else ())
    if mode == "full":
        return arithmetic("div", "f32", "rn", flags)

    quotient = arithmetic("div", "f32", "rn", flags)

    def run(a: Values, b: Values) -> Values:
        result = quotient(a, b)
        divisor = b.view(np.uint32) & np.uint32(F32.magnitude)
        large = (divisor > _LARGE_DIVISOR) & (divisor < F32.infinity)
        if not large.any():
            return result
        dividend = a.view(np.uint32) & np.uint32(F32.magnitude)
        zero = result & np.uint32(F32.sign)
        # NaN stays what it is.
        zero = np.where(dividend >= F32.infinity, np.uint32(F32.nan), zero)
        return np.where(large, zero, result)

    return run


@functools.cache
def reciprocal_root(ftz: bool) -> Function:
    """One divided by the square root of f32 numbers: ``rsqrt.approx``."""

    def emit(builder: Any, bits: Any) -> Any:
        if ftz:
            bits = flushed(builder, bits, F32)
        root = intrinsic(builder, "llvm.sqrt.f64", compiled.F64, to_f64(builder, bits, F32))
        value = builder.fdiv(ir.Constant(compiled.F64, 1.0), root)
        return from_f64(builder, value, F32)

    return compiled.elementwise(emit, [32], 32)


@functools.cache
def double_reciprocal_root() -> Function:
    """One divided by the square root of f64 numbers: ``rsqrt.approx.f64``."""

    def emit(builder: Any, bits: Any) -> Any:
        value = as_float(builder, bits)
        root = intrinsic(builder, "llvm.sqrt.f64", compiled.F64, value)
        result = as_bits(builder, builder.fdiv(ir.Constant(compiled.F64, 1.0), root))
        invalid = is_nan(builder, result, F64)
        quiet = builder.or_(bits, constant(bits, F64.quiet))
        nan = builder.select(is_nan(builder, bits, F64), quiet, constant(bits, F64.nan))
        return builder.select(invalid, nan, result)

    return compiled.elementwise(emit, [64], 64)


@functools.cache
def coarse(root: bool) -> Function:
    """``rcp.approx.ftz.f64``, or ``rsqrt.approx.ftz.f64`` if ``root``: only the upper halves of the
    operand and of the result count."""

    def emit(builder: Any, bits: Any) -> Any:
        upper = constant(bits, 0xFFFFFFFF00000000)
        bits = flushed(builder, builder.and_(bits, upper), F64)
        value = as_float(builder, bits)
        if root:
            value = intrinsic(builder, "llvm.sqrt.f64", compiled.F64, value)
        result = as_bits(builder, builder.fdiv(ir.Constant(compiled.F64, 1.0), value))
        result = flushed(builder, result, F64)
        # To the nearest, where the lower half does not count; infinity stays infinity.
        result = builder.and_(builder.add(result, constant(result, 1 << 31)), upper)
        nan = is_nan(builder, as_bits(builder, value), F64)
        return builder.select(nan, constant(result, 0x7FFFFFFF00000000), result)

    return compiled.elementwise(emit, [64], 64)


def _truncate(values: Array) -> Array:
    cut: Array = between_formats(F64, F32, "rz")(values)
    return cut


@functools.cache
def _rounded(ftz: bool) -> Function:
    """f64 results as f32."""

    def emit(builder: Any, bits: Any) -> Any:
        result = from_f64(builder, as_float(builder, bits), F32)
        return flush_tiny(builder, bits, result, F32, "rn") if ftz else result

    return compiled.elementwise(emit, [64], 32)


@functools.cache
def function(name: str, ftz: bool = False) -> Function:
    """``"sin"``, ``"cos"``, ``"lg2"``, ``"ex2"`` or ``"tanh"`` of f32 numbers."""
    compute = _FUNCTIONS[name]
    widened = between_formats(F32, F64, "rn", frozenset({"ftz"} if ftz else ()))
    rounded = _rounded(ftz)

    def run(values: Values) -> Values:
        with np.errstate(all="ignore"):
            return rounded(compute(widened(values).view(np.float64)))

    return run


@functools.cache
def table(name: str, kind: str, ftz: bool = False) -> Function:
    """A function, as for :func:`function`, of f16 or bf16 numbers, looked up.

    Takes arrays of bits, also of packed types.
    """
    form = FORMATS[kind]
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    operands = flush(patterns, form) if ftz else patterns
    wide = between_formats(form, F64)(operands).view(np.float64)
    with np.errstate(all="ignore"):
        exact = _FUNCTIONS[name](wide)
    results: Array = between_formats(F64, form)(exact)
    if ftz:
        results = flush(results, form)
    results[np.isnan(exact)] = form.nan

    def run(values: Values) -> Values:
        bits = np.atleast_1d(values)
        found = results[bits.view(np.uint16)].view(bits.dtype)
        return found if values.ndim else found[0]

    return run
