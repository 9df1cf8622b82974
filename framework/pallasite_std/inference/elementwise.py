"""Element-wise operations: all arrays have one layout."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import primitives

from pallasite.plugin import RuleSet
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import AbstractValue, ArrayValue, InferenceContext
from pallasite.plugin.ir import types
from pallasite.plugin.layouts import default_strided
from pallasite_std.inference.shape import stretches
from pallasite_std.memory.usual_code import is_wide
from pallasite_std.rules.arithmetic import BINARY_PRIMITIVES, UNARY_PRIMITIVES

rules = RuleSet()
lax = _jax.lax_primitives

_OTHERS = (
    primitives.one_minus_square_p,
    lax.integer_pow_p,
    lax.clamp_p,
    lax.round_p,
    lax.convert_element_type_p,
    lax.reduce_precision_p,
    lax.select_n_p,
    lax.copy_p,
    _jax.reshard_p,
    _jax.stop_gradient_p,
    _jax.reciprocal_p,
    _jax.erf_p,
    _jax.erfc_p,
    _jax.erf_inv_p,
)


def elementwise(ctx: InferenceContext, *operands: AbstractValue, **params: Any) -> AbstractValue:
    """The inference rule of element-wise primitives."""
    arrays = [one for one in operands if isinstance(one, ArrayValue) and math.prod(one.shape) > 1]
    shape = tuple(ctx.avals_out[0].shape)
    narrow = [one for one in arrays if one.shape != shape and len(one.shape) == len(shape)]
    if not any(_repeats(one, shape) for one in narrow):
        return ctx.elementwise(*operands)
    result = ctx.result(None, *operands, varying=False)
    for position, operand in enumerate(operands):
        if operand in narrow:
            stretches(ctx, position, operand, result)
        elif operand in arrays:
            ctx.same_layout(operand, result)
    return result


def _repeats(array: ArrayValue, shape: tuple[int, ...]) -> bool:
    """Whether an array of an odd shape is repeated by wide accesses to shared memory: where threads
    would best be consecutive in several dimensions, no layout of it stretches to theirs."""
    if not default_strided(shape, array.bits).flat:
        return False
    last = max(d for d, n in enumerate(shape) if array.shape[d] != n)
    return any(n & (n - 1) for n in array.shape) and is_wide(
        math.prod(shape[last + 1 :]), array.bits
    )


for _primitive in (*UNARY_PRIMITIVES, *BINARY_PRIMITIVES, *_OTHERS):
    rules.inference(_primitive)(elementwise)


@rules.inference(lax.bitcast_convert_type_p)
def _bitcast(ctx: InferenceContext, x: AbstractValue, **params: Any) -> AbstractValue:
    before, after = ctx.avals_in[0], ctx.avals_out[0]
    if types.bit_width(before.dtype) == types.bit_width(after.dtype):
        return ctx.elementwise(x)
    return ctx.result()


@rules.inference(lax.optimization_barrier_p)
def _optimization_barrier(ctx: InferenceContext, *operands: AbstractValue) -> list[AbstractValue]:
    return [
        ctx.elementwise(operand, aval=aval) if isinstance(aval, _jax.ShapedArray) else operand
        for operand, aval in zip(operands, ctx.avals_out, strict=True)
    ]
