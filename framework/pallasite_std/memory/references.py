"""Making references: to the arguments of kernels and to shared memory; indexing them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError, UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.layouts import Extent, MemoryLayout, OffsetTerm, row_major
from pallasite.plugin.lowering import (
    GLOBAL_ALIGNMENT,
    SHARED_MEMORY_ALIGNMENT,
    Buffer,
    LaunchContext,
    RegisterArray,
)
from pallasite_std.memory.divisibility import known_remainder
from pallasite_std.memory.reference_types import (
    DynamicOffset,
    MemoryReference,
    WindowStart,
)


class GlobalReference:
    """A reference to a whole global array; its pointer becomes a kernel parameter on first use,
    so that an array used only through TMA descriptors takes no pointer."""

    def __init__(self, launch: LaunchContext, buffer: Buffer, may_be_read: bool, constant: bool):
        self._launch = launch
        self.buffer = buffer
        self._may_be_read = may_be_read
        self._constant = constant

    @property
    def space(self) -> MemorySpace:
        """Global memory."""
        return MemorySpace.GMEM

    def resolve(self, *, pointer: bool = True) -> MemoryReference:
        """The memory reference; without ``pointer``, its pointer must not be used."""
        dtype = np.dtype(self.buffer.dtype) if not _is_extended(self.buffer.dtype) else np.int32
        bits = types.bit_width(dtype)
        window = tuple(WindowStart(0, (), size) for size in self.buffer.shape)
        return MemoryReference(
            pointer=self._launch.array_pointer(self.buffer) if pointer else None,
            layout=row_major(self.buffer.shape, bits),
            dtype=np.dtype(dtype),
            space=MemorySpace.GMEM,
            alignment=GLOBAL_ALIGNMENT,
            buffer=self.buffer,
            window=window,
            may_be_read=self._may_be_read,
            constant=self._constant,
        )


def _is_extended(dtype: Any) -> bool:
    return bool(_jax.issubdtype(dtype, _jax.extended))


def shared_reference(
    launch: LaunchContext,
    offset: int,
    shape: Sequence[int],
    dtype: Any,
    space: MemorySpace = MemorySpace.SMEM,
) -> MemoryReference:
    """The reference to a row-major array at a byte offset of shared memory (1024-aligned)."""
    return MemoryReference(
        pointer=launch.shared_pointer(offset),
        layout=row_major(shape, types.bit_width(dtype)),
        dtype=np.dtype(dtype),
        space=space,
        alignment=SHARED_MEMORY_ALIGNMENT,
    )


# Indexing -------------------------------------------------------------------------------------


def _index_value(index: Any) -> int | ir.Value:
    if isinstance(index, int | np.integer):
        return int(index)
    if isinstance(index, RegisterArray):
        if index.shape != ():
            raise UnsupportedError(
                "a reference is indexed by an array",
                got=f"indices of shape {list(index.shape)}",
                expected="scalars and slices",
            )
        value = index.scalar
        known = constant_integer(value)
        return value if known is None else known
    if isinstance(index, np.ndarray | _jax.TypedNdArray) or hasattr(index, "item"):
        return int(np.asarray(index))
    raise UnsupportedError(f"an index of type {type(index).__name__}", got=repr(index))


def constant_integer(value: ir.Value) -> int | None:
    """The number that an MLIR integer value always has, if it is a constant."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "arith.constant":
        return None
    return int(ir.IntegerAttr(owner.attributes["value"]).value)


def index_reference(reference: MemoryReference, indices: Sequence[Any]) -> MemoryReference:
    """The view of a reference by integers and slices, one index per dimension."""
    layout = reference.layout
    offset = reference.offset
    dynamic = list(reference.dynamic)
    window = None if reference.window is None else list(reference.window)
    free = [] if window is None else [i for i, start in enumerate(window) if not start.squeezed]
    dim = 0
    for position, index in enumerate(indices):
        is_slice = isinstance(index, _jax.Slice)
        start = _index_value(index.start if is_slice else index)
        size = index.size if is_slice else 1
        if not isinstance(size, int):
            raise UnsupportedError(
                "a slice whose size is computed in the kernel", expected="a static size"
            )
        stride = 1 if not is_slice or index.stride is None else int(index.stride)
        if stride != 1:
            layout, start_offset = _strided(layout, dim, start, size, stride)
            offset += start_offset
            window = None
            dim += 1
            continue
        known = start if isinstance(start, int) else None
        if is_slice and known == 0 and size == layout.shape[dim]:
            dim += 1
            continue
        if known is None:
            _check_reach(reference, dim if window is None else free[position])
        if window is not None:
            # A window of a global array may leave the array: TMA fills and clips. Plain accesses
            # check when they happen.
            axis = free[position]
            step = math.prod(reference.buffer.shape[axis + 1 :]) if reference.buffer else 1
            dims = [*layout.dims]
            dims[dim] = (Extent(size, step),)
            if not is_slice:
                del dims[dim]
            layout = layout.with_dims(dims)
            offset += (known or 0) * step
            terms: tuple[OffsetTerm, ...] = (OffsetTerm(1, None, step),) if known is None else ()
            old = window[axis]
            window[axis] = WindowStart(
                static=old.static + (known or 0),
                dynamic=old.dynamic if known is not None else (*old.dynamic, _as_i32(start)),
                size=size,
                squeezed=not is_slice,
            )
        else:
            part = layout.slice(dim, known, size) if is_slice else layout.index(dim, known)
            if known is None:
                _check_place(layout, dim, start, size)
            layout, terms = part.layout, part.terms
            offset += part.offset
        if known is None:
            assert isinstance(start, ir.Value)
            dynamic += [DynamicOffset(_as_i32(start), term) for term in terms if term.stride]
        if is_slice:
            dim += 1
    return dataclasses.replace(
        reference,
        layout=layout,
        offset=offset,
        dynamic=tuple(dynamic),
        window=None if window is None else tuple(window),
    )


def _check_reach(reference: MemoryReference, axis: int) -> None:
    """Refuses a computed index along an axis on which an index of 32 bits can wrap around."""
    buffer = reference.buffer if reference.window is not None else None
    shape = reference.layout.shape if buffer is None else buffer.shape
    if shape[axis] >= 2**31:
        raise UnsupportedError(
            f"a computed index along dimension {axis}, of {shape[axis]} elements",
            expected="fewer than 2**31: indices have 32 bits",
            hint="reshape the array, so that two dimensions share them; offsets have 64 bits",
        )


def _check_place(layout: MemoryLayout, dim: int, start: Any, size: int) -> None:
    """Refuses a computed start that is never where the tiles of the memory allow it.

    Where that depends on what the kernel computes, its author has to be right.
    """
    tile = 1
    for extent in reversed(layout.dims[dim][1:]):
        tile *= extent.size
        behind = known_remainder(start, tile)
        if not behind:
            continue
        try:
            layout.slice(dim, behind, size)
        except InvalidValueError as error:
            error.got = f"a computed start, always {behind} behind a multiple of {tile}"
            raise


def _as_i32(value: Any) -> ir.Value:
    return ops.cast_integer(value, ops.i32())


def _strided(
    layout: MemoryLayout, dim: int, start: int | ir.Value, size: int, stride: int
) -> tuple[MemoryLayout, int]:
    if not isinstance(start, int):
        raise UnsupportedError(
            "a slice with a stride whose start is computed in the kernel",
            got=f"stride {stride}",
            expected="a static start, or stride 1",
        )
    if stride < 0:
        raise UnsupportedError("a slice with a negative stride", got=stride)
    extents = layout.dims[dim]
    if len(extents) > 1:
        raise UnsupportedError(
            "a slice with a stride across tiles", got=f"stride {stride} of {layout}"
        )
    step = extents[0].stride if extents else 1
    last = start + (size - 1) * stride
    if last >= layout.shape[dim]:
        raise InvalidValueError(
            f"the slice reaches element {last} of dimension {dim}, which has {layout.shape[dim]}"
        )
    dims = [*layout.dims]
    dims[dim] = (Extent(size, step * stride),)
    return layout.with_dims(dims), start * step
