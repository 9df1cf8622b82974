"""Resolving the transforms of a reference: every view becomes a memory layout and an offset."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from pallasite import _jax, plugins
from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite.ir import ops, types
from pallasite.language import transforms as tr
from pallasite.language.memory import MemorySpace
from pallasite.layouts.memory import row_major
from pallasite.lowering.arrays import RegisterArray
from pallasite.lowering.context import RuleContext, Value
from pallasite.lowering.references import (
    BarrierReference,
    GlobalReference,
    MemoryReference,
    constant_integer,
    index_reference,
)


def resolve(
    ctx: RuleContext,
    reference: Value,
    transforms: Any = (),
    *,
    pointer: bool = True,
    other_blocks: bool = False,
) -> MemoryReference:
    """The memory that a reference and its transforms stand for.

    Args:
      ctx: the rule's context.
      reference: a reference value, or a TransformedRef whose ``ref`` is one.
      transforms: its transforms, outermost view last.
      pointer: whether plain accesses will happen; a copy by TMA needs no pointer of a global array.
      other_blocks: whether the rule accesses the shared memory of other blocks of the cluster too.

    Raises:
      InvalidTypeError: not a reference to memory.
      InvalidValueError, UnsupportedError: a view that the memory layout cannot express.
    """
    if isinstance(reference, _jax.TransformedRef):
        transforms = (*reference.transforms, *transforms)
        reference = reference.ref
    if isinstance(reference, GlobalReference):
        reference = reference.resolve(pointer=pointer)
    if not isinstance(reference, MemoryReference):
        raise InvalidTypeError(
            f"primitive {ctx.primitive} cannot access this reference",
            got=type(reference).__name__,
            expected="a reference to global or shared memory",
        )
    memory: MemoryReference = reference
    for transform in transforms:
        memory = apply(ctx, memory, transform)
    if memory.remote is not None and not other_blocks:
        raise UnsupportedError(
            f"primitive {ctx.primitive} cannot access the shared memory of another block",
            expected="the block's own shared memory",
            hint="read what cluster_ref gives, or assign to it",
        )
    if ctx.kernel.recorder is not None and memory.space is MemorySpace.SMEM:
        ctx.kernel.recorder.view(ctx, reference, memory)
    return memory


def apply(ctx: RuleContext, reference: MemoryReference, transform: Any) -> MemoryReference:
    """One view of a reference."""
    match transform:
        case _jax.NDIndexer():
            if transform.int_indexer_shape:
                raise UnsupportedError(
                    f"primitive {ctx.primitive} cannot index a reference by an array",
                    got=f"indices of shape {list(transform.int_indexer_shape)}",
                    expected="scalars and slices",
                )
            for index in transform.indices:
                start = index.start if isinstance(index, _jax.Slice) else index
                if isinstance(start, RegisterArray) and not types.is_integer(start.dtype):
                    raise InvalidTypeError(
                        f"primitive {ctx.primitive} indexes a reference by a {start.dtype}",
                        expected="an integer, or a slice that starts at one",
                    )
            return index_reference(reference, transform.indices)
        case _jax.TransposeTransform():
            return reference.with_layout(reference.layout.transpose(transform.permutation))
        case _jax.ReshapeTransform():
            return reference.with_layout(reference.layout.reshape(transform.shape))
        case tr.UntilingTransform():
            return reference.with_layout(reference.layout.untile(transform.tiling))
        case tr.TilingTransform():
            return reference.with_layout(reference.layout.tile(transform.tiling))
        case tr.UnswizzleTransform() | tr.SwizzleTransform():
            if reference.space is not MemorySpace.SMEM:
                raise InvalidValueError(
                    "only shared memory can be swizzled", got=str(reference.space)
                )
            swizzle = transform.swizzle if isinstance(transform, tr.UnswizzleTransform) else 16
            return reference.with_layout(reference.layout.with_swizzle(swizzle))
        case tr.ExtractAliasedRef():
            return _member(reference, transform)
        case _jax.BitcastTransform():
            return _bitcast(reference, transform.dtype)
        case tr.ClusterRefTransform():
            return _in_cluster(ctx, reference, transform)
        case tr.PeerMemRef() | tr.MulticastRef():
            resolver = ctx.kernel.extra.get("remote_references")
            if resolver is None:
                raise UnsupportedError(
                    "references to other devices come with the multi-GPU plugin",
                    hint=plugins.manager().remedy("names", "remote_ref"),
                )
            resolved: MemoryReference = resolver(ctx, reference, transform)
            return resolved
        case _:
            raise UnsupportedError(
                f"primitive {ctx.primitive} does not understand the view"
                f" {type(transform).__name__}",
                got=str(transform),
            )


def _member(reference: MemoryReference, member: tr.ExtractAliasedRef) -> MemoryReference:
    pointer = ops.byte_pointer(reference.pointer, member.offset + reference.offset)
    dtype = np.dtype(member.dtype)
    key = (member.offset, str(dtype), tuple(member.shape))
    chosen = (reference.members or {}).get(key)
    return dataclasses.replace(
        reference,
        pointer=pointer,
        offset=0,
        layout=chosen or row_major(member.shape, types.bit_width(dtype)),
        members=None,
        dtype=dtype,
        window=None,
    )


def _bitcast(reference: MemoryReference, dtype: Any) -> MemoryReference:
    dtype = np.dtype(dtype)
    if types.bit_width(dtype) != reference.element_bits:
        raise UnsupportedError(
            "a reference seen as elements of another width",
            got=f"{reference.dtype} as {dtype}",
            expected="a dtype of the same width",
            hint="use plgpu.RefUnion to give one memory region several dtypes",
        )
    return dataclasses.replace(reference, dtype=dtype)


def _in_cluster(
    ctx: RuleContext, reference: MemoryReference, transform: tr.ClusterRefTransform
) -> MemoryReference:
    if reference.space is not MemorySpace.SMEM:
        raise InvalidValueError(
            "cluster_ref is for shared memory", got=str(reference.space), expected="smem"
        )
    launch = ctx.launch
    launch.uses_cluster_memory = True
    launch.shares_memory_in_cluster = True
    coordinates = {
        launch.geometry.cluster_dimension(name): ctx.scalar(index, ops.i32())
        for name, index in zip(transform.dims, transform.idxs, strict=True)
    }
    return dataclasses.replace(reference, remote=launch.cluster_rank(coordinates))


def resolve_barrier(ctx: RuleContext, reference: Value, transforms: Any = ()) -> BarrierReference:
    """The barrier that a reference and its transforms select.

    Indices may be chained; a slice must cover its dimension.

    Raises:
      InvalidTypeError: not a barrier.
      InvalidValueError: an array of barriers from which none is selected.
    """
    if isinstance(reference, _jax.TransformedRef):
        transforms = (*reference.transforms, *transforms)
        reference = reference.ref
    if not isinstance(reference, BarrierReference):
        raise InvalidTypeError(
            f"primitive {ctx.primitive} needs a barrier",
            got=type(reference).__name__,
            expected="a reference allocated as plgpu.Barrier or plgpu.ClusterBarrier",
        )
    barrier = reference
    for transform in transforms:
        if not isinstance(transform, _jax.NDIndexer):
            raise UnsupportedError(
                "a view of barriers other than an index", got=type(transform).__name__
            )
        barrier = _index_barrier(ctx, barrier, transform.indices)
    if barrier.shape != ():
        count = int(np.prod(barrier.shape))
        if count != 1:
            raise InvalidValueError(
                f"an array of {count} barriers is used as one",
                got=f"shape {list(barrier.shape)}",
                expected="one barrier",
                hint="select one, such as barrier.at[slot]",
            )
        barrier = dataclasses.replace(barrier, shape=())
    return barrier


def _index_barrier(ctx: RuleContext, barrier: BarrierReference, indices: Any) -> BarrierReference:
    offset = barrier.index
    kept: list[int] = []
    stride = int(np.prod(barrier.shape))
    for index, extent in zip(indices, barrier.shape, strict=True):
        stride //= extent
        size = 1
        if isinstance(index, _jax.Slice):
            size = index.size
            # The selected barriers lie one after the other, so only the first dimension is cut.
            if index.stride != 1 or (size != extent and math.prod(kept) != 1):
                raise InvalidValueError(
                    "barriers that do not lie one after the other are selected by a slice",
                    expected="a slice of the first dimension, without steps",
                )
            kept.append(size)
            index = index.start
        value: Any = index if isinstance(index, int) else ctx.scalar(index, ops.i32())
        known = value if isinstance(value, int) else constant_integer(value)
        if known is not None:
            value = known
            if not 0 <= value <= extent - size:
                raise InvalidValueError(
                    f"barrier {value} of {extent}",
                    expected=f"an index from 0 to {extent - size}",
                )
            value = value * stride
        else:
            value = ops.multiply(value, stride)
        if isinstance(offset, int) and isinstance(value, int):
            offset = offset + value
        elif isinstance(offset, int):
            offset = ops.add(value, offset)
        else:
            offset = ops.add(offset, value)
    return dataclasses.replace(barrier, index=offset, shape=tuple(kept))
