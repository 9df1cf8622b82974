"""Layouts of arrays of odd shapes: the elements in one row, or rows over few lanes each."""

from __future__ import annotations

import functools
import math

from pallasite.plugin.layouts import (
    LANES,
    WARPS,
    Digit,
    Layout,
    Owner,
    RegisterLayout,
    default_strided,
)
from pallasite_std.memory.reference_types import MemoryReference, default_layout

ROW_LANES = 8
"""Lanes that share a row to be reduced: more of them exchange more, with less to add up."""


@functools.lru_cache(maxsize=4096)
def row(shape: tuple[int, ...], vector_length: int) -> RegisterLayout:
    """Consecutive vectors of the row-major flattened array go to consecutive threads, whatever the
    number of elements: padding follows the last one."""
    vectors = -(-math.prod(shape) // vector_length)
    lanes = min(LANES, 1 << (vectors - 1).bit_length())
    warps = min(WARPS, 1 << (-(-vectors // lanes) - 1).bit_length())
    digits = (
        Digit(-(-vectors // (lanes * warps)), Owner.REGISTER, 1),
        Digit(warps, Owner.WARP, 1),
        Digit(lanes, Owner.LANE, 1),
        Digit(vector_length, Owner.VECTOR, 1),
    )
    return RegisterLayout(tuple(shape), (digits,), vector_length, flat=True)


def better_row(layout: RegisterLayout, widest: int) -> RegisterLayout | None:
    """A :func:`row` of vectors of at most ``widest`` elements that means much less work for each
    lane than another layout, where only element-wise operations follow; or None."""
    if layout.size < LANES * WARPS * 4 or not layout.size & (layout.size - 1):
        return None
    widths = (n for n in (16, 8, 4, 2) if n <= widest)
    best = min((row(layout.shape, n) for n in widths), key=_work, default=layout)
    return best if _work(best) * 1.25 < _work(layout) else None


def _work(layout: RegisterLayout) -> int:
    """Of a lane, if a transfer of a register takes as long as the work on two elements."""
    return layout.registers * (layout.vector_length + 2)


def suitable_layouts(reference: MemoryReference) -> list[Layout]:
    """The default layout; and a row, in which elements of dense memory are moved by fewer accesses,
    if nothing needs another layout."""
    best = default_layout(reference)
    extents = reference.layout.flat_extents
    if len(extents) != 1 or extents[0].stride != 1:
        return [best]
    other = better_row(best, 8 * min(16, reference.offset_alignment) // reference.element_bits)
    return [best] if other is None else [best, other]


@functools.lru_cache(maxsize=4096)
def short_rows(shape: tuple[int, ...], bits: int) -> RegisterLayout | None:
    """A layout with few lanes for each row of an odd shape, if there are many rows; else None.

    Args:
      shape: of the array, whose last dimension is a row.
      bits: of an element.
    """
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    natural = default_strided(shape, bits)
    lanes = math.prod(one.size for one in natural.dims[-1] if one.owner is Owner.LANE)
    beside = LANES // ROW_LANES
    longest = max(range(len(shape) - 1), key=lambda dim: shape[dim])
    if natural.flat or not natural.is_padded or lanes <= ROW_LANES:
        return None
    if shape[longest] < WARPS * beside:
        return None
    width = natural.vector_length
    steps = -(-shape[-1] // (ROW_LANES * width))
    dims: list[tuple[Digit, ...]] = [
        (Digit(steps, Owner.REGISTER, 1), Digit(ROW_LANES, Owner.LANE, 1))
    ]
    if width > 1:
        dims[0] = (*dims[0], Digit(width, Owner.VECTOR, 1))
    registers = steps
    for dim in reversed(range(len(shape) - 1)):
        count, threads = shape[dim], tuple[Digit, ...]()
        if dim == longest:
            count = -(-count // (WARPS * beside))
            threads = (Digit(WARPS, Owner.WARP, 1), Digit(beside, Owner.LANE, ROW_LANES))
        dims.insert(0, (Digit(count, Owner.REGISTER, registers), *threads))
        registers *= count
    return RegisterLayout(shape, tuple(dims), width)
