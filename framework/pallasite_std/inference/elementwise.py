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
from pallasite_std.memory.access import MAXIMUM_BYTES
from pallasite_std.memory.relayout import USUAL
from pallasite_std.memory.rows import FEW, repeated, whole_rows
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
    whole = any(one.shape == shape for one in arrays)
    in_row = whole and any(_is_in_row(one, shape) for one in narrow)
    if not in_row and not any(_repeats(one, shape) for one in narrow):
        result = ctx.elementwise(*operands)
        if narrow and isinstance(result, ArrayValue):
            _propose_rows(ctx, result)
        return result
    result = ctx.result(None, *operands, varying=False)
    for position, operand in enumerate(operands):
        if operand in narrow:
            stretches(ctx, position, operand, result, in_row=in_row)
        elif operand in arrays:
            ctx.same_layout(operand, result)
    return result


def _propose_rows(ctx: InferenceContext, result: ArrayValue) -> None:
    """Where threads would best be consecutive in several dimensions, what has extents of 1 does not
    stretch to that."""
    if result.bits >= 8 and default_strided(result.shape, result.bits).flat:
        rows = whole_rows(result.shape, MAXIMUM_BYTES * 8 // result.bits)
        ctx.proposes(result, [] if rows is None else [rows])


def _is_in_row(array: ArrayValue, shape: tuple[int, ...]) -> bool:
    """Whether it takes less code to repeat an array through shared memory, and to have all elements
    in one row of vectors."""
    if array.bits < 8 or not any(n & (n - 1) for n in shape) or math.prod(shape) <= FEW:
        return False
    row, _ = repeated(shape, array.bits, MAXIMUM_BYTES * 8 // array.bits)
    return row is not None and math.prod(shape) * array.bits // 8 <= USUAL


def _repeats(array: ArrayValue, shape: tuple[int, ...]) -> bool:
    """Whether an array of an odd shape is repeated by wide accesses to shared memory: where threads
    would best be consecutive in several dimensions, no layout of it stretches to theirs."""
    if not default_strided(shape, array.bits).flat:
        return False
    if array.bits == 8 and repeated(shape, 8, MAXIMUM_BYTES)[0] is None:
        return False  # Vectors of bytes would be taken apart.
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
