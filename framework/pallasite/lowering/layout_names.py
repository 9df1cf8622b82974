"""Layouts in the words that a program would use for them."""

from __future__ import annotations

from pallasite.layouts.memory import MemoryLayout, row_major
from pallasite.layouts.named import describe
from pallasite.layouts.registers import Layout


def name_of(layout: Layout) -> str:
    """A layout in words; one of an array with extents of 1 by what it is without these."""
    name = describe(layout)
    kept = tuple(extent for extent in layout.shape if extent != 1)
    if name != str(layout) or not kept or len(kept) == len(layout.shape):
        return name
    inner = layout.reshape(kept).layout
    dims = ", ".join("None" if extent == 1 else ":" for extent in layout.shape)
    return name if describe(inner) == str(inner) else f"{describe(inner)}[{dims}]"


def describe_memory(layout: MemoryLayout) -> str:
    """The transforms that declare a memory layout, or ``row-major``, or its extents."""
    shape, bits = layout.shape, layout.element_bits
    plain = row_major(shape, bits)
    if layout == plain:
        return "row-major"
    swizzle = f"SwizzleTransform({layout.swizzle})" if layout.swizzle != 16 else ""
    if layout == plain.with_swizzle(layout.swizzle):
        width = 8 * layout.swizzle // bits
        if len(shape) < 2 or shape[-1] != width or shape[-2] % 8:
            return swizzle
    for width in (8 * layout.swizzle // bits, 8 * 16 // bits):
        if len(shape) < 2 or shape[-2] % 8 or width == 0 or shape[-1] % width:
            continue
        tiles = (*shape[:-2], shape[-2] // 8, shape[-1] // width, 8, width)
        if layout == row_major(tiles, bits).untile((8, width)).with_swizzle(layout.swizzle):
            return f"TilingTransform((8, {width}))" + (f", {swizzle}" if swizzle else "")
    return str(layout)
