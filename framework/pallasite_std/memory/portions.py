"""Moving arrays through scratch shared memory that has no room for them: portion by portion.

Memory is taken to have room for everything. Of that, one window after the other is there: threads
store what lies in it, and load what lies in it, by accesses that are the same for all windows but
for their base. Whether one is inside the window is known for most of them when the code is made;
for others a condition chooses the address.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from pallasite.plugin.ir import ops, types
from pallasite.plugin.layouts import RegisterLayout
from pallasite.plugin.lowering import RegisterArray, RuleContext, gather
from pallasite_std.memory.access import MAXIMUM_BYTES, Access, AccessPlan, plan_access
from pallasite_std.memory.padding import holds_element
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.transfers import from_memory, thread_offset, to_memory

PURPOSE = "scratch for layout changes and reductions"
"""What reports say of the memory: one region serves all uses."""

_SLACK = 1024
"""Bytes for barriers and alignment, about."""

_LEAST = 4096
"""Bytes of a window, at least."""


def room_for(ctx: RuleContext) -> int:
    """Bytes of scratch memory that there can be beside what the kernel allocates."""
    room = ctx.target.max_shared_memory - ctx.kernel.shared.limit
    return max(0, (room - _SLACK) // ctx.kernel.geometry.threads)


def has_portions(ctx: RuleContext, size: int) -> bool:
    """Whether arrays of so many bytes are moved in portions, since there is no room for them."""
    room = room_for(ctx)
    return not ctx.in_warp and room >= _LEAST and size > room


def in_portions(
    ctx: RuleContext,
    size: int,
    stored: Sequence[tuple[MemoryReference, RegisterArray]],
    view: MemoryReference,
    layout: RegisterLayout,
) -> RegisterArray:
    """What a view of memory holds after arrays were stored to other views of it.

    Args:
      ctx: of the rule.
      size: bytes of the memory.
      stored: views, and arrays of their shapes; pointers do not matter.
      view: of what is loaded.
      layout: of the result, which suits the view; those of the arrays suit theirs.
    """
    room = (room_for(ctx) - MAXIMUM_BYTES) // MAXIMUM_BYTES * MAXIMUM_BYTES
    count = -(-size // room)
    window = -(-size // (count * MAXIMUM_BYTES)) * MAXIMUM_BYTES
    stores = [_Transfer.of(ctx, memory, array.layout) for memory, array in stored]
    values = [
        [to_memory(register, array.dtype) for register in array.registers] for _, array in stored
    ]
    load = _Transfer.of(ctx, view, layout)
    kind = types.memory_type(view.dtype)
    loaded = [ops.constant(0, ops.vector_type(kind, len(access.parts))) for access in load.accesses]
    # What lies outside goes to the end, where nobody loads it.
    with ctx.scratch(window + MAXIMUM_BYTES, PURPOSE) as (pointer, _):
        for number in range(count):
            inside = (number * window, min(size, (number + 1) * window))
            ctx.synchronize()
            for store, registers in zip(stores, values, strict=True):
                for access in store.accesses:
                    place = store.place(ctx, access, inside, window)
                    if place is not None:
                        address = ops.byte_pointer(pointer, place[0])
                        (value,) = gather(registers, [access.parts])
                        ops.store(value, address, alignment=access.bytes(store.plan))
            ctx.synchronize()
            for position, access in enumerate(load.accesses):
                place = load.place(ctx, access, inside, window)
                if place is None:
                    continue
                address, condition = ops.byte_pointer(pointer, place[0]), place[1]
                old = loaded[position]
                value = ops.load(old.type, address, alignment=access.bytes(load.plan))
                if condition is not None:
                    value = ops.arith.select(condition, value, old)
                loaded[position] = value
    registers = [from_memory(one, view.dtype) for one in load.registers(layout, loaded)]
    return RegisterArray(tuple(registers), layout, view.dtype)


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """The accesses of an array in a layout to a view of memory.

    Attributes:
      plan: of the accesses.
      accesses: all of them.
      layout: of the array.
      thread: what the thread, and indices that are not known, add to the offset (i32), in bytes.
      reach: the least and the greatest of these bytes; None if they are not known.
      first: bytes before the view.
      bits: of an element.
    """

    plan: AccessPlan
    accesses: tuple[Access, ...]
    layout: RegisterLayout
    thread: ir.Value
    reach: tuple[int, int] | None
    first: int
    bits: int

    @staticmethod
    def of(ctx: RuleContext, memory: MemoryReference, layout: Any) -> _Transfer:
        """The accesses of whole vectors, or of single elements where rows do not end with one."""
        alignment = min(MAXIMUM_BYTES, memory.offset_alignment)
        plan = plan_access(layout, memory.layout, alignment)
        bits = memory.element_bits
        if plan.tail:
            plan = plan_access(layout, memory.layout, max(1, bits // 8))
        thread = ops.cast_integer(thread_offset(ctx.launch, plan), ops.i32())
        reach: tuple[int, int] | None = None
        dynamic = memory.dynamic_offset()
        if dynamic is None:
            ends = [(term.modulus - 1) * term.stride for term in plan.thread_terms]
            reach = (
                sum(min(0, end) for end in ends) * bits // 8,
                sum(max(0, end) for end in ends) * bits // 8,
            )
        else:
            thread = ops.add(thread, dynamic)
        moved: Any = memory.byte_offset(thread)
        offset = memory.offset * bits // 8
        return _Transfer(plan, plan.everything, layout, moved, reach, offset, bits)

    def place(
        self, ctx: RuleContext, access: Access, inside: tuple[int, int], outside: int
    ) -> tuple[ir.Value, ir.Value | None] | None:
        """Where in a window an access is (i32, in bytes), and where it is there at all (i1); None
        if it is in no thread.

        Args:
          ctx: of the rule.
          access: one of these.
          inside: where the window begins and ends.
          outside: the place of accesses outside of it.
        """
        begin, end = inside
        first = self.first + access.offset * self.bits // 8
        condition = holds_element(ctx.launch, self.layout, access.guards)
        place: ir.Value = ops.add(self.thread, first - begin)
        size = access.bytes(self.plan)
        if self.reach is not None:
            low, high = first + self.reach[0], first + self.reach[1] + size
            if high <= begin or low >= end:
                return None
        if self.reach is None or low < begin or high > end:
            own = ops.compare("ult", place, end - begin)
            condition = own if condition is None else ops.arith.andi(condition, own)
        if condition is not None:
            place = ops.arith.select(condition, place, ops.i32_constant(outside))
        return place, condition

    def registers(self, layout: RegisterLayout, loaded: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
        """What was loaded by each of the accesses, as registers of the layout."""
        places = {
            part: (number, position)
            for number, access in enumerate(self.accesses)
            for position, part in enumerate(access.parts)
        }
        nothing = (0, 0)  # Of padding, where no thread has an element.
        sources = [
            [places.get((register, one), nothing) for one in range(layout.vector_length)]
            for register in range(layout.registers)
        ]
        return gather(loaded, sources)
