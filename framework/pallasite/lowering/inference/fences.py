"""Where ordinary stores to shared memory have to be fenced for asynchronous operations to see them.

Ordinary stores and asynchronous operations (TMA, matrix products) go through different proxies of
memory; a ``fence.proxy.async`` by the threads that stored has to come in between (PTX ISA,
"Proxies" and "Async proxy"). The walk over the kernel leaves a tree of events; following it in the
order of the program, this finds the places that lack a fence: before an asynchronous use, or before
the arrival on a barrier by which another thread of the block learns that the data are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallasite.lowering.inference.plan import Path

type Key = tuple[Path, int]
"""An equation: its path and id."""

type Branches = tuple[tuple[Key, int], ...]
"""The branches of conditionals around an equation: which conditional, and number of the branch."""


_OTHER_PROXY = ("asynchronous", "copied")


@dataclasses.dataclass(frozen=True)
class Event:
    """What an equation does to shared memory.

    Attributes:
      kind: ``"load"``, ``"store"``, ``"unknown"`` (perhaps both), ``"asynchronous"`` (a load by
        another proxy), ``"copied"`` (a store by another proxy); ``"overwrite"`` (one lane is about
        to start such a store for all, and to arrive on a barrier), ``"expect"`` (one lane is about
        to arrive for all), ``"wait"`` (on a barrier); ``"fence"``, ``"barrier"`` (all lanes of the
        thread meet), ``"arrive"`` or ``"allocate"``.
      key: the equation before which a fence would come.
      branches: those around it.
      memory: the allocation.
    """

    kind: str
    key: Key
    branches: Branches
    memory: Any = None


@dataclasses.dataclass
class Loop:
    """Events that may happen again and again."""

    body: list[Any]


@dataclasses.dataclass
class Fork:
    """Events of which one list happens."""

    ways: list[list[Any]]


@dataclasses.dataclass(frozen=True)
class _Store:
    memory: Any
    branches: Branches


type _State = frozenset[_Store]


class _Search:
    def __init__(self, used: dict[int, set[Branches]]):
        self._used = used
        self.found: dict[Key, None] = {}
        self.scopes: dict[Key, None] = {}

    def follow(self, events: Sequence[Any], state: _State) -> _State:
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
        if event.kind == "fence":
            return frozenset()
        if event.kind in ("store", "unknown"):
            return state | {_Store(event.memory, event.branches)}
        if event.kind in ("load", "barrier", "overwrite", "expect", "wait"):
            return state
        if event.kind == "allocate":
            # What was stored may lie where this does, and any thread may have stored it.
            if state:
                self.scopes[event.key] = None
            return frozenset()
        if event.kind in _OTHER_PROXY:
            needed = any(store.memory is event.memory for store in state)
        else:
            needed = any(self._is_for_others(store) for store in state)
        if not needed:
            return state
        self.found[event.key] = None
        return frozenset()

    def _is_for_others(self, store: _Store) -> bool:
        """Whether threads outside of the branch that stores may use it asynchronously."""
        depth = len(store.branches)
        uses = self._used.get(id(store.memory), set())
        return any(use[:depth] != store.branches for use in uses)


@dataclasses.dataclass(frozen=True)
class Fences:
    """Where fences are missing.

    Attributes:
      before: the equations before which one has to be inserted, in the order of the program.
      scopes: the scopes whose memory may be that of an earlier one, which was stored to since the
        last fence; all threads have to run one there.
    """

    before: tuple[Key, ...] = ()
    scopes: tuple[Key, ...] = ()


def missing_fences(events: Sequence[Any]) -> Fences:
    """Finds the places that lack a fence."""
    used: dict[int, set[Branches]] = {}

    def collect(part: Sequence[Any]) -> None:
        for event in part:
            if isinstance(event, Loop):
                collect(event.body)
            elif isinstance(event, Fork):
                for way in event.ways:
                    collect(way)
            elif event.kind in _OTHER_PROXY:
                used.setdefault(id(event.memory), set()).add(event.branches)

    collect(events)
    if not used:
        return Fences()
    search = _Search(used)
    search.follow(events, frozenset())
    return Fences(tuple(search.found), tuple(search.scopes))
