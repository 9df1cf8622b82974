"""Tiled layouts of shared memory, such as TMA and the tensor cores know."""

from __future__ import annotations

import functools

from pallasite.layouts.memory import MemoryLayout, row_major


@functools.lru_cache(maxsize=256)
def tiled(shape: tuple[int, ...], bits: int, height: int) -> tuple[MemoryLayout, ...]:
    """The layouts in tiles of so many rows that are as wide as a swizzle."""
    found: list[MemoryLayout] = []
    if len(shape) < 2 or bits > 32:
        return ()
    rows, columns = shape[-2:]
    for swizzle in (128, 64, 32, 16):
        width = swizzle * 8 // bits
        if rows % 8 or rows % height or columns % width or (swizzle == 16 and bits == 32):
            continue
        shape_of_tiles = (*shape[:-2], rows // height, columns // width, height, width)
        found.append(row_major(shape_of_tiles, bits).untile((height, width)).with_swizzle(swizzle))
    return tuple(found)
