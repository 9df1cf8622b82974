"""Layouts in the words that a program would use for them."""

from __future__ import annotations

from pallasite.layouts.description import describe
from pallasite.layouts.memory import MemoryLayout, row_major
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
    swizzle = f"SwizzleTransform({layout.swizzle})" if layout.swizzle != 16 else ""
    if layout == plain:
        return "row-major"
    for tile in _tiles(layout):
        lead = len(shape) - len(tile)
        counts = [extent // size for extent, size in zip(shape[lead:], tile, strict=True)]
        tiled = row_major((*shape[:lead], *counts, *tile), bits)
        if layout == tiled.untile(tile).with_swizzle(layout.swizzle):
            return f"TilingTransform({tile})" + (f", {swizzle}" if swizzle else "")
    return swizzle if layout == plain.with_swizzle(layout.swizzle) else str(layout)


def _tiles(layout: MemoryLayout) -> list[tuple[int, ...]]:
    """Tiles that the last dimensions may be cut into, those of the tensor cores first."""
    shape = layout.shape
    if len(shape) < 2:
        return []
    width = 8 * layout.swizzle // layout.element_bits
    usual = [(8, width)] if width and shape[-2] % 8 == 0 and shape[-1] % width == 0 else []
    sizes = [dim[-1].size if dim else 1 for dim in layout.dims]
    return usual + [tuple(sizes[-rank:]) for rank in range(1, len(shape) + 1)]
