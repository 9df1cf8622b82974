"""Arrays of odd shapes that become one: stored row by row, and brought into order by a loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.layouts import RegisterLayout, padded, row_major
from pallasite.plugin.lowering import RegisterArray, RuleContext
from pallasite_std.memory.access import plan_access
from pallasite_std.memory.ordering import Elements, load_elements, ordering_code, quotient
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.row_parts import operand, parts_of
from pallasite_std.memory.scratch import ordered, room_for, viewed
from pallasite_std.primitives.slices import Slice

_EXCHANGE = 16
"""Instructions around an exchange of an array in one row for one in another layout, at least."""

_CHOICE = 6
"""Instructions that find out which array an element is of."""


def joined(
    ctx: RuleContext, arrays: Sequence[RegisterArray], dimension: int, layout: RegisterLayout
) -> RegisterArray | None:
    """Arrays one beside the other along a dimension; None where a loop is no less code than
    accesses of each element, or there is no room.

    Args:
      ctx: of the rule.
      arrays: of one dtype of whole bytes, in any layouts.
      dimension: the one along which they follow each other.
      layout: of the result.
    """
    sources: dict[Any, RegisterArray] = {}
    for array in arrays:
        sources.setdefault(_key(array), array)
    numbers = {key: number for number, key in enumerate(sources)}
    slices = [Slice(numbers[_key(one)], 0, one.shape[dimension]) for one in arrays]
    return joined_slices(ctx, list(sources.values()), slices, dimension, layout, arrays)


def joined_slices(
    ctx: RuleContext,
    sources: Sequence[RegisterArray],
    slices: Sequence[Slice],
    dimension: int,
    layout: RegisterLayout,
    whole: Sequence[RegisterArray] = (),
) -> RegisterArray | None:
    """Slices of arrays one beside the other; None where there is no room.

    Args:
      ctx: of the rule.
      sources: of one dtype of whole bytes, in any layouts.
      slices: along the dimension, in the order of the result.
      dimension: the one along which they follow each other.
      layout: of the result.
      whole: the slices if these are arrays that could be stored one beside the other; None is
        returned where that is less code.
    """
    operands = [operand(one) for one in sources]
    elements = _elements([one.shape for one in sources], slices, dimension, sources[0].dtype)
    parts = parts_of(layout, operands, elements.windows, room_for(ctx), elements.unit)
    if not parts:
        return None
    if whole and not _is_long(whole, dimension, layout, ordering_code(parts, elements)):
        return None
    return ordered(ctx, operands, elements, layout, parts)


def _key(array: RegisterArray) -> Any:
    return array.layout, tuple(array.registers)


def _elements(
    shapes: Sequence[tuple[int, ...]],
    slices: Sequence[Slice],
    dimension: int,
    dtype: np.dtype[Any],
) -> Elements:
    """The elements of slices of row-major arrays of some shapes."""
    inner = math.prod(shapes[0][dimension + 1 :])
    return row_elements(
        rows=math.prod(shapes[0][:dimension]),
        arrays=len(shapes),
        operands=[one.operand for one in slices],
        widths=[one.size * inner for one in slices],
        starts=[one.start * inner for one in slices],
        strides=[math.prod(shapes[one.operand][dimension:]) for one in slices],
        dtype=dtype,
    )


def row_elements(
    *,
    rows: int,
    arrays: int,
    operands: Sequence[int],
    widths: Sequence[int],
    starts: Sequence[int],
    strides: Sequence[int],
    dtype: np.dtype[Any],
) -> Elements:
    """The elements of rows, each of which is rows of several arrays one beside the other.

    Args:
      rows: how many.
      arrays: from which they are.
      operands: for each part of a row, the number of the array.
      widths: elements of that part.
      starts: where in the array its first row begins.
      strides: elements from row to row of the array.
      dtype: of all.
    """
    width = sum(widths)
    bits = types.bit_width(dtype)
    parts = list(zip(operands, widths, starts, strides, strict=True))

    def load(number: ir.Value, unit: int, pointer: ir.Value, places: Sequence[int]) -> ir.Value:
        row = ops.i32_constant(0)
        column = number
        if rows > 1:
            row = quotient(number, width // unit, rows * (width // unit))
            column = ops.arith.subi(number, ops.multiply(row, width // unit))
        found: ir.Value | None = None
        before = 0
        for array, own, start, stride in parts:
            place = ops.add(ops.multiply(row, stride), ops.multiply(column, unit))
            place = ops.add(place, places[array] * 8 // bits + start - before)
            if found is not None:
                place = ops.arith.select(ops.compare("ult", column, before // unit), found, place)
            found = place
            before += own
        assert found is not None
        return load_elements(pointer, found, unit, dtype)

    def windows(first: int, count: int) -> list[tuple[int, int]]:
        (top, left), (bottom, right) = divmod(first, width), divmod(first + count - 1, width)
        needed: list[list[int]] = [[] for _ in range(arrays)]
        before = 0
        for number, own, start, stride in parts:
            # Rows in which the slice is not reached, or behind it, are others'.
            begin, end = max(left - before, 0), min(right + 1 - before, own)
            low, high = (top, begin) if begin < own else (top + 1, 0)
            last, until = (bottom, end) if end > 0 else (bottom - 1, own)
            if (low, high) < (last, until):
                needed[number] += [low * stride + start + high, last * stride + start + until]
            before += own
        return [(min(ends), max(ends)) if ends else (0, 0) for ends in needed]

    unit = math.gcd(128 // bits, *widths, *starts, *strides)
    return Elements(rows * width, unit, load, windows)


def _is_long(
    arrays: Sequence[RegisterArray], dimension: int, layout: RegisterLayout, ordering: int
) -> bool:
    """Whether the code that stores the arrays in their places is longer than loops are."""
    bits = types.bit_width(arrays[0].dtype)
    # Of a view, all but the pointer is known before there is memory.
    nowhere: Any = None
    rows = row_major(layout.shape, bits)
    whole = MemoryReference(nowhere, rows, arrays[0].dtype, MemorySpace.SMEM, alignment=16)
    direct = _accesses(padded(layout.shape) if layout.flat else layout, rows, 16)
    direct += 2 * layout.registers + _EXCHANGE if layout.flat else 0
    by_rows = _accesses(layout, rows, 16) + ordering + _CHOICE * (len(arrays) - 1)
    first = [0] * len(layout.shape)
    stored: set[Any] = set()
    for array in arrays:
        own = array.layout if isinstance(array.layout, RegisterLayout) else padded(array.shape)
        if _key(array) not in stored:
            by_rows += _accesses(own, row_major(array.shape, bits), 16)
            stored.add(_key(array))
        if own.flat:
            # Rows of an array in another layout, which is exchanged for it.
            own = padded(array.shape)
            direct += 3 * own.registers + _EXCHANGE
        view = viewed(whole, first, array.shape)
        direct += _accesses(own, view.layout, min(16, view.offset_alignment))
        first[dimension] += array.shape[dimension]
    return direct > by_rows


def _accesses(layout: RegisterLayout, memory: Any, alignment: int) -> int:
    try:
        return len(plan_access(layout, memory, alignment).everything)
    except InvalidValueError:
        return layout.registers * layout.vector_length
