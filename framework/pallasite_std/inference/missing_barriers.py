"""Where the lanes of a thread have to converge between accesses of shared memory.

What one lane stores another may load, or overwrite, and it may still load what another is about to
overwrite; a barrier of the warpgroup has to come in between. Many operations are such a barrier
already. Following the events of the kernel in the order of the program, this finds the accesses
before which there is none.

The same holds for a copy into shared memory, which one lane starts for all. That lane arrives on a
barrier, too, so the others must not be behind at an earlier wait: when the barrier has gone through
two more phases, they would wait for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pallasite.plugin import GENERIC, EventKind
from pallasite.plugin.inference import Event, Fork, Key, Loop

type _Pending = frozenset[tuple[int, str]]
"""Accesses since the last barrier: of which allocation (by id), and whether a load or a store. A
wait is of the allocation 0."""


class _Search:
    def __init__(self, fenced: Collection[Key]):
        self._fenced = fenced
        self.found: dict[Key, None] = {}
        self._followed: dict[tuple[int, _Pending], _Pending] = {}

    def follow(self, events: Sequence[Any], pending: _Pending) -> _Pending:
        """What is pending after events; the same events with the same before are followed once, or
        each level of a nest of loops would double the work."""
        key = (id(events), pending)
        if key not in self._followed:
            self._followed[key] = self._follow(events, pending)
        return self._followed[key]

    def _follow(self, events: Sequence[Any], pending: _Pending) -> _Pending:
        for event in events:
            if isinstance(event, Loop):
                once = self.follow(event.body, pending)
                pending = pending | self.follow(event.body, pending | once)
            elif isinstance(event, Fork):
                pending = frozenset().union(*[self.follow(way, pending) for way in event.ways])
            else:
                pending = self._event(event, pending)
        return pending

    def _event(self, event: Event, pending: _Pending) -> _Pending:
        if event.key in self._fenced:
            pending = frozenset()
        kind = event.kind
        if kind is EventKind.SYNCHRONIZE:
            return frozenset()
        if kind is EventKind.ALLOCATE:
            # It may lie where something else did.
            reused = {kind for _, kind in pending}
            return pending | {(id(event.memory), kind) for kind in reused}
        if kind in (EventKind.ARRIVE, EventKind.FENCE):
            return pending
        if kind is EventKind.WAIT:
            return pending | {(0, "wait")}
        if kind in (EventKind.ELECTED_STORE, EventKind.ELECTED_ARRIVE):
            late = {(0, "wait"), (id(event.memory), "load"), (id(event.memory), "store")}
            if pending & late or (kind is EventKind.ELECTED_ARRIVE and pending):
                self.found[event.key] = None
                return frozenset()
            return pending
        memory = id(event.memory)
        loads, stores = (memory, "load") in pending, (memory, "store") in pending
        after: set[tuple[int, str]]
        if event.proxy != GENERIC:
            # Stores are fenced, which is a barrier as well; that it is complete is up to waits.
            if kind is EventKind.STORE:
                return pending
            needed, after = False, {(memory, "load")}
        elif kind is EventKind.STORE:
            needed, after = loads or stores, {(memory, "store")}
        elif kind is EventKind.LOAD:
            needed, after = stores, {(memory, "load")}
        else:
            needed, after = loads or stores, {(memory, "load"), (memory, "store")}
        if needed:
            self.found[event.key] = None
            pending = frozenset()
        return pending | after


def missing_barriers(events: Sequence[Any], fenced: Collection[Key]) -> list[Key]:
    """The equations before which the lanes have to converge, in the order of the program.

    Args:
      events: of the kernel.
      fenced: the equations before which a fence is inserted, with a barrier.
    """
    search = _Search(fenced)
    search.follow(events, frozenset())
    return list(search.found)
