"""What equations do to memory, as a tree of events in the order of the program; missing fences."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallasite.lowering.inference.plan import Path
from pallasite.memory_events import GENERIC, EventKind, Proxy, ProxyFence

type Key = tuple[Path, int]
"""An equation: its path and id."""

type Branches = tuple[tuple[Key, int], ...]
"""The branches of conditionals around an equation: which conditional, and number of the branch."""


ACCESSES = (EventKind.LOAD, EventKind.STORE, EventKind.ACCESS)
"""The kinds of events that access memory, by the proxy of the event."""


@dataclasses.dataclass(frozen=True)
class Event:
    """What an equation does to memory.

    Attributes:
      kind: what it does.
      key: the equation before which a fence would come.
      branches: those around it.
      memory: the allocation.
      proxy: by which it is accessed; of a fence, that of the later accesses.
      source: of a fence, the proxy of the earlier accesses.
    """

    kind: EventKind
    key: Key
    branches: Branches
    memory: Any = None
    proxy: Proxy = GENERIC
    source: Proxy = GENERIC


@dataclasses.dataclass
class Loop:
    """Events that may happen again and again."""

    body: list[Any]


@dataclasses.dataclass
class Fork:
    """Events of which one list happens."""

    ways: list[list[Any]]


@dataclasses.dataclass(frozen=True)
class Fences:
    """Where fences are missing.

    Attributes:
      before: by the equation before which they have to be inserted, in the order of the program,
        the fences.
      scopes: by the scope whose memory may be that of an earlier one, which was stored to since the
        last fence, the fences that all threads have to run there.
    """

    before: dict[Key, tuple[ProxyFence, ...]] = dataclasses.field(default_factory=dict)
    scopes: dict[Key, tuple[ProxyFence, ...]] = dataclasses.field(default_factory=dict)
