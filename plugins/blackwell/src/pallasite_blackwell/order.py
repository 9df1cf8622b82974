"""Barriers and the order of memory, as far as the tensor core's work is concerned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pallasite.plugin import (
    BarrierOrder,
    BarrierRole,
    BarrierUse,
    EventContext,
    EventKind,
    MemoryEvent,
    MemoryEvents,
    TargetPredicate,
)
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.language import memory_space_of
from pallasite_blackwell.tensor_core import copies, products
from pallasite_std.api import ASYNC

if TYPE_CHECKING:
    from pallasite.plugin.lowering import RuleContext


def fence(moment: str) -> None:
    """What this lane started on the tensor core, loaded and stored comes before what others do
    after the synchronization to come (``"before"``), or the other way round (``"after"``)."""
    ops.inline_assembly(f"tcgen05.fence::{moment}_thread_sync;", "~{memory}")


def synchronize(ctx: RuleContext, *kinds: str) -> None:
    """The lanes of the thread wait until their loads (``"ld"``) or stores (``"st"``) are complete,
    and tell one another (PTX ISA, "Canonical synchronization patterns" of ``tcgen05``)."""
    for kind in kinds:
        ops.inline_assembly(f"tcgen05.wait::{kind}.sync.aligned;", "~{memory}")
    fence("before")
    ctx.synchronize()
    fence("after")


def _before_arrive(ctx: RuleContext, barrier: Any) -> None:
    fence("before")


def _after_wait(ctx: RuleContext, barrier: Any) -> None:
    fence("after")


ORDERS = (
    BarrierOrder(
        name=products.ORDER,
        before_arrive=_before_arrive,
        after_wait=_after_wait,
        target=TargetPredicate(frozenset({"tcgen05"})),
    ),
)


def _arrivals(dtype: Any, params: Mapping[str, Any]) -> int | None:
    """For a pair, it is one block that arrives for both."""
    return 1 if params["collective_axis"] is None else None


USES = (
    BarrierUse(
        primitive=products.tcgen05_mma_p,
        role=BarrierRole.COMPLETE,
        barrier=4,
        arrivals=_arrivals,
    ),
    BarrierUse(
        primitive=products.tcgen05_commit_arrive_p,
        role=BarrierRole.COMPLETE,
        arrivals=_arrivals,
    ),
)


def _is_shared(context: EventContext, reference: Any) -> bool:
    base = reference.ref if isinstance(reference, _jax.TransformedRef) else reference
    space = getattr(base, "space", None)
    if space is None:
        space = memory_space_of(getattr(base, "aval", base))
    return bool(getattr(space, "is_shared", False))


def _product(
    context: EventContext, *operands: Any, args_tree: Any, **params: Any
) -> Sequence[MemoryEvent]:
    """The tensor core reads the operands that are in shared memory; one lane starts it."""
    _, a, b, _, barrier, *_ = args_tree.unflatten(operands)
    events = [MemoryEvent(EventKind.LOAD, b, proxy=ASYNC)]
    if _is_shared(context, a):
        events.append(MemoryEvent(EventKind.LOAD, a, proxy=ASYNC))
    if barrier is not None and not context.in_warp:
        events.append(MemoryEvent(EventKind.ELECTED_ARRIVE))
    return events


def _commit(context: EventContext, *operands: Any, **params: Any) -> Sequence[MemoryEvent]:
    return [] if context.in_warp else [MemoryEvent(EventKind.ELECTED_ARRIVE)]


def _copy(
    context: EventContext, *operands: Any, args_tree: Any, **params: Any
) -> Sequence[MemoryEvent]:
    source, _ = args_tree.unflatten(operands)
    return [MemoryEvent(EventKind.LOAD, source, proxy=ASYNC)]


def _nothing(context: EventContext, *operands: Any, **params: Any) -> Sequence[MemoryEvent]:
    """Loads from tensor memory and stores to it touch no shared memory."""
    return []


def _synchronizes(context: EventContext, **params: Any) -> Sequence[MemoryEvent]:
    return [MemoryEvent(EventKind.SYNCHRONIZE)]


def events() -> tuple[MemoryEvents, ...]:
    """What the plugin's primitives do to memory."""
    from pallasite_blackwell.tensor_memory import primitives

    return (
        MemoryEvents(primitive=products.tcgen05_mma_p, function=_product),
        MemoryEvents(primitive=products.tcgen05_commit_arrive_p, function=_commit),
        *(MemoryEvents(primitive=one, function=_copy) for one in copies.PRIMITIVES),
        MemoryEvents(primitive=primitives.async_load_tmem_p, function=_nothing),
        MemoryEvents(primitive=primitives.async_store_tmem_p, function=_nothing),
        MemoryEvents(primitive=primitives.commit_tmem_p, function=_synchronizes),
        MemoryEvents(primitive=primitives.wait_load_tmem_p, function=_synchronizes),
    )
