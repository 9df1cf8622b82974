"""Memrefs that inlined code has made of its references, as references again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import builtin

from pallasite.plugin import InvalidValueError, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.layouts import Extent, MemoryLayout
from pallasite.plugin.lowering import RegisterArray
from pallasite_std.memory.divisibility import MEMREF_ALIGNMENT, known_divisor
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.references import index_reference

_DYNAMIC = -(2**63)
_SAME_PLACE = frozenset(
    f"memref.{name}" for name in ("collapse_shape", "expand_shape", "transpose", "cast")
)


def window_of(value: ir.Value, references: Mapping[ir.Value, MemoryReference]) -> MemoryReference:
    """The part of a kernel's argument that a memref in global memory is.

    Args:
      value: one of ``references``, or what ``memref_slice`` makes of one.
      references: what inlined code was given.

    Raises:
      UnsupportedError: other views, or a memref that comes from somewhere else.
    """
    found = references.get(value)
    if found is not None:
        return found
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "memref.subview":
        raise UnsupportedError(
            "a copy of global memory that is no window of an argument of the inlined code",
            got=str(value.type),
            expected="an argument, or a memref_slice of one",
        )
    operation = owner.operation if hasattr(owner, "operation") else owner
    source, *operands = operation.operands
    dynamic = iter(operands)
    starts = [
        next(dynamic) if offset == _DYNAMIC else offset
        for offset in operation.attributes["static_offsets"]
    ]
    sizes = list(operation.attributes["static_sizes"])
    kept = iter([*value.type.shape, None])
    following = next(kept)
    squeezed = []
    for size in sizes:
        # Only dimensions of extent 1 are dropped, the first of several.
        squeezed.append(size == 1 and following != 1)
        if not squeezed[-1]:
            following = next(kept)
    return select(window_of(source, references), starts, sizes, squeezed)


def select(
    reference: MemoryReference,
    starts: Sequence[ir.Value | int],
    sizes: Sequence[int],
    squeezed: Sequence[bool],
) -> MemoryReference:
    """A part of a reference.

    Args:
      reference: the whole.
      starts: where it begins along each dimension; values are of type ``index``.
      sizes: how many elements it has.
      squeezed: which dimensions, of one element, it drops.
    """
    indices: list[Any] = []
    for start, size, dropped in zip(starts, sizes, squeezed, strict=True):
        first: Any = start
        if isinstance(start, ir.Value):
            number = ops.arith.index_cast(ops.i32(), start)
            first = RegisterArray.splat(number, np.int32)
        indices.append(first if dropped else _jax.Slice(first, size))
    return index_reference(reference, indices)


def shared_memory_of(value: ir.Value, dtype: Any, swizzle: int) -> MemoryReference:
    """A memref in shared memory as a reference of the same shape.

    Args:
      value: the memref.
      dtype: of its elements.
      swizzle: in bytes; 16 for none.
    """
    strides, _ = value.type.get_strides_and_offset()
    dims = [(Extent(size, step),) for size, step in zip(value.type.shape, strides, strict=True)]
    pointer = builtin.unrealized_conversion_cast([types.pointer_type(3)], [value])
    return MemoryReference(
        pointer=pointer,
        layout=MemoryLayout(tuple(dims), swizzle, types.bit_width(dtype)),
        dtype=np.dtype(dtype),
        space=MemorySpace.SMEM,
        alignment=_alignment(value, types.bit_width(dtype)),
    )


def _alignment(value: ir.Value, bits: int) -> int:
    """Bytes that the address of a memref is known to be a multiple of."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return max(1, bits // 8)
    operation = owner.operation if hasattr(owner, "operation") else owner
    if MEMREF_ALIGNMENT in operation.attributes:
        return int(ir.IntegerAttr(operation.attributes[MEMREF_ALIGNMENT]).value)
    if operation.name in _SAME_PLACE:
        return _alignment(operation.operands[0], bits)
    if operation.name != "memref.subview":
        return max(1, bits // 8)
    source, *operands = operation.operands
    strides, _ = source.type.get_strides_and_offset()
    dynamic = iter(operands)
    steps = [
        (known_divisor(next(dynamic)) if offset == _DYNAMIC else offset) * stride
        for offset, stride in zip(operation.attributes["static_offsets"], strides, strict=True)
    ]
    return math.gcd(_alignment(source, bits), math.gcd(*steps) * bits // 8)


def without_transforms(
    reference: MemoryReference, transforms: Sequence[Any], shape: Sequence[int]
) -> MemoryReference:
    """Shared memory in the order of the array that was transformed to it.

    Args:
      reference: shared memory as a plain array.
      transforms: ``TileTransform`` and ``TransposeTransform`` of ``jax.experimental.mosaic.gpu``,
        in the order in which they were applied.
      shape: of the array.

    Raises:
      UnsupportedError: another transform.
      InvalidValueError: the transforms do not lead from ``shape`` to that of the reference.
    """
    mosaic = _jax.mosaic_gpu()
    layout = reference.layout
    for transform in reversed(transforms):
        if isinstance(transform, mosaic.TileTransform):
            layout = layout.untile(layout.shape[-len(transform.tiling) :])
        elif isinstance(transform, mosaic.TransposeTransform):
            layout = layout.transpose(np.argsort(transform.permutation).tolist())
        else:
            raise UnsupportedError(
                f"a copy by a {type(transform).__name__}",
                expected="TileTransform and TransposeTransform",
            )
    expected = tuple(shape)
    for transform in transforms:
        expected = tuple(transform.transform_gmem_shape(expected))
    if expected != reference.shape or layout.shape != tuple(shape):
        raise InvalidValueError(
            "the shared memory of a copy has another shape than the part of the array",
            got=str(list(reference.shape)),
            expected=f"{list(expected)}, which is {list(shape)} after gmem_transform",
        )
    return reference.with_layout(layout)
