"""Global memory that lanes store to and asynchronous copies access.

These see memory in two ways, which a fence has to bring together (PTX ISA 9.7.13.6,
``fence.proxy.async``). It is enough if the lane that starts a copy executes it, after a barrier
has told it of the stores. Of shared memory, programs or layout inference say where fences are.
"""

from __future__ import annotations

from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import KernelContext, RuleContext, StateKey
from pallasite_std.memory.reference_types import MemoryReference


def _nothing(kernel: KernelContext) -> set[tuple[str, int]]:
    return set()


_STORED = StateKey("standard.stored-by-lanes", _nothing)
"""The arrays in global memory that lanes store to."""


def note_store(ctx: RuleContext, memory: MemoryReference) -> None:
    """Notes that lanes store to a reference."""
    if memory.buffer is not None and memory.peer is None and memory.space.is_global:
        ctx.kernel.state(_STORED).update(_names(ctx, memory))


def acquire_stores(ctx: RuleContext, memory: MemoryReference) -> None:
    """Makes what lanes stored to an array visible to the copy of it that this lane starts next,
    if the kernel stores to it at all."""
    if memory.buffer is None or memory.peer is not None:
        return
    stored = ctx.kernel.state(_STORED)

    def fence() -> None:
        if _names(ctx, memory) & stored:
            ops.inline_assembly("fence.proxy.async.global;", "~{memory}")

    ctx.kernel.emit_later(fence)


def _names(ctx: RuleContext, memory: MemoryReference) -> set[tuple[str, int]]:
    """An array's kind and number, and those of an input or output that is the same memory."""
    assert memory.buffer is not None
    kind, number = memory.buffer.kind.value, memory.buffer.index
    found = {(kind, number)}
    for given, result in ctx.launch.aliases:
        same = {("input", given), ("output", result)}
        if found & same:
            return same
    return found
