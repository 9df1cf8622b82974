"""References while lowering: a pointer, a memory layout, and an offset that is added late.

All views (indexing, tiling, swizzle, transposition, reshaping) act on the memory layout, whose
dimensions have nested strides; nothing is left over for the rules that use the reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidValueError, SourceLocation, UnsupportedError
from pallasite.plugin.inference import ANY
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.layouts import (
    LANES,
    WARPS,
    MemoryLayout,
    OffsetTerm,
    RegisterLayout,
    even,
    padded,
)
from pallasite.plugin.lowering import (
    BarrierStorage,
    Buffer,
    LaunchContext,
    RuleContext,
    TensorMapParameter,
)
from pallasite_std.memory.access import plan_access
from pallasite_std.memory.contents import AllocationUse, Part
from pallasite_std.memory.divisibility import known_divisor


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


class Elsewhere:
    """Where memory is that is not on this device: what a plugin for such memory derives from.

    Attributes:
      copied_to: whether it can only be copied to: it stands for the memory of several devices.
    """

    copied_to = False

    def descriptor(self, ctx: RuleContext, parameter: TensorMapParameter) -> ir.Value:
        """A pointer to a TMA descriptor of the memory there, else as a parameter says.

        Raises:
          UnsupportedError: there is none.
        """
        del parameter
        raise UnsupportedError(f"{ctx.primitive} by a TMA descriptor of memory elsewhere")

    def send(
        self, ctx: RuleContext, target: ir.Value, source: ir.Value, size: ir.Value, most: int
    ) -> None:
        """Emits what one lane does to start the copy of a piece of shared memory to there.

        Args:
          ctx: the rule's context.
          target: the address there.
          source: 32-bit address in shared memory.
          size: of the piece in bytes, i32; a multiple of 16.
          most: that it can be.
        """
        del ctx, most
        text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
        ops.inline_assembly(text, "l,r,r,~{memory}", target, source, size)


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
      constant: whether it is not written while the kernel runs.
      members: for a union of allocations, the layouts of those members that inference has chosen
        one for, by offset in bytes, dtype and shape.
      peer: where it is, if it is not on this device; ``pointer`` leads there.
      ordered: whether its stores come with barriers also where the kernel has none by itself: it
        belongs to the definition of a primitive, of which the kernel's author knows nothing.
      use: what is done to the allocation, to be added to; None where nobody asks.
      part: the array, or member of a union, of the allocation that this is a view of.
      line: what accesses have as their line, if it is not that of the equation.
      whole: the kernel's buffer, where ``buffer`` has another shape for it; only copies by tensor
        maps take such memory.
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
    peer: Elsewhere | None = None
    ordered: bool = False
    use: AllocationUse | None = dataclasses.field(default=None, compare=False)
    part: Part | None = None
    line: SourceLocation | None = dataclasses.field(default=None, compare=False)
    whole: Buffer | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The viewed shape."""
        return self.layout.shape

    @property
    def at_line(self) -> contextlib.AbstractContextManager[Any]:
        """Gives :attr:`line` to what is emitted inside."""
        if self.line is None:
            return contextlib.nullcontext()
        where: contextlib.AbstractContextManager[Any] = ir.Location.file(
            self.line.file, self.line.line, self.line.column
        )
        return where

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

    def dynamic_offset(self, unit: int = 1) -> ir.Value | None:
        """The dynamic part of the element offset, or None if there is none; counted in units of so
        many elements, which must divide the strides of all parts."""
        total: ir.Value | None = None
        for part in self.dynamic:
            index = part.index
            value = ops.divide_unsigned(index, part.term.divisor)
            if part.term.modulus is not None:
                value = ops.remainder_unsigned(value, part.term.modulus)
            value = ops.cast_integer(value, self.index_type)
            value = ops.multiply(value, part.term.stride // unit)
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


MAXIMUM_BITS = 128


def default_layout(reference: MemoryReference, vector_limit: int | None = None) -> RegisterLayout:
    """The strided layout with the widest vectors that the reference's memory allows, of at most
    ``vector_limit`` elements if that is given."""
    extents = reference.layout.flat_extents
    run = extents[-1].size if extents and extents[-1].stride == 1 else 1
    size = reference.layout.size
    bits = reference.element_bits
    limit = min(MAXIMUM_BITS, 8 * reference.offset_alignment)
    if reference.layout.swizzle != 16:
        limit = min(limit, MAXIMUM_BITS)
    width = 1
    for candidate in (128, 64, 32, 16, 8, 4, 2):
        if vector_limit is not None and candidate > max(vector_limit, 8 // bits):
            continue
        if candidate * bits <= limit and run % candidate == 0 and size % candidate == 0:
            width = candidate
            break
    widest = width
    while width > 1 and size // width % (LANES * WARPS) and width * bits > 8:
        # Fewer elements for each thread, but every thread takes part.
        width //= 2
    layout = even(tuple(reference.shape), max(width, 1), widest, max(1, 8 // bits))
    if layout.flat and not fits_memory(layout, reference):
        together = max(1, 8 // bits)
        if reference.shape[-1] % together:
            raise InvalidValueError(
                f"elements of {bits} bits do not fill the bytes of an array",
                got=f"{reference.dtype}{list(reference.shape)}",
                expected=f"rows, or a whole, of a multiple of {together} elements",
                hint="add a column, or convert to int8",
            )
        return padded(tuple(reference.shape), together)
    return layout


def fits_memory(layout: RegisterLayout, reference: MemoryReference) -> bool:
    """Whether a layout's elements can be transferred to and from what a reference views."""
    try:
        plan_access(layout, reference.layout, max(1, reference.element_bits // 8))
    except InvalidValueError:
        return False
    return True


def whole_window(shape: Sequence[int]) -> list[WindowStart]:
    """The window of a whole array in global memory."""
    return [WindowStart(0, (), size) for size in shape]


def without_pointer(
    layout: MemoryLayout, dtype: Any, space: MemorySpace, alignment: int
) -> MemoryReference:
    """A reference without a pointer, for the functions that plan accesses."""
    return MemoryReference(
        pointer=None, layout=layout, dtype=dtype, space=space, alignment=alignment
    )
