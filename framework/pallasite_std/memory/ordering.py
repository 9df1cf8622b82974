"""Loops that bring elements of shared memory into another order.

Their code does not grow with the array.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import scf

from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import LANES, WARPS, Extent, Owner
from pallasite.plugin.lowering import RuleContext
from pallasite_std.memory.padding import consecutive_threads, thread_part
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.row_parts import Part, Windows
from pallasite_std.memory.transfers import from_memory

LOOP = 24
"""Instructions of a loop that copies a view of shared memory, about."""

_MOVES = 3
"""Moves of a thread, at most, that are made without a loop."""

_MOVE = 10
"""Instructions of one of these, about."""

_MOST_THREADS = 1024
"""Of a block (PTX ISA, ``%tid``)."""

_BARRIER = 4
"""Instructions that are not needed where threads load what they keep."""


@dataclasses.dataclass(frozen=True)
class Elements:
    """Elements of arrays in shared memory in some order.

    Attributes:
      size: how many there are.
      unit: how many, at most, can be moved at once; a power of two.
      load: ``load(number, unit, pointer, starts)`` is a vector of so many, or a scalar, by their
        number (i32) in units; the arrays begin so many bytes behind the pointer, or before it.
      windows: where in the arrays some of them are.
    """

    size: int
    unit: int
    load: Callable[[ir.Value, int, ir.Value, Sequence[int]], ir.Value]
    windows: Windows


def load_elements(pointer: ir.Value, offset: ir.Value, unit: int, dtype: np.dtype[Any]) -> ir.Value:
    """So many elements, as they are in shared memory, from an offset on that is a multiple."""
    kind = types.memory_type(dtype)
    where = ops.element_pointer(pointer, offset, kind)
    size = unit * types.bit_width(dtype) // 8
    return ops.load(ops.vector_type(kind, unit), where, alignment=size)


def elements_of(view: MemoryReference, whole: int) -> Elements:
    """The elements of a view of an array of so many elements, in row-major order."""
    extents = view.layout.flat_extents
    size = view.layout.size

    def load(number: ir.Value, unit: int, pointer: ir.Value, starts: Sequence[int]) -> ir.Value:
        offset = ops.add(_offset(number, extents, unit), view.element_offset())
        offset = ops.add(offset, starts[0] * 8 // view.element_bits)
        return load_elements(pointer, offset, unit, view.dtype)

    def windows(first: int, count: int) -> list[tuple[int, int]]:
        if view.dynamic:
            return [(0, whole)]
        low, high = _span(extents, first, count)
        return [(view.offset + low, view.offset + high)]

    return Elements(size, _unit(view), load, windows)


def _span(extents: Sequence[Extent], first: int, count: int) -> tuple[int, int]:
    """The least and the greatest offset, and one more, of consecutive elements of a view; or
    further ones."""
    low, high = 0, 1
    inner = math.prod(extent.size for extent in extents)
    last = first + count - 1
    whole = False
    for extent in extents:
        inner //= extent.size
        index = (first // inner % extent.size, last // inner % extent.size)
        if whole:
            index = (0, extent.size - 1)
        whole = whole or index[0] != index[1]
        low += min(one * extent.stride for one in index)
        high += max(one * extent.stride for one in index)
    return low, high


def moves_of(part: Part, elements: Elements) -> int | None:
    """How many moves each thread makes that loads its part of a row by itself; None if a loop for
    all is less code."""
    layout = part.layout
    vectors = [digit for digit in layout.digits if digit.owner is Owner.VECTOR]
    if not part.row or (vectors and [*vectors] != [layout.digits[-1]]):
        return None
    unit = min(elements.unit, layout.vector_length)
    moves = layout.registers * layout.vector_length // unit
    return moves if moves <= _MOVES else None


def ordering_code(parts: Sequence[Part], elements: Elements) -> int:
    """Instructions that bring elements into order, about."""
    moves = [moves_of(part, elements) for part in parts]
    return sum(LOOP if one is None else one * _MOVE - _BARRIER for one in moves)


def load_in_order(
    ctx: RuleContext,
    source: Elements,
    pointer: ir.Value,
    starts: Sequence[int],
    part: Part,
    dtype: np.dtype[Any],
) -> list[ir.Value]:
    """The registers of a part of which each thread makes few moves; see :func:`copy_in_order`."""
    layout = part.layout
    unit = min(source.unit, layout.vector_length)
    digits = [(d.owner, d.stride, d.size, w) for d, w in layout.weighted_dims[0]]
    digits = [one for one in digits if one[0].is_thread]
    thread = consecutive_threads(ctx.launch, digits) or thread_part(ctx.launch, layout, 0)
    registers = []
    for register in range(layout.registers):
        pieces = []
        for place in range(0, layout.vector_length, unit):
            known = (part.first + layout.part_of_register(register, place)) // unit
            number = ops.i32_constant(known)
            if thread is not None:
                number = ops.add(ops.divide_unsigned(thread, unit), known)
            if known + layout.thread_reach(0) // unit >= source.size // unit:
                number = ops.arith.minui(number, ops.i32_constant(source.size // unit - 1))
            pieces.append(source.load(number, unit, pointer, starts))
        registers.append(from_memory(ops.concatenate(pieces), dtype))
    return registers


def copy_in_order(
    ctx: RuleContext,
    source: Elements,
    pointer: ir.Value,
    starts: Sequence[int],
    target: MemoryReference,
    first: int = 0,
) -> None:
    """Copies elements of shared memory to row-major memory, in a loop.

    Args:
      ctx: of the rule.
      source: the elements.
      pointer, starts: see :attr:`Elements.load`.
      target: as many of them as it has, and behind them the last one; with room for one move of all
        threads at least.
      first: of the elements that are copied.
    """
    kind = types.memory_type(target.dtype)
    unit = source.unit
    while target.layout.size % unit or first % unit:
        unit //= 2
    size = unit * target.element_bits // 8
    lane = lane_of_thread(ctx)
    first, last = first // unit, (first + target.layout.size) // unit
    moved = ops.element_pointer(target.pointer, -first * unit, kind)
    limited = max(last, first + LANES * WARPS) > source.size // unit

    def move(number: ir.Value) -> None:
        kept = number
        if limited:
            kept = ops.arith.minui(number, ops.i32_constant(source.size // unit - 1))
        value = source.load(kept, unit, pointer, starts)
        where = ops.element_pointer(moved, ops.multiply(number, unit), kind)
        ops.store(value, where, alignment=size)

    each_step(ops.add(lane, first), last, LANES * WARPS, move)


def store_in_order(
    ctx: RuleContext,
    source: Elements,
    pointer: ir.Value,
    starts: Sequence[int],
    target: MemoryReference,
) -> None:
    """Stores elements of shared memory to global memory, in a loop.

    Args:
      ctx: of the rule.
      source: the elements.
      pointer, starts: see :attr:`Elements.load`.
      target: as many of them, in row-major order.
    """
    kind = types.memory_type(target.dtype)
    extents = target.layout.flat_extents
    unit = min(source.unit, _unit(target))
    count = source.size // unit
    lane = lane_of_thread(ctx)

    def move(number: ir.Value) -> None:
        value = source.load(number, unit, pointer, starts)
        offset = ops.add(_offset(number, extents, unit), target.offset)
        where = ops.element_pointer(target.pointer, offset, kind)
        ops.store(value, where, alignment=unit * target.element_bits // 8)

    if count <= LANES * WARPS:
        with ops.when(ops.compare("slt", lane, count)):
            move(lane)
        return
    each_step(lane, count, LANES * WARPS, move)


def lane_of_thread(ctx: RuleContext) -> ir.Value:
    """The number (i32) of the lane among the 128 of a user's thread."""
    number: ir.Value = ctx.launch.thread_id
    if ctx.kernel.geometry.threads > 1:
        number = ops.bitwise_and(number, LANES * WARPS - 1)
    return number


def each_step(begin: ir.Value, end: int, step: int, body: Callable[[ir.Value], None]) -> None:
    """A loop over numbers (i32) from one on, in steps, up to an end that is behind the first."""
    operation = scf.WhileOp([begin.type], [begin])
    operation.before.blocks.append(begin.type)
    operation.after.blocks.append(begin.type)
    with ir.InsertionPoint(operation.before.blocks[0]):
        (number,) = operation.before.blocks[0].arguments
        body(number)
        following = ops.add(number, step)
        scf.condition(ops.compare("slt", following, end), [following])
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
    rest, limit = number, math.prod(sizes)
    for place in reversed(range(len(sizes) - 1)):
        rest = quotient(rest, sizes[place + 1], limit)
        limit //= sizes[place + 1]
        factor = steps[place] - sizes[place + 1] * steps[place + 1]
        if factor:
            total = ops.add(total, ops.multiply(rest, factor))
    return total


def quotient(number: ir.Value, divisor: int, limit: int) -> ir.Value:
    """Unsigned quotient of a number (i32) by a positive number, of a number below a limit.

    Two instructions, where LLVM, which knows no limit, takes five for some divisors: with a
    ``factor`` that is ``2**shift / divisor``, rounded up, ``number * factor / 2**shift`` is too
    large by less than ``1 / divisor`` as long as ``number * (factor * divisor - 2**shift)`` is
    below ``2**shift``.
    """
    known = limit <= _MOST_THREADS  # LLVM knows that of numbers of threads.
    for shift in range(32) if _is_long(divisor) and not known else ():
        factor = -(-(1 << shift) // divisor)
        if (limit - 1) * factor >= 1 << 32:
            break
        if (limit - 1) * (factor * divisor - (1 << shift)) < 1 << shift:
            return ops.divide_unsigned(ops.multiply(number, factor), 1 << shift)
    return ops.divide_unsigned(number, divisor)


def _is_long(divisor: int) -> bool:
    """Whether the quotient of any number (i32) is more than the upper half of a product, shifted:
    of an odd divisor, for which the factor has 33 bits."""
    if divisor % 2 == 0:
        return False
    factors = ((n, -(-(1 << 32 + n) // divisor)) for n in range(divisor.bit_length()))
    return not any(f < 1 << 32 and f * divisor - (1 << 32 + n) <= 1 << n for n, f in factors)


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
