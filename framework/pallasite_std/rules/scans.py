"""Cumulative sums and the like: in the layout of the array, by steps of doubling distance.

Where each lane holds whole lines along the axis, it combines their elements one after the other.
Elsewhere, every element is combined with the one ``2**step`` places before it, which it reads from
scratch shared memory; a loop over the steps keeps the code as long as the elements of a lane
(W. D. Hillis and G. L. Steele, "Data parallel algorithms", 1986).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import primitives
from jaxlib.mlir import ir

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin.inference import AbstractValue, ArrayValue, InferenceContext, Pair, Pairs
from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import Layout, RegisterLayout, even, padded
from pallasite.plugin.lowering import LayoutContext, RegisterArray, RuleContext, relayout
from pallasite_std.inference.costs import conversion_cost, movement_cost
from pallasite_std.math.conversion import convert
from pallasite_std.math.table import BINARY, UNARY
from pallasite_std.memory.elements import element_indices
from pallasite_std.memory.reduced_layouts import in_lines
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
    if not before.flat and not any(digit.owner.is_thread for digit in before.dims[axis]):
        return _in_registers(array, axis, reverse, combine)
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


def _in_registers(
    array: RegisterArray, axis: int, reverse: bool, combine: Combine
) -> RegisterArray:
    """:func:`scan` of an array of which each lane holds whole lines along the axis."""
    layout = array.layout
    assert isinstance(layout, RegisterLayout)
    lines: dict[tuple[int, ...], dict[int, tuple[int, int]]] = {}
    for register, position in np.ndindex(layout.registers, layout.vector_length):
        place = [layout.part_of_register(register, position, d) for d in range(len(array.shape))]
        number, place[axis] = place[axis], 0
        if number < array.shape[axis]:
            lines.setdefault(tuple(place), {})[number] = (register, position)
    elements = [
        [ops.extract(register, position) for position in range(layout.vector_length)]
        for register in array.registers
    ]
    for line in lines.values():
        last = None
        for _, (register, position) in sorted(line.items(), reverse=reverse):
            if last is not None:
                elements[register][position] = combine(last, elements[register][position])
            last = elements[register][position]
    registers = tuple(ops.from_elements(own) for own in elements)
    return RegisterArray(registers, layout, array.dtype)


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


def _hint(
    ctx: LayoutContext, wanted: Sequence[Layout | None], *, axis: int, **params: Any
) -> list[Any]:
    """Lanes hold short lines whole; else the result's layout is the operand's. One row of all
    elements, as element-wise functions may have, is none in which there are lines."""
    hint = in_lines(tuple(ctx.avals_in[0].shape), axis)
    return list(same_layout_hint(ctx, wanted, **params)) if hint is None else [hint]


def _pairs(axis: int, shape: tuple[int, ...]) -> Pairs:
    short = in_lines(shape, axis)

    def pairs(operand: Layout | None, result: Layout | None) -> list[Pair]:
        found = [operand, result, short]
        return [(one, one) for one in dict.fromkeys(found) if one is not None]

    return pairs


def _work(operand: Layout, result: Layout, axis: int, bits: int) -> float:
    """Of a scan of an odd shape: of steps through shared memory, and of bringing an array in one
    row into lines, and back."""
    if not isinstance(operand, RegisterLayout) or not any(n & (n - 1) for n in operand.shape):
        return 0.0
    lines, cost = operand, 0.0
    if operand.flat:
        lines = padded(operand.shape)
        cost = 2 * conversion_cost(operand, lines, bits)
    if any(digit.owner.is_thread for digit in lines.dims[axis]):
        steps = (operand.shape[axis] - 1).bit_length()
        cost += steps * movement_cost(lines, lines, bits, run=1)
    return cost


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
    def _inference(
        ctx: InferenceContext, x: AbstractValue, *, axis: int, **params: Any
    ) -> AbstractValue:
        result = ctx.result(varying=True)  # Sums of equal elements are not equal.
        if isinstance(x, ArrayValue):
            work = functools.partial(_work, axis=axis, bits=x.bits)
            ctx.relate(0, x, result, _pairs(axis, tuple(x.shape)), work)
        return result

    rules.layout(primitive)(_hint)


for _primitive, _name in (
    (primitives.cumsum_p, "add"),
    (primitives.cumprod_p, "mul"),
    (primitives.cummax_p, "max"),
    (primitives.cummin_p, "min"),
    (primitives.cumlogsumexp_p, "logaddexp"),
):
    _register(_primitive, _name)
