"""Scopes' arrays in shared memory of which each thread of a block has its own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import KernelContext, RuleContext, StateKey, buffer_bytes
from pallasite_std.memory.accesses import laid_out
from pallasite_std.memory.reference_types import MemoryReference
from pallasite_std.memory.references import shared_reference

EACH_THREAD = "<each thread>"
"""The ``collective_axes`` of scopes that definitions of primitives open: they do not know which
threads the kernel has."""

_ALIGNMENT = 1024


def _no_regions(kernel: KernelContext) -> list[tuple[int, int]]:
    return []


_FREE_REGIONS = StateKey("standard.free-thread-arrays", _no_regions)
"""Offsets and sizes, for one thread, of regions that no scope uses now."""


@contextlib.contextmanager
def thread_array(ctx: RuleContext, variable: Any) -> Iterator[MemoryReference]:
    """A scope's array, behind those of the stack, in the layout that inference has chosen for it.

    Threads may be in different scopes at the same time. So scopes have regions of their own, and in
    each of these every thread has its part, at the same distance.
    """
    aval = variable.aval
    size = -(-buffer_bytes(aval.shape, aval.dtype) // _ALIGNMENT) * _ALIGNMENT
    threads = ctx.kernel.geometry.threads
    free = ctx.kernel.state(_FREE_REGIONS)
    region = min((one for one in free if one[1] >= size), key=lambda one: one[1], default=None)
    if region is None:
        what = f"{aval.dtype}{list(aval.shape)} of each thread"
        offset = ctx.launch.reserve_shared(
            size * threads, alignment=_ALIGNMENT, what=what, location=ctx.location
        )
        region = offset, size
    else:
        free.remove(region)
    offset, reserved = region
    reference = shared_reference(ctx.launch, offset, aval.shape, aval.dtype, aval.memory_space)
    base, thread = reference.pointer, ctx.launch.warpgroup_id
    pointer = ctx.launch.emit_once(
        f"thread-array.{offset}",
        lambda: ops.byte_pointer(base, ops.multiply(thread, reserved)),
    )
    yield laid_out(ctx, variable, dataclasses.replace(reference, pointer=pointer))
    free.append(region)
