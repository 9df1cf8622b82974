"""Plain accesses of memory by all lanes of a thread: what ``ref[...]`` means for addresses.

Memory spaces of plugins whose references are not a :class:`~.references.MemoryReference` have
accesses of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pallasite.plugin import InvalidValueError
from pallasite.plugin.ir import ops
from pallasite.plugin.layouts import Layout, RegisterLayout
from pallasite.plugin.lowering import Allocation, RegisterArray, RuleContext, Value, buffer_bytes
from pallasite_std.memory.access import plan_access
from pallasite_std.memory.contents import AllocationUse, Part, note_use
from pallasite_std.memory.overwrites import lanes_of, order_store
from pallasite_std.memory.proxies import note_store
from pallasite_std.memory.reference_types import (
    MemoryReference,
    default_layout,
    fits_memory,
    whole_window,
    without_pointer,
)
from pallasite_std.memory.references import GlobalReference, shared_reference
from pallasite_std.memory.relayout import relayout
from pallasite_std.memory.resolution import by_table, resolve, resolve_barrier
from pallasite_std.memory.rows import row, suitable_layouts
from pallasite_std.memory.transfers import load_array, store_array


def require_scalar(ctx: RuleContext, shape: Sequence[int], what: str) -> None:
    """Raises if a single warp accesses an array: it has no layout for one warp."""
    if ctx.in_warp and math.prod(shape) != 1:
        raise InvalidValueError(
            f"a single warp {what} an array",
            got=f"shape {list(shape)}",
            expected="scalars inside a warp-mapped region",
            hint="move the access out of the region, or index single elements",
        )


def read(ctx: RuleContext, reference: Value, transforms: Sequence[Any] = ()) -> RegisterArray:
    """Loads what a reference views, in the hinted layout if there is one."""
    memory = resolve(ctx, reference, transforms, other_blocks=True, own_line=True)
    aval = ctx.avals_out[0]
    require_scalar(ctx, aval.shape, "reads")
    with memory.at_line:
        return _load(ctx, memory)


def _load(ctx: RuleContext, memory: MemoryReference) -> RegisterArray:
    hint = ctx.layout_hint
    if ctx.kernel.plan is None and not _moves_vectors(hint, memory):
        hint = None
    if isinstance(hint, RegisterLayout) and hint.flat and not fits_memory(hint, memory):
        return relayout(ctx, load_array(ctx.launch, memory), hint)
    if memory.element_bits < 8 and memory.layout.size > 1:
        fitting = _in_whole_bytes(memory, hint)
        loaded = load_array(ctx.launch, memory, fitting, ctx.vector_limit)
        return loaded if hint is None or fitting is None else relayout(ctx, loaded, hint)
    return load_array(ctx.launch, memory, hint, ctx.vector_limit)


def _moves_vectors(hint: Layout | None, memory: MemoryReference) -> bool:
    """Whether an array whose elements are in one row, for the sake of wide accesses, has them."""
    if not isinstance(hint, RegisterLayout) or not hint.is_padded:
        return True
    width = hint.vector_length
    if hint not in (row(hint.shape, width), row(hint.shape, width, alone=True)):
        return True
    try:
        plan = plan_access(hint, memory.layout, min(16, memory.offset_alignment))
    except InvalidValueError:
        return False
    return plan.width == hint.vector_length


def orders_stores(ctx: RuleContext, memory: MemoryReference) -> bool:
    """Whether a store has to come with barriers before and after it.

    Memory that the kernel never reads needs none. In warpgroup semantics, the barriers that shared
    memory needs are part of the plan.
    """
    note_store(ctx, memory)
    if not ctx.auto_barriers:
        return memory.ordered
    if not memory.space.is_shared:
        return memory.may_be_read
    return ctx.kernel.plan is None or ctx.in_warp or memory.remote is not None


def write(
    ctx: RuleContext, memory: MemoryReference, value: RegisterArray, *, exchanged: bool = False
) -> None:
    """Stores a value so that all lanes of the thread see it afterwards.

    Memory that the kernel never reads needs no barriers but where a store overwrites another one.
    """
    require_scalar(ctx, memory.shape, "writes")
    layout = value.layout
    if isinstance(layout, RegisterLayout) and layout.flat and not fits_memory(layout, memory):
        value = relayout(ctx, value, default_layout(memory))
    elif memory.element_bits < 8 and not ctx.in_warp and isinstance(layout, RegisterLayout):
        fitting = _in_whole_bytes(memory, layout)
        value = value if fitting is None else relayout(ctx, value, fitting)
    ordered = orders_stores(ctx, memory)
    if ordered:
        ctx.synchronize()
    else:
        order_store(ctx, memory, None if exchanged else lanes_of(value, memory))
    if ctx.in_warp or (memory.layout.size == 1 and not exchanged):
        # One lane stores a scalar; the others would store the same.
        with ops.when(ctx.leader):
            store_array(ctx.launch, memory, value)
    else:
        store_array(ctx.launch, memory, value)
    if ordered:
        ctx.synchronize()


def _in_whole_bytes(memory: MemoryReference, wanted: Layout | None) -> RegisterLayout | None:
    """The wanted layout, if threads then hold whole bytes of memory, or another one in which they
    do, or None."""
    candidates = [default_layout(memory), row(memory.shape, 8 // memory.element_bits)]
    for layout in [wanted, *candidates] if isinstance(wanted, RegisterLayout) else candidates:
        assert isinstance(layout, RegisterLayout)
        with contextlib.suppress(InvalidValueError):
            plan_access(layout, memory.layout, 1)
            return layout
    return None


def swap(
    ctx: RuleContext, reference: Value, transforms: Sequence[Any], value: RegisterArray
) -> RegisterArray:
    """Stores a value; returns what was there, if it is used."""
    memory = resolve(ctx, reference, transforms, other_blocks=True, own_line=True)
    used = any(ctx.used)
    old: RegisterArray | None = None
    with memory.at_line:
        if used:
            old = _load_like(ctx, memory, value)
        write(ctx, memory, value)
    return old if old is not None else value


def update(
    ctx: RuleContext,
    reference: Value,
    transforms: Sequence[Any],
    value: RegisterArray,
    combine: Callable[[RegisterArray, RegisterArray], RegisterArray],
) -> None:
    """Stores what ``combine`` makes of the elements that are there and of a value."""
    memory = resolve(ctx, reference, transforms, other_blocks=True, own_line=True)
    with memory.at_line:
        old = _load_like(ctx, memory, value)
        write(ctx, memory, combine(old, value))


def _load_like(ctx: RuleContext, memory: MemoryReference, value: RegisterArray) -> RegisterArray:
    return load_array(ctx.launch, memory, None if value.is_splat else value.layout)


def describe(ctx: RuleContext, reference: Value, transforms: Sequence[Any]) -> str:
    """How the viewed elements lie, in words."""
    memory = resolve(ctx, reference, transforms, pointer=False, other_blocks=True)
    return f"{memory.dtype}{list(memory.shape)} in {memory.space}, {memory.layout}"


# Allocation -----------------------------------------------------------------------------------


@contextlib.contextmanager
def shared_array(ctx: RuleContext, variable: Any) -> Iterator[MemoryReference]:
    """A scope's array in shared memory, in the layout that inference has chosen for it."""
    aval = variable.aval
    size = buffer_bytes(aval.shape, aval.dtype)
    with ctx.kernel.shared.allocate(size) as offset:
        what = f"{aval.dtype}{list(aval.shape)}"
        row = Allocation("smem", what, size, offset, ctx.location)
        ctx.launch.note(row)
        reference = shared_reference(ctx.launch, offset, aval.shape, aval.dtype, aval.memory_space)
        use, part = AllocationUse(), Part(what, 0, size)
        yield laid_out(ctx, variable, dataclasses.replace(reference, use=use, part=part))
        note_use(ctx.launch, row, use)


def laid_out(ctx: RuleContext, variable: Any, reference: MemoryReference) -> MemoryReference:
    """An allocation in the layout that inference has chosen for it, or for its members."""
    if ctx.kernel.plan is None:
        return reference
    members = {}
    for (path, key, member), layout in ctx.kernel.plan.memory.items():
        if path == ctx.path and key == id(variable):
            if member is None:
                return dataclasses.replace(reference, layout=layout)
            members[member] = layout
    return dataclasses.replace(reference, members=members) if members else reference


class Accesses:
    """Memory with addresses, as the core and contexts of rules ask for it."""

    kernel_argument = staticmethod(GlobalReference)
    whole_window = staticmethod(whole_window)
    without_pointer = staticmethod(without_pointer)
    suitable_layouts = staticmethod(suitable_layouts)
    resolve = staticmethod(resolve)
    resolve_barrier = staticmethod(resolve_barrier)
    relayout = staticmethod(relayout)
    view = staticmethod(by_table)
    read = staticmethod(read)
    swap = staticmethod(swap)
    update = staticmethod(update)
    describe = staticmethod(describe)
    shared_array = staticmethod(shared_array)


ACCESSES = Accesses()
