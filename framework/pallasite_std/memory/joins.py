"""Arrays of odd shapes that become one: stored row by row, and brought into order by a loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.layouts import RegisterLayout, padded, row_major
from pallasite.plugin.lowering import RegisterArray, RuleContext
from pallasite_std.memory.access import plan_access
from pallasite_std.memory.ordering import LOOP, Elements
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.scratch import bytes_of, ordered, parts_of, viewed, whole_row

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
    bits = types.bit_width(arrays[0].dtype)
    stored: dict[Any, RegisterArray] = {}
    for array in arrays:
        stored.setdefault(_key(array), whole_row(array) or array)
    sources = list(stored.values())
    starts, end = {}, 0
    for key, source in stored.items():
        starts[key] = end * 8 // bits
        end += bytes_of(row_major(source.shape, bits))
    parts = parts_of(layout, bits, end, ctx.target.max_shared_memory)
    if not parts or not _is_long(arrays, dimension, layout, len(parts)):
        return None
    elements = _elements(
        [array.shape for array in arrays],
        [starts[_key(array)] for array in arrays],
        dimension,
        bits,
    )
    return ordered(ctx, sources, elements, layout, parts)


def _key(array: RegisterArray) -> Any:
    return array.layout, tuple(array.registers)


def _elements(
    shapes: Sequence[tuple[int, ...]], starts: Sequence[int], dimension: int, bits: int
) -> Elements:
    """The elements of row-major arrays that begin at some elements, joined along a dimension."""
    widths = [math.prod(shape[dimension:]) for shape in shapes]
    outer = math.prod(shapes[0][:dimension])
    width = sum(widths)

    def offset(number: ir.Value, unit: int) -> ir.Value:
        row = ops.i32_constant(0)
        column = number
        if outer > 1:
            row = ops.divide_unsigned(number, width // unit)
            column = ops.arith.subi(number, ops.multiply(row, width // unit))
        found: ir.Value | None = None
        before = 0
        for start, own in zip(starts, widths, strict=True):
            place = ops.add(ops.multiply(row, own), ops.multiply(column, unit))
            place = ops.add(place, start - before)
            if found is not None:
                place = ops.arith.select(ops.compare("ult", column, before // unit), found, place)
            found = place
            before += own
        assert found is not None
        return found

    return Elements(outer * width, math.gcd(128 // bits, *widths), offset)


def _is_long(
    arrays: Sequence[RegisterArray], dimension: int, layout: RegisterLayout, parts: int
) -> bool:
    """Whether the code that stores the arrays in their places is longer than loops are."""
    bits = types.bit_width(arrays[0].dtype)
    # Of a view, all but the pointer is known before there is memory.
    nowhere: Any = None
    rows = row_major(layout.shape, bits)
    whole = MemoryReference(nowhere, rows, arrays[0].dtype, MemorySpace.SMEM, alignment=16)
    direct = _accesses(padded(layout.shape) if layout.flat else layout, rows, 16)
    direct += 2 * layout.registers if layout.flat else 0
    by_rows = _accesses(layout, rows, 16) + parts * (LOOP + _CHOICE * (len(arrays) - 1))
    first = [0] * len(layout.shape)
    for array in arrays:
        own = array.layout if isinstance(array.layout, RegisterLayout) else padded(array.shape)
        by_rows += _accesses(own, row_major(array.shape, bits), 16)
        if own.flat:
            # Rows of an array in another layout, which is exchanged for it.
            own = padded(array.shape)
            direct += 3 * own.registers
        view = viewed(whole, first, array.shape)
        direct += _accesses(own, view.layout, min(16, view.offset_alignment))
        first[dimension] += array.shape[dimension]
    return direct > by_rows


def _accesses(layout: RegisterLayout, memory: Any, alignment: int) -> int:
    try:
        return len(plan_access(layout, memory, alignment).everything)
    except InvalidValueError:
        return layout.registers * layout.vector_length
