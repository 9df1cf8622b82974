"""Cumulative sums and the like: in the layout of the array, by steps of doubling distance.

Every element is combined with the one ``2**step`` places before it, which it reads from scratch
shared memory; a loop over the steps keeps the code as long as the elements of a lane
(W. D. Hillis and G. L. Steele, "Data parallel algorithms", 1986).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import primitives
from jaxlib.mlir import ir

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin.inference import AbstractValue, InferenceContext
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import RegisterLayout, even, padded
from pallasite.plugin.lowering import RegisterArray, RuleContext, relayout
from pallasite_std.math.conversion import convert
from pallasite_std.math.table import BINARY, UNARY
from pallasite_std.memory.elements import element_indices
from pallasite_std.memory.scratch import linear, load_element, scratch_array, store, strides
from pallasite_std.rules.shape import same_layout_hint

rules = RuleSet()

type Combine = Callable[[ir.Value, ir.Value], ir.Value]


def scan(
    ctx: RuleContext, array: RegisterArray, axis: int, reverse: bool, combine: Combine
) -> RegisterArray:
    """Combines each element with all those before it along an axis (``reverse``: after it).

    Args:
      ctx: of the rule.
      array: any layout, which the result has, too.
      axis: the dimension.
      reverse: whether to begin at its end.
      combine: an associative function of an earlier and a later element.
    """
    before = array.layout
    assert isinstance(before, RegisterLayout)
    layout = padded(array.shape) if before.flat else before
    array = relayout(ctx, array, layout)
    extent = array.shape[axis]
    factors = strides(array.shape)
    places = {(r, e): index for r, e, index in element_indices(ctx.launch, layout, guarded=False)}
    with scratch_array(ctx, array.shape, array.dtype) as memory:

        def step(number: ir.Value, registers: list[ir.Value]) -> Sequence[ir.Value]:
            distance = ops.arith.shli(ops.i32_constant(1), number)
            ctx.synchronize()
            store(ctx, memory, RegisterArray(tuple(registers), layout, array.dtype))
            ctx.synchronize()
            results = []
            for place, register in enumerate(registers):
                elements = []
                for position in range(layout.vector_length):
                    own = ops.extract(register, position)
                    elements.append(own)
                    if (place, position) not in places:
                        continue
                    index = list(places[place, position])
                    sign = 1 if reverse else -1
                    index[axis] = ops.add(index[axis], ops.multiply(distance, sign))
                    # Below zero is far above, too.
                    exists = ops.compare("ult", index[axis], extent)
                    offset = linear(index, factors)
                    offset = ops.arith.select(exists, offset, ops.i32_constant(0))
                    inside = ops.compare("ult", offset, memory.layout.size)
                    offset = ops.arith.select(inside, offset, ops.i32_constant(0))
                    both = combine(load_element(memory, offset), own)
                    elements[-1] = ops.arith.select(exists, both, own)
                results.append(ops.from_elements(elements))
            return results

        steps = (extent - 1).bit_length()
        zero, end = ops.i32_constant(0), ops.i32_constant(steps)
        registers = ops.for_loop(zero, end, list(array.registers), step)
    return relayout(ctx, RegisterArray(tuple(registers), layout, array.dtype), before)


def _log_add_exp(dtype: np.dtype[Any], approximate: bool) -> Combine:
    def combine(x: ir.Value, y: ir.Value) -> ir.Value:
        most = BINARY["max"](x, y, dtype, False)
        least = BINARY["min"](x, y, dtype, False)
        difference = BINARY["sub"](least, most, dtype, False)
        rest = UNARY["log1p"](UNARY["exp"](difference, dtype, approximate), dtype, approximate)
        # Equal infinities have no difference.
        same = BINARY["eq"](x, y, dtype, False)
        rest = ops.arith.select(same, ops.constant(float(np.log(2)), rest.type), rest)
        return BINARY["add"](most, rest, dtype, False)

    return combine


def _register(primitive: Any, name: str) -> None:
    @rules.lowering(primitive, Semantics.LANE)
    def _rule(ctx: RuleContext, x: RegisterArray, *, axis: int, reverse: bool) -> RegisterArray:
        if x.size == 1 or x.shape[axis] == 1:
            return x
        if x.is_splat:
            x = x.materialize(even(x.shape, 1))
        dtype = x.dtype
        narrow = types.is_float(dtype) and types.bit_width(dtype) < 32
        wide = np.dtype(np.float32) if narrow else dtype
        array = x.map(lambda value: convert(value, dtype, wide), wide) if narrow else x
        if name == "logaddexp":
            combine = _log_add_exp(wide, ctx.params.approx_math)
        else:
            combine = lambda a, b: BINARY[name](a, b, wide, False)  # noqa: E731
        result = scan(ctx, array, axis, reverse, combine)
        return result.map(lambda value: convert(value, wide, dtype), dtype) if narrow else result

    @rules.inference(primitive)
    def _inference(ctx: InferenceContext, x: AbstractValue, **params: Any) -> AbstractValue:
        return ctx.elementwise(x)

    rules.layout(primitive)(same_layout_hint)


for _primitive, _name in (
    (primitives.cumsum_p, "add"),
    (primitives.cumprod_p, "mul"),
    (primitives.cummax_p, "max"),
    (primitives.cummin_p, "min"),
    (primitives.cumlogsumexp_p, "logaddexp"),
):
    _register(_primitive, _name)
