"""Which arrivals on barriers tell another thread that something is free or ready.

An arrival on a barrier that the same thread waits on as well, such as one by which two threads take
turns, belongs where the program has it. All others had better happen early.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from pallasite.barrier_kinds import BarrierRole
from pallasite.lowering.inference.fences import Branches, Key


@dataclasses.dataclass(frozen=True)
class BarrierEvent:
    """An arrival on a barrier or a wait.

    Attributes:
      role: what the equation does to the barrier.
      key: the equation.
      branches: of conditionals around it.
      barrier: the allocation.
    """

    role: BarrierRole
    key: Key
    branches: Branches
    barrier: Any


def releases(events: Sequence[BarrierEvent]) -> Iterator[Key]:
    """The arrivals on barriers that only threads in other branches wait on."""
    waits: dict[int, set[Branches]] = {}
    for event in events:
        if event.role is BarrierRole.WAIT:
            waits.setdefault(id(event.barrier), set()).add(event.branches[:1])
    for event in events:
        places = waits.get(id(event.barrier))
        if (
            event.role is BarrierRole.ARRIVE
            and event.branches
            and places
            and event.branches[:1] not in places
        ):
            yield event.key
