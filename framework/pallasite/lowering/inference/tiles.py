"""Tiled layouts of shared memory, such as TMA and the tensor cores know."""

from __future__ import annotations

from collections.abc import Sequence

from pallasite.layouts.memory import MemoryLayout, row_major


def tiled(shape: Sequence[int], bits: int, height: int) -> list[MemoryLayout]:
    """The layouts in tiles of so many rows that are as wide as a swizzle."""
    found: list[MemoryLayout] = []
    if len(shape) < 2 or bits > 32:
        return found
    rows, columns = shape[-2:]
    for swizzle in (128, 64, 32, 16):
        width = swizzle * 8 // bits
        if rows % 8 or rows % height or columns % width or (swizzle == 16 and bits == 32):
            continue
        tiled = (*shape[:-2], rows // height, columns // width, height, width)
        found.append(row_major(tiled, bits).untile((height, width)).with_swizzle(swizzle))
    return found
