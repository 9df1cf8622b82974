"""Copies of one run of bytes between global and shared memory, without a tensor map.

Where a window lies in one piece on both sides, one instruction copies any number of 16-byte units
(PTX ISA 9.7.9.25.4.1, ``cp.async.bulk``): no limit of 256 elements, no descriptor. But it knows no
ends of arrays, so what leaves the array has to be cut off here.
"""

from __future__ import annotations

import dataclasses
import math

from jaxlib.mlir import ir

from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RuleContext
from pallasite_std.copies.tensor_copies import start_value
from pallasite_std.memory.reference_types import Elsewhere, MemoryReference, WindowStart

UNIT = 16
"""Addresses and sizes are multiples of so many bytes."""


@dataclasses.dataclass(frozen=True)
class BulkCopy:
    """A planned copy.

    Attributes:
      shared: the shared memory.
      window: the window of the kernel's argument, perhaps without its pointer.
      axis: the dimension of the argument that the window cuts: it has one index of those before it
        and all indices of those behind it.
      may_leave: whether the part outside of the array has to be cut off.
    """

    shared: MemoryReference
    window: MemoryReference
    axis: int
    may_leave: bool = False

    @property
    def size(self) -> int:
        """Bytes of the whole window."""
        return _size(self.window)

    def global_address(self, ctx: RuleContext) -> ir.Value:
        """Emits a pointer to where the window begins, which may be outside of the array."""
        assert self.window.buffer is not None
        if self.window.peer is not None:
            return self.window.address()
        pointer = ctx.launch.array_pointer(self.window.buffer)
        return dataclasses.replace(self.window, pointer=pointer).address()

    def inside(self) -> tuple[ir.Value, ir.Value]:
        """Emits how many bytes of the window lie before the array, and how many inside (i32)."""
        assert self.window.window is not None and self.window.buffer is not None
        zero = ops.i32_constant(0)
        before, inside = zero, ops.i32_constant(self.size)
        shape = self.window.buffer.shape
        for dim, (start, extent) in enumerate(zip(self.window.window, shape, strict=True)):
            if dim == self.axis and not _is_inside(start, extent):
                step = math.prod(shape[dim + 1 :]) * self.window.element_bits
                first = start_value(start)
                end = ops.arith.subi(ops.i32_constant(min(extent, 2**31 - 1)), first)
                end = ops.arith.minsi(end, ops.i32_constant(start.size))
                skipped = ops.arith.maxsi(ops.arith.subi(zero, first), zero)
                skipped = ops.arith.minsi(skipped, ops.i32_constant(start.size))
                count = ops.arith.maxsi(ops.arith.subi(end, skipped), zero)
                before, inside = _bytes(skipped, step), _bytes(count, step)
        for dim, (start, extent) in enumerate(zip(self.window.window, shape, strict=True)):
            if dim < self.axis and not _is_inside(start, extent):
                there = ops.compare("ult", start_value(start), ops.i32_constant(extent))
                inside = ops.arith.select(there, inside, zero)
        return before, inside


def plan(
    window: MemoryReference, shared: MemoryReference, *, promised: bool = False
) -> BulkCopy | None:
    """Plans the copy between a window of a kernel argument and shared memory of its shape.

    Args:
      window: in global memory; it needs no pointer.
      shared: in the shared memory of this block.
      promised: whether the window never leaves the array.

    Returns:
      The plan; None if the window does not lie in one piece on both sides, or if addresses or sizes
      are not known to be multiples of 16 bytes. Where it begins in the last dimension of the array
      is taken to be one if the kernel computes it: no other copy can do without that either.
    """
    axis = _cut_dimension(window)
    if axis is None or not shared.layout.is_contiguous:
        return None
    if _size(window) % UNIT or not (_begins_aligned(window) and _is_aligned(shared)):
        return None
    assert window.window is not None and window.buffer is not None
    shape = window.buffer.shape
    inside = promised or all(map(_is_inside, window.window, shape))
    if not inside:
        # What is inside the array consists of whole units too.
        step = math.prod(shape[axis + 1 :]) * window.element_bits
        known = window.window[axis].divisor * step if axis < len(shape) - 1 else 0
        if math.gcd(known, shape[axis] * step) % (8 * UNIT):
            return None
    return BulkCopy(shared, window, axis, not inside)


def _cut_dimension(reference: MemoryReference) -> int | None:
    """The dimension that a window in one piece cuts; None if it is in several pieces."""
    if reference.window is None or reference.buffer is None or not reference.window:
        return None
    sizes = [start.size for start in reference.window]
    axis = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes) - 1)
    for start, extent in zip(
        reference.window[axis + 1 :], reference.buffer.shape[axis + 1 :], strict=True
    ):
        if start.dynamic or start.static or start.size != extent:
            return None
    return axis


def _is_inside(start: WindowStart, extent: int) -> bool:
    return not start.dynamic and 0 <= start.static <= extent - start.size


def _begins_aligned(window: MemoryReference) -> bool:
    """Whether a window begins at a multiple of 16 bytes, if its last start in the array is one,
    which any copy asks of what the kernel computes."""
    assert window.window is not None and window.buffer is not None
    step = window.element_bits
    for dim in reversed(range(len(window.window))):
        start = window.window[dim]
        assumed = dim == len(window.window) - 1 and start.dynamic
        if not assumed and start.divisor * step % (8 * UNIT):
            return False
        step *= window.buffer.shape[dim]
    return window.alignment % UNIT == 0


def _is_aligned(reference: MemoryReference) -> bool:
    elements = math.gcd(reference.offset, *(part.divisor for part in reference.dynamic))
    return reference.alignment % UNIT == 0 and elements * reference.element_bits % (8 * UNIT) == 0


def _size(window: MemoryReference) -> int:
    return window.layout.size * window.element_bits // 8


def _bytes(count: ir.Value, step: int) -> ir.Value:
    """Bytes of so many indices that are ``step`` bits apart; a whole number."""
    if step % 8 == 0:
        return ops.multiply(count, step // 8)
    return ops.divide_exactly(ops.multiply(count, step), 8)


def issue_load(ctx: RuleContext, copy: BulkCopy, barrier: ir.Value) -> None:
    """Emits the load; the caller elects one lane, which has announced ``copy.size`` bytes.

    Args:
      ctx: the rule's context.
      copy: the plan.
      barrier: 32-bit shared address of the mbarrier.
    """
    target = ops.shared_address(copy.shared.address())
    source = copy.global_address(ctx)
    text = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    constraints = "r,l,r,r,~{memory}"
    size: ir.Value = ops.i32_constant(copy.size)
    if not copy.may_leave:
        ops.inline_assembly(text, constraints, target, source, size, barrier)
        return
    before, inside = copy.inside()
    with ops.when(ops.compare("slt", inside, size)):
        # Nothing arrives from outside of the array.
        ops.inline_assembly(
            "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [$0], $1;",
            "r,r,~{memory}",
            barrier,
            ops.arith.subi(size, inside),
        )
    with ops.when(ops.compare("sgt", inside, 0)):
        target, source = ops.add(target, before), ops.byte_pointer(source, before)
        ops.inline_assembly(text, constraints, target, source, inside, barrier)


def issue_store(ctx: RuleContext, copy: BulkCopy) -> None:
    """Emits the store; the caller elects one lane and commits the group."""
    target = copy.global_address(ctx)
    source = ops.shared_address(copy.shared.address())
    where = copy.window.peer or Elsewhere()
    if not copy.may_leave:
        where.send(ctx, target, source, ops.i32_constant(copy.size), copy.size)
        return
    before, inside = copy.inside()
    with ops.when(ops.compare("sgt", inside, 0)):
        target, source = ops.byte_pointer(target, before), ops.add(source, before)
        where.send(ctx, target, source, inside, copy.size)
