"""Layouts of arrays of odd shapes whose elements lie in one row."""

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
)
from pallasite_std.memory.reference_types import MemoryReference, default_layout


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
