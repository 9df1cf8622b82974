"""Element-wise arithmetic, comparisons, math functions and conversions, registered from tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import primitives
from jaxlib.mlir import ir

from pallasite.plugin import RuleSet, Semantics, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.lowering import RegisterArray, RuleContext, elementwise
from pallasite_std.math import conversion, power
from pallasite_std.math.hardware import hardware_of
from pallasite_std.math.precision import reduce_precision
from pallasite_std.math.table import BINARY, UNARY
from pallasite_std.memory.bounds import indices_of
from pallasite_std.rules.shape import same_layout_hint, stretchable

rules = RuleSet()
lax = _jax.lax_primitives
_ALL = (Semantics.LANE, Semantics.WARP)

UNARY_PRIMITIVES = {
    lax.neg_p: "neg",
    lax.not_p: "not",
    lax.abs_p: "abs",
    lax.sign_p: "sign",
    lax.floor_p: "floor",
    lax.ceil_p: "ceil",
    lax.is_finite_p: "is_finite",
    lax.exp_p: "exp",
    lax.exp2_p: "exp2",
    lax.expm1_p: "expm1",
    lax.log_p: "log",
    primitives.log2_p: "log2",
    lax.log1p_p: "log1p",
    lax.logistic_p: "logistic",
    lax.sqrt_p: "sqrt",
    lax.rsqrt_p: "rsqrt",
    lax.cbrt_p: "cbrt",
    lax.sin_p: "sin",
    lax.cos_p: "cos",
    lax.tan_p: "tan",
    lax.asin_p: "asin",
    lax.acos_p: "acos",
    lax.atan_p: "atan",
    lax.sinh_p: "sinh",
    lax.cosh_p: "cosh",
    lax.tanh_p: "tanh",
    lax.asinh_p: "asinh",
    lax.acosh_p: "acosh",
    lax.atanh_p: "atanh",
    lax.population_count_p: "population_count",
    lax.clz_p: "clz",
    lax.square_p: "square",
}

BINARY_PRIMITIVES = {
    lax.add_p: "add",
    lax.sub_p: "sub",
    lax.mul_p: "mul",
    lax.mulhi_p: "mul_hi",
    lax.div_p: "div",
    lax.rem_p: "rem",
    lax.max_p: "max",
    lax.min_p: "min",
    lax.pow_p: "pow",
    lax.atan2_p: "atan2",
    lax.nextafter_p: "nextafter",
    lax.and_p: "and",
    lax.or_p: "or",
    lax.xor_p: "xor",
    lax.shift_left_p: "shift_left",
    lax.shift_right_logical_p: "shift_right_logical",
    lax.shift_right_arithmetic_p: "shift_right_arithmetic",
    lax.eq_p: "eq",
    lax.ne_p: "ne",
    lax.lt_p: "lt",
    lax.le_p: "le",
    lax.gt_p: "gt",
    lax.ge_p: "ge",
}


def unary(ctx: RuleContext, name: str, x: RegisterArray, dtype: Any) -> RegisterArray:
    """Applies a function of the math library to every element."""
    function, approximate = UNARY[name], ctx.params.approx_math
    hardware = hardware_of(ctx.target.compute_capability)
    return x.map(lambda value: function(value, x.dtype, approximate, hardware), dtype)


def binary(
    ctx: RuleContext, name: str, x: RegisterArray, y: RegisterArray, dtype: Any
) -> RegisterArray:
    """Applies a function of the math library to corresponding elements."""
    function, approximate = BINARY[name], ctx.params.approx_math
    operand = x.dtype
    return elementwise(lambda a, b: function(a, b, operand, approximate), [x, y], dtype)


def _shape(ctx: RuleContext) -> tuple[int, ...]:
    return tuple(ctx.avals_out[0].shape)


def _register_unary(primitive: Any, name: str) -> None:
    @rules.lowering(primitive, *_ALL)
    def _rule(ctx: RuleContext, x: RegisterArray, **params: Any) -> RegisterArray:
        _check_accuracy(ctx, params)
        return unary(ctx, name, x, ctx.avals_out[0].dtype)

    rules.layout(primitive)(same_layout_hint)


def _register_binary(primitive: Any, name: str) -> None:
    @rules.lowering(primitive, *_ALL)
    def _rule(ctx: RuleContext, x: RegisterArray, y: RegisterArray, **params: Any) -> RegisterArray:
        function, approximate, operand = BINARY[name], ctx.params.approx_math, x.dtype
        known = indices_of(ctx.kernel)

        def apply(a: ir.Value, b: ir.Value) -> ir.Value:
            found = known.compared(name, a, b)
            return function(a, b, operand, approximate) if found is None else found

        return elementwise(
            apply,
            stretchable(ctx, [x, y], _shape(ctx)),
            ctx.avals_out[0].dtype,
            _shape(ctx),
        )

    rules.layout(primitive)(same_layout_hint)


def _check_accuracy(ctx: RuleContext, params: dict[str, Any]) -> None:
    if params.get("accuracy") is not None:
        raise UnsupportedError(
            f"{ctx.primitive} with accuracy={params['accuracy']}",
            expected="accuracy=None; CompilerParams(approx_math=True) selects faster functions",
        )


for _primitive, _name in UNARY_PRIMITIVES.items():
    _register_unary(_primitive, _name)
for _primitive, _name in BINARY_PRIMITIVES.items():
    _register_binary(_primitive, _name)


@rules.lowering(lax.integer_pow_p, *_ALL)
def _integer_pow(ctx: RuleContext, x: RegisterArray, *, y: int) -> RegisterArray:
    approximate = ctx.params.approx_math
    return x.map(lambda value: power.integer_pow(value, y, x.dtype, approximate))


@rules.lowering(lax.clamp_p, *_ALL)
def _clamp(
    ctx: RuleContext, low: RegisterArray, x: RegisterArray, high: RegisterArray
) -> RegisterArray:
    at_least = elementwise(
        lambda a, b: BINARY["max"](a, b, x.dtype, False),
        stretchable(ctx, [x, low], _shape(ctx)),
        x.dtype,
        _shape(ctx),
    )
    return elementwise(
        lambda a, b: BINARY["min"](a, b, x.dtype, False),
        stretchable(ctx, [at_least, high], _shape(ctx)),
        x.dtype,
        _shape(ctx),
    )


@rules.lowering(lax.round_p, *_ALL)
def _round(ctx: RuleContext, x: RegisterArray, *, rounding_method: Any) -> RegisterArray:
    to_even = rounding_method == _jax.RoundingMethod.TO_NEAREST_EVEN
    return unary(ctx, "round_to_even" if to_even else "round_away_from_zero", x, x.dtype)


@rules.lowering(lax.convert_element_type_p, *_ALL)
def _convert_element_type(
    ctx: RuleContext, x: RegisterArray, *, new_dtype: Any, **params: Any
) -> RegisterArray:
    source, target = x.dtype, np.dtype(new_dtype)
    return x.map(lambda value: conversion.convert(value, source, target), target)


@rules.lowering(lax.bitcast_convert_type_p, *_ALL)
def _bitcast_convert_type(
    ctx: RuleContext, x: RegisterArray, *, new_dtype: Any, **params: Any
) -> RegisterArray:
    source, target = x.dtype, np.dtype(new_dtype)
    if ctx.avals_out[0].shape != x.shape:
        raise UnsupportedError(
            "a bitcast between element types of different widths",
            got=f"{source} to {target}",
            expected="types of the same width",
        )
    return x.map(lambda value: conversion.bitcast(value, source, target), target)


@rules.lowering(lax.reduce_precision_p, *_ALL)
def _reduce_precision(
    ctx: RuleContext, x: RegisterArray, *, exponent_bits: int, mantissa_bits: int
) -> RegisterArray:
    dtype = x.dtype
    return x.map(lambda value: reduce_precision(value, dtype, exponent_bits, mantissa_bits), dtype)


def _special_unary(primitive: Any, name: str) -> None:
    if name in UNARY:
        _register_unary(primitive, name)


for _primitive_name, _name in (("erf_p", "erf"), ("erfc_p", "erfc"), ("erf_inv_p", "erf_inv")):
    _found = getattr(_jax, _primitive_name, None)
    if _found is not None:
        _special_unary(_found, _name)


@rules.lowering(primitives.one_minus_square_p, *_ALL)
def _one_minus_square(ctx: RuleContext, x: RegisterArray, **params: Any) -> RegisterArray:
    one = RegisterArray.constant(1, x.dtype)
    return binary(ctx, "sub", one, binary(ctx, "mul", x, x, x.dtype), x.dtype)


@rules.lowering(_jax.reciprocal_p, *_ALL)
def _reciprocal(
    ctx: RuleContext, x: RegisterArray, *, approx: bool, **params: Any
) -> RegisterArray:
    one = RegisterArray.constant(1, x.dtype)
    function = BINARY["div"]
    return elementwise(lambda a, b: function(a, b, x.dtype, approx), [one, x], x.dtype, x.shape)


for _primitive in (
    primitives.one_minus_square_p,
    lax.integer_pow_p,
    lax.clamp_p,
    lax.round_p,
    lax.bitcast_convert_type_p,
    lax.reduce_precision_p,
    _jax.reciprocal_p,
):
    rules.layout(_primitive)(same_layout_hint)
