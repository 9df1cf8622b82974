"""References while lowering: a pointer, a memory layout, and an offset that is added late.

All views (indexing, tiling, swizzle, transposition, reshaping) act on the memory layout, whose
dimensions have nested strides; nothing is left over for the rules that use the reference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite import _jax
from pallasite.errors import InvalidValueError, UnsupportedError
from pallasite.ir import ops, types
from pallasite.ir.divisibility import ANY, known_divisor, known_remainder
from pallasite.language.memory import MemorySpace
from pallasite.launch import Buffer
from pallasite.layouts.memory import Extent, MemoryLayout, OffsetTerm, row_major
from pallasite.lowering.arrays import RegisterArray
from pallasite.lowering.launch import SHARED_MEMORY_ALIGNMENT, BarrierStorage, LaunchContext

GLOBAL_ALIGNMENT = 256


@dataclasses.dataclass(frozen=True)
class DynamicOffset:
    """``((index // divisor) % modulus) * stride`` elements, with an index known at run time."""

    index: ir.Value
    term: OffsetTerm

    @property
    def divisor(self) -> int:
        """What the offset is known to be a multiple of, in elements."""
        whole = known_divisor(self.index)
        places = whole // self.term.divisor if whole % self.term.divisor == 0 else 1
        if self.term.modulus is not None:
            places = math.gcd(places, self.term.modulus)
        return places * self.term.stride


@dataclasses.dataclass(frozen=True)
class WindowStart:
    """Where a window begins along one dimension of an array in global memory.

    ``static`` plus the sum of ``dynamic`` (i32 values); ``size`` elements; ``squeezed`` if an
    integer index removed the dimension.
    """

    static: int
    dynamic: tuple[ir.Value, ...]
    size: int
    squeezed: bool = False

    @property
    def divisor(self) -> int:
        """What the start is known to be a multiple of."""
        return math.gcd(self.static, *map(known_divisor, self.dynamic)) or ANY


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryReference:
    """A reference to (part of) an array in global or shared memory.

    Attributes:
      pointer: address of the root array, in address space 1 or 3.
      layout: placement of the viewed elements, relative to ``pointer`` plus the offset.
      dtype: element type.
      space: ``MemorySpace.GMEM`` or ``SMEM``, or a plugin's part of one.
      alignment: bytes that ``pointer`` is a multiple of.
      offset: static part of the element offset.
      dynamic: the rest of it.
      buffer: the kernel's buffer, for global memory.
      window: the part of the root array that is viewed, one entry per dimension of the root array;
        None once the view is more than a window.
      remote: for shared memory, the cluster rank (i32) of another block that owns it.
      may_be_read: whether the kernel also reads this memory.
      constant: whether nobody writes it while the kernel runs.
      members: for a union of allocations, the layouts of those members that inference has chosen
        one for, by offset in bytes, dtype and shape.
      peer: device-side information of plugins for multi-GPU references.
    """

    pointer: ir.Value
    layout: MemoryLayout
    dtype: np.dtype[Any]
    space: MemorySpace
    alignment: int
    offset: int = 0
    dynamic: tuple[DynamicOffset, ...] = ()
    buffer: Buffer | None = None
    window: tuple[WindowStart, ...] | None = None
    remote: ir.Value | None = None
    may_be_read: bool = True
    constant: bool = False
    members: Mapping[Any, MemoryLayout] | None = None
    peer: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The viewed shape."""
        return self.layout.shape

    @property
    def element_bits(self) -> int:
        """Bits of one element in memory."""
        return self.layout.element_bits

    @property
    def offset_alignment(self) -> int:
        """Bytes that the address of the first element is known to be a multiple of."""
        elements = math.gcd(self.offset, *[part.divisor for part in self.dynamic])
        if elements == 0:
            return self.alignment
        return math.gcd(self.alignment, max(1, elements * self.element_bits // 8))

    @property
    def index_type(self) -> ir.Type:
        """i32 where every offset in the root array fits, else i64."""
        if self.space.is_shared:
            return ops.i32()
        assert self.buffer is not None
        size = math.prod(self.buffer.shape) * max(1, self.element_bits // 8)
        return ops.i32() if size < 2**31 else ops.i64()

    def dynamic_offset(self) -> ir.Value | None:
        """The dynamic part of the element offset, or None if there is none."""
        total: ir.Value | None = None
        for part in self.dynamic:
            index = part.index
            value = ops.divide_unsigned(index, part.term.divisor)
            if part.term.modulus is not None:
                value = ops.remainder_unsigned(value, part.term.modulus)
            value = ops.multiply(ops.cast_integer(value, self.index_type), part.term.stride)
            total = value if total is None else ops.add(total, value)
        return total

    def element_offset(self) -> ir.Value | int:
        """The element offset of the first element from ``pointer``."""
        dynamic = self.dynamic_offset()
        return self.offset if dynamic is None else ops.add(dynamic, self.offset)

    def address(self) -> ir.Value:
        """A pointer to the first element. Not for swizzled views that begin inside an atom.

        Raises:
          UnsupportedError: elements of less than a byte at an offset that is not a whole byte.
        """
        offset = self.element_offset()
        if self.element_bits < 8:
            return ops.byte_pointer(self.pointer, self.byte_offset(offset))
        return ops.element_pointer(self.pointer, offset, types.memory_type(self.dtype))

    def byte_offset(self, offset: ir.Value | int) -> ir.Value | int:
        """An element offset in bytes."""
        if self.element_bits >= 8:
            size = self.element_bits // 8
            return offset * size if isinstance(offset, int) else ops.multiply(offset, size)
        per_byte = 8 // self.element_bits
        if isinstance(offset, int):
            if offset % per_byte:
                raise UnsupportedError(
                    f"{self.dtype} elements at offset {offset}, inside a byte",
                    expected=f"offsets that are multiples of {per_byte}",
                )
            return offset // per_byte
        return ops.divide_exactly(offset, per_byte)

    def with_layout(self, layout: MemoryLayout) -> MemoryReference:
        """The same memory seen through another layout; no longer a plain window."""
        return dataclasses.replace(self, layout=layout, window=None)


@dataclasses.dataclass(frozen=True, eq=False)
class BarrierReference:
    """A reference to an array of mbarriers, or to one of them.

    Attributes:
      storage: where they lie.
      dtype: the barrier type (arrivals and so on).
      shape: shape of the array; ``()`` for one.
      index: number of the first (a number or an i32).
      phases: pointer to the word that holds this thread's phase bits.
      space: the memory space of barriers, which says what views of them are.
      cluster_dimensions: CUDA cluster dimensions of a cluster barrier, one tuple per axis.
    """

    storage: BarrierStorage
    dtype: Any
    shape: tuple[int, ...]
    index: ir.Value | int
    phases: ir.Value
    launch: LaunchContext
    space: MemorySpace
    cluster_dimensions: tuple[tuple[int, ...], ...] | None = None

    def pointer(self) -> ir.Value:
        """A shared pointer to the barrier."""
        base = self.launch.shared_pointer(self.storage.offset)
        return ops.element_pointer(base, self.index, ops.i64())

    def address(self) -> ir.Value:
        """The 32-bit shared address of the barrier."""
        return ops.shared_address(self.pointer())


def global_reference(
    launch: LaunchContext, buffer: Buffer, *, may_be_read: bool, constant: bool
) -> MemoryReference | GlobalReference:
    """The reference to a whole array in global memory."""
    return GlobalReference(launch, buffer, may_be_read, constant)


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
