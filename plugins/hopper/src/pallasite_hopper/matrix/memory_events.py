"""What wgmma does to memory, for plugins' tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallasite.plugin import EventContext, EventKind, MemoryEvent, MemoryEvents
from pallasite.plugin import jax_internals as _jax
from pallasite_hopper.matrix import products as prim
from pallasite_hopper.matrix import row_copies
from pallasite_std.api import ASYNC


def _product(
    context: EventContext, *operands: Any, args_tree: Any, **params: Any
) -> Sequence[MemoryEvent]:
    """The tensor core reads the operands that are in shared memory."""
    _, a, b, _ = args_tree.unflatten(operands)
    return [
        MemoryEvent(EventKind.LOAD, operand, proxy=ASYNC)
        for operand in (a, b)
        if isinstance(operand, _jax.TransformedRef)
    ]


def _row_copy(
    context: EventContext, *operands: Any, args_tree: Any, **params: Any
) -> Sequence[MemoryEvent]:
    """All lanes store."""
    *_, destination = args_tree.unflatten(operands)
    return [MemoryEvent(EventKind.STORE, destination)]


EVENTS = (
    MemoryEvents(primitive=prim.wgmma_p, function=_product),
    MemoryEvents(primitive=row_copies.copy_row_words_p, function=_row_copy),
)
