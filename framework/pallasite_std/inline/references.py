"""References as memrefs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import builtin

from pallasite.plugin import InvalidValueError, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.language import transforms as tr
from pallasite.plugin.layouts import Extents, MemoryLayout
from pallasite_std.inline.arrays import mosaic_type
from pallasite_std.memory.divisibility import MEMREF_ALIGNMENT
from pallasite_std.memory.reference_types import MemoryReference


def physical_layout(layout: MemoryLayout, transforms: Sequence[Any]) -> MemoryLayout | None:
    """The memory of an array as a plain array: its layout once transforms of its shape are applied.

    Outer strides may be anything, so that views of larger arrays qualify; a tile is contiguous.

    Returns:
      None if the memory does not lie in the way that the transforms say.
    """
    swizzle = 16
    tile_rank = 0
    for transform in transforms:
        match transform:
            case tr.TilingTransform():
                try:
                    layout = layout.tile(transform.tiling)
                except InvalidValueError:
                    return None
                tile_rank = len(transform.tiling)
            case tr.SwizzleTransform():
                swizzle = transform.swizzle
            case _jax.TransposeTransform():
                layout = layout.transpose(transform.permutation)
            case _:
                return None
    if layout.swizzle != swizzle or any(len(dim) > 1 for dim in layout.dims):
        return None
    minor = layout.with_dims(layout.dims[len(layout.dims) - tile_rank :]).with_swizzle(16)
    return layout if minor.is_contiguous or math.prod(minor.shape) == 1 else None


def memref(memory: MemoryReference, layout: MemoryLayout, what: str) -> ir.Value:
    """A reference as a memref: in shared memory the block's own, else without a memory space.

    Args:
      memory: the reference.
      layout: its memory as a plain array, from :func:`physical_layout`.
      what: it is, for messages.

    Raises:
      UnsupportedError: the shared memory of another block.
      InvalidValueError: memory that may begin inside of what a swizzle repeats.
    """
    if memory.remote is not None:
        raise UnsupportedError(
            f"{what} is the shared memory of another block, which no memref stands for",
            expected="memory of the block's own, or global memory",
            hint="pass the block's own, and take mgpu.get_cluster_ref of it",
        )
    if memory.offset_alignment % layout.atom_bytes:
        raise InvalidValueError(
            f"{what} may begin inside of a pattern of its swizzle",
            got=f"a multiple of {memory.offset_alignment} bytes",
            expected=f"a multiple of {layout.atom_bytes} bytes",
            hint="pass the whole buffer, and select a part of the memref",
        )
    shape = list(layout.shape)
    strides = _strides(layout.dims, shape)
    row_major = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    shared = memory.space.is_shared
    type_ = ir.MemRefType.get(
        shape,
        mosaic_type(memory.dtype),
        None if strides == row_major else ir.StridedLayoutAttr.get(0, strides),
        ir.Attribute.parse("#gpu.address_space<workgroup>") if shared else None,
    )
    pointer = memory.address()
    value: Any = builtin.unrealized_conversion_cast([type_], [pointer])
    alignment = ir.IntegerAttr.get(ops.i64(), memory.offset_alignment)
    value.owner.attributes[MEMREF_ALIGNMENT] = alignment
    result: ir.Value = value
    return result


def _strides(dims: Sequence[Extents], shape: Sequence[int]) -> list[int]:
    """One stride for each dimension; one of extent 1 steps over what comes behind it."""
    strides: list[int] = []
    behind = 1
    for extents, size in zip(reversed(dims), reversed(shape), strict=True):
        strides.append(extents[0].stride if extents else behind)
        behind = strides[-1] * size
    return strides[::-1]
