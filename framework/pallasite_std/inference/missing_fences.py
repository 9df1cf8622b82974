"""Where stores by one proxy of memory have to be fenced for accesses by another to see them.

Ordinary stores and asynchronous operations, say, go through different proxies; a fence by the
threads that stored has to come in between (PTX ISA, "Proxies" and "Async proxy"). Which fences
there are is up to plugins. The walk over the kernel leaves a tree of events; following it in the
order of the program, this finds the places that lack a fence: before an access by the other proxy,
or before the arrival on a barrier by which another thread of the block learns that the data are
there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import EventKind, Proxy, ProxyFence
from pallasite.plugin.inference import ACCESSES, Branches, Event, Fences, Fork, Key, Loop


@dataclasses.dataclass(frozen=True)
class _Store:
    memory: Any
    branches: Branches


type _State = frozenset[_Store]


class _Search:
    """Finds what lacks one fence."""

    def __init__(self, fence: ProxyFence, used: dict[int, set[Branches]]):
        self._fence = fence
        self._used = used
        self.found: dict[Key, None] = {}
        self.scopes: dict[Key, None] = {}
        self._followed: dict[tuple[int, _State], _State] = {}

    def follow(self, events: Sequence[Any], state: _State) -> _State:
        """The state after events; the same events in the same state are followed once, or each
        level of a nest of loops would double the work."""
        key = (id(events), state)
        if key not in self._followed:
            self._followed[key] = self._follow(events, state)
        return self._followed[key]

    def _follow(self, events: Sequence[Any], state: _State) -> _State:
        for event in events:
            if isinstance(event, Loop):
                once = self.follow(event.body, state)
                state = state | self.follow(event.body, state | once)
            elif isinstance(event, Fork):
                ends = [self.follow(way, state) for way in event.ways]
                state = frozenset().union(*ends)
            else:
                state = self._event(event, state)
        return state

    def _event(self, event: Event, state: _State) -> _State:
        fence = self._fence
        if event.kind is EventKind.FENCE:
            fences = event.source == fence.source and event.proxy == fence.proxy
            return frozenset() if fences else state
        if event.kind is EventKind.ALLOCATE:
            if fence.emit is None:
                return state
            # What was stored may lie where this does, and any thread may have stored it.
            if state:
                self.scopes[event.key] = None
            return frozenset()
        if event.kind in ACCESSES and event.proxy == fence.proxy:
            needed = any(store.memory is event.memory for store in state)
        elif event.kind in ACCESSES:
            stores = event.kind is not EventKind.LOAD and event.proxy == fence.source
            return state | {_Store(event.memory, event.branches)} if stores else state
        elif event.kind is EventKind.ARRIVE:
            needed = any(self._is_for_others(store) for store in state)
        else:
            needed = False
        if not needed:
            return state
        self.found[event.key] = None
        return frozenset()

    def _is_for_others(self, store: _Store) -> bool:
        """Whether threads outside of the branch that stores may access it by the other proxy."""
        depth = len(store.branches)
        uses = self._used.get(id(store.memory), set())
        return any(use[:depth] != store.branches for use in uses)


def missing_fences(events: Sequence[Any], fences: Sequence[ProxyFence]) -> Fences:
    """Finds the places that lack a fence.

    Args:
      events: of the kernel.
      fences: those that the target has.
    """
    found = Fences()
    for fence in fences:
        used = _accesses(events, fence.proxy)
        if not used:
            continue
        search = _Search(fence, used)
        search.follow(events, frozenset())
        for places, keys in ((found.before, search.found), (found.scopes, search.scopes)):
            for key in keys:
                places[key] = (*places.get(key, ()), fence)
    return found


def _accesses(events: Sequence[Any], proxy: Proxy) -> dict[int, set[Branches]]:
    """In which branches each allocation (by id) is accessed by a proxy."""
    used: dict[int, set[Branches]] = {}

    def collect(part: Sequence[Any]) -> None:
        for event in part:
            if isinstance(event, Loop):
                collect(event.body)
            elif isinstance(event, Fork):
                for way in event.ways:
                    collect(way)
            elif event.kind in ACCESSES and event.proxy == proxy:
                used.setdefault(id(event.memory), set()).add(event.branches)

    collect(events)
    return used
