"""Plans of transfers for any pair of layouts, at the price of index arithmetic in the program."""

from __future__ import annotations

import dataclasses
import math

from pallasite.plugin import InvalidValueError
from pallasite.plugin.layouts import MemoryLayout, OffsetTerm, Owner, RegisterLayout, swizzle_bytes
from pallasite_std.memory.access import MAXIMUM_BYTES, ThreadTerm


@dataclasses.dataclass(frozen=True)
class IndexedAccessPlan:
    """Every access computes ``linear = thread part + static part`` and its offset from that.

    Attributes:
      thread_terms: their sum is the thread's part of the row-major linear index.
      register_linear: the static part for each register.
      vector_linear: what each vector element adds to it.
      memory_terms: their sum, of ``linear``, is the element offset in memory.
      width: elements for each access: that many neighbours in a register's vector.
      lane_mask: lanes to let through to store every element once.
      warp_mask: the same for warps.
      element_bits: bits of one element.
      swizzle: of the memory layout, in bytes.
    """

    thread_terms: tuple[ThreadTerm, ...]
    register_linear: tuple[int, ...]
    vector_linear: tuple[int, ...]
    memory_terms: tuple[OffsetTerm, ...]
    width: int
    lane_mask: int
    warp_mask: int
    element_bits: int
    swizzle: int

    def byte_address(self, warp: int, lane: int, register: int, vector: int) -> int:
        """The swizzled byte address of an element from the base; the meaning of the plan."""
        linear = sum(term.value(warp, lane) for term in self.thread_terms)
        linear += self.register_linear[register] + self.vector_linear[vector]
        offset = sum(term.value(linear) for term in self.memory_terms)
        return swizzle_bytes(offset * self.element_bits // 8, self.swizzle)


def plan_indexed_access(
    layout: RegisterLayout, memory: MemoryLayout, alignment_bytes: int = MAXIMUM_BYTES
) -> IndexedAccessPlan:
    """Plans the transfer of an array between registers and memory by general index arithmetic.

    Args:
      layout: where the elements are in registers.
      memory: where they are in memory; the same shape.
      alignment_bytes: what the address of element 0 is known to be a multiple of.

    Raises:
      InvalidValueError: the shapes differ, or elements of less than a byte would have to be
        addressed singly.
    """
    if layout.shape != memory.shape:
        raise InvalidValueError(
            f"registers of shape {layout.shape} and memory of shape {memory.shape} differ"
        )
    trailing = [1] if layout.flat else [
        math.prod(layout.shape[dim + 1 :]) for dim in range(len(layout.shape))
    ]  # fmt: skip
    weighted = [
        (digit, weight * outer)
        for dim, outer in zip(layout.weighted_dims, trailing, strict=True)
        for digit, weight in dim
    ]

    def static(owner: Owner, total: int) -> tuple[int, ...]:
        own = [(digit, weight) for digit, weight in weighted if digit.owner is owner]
        return tuple(sum(d.value(i) * w for d, w in own) for i in range(total))

    extents = memory.flat_extents
    terms, inner = [], 1
    for position in reversed(range(len(extents))):
        extent = extents[position]
        terms.append(OffsetTerm(inner, extent.size if position else None, extent.stride))
        inner *= extent.size
    vector = static(Owner.VECTOR, layout.vector_length)
    width = _width(layout, memory, vector, alignment_bytes)
    if width * memory.element_bits % 8:
        raise InvalidValueError(
            f"elements of {memory.element_bits} bits in the layout {layout} are not stored in "
            f"whole bytes of memory laid out as {memory}"
        )
    return IndexedAccessPlan(
        thread_terms=tuple(
            ThreadTerm(d.owner, d.stride, d.size, w) for d, w in weighted if d.owner.is_thread
        ),
        register_linear=static(Owner.REGISTER, layout.registers),
        vector_linear=vector,
        memory_terms=tuple(reversed(terms)),
        width=width,
        lane_mask=layout.lane_mask,
        warp_mask=layout.warp_mask,
        element_bits=memory.element_bits,
        swizzle=memory.swizzle,
    )


def _width(
    layout: RegisterLayout, memory: MemoryLayout, vector: tuple[int, ...], alignment_bytes: int
) -> int:
    """The largest power of two of vector elements that are neighbours and aligned in memory."""
    extents = memory.flat_extents
    if not extents or extents[-1].stride != 1 or vector != tuple(range(len(vector))):
        return 1
    limit = 8 * min(MAXIMUM_BYTES, alignment_bytes) // memory.element_bits
    common = math.gcd(extents[-1].size, layout.vector_length, *(e.stride for e in extents[:-1]))
    return math.gcd(common, 1 << max(limit, 1).bit_length() - 1)
