"""Loops that bring elements of shared memory into another order.

Their code does not grow with the array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import LANES, WARPS, Extent
from pallasite.plugin.lowering import RuleContext
from pallasite_std.memory.reference_types import MemoryReference

LOOP = 24
"""Instructions of a loop that copies a view of shared memory, about."""


@dataclasses.dataclass(frozen=True)
class Elements:
    """Elements of shared memory in some order.

    Attributes:
      size: how many there are.
      unit: how many, at most, can be moved at once; a power of two.
      offset: ``offset(number, unit)`` is the first element of so many, of their number (i32).
    """

    size: int
    unit: int
    offset: Callable[[ir.Value, int], ir.Value]


def elements_of(view: MemoryReference) -> Elements:
    """The elements of a view in row-major order, from its pointer on."""
    extents = view.layout.flat_extents

    def offset(number: ir.Value, unit: int) -> ir.Value:
        return ops.add(_offset(number, extents, unit), view.element_offset())

    return Elements(view.layout.size, _unit(view), offset)


def copy_in_order(
    ctx: RuleContext,
    pointer: ir.Value,
    source: Elements,
    target: MemoryReference,
    first: int = 0,
) -> None:
    """Copies elements of shared memory to row-major memory, in a loop.

    Args:
      ctx: of the rule.
      pointer: from which elements are counted.
      source: the elements.
      target: as many of them as it has, and behind them the last one; with room for one move of all
        threads at least.
      first: of the elements that are copied.
    """
    kind = types.memory_type(target.dtype)
    unit = source.unit
    while target.layout.size % unit or first % unit:
        unit //= 2
    size = unit * target.element_bits // 8
    vector = ops.vector_type(kind, unit)
    launch = ctx.launch
    lane = launch.thread_id
    if ctx.kernel.geometry.threads > 1:
        lane = ops.bitwise_and(lane, LANES * WARPS - 1)
    first, last = first // unit, (first + target.layout.size) // unit
    moved = ops.element_pointer(target.pointer, -first * unit, kind)
    begin = ops.add(lane, first)
    operation = scf.WhileOp([begin.type], [begin])
    operation.before.blocks.append(begin.type)
    operation.after.blocks.append(begin.type)
    with ir.InsertionPoint(operation.before.blocks[0]):
        (number,) = operation.before.blocks[0].arguments
        kept = number
        if max(last, first + LANES * WARPS) > source.size // unit:
            kept = ops.arith.minui(number, ops.i32_constant(source.size // unit - 1))
        offset = source.offset(kept, unit)
        value = ops.load(vector, ops.element_pointer(pointer, offset, kind), alignment=size)
        where = ops.element_pointer(moved, ops.multiply(number, unit), kind)
        ops.store(value, where, alignment=size)
        following = ops.add(number, LANES * WARPS)
        scf.condition(ops.compare("slt", following, last), [following])
    with ir.InsertionPoint(operation.after.blocks[0]):
        scf.yield_(list(operation.after.blocks[0].arguments))


def _offset(number: ir.Value, extents: Sequence[Extent], unit: int) -> ir.Value:
    """Elements to the unit of a number, in row-major order of the extents.

    An index is a quotient less a multiple of the one before it, so each quotient has one factor.
    """
    if not extents:
        return ops.i32_constant(0)
    sizes = [extent.size for extent in extents]
    steps = [extent.stride for extent in extents]
    sizes[-1], steps[-1] = sizes[-1] // unit, steps[-1] * unit
    total = ops.multiply(number, steps[-1])
    rest = number
    for place in reversed(range(len(sizes) - 1)):
        rest = ops.divide_unsigned(rest, sizes[place + 1])
        factor = steps[place] - sizes[place + 1] * steps[place + 1]
        if factor:
            total = ops.add(total, ops.multiply(rest, factor))
    return total


def _unit(view: MemoryReference) -> int:
    """Consecutive elements that can be moved at once."""
    *outer, last = view.layout.flat_extents or (Extent(1, 0),)
    if last.stride != 1:
        return 1
    return next(
        unit
        for unit in (16, 8, 4, 2, 1)
        if unit * view.element_bits <= 8 * min(16, view.offset_alignment)
        and last.size % unit == 0
        and not any(extent.stride % unit for extent in outer)
    )
