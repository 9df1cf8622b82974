"""What the primitives of the standard library do to memory, for plugins' tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallasite.plugin import (
    GENERIC,
    EventContext,
    EventKind,
    MemoryEvent,
    MemoryEvents,
    Proxy,
    ProxyFence,
    TargetPredicate,
)
from pallasite.plugin import jax_internals as _jax
from pallasite_std.primitives import arrays, barriers, copies
from pallasite_std.primitives.arguments import part
from pallasite_std.primitives.inline import RefType, inline_mgpu_p
from pallasite_std.rules.barriers import emit_async_fence

ASYNC = Proxy("async")
"""Asynchronous copies between memory spaces, and tensor cores that read shared memory (PTX ISA,
"Async proxy")."""

FENCES = (
    ProxyFence(
        proxy=ASYNC,
        primitive=barriers.commit_smem_p,
        emit=emit_async_fence,
        target=TargetPredicate(frozenset({"tma"})),
    ),
)

type _Events = Sequence[MemoryEvent]


def _view(reference: Any, transforms: Any) -> Any:
    return _jax.TransformedRef(reference, tuple(transforms))


def _get(context: EventContext, reference: Any, *leaves: Any, tree: Any, **params: Any) -> _Events:
    return [MemoryEvent(EventKind.LOAD, _view(reference, jax.tree.unflatten(tree, leaves)))]


def _swap(
    context: EventContext, reference: Any, value: Any, *leaves: Any, tree: Any, **params: Any
) -> _Events:
    return [MemoryEvent(EventKind.STORE, _view(reference, jax.tree.unflatten(tree, leaves)))]


def _load(context: EventContext, *operands: Any, args_tree: Any, **params: Any) -> _Events:
    (reference,) = args_tree.unflatten(operands)
    return [MemoryEvent(EventKind.LOAD, reference)]


def _masked_load(context: EventContext, *operands: Any, args_tree: Any, **params: Any) -> _Events:
    reference, transforms, mask, _ = jax.tree.unflatten(args_tree, operands)
    return [MemoryEvent(EventKind.LOAD, _view(reference, transforms), certain=mask is None)]


def _masked_swap(context: EventContext, *operands: Any, args_tree: Any, **params: Any) -> _Events:
    reference, transforms, _, mask = jax.tree.unflatten(args_tree, operands)
    return [MemoryEvent(EventKind.STORE, _view(reference, transforms), certain=mask is None)]


def _atomic(context: EventContext, *operands: Any, args_tree: Any, **params: Any) -> _Events:
    reference, _ = args_tree.unflatten(operands)
    return [MemoryEvent(EventKind.STORE, reference)]


def _to_shared(
    context: EventContext, *operands: Any, args_tree: Any, arrive: bool, **params: Any
) -> _Events:
    """One lane starts the copy for all, and arrives for them; without a barrier or TMA, all lanes
    copy, after they have converged."""
    destination = part(args_tree, operands, 1)
    by_lanes = not args_tree.children()[2].num_leaves or not context.target.has("tma")
    events = []
    if arrive and not context.in_warp:
        start = EventKind.SYNCHRONIZE if by_lanes else EventKind.ELECTED_STORE
        events.append(MemoryEvent(start, destination))
    proxy = GENERIC if by_lanes else ASYNC
    return [*events, MemoryEvent(EventKind.STORE, destination, proxy=proxy)]


def _to_global(context: EventContext, *operands: Any, args_tree: Any, **params: Any) -> _Events:
    source = part(args_tree, operands, 0)
    return [MemoryEvent(EventKind.LOAD, source, proxy=ASYNC)]


def _to_other_block(
    context: EventContext, *operands: Any, args_tree: Any, **params: Any
) -> _Events:
    """Whether another block stores to this block's memory is not known."""
    _, reference, *_ = args_tree.unflatten(operands)
    return [MemoryEvent(EventKind.STORE, reference, certain=False)]


def _wait_for_copies(context: EventContext, **params: Any) -> _Events:
    return [] if context.in_warp else [MemoryEvent(EventKind.SYNCHRONIZE)]


def _inlined(
    context: EventContext,
    *operands: Any,
    args_tree: Any,
    arg_types: tuple[Any, ...],
    **params: Any,
) -> _Events:
    if context.in_warp:  # There, it takes and returns scalars.
        return []
    return [
        MemoryEvent(EventKind.ACCESS, value, certain=False)
        for value, declared in zip(args_tree.unflatten(operands), arg_types, strict=True)
        if isinstance(declared, RefType)
    ]


_FUNCTIONS: dict[Any, Callable[..., _Events]] = {
    _jax.get_p: _get,
    _jax.swap_p: _swap,
    _jax.addupdate_p: _swap,
    _jax.masked_load_p: _masked_load,
    _jax.masked_swap_p: _masked_swap,
    arrays.load_p: _load,
    arrays.atomic_p: _atomic,
    copies.copy_gmem_to_smem_p: _to_shared,
    copies.copy_smem_to_gmem_p: _to_global,
    copies.async_store_smem_p: _to_other_block,
    copies.wait_smem_to_gmem_p: _wait_for_copies,
    copies.wait_gmem_to_smem_p: _wait_for_copies,
    inline_mgpu_p: _inlined,
}

EVENTS = tuple(
    MemoryEvents(primitive=primitive, function=function)
    for primitive, function in _FUNCTIONS.items()
)
