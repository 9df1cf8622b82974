"""Which arrivals on barriers tell another thread that something is free or ready.

An arrival on a barrier that the same thread waits on as well, such as one by which two threads take
turns, belongs where the program has it. All others had better happen early.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from pallasite.lowering.inference.fences import Branches, Key


@dataclasses.dataclass(frozen=True)
class BarrierUse:
    """An arrival on a barrier or a wait.

    Attributes:
      kind: ``"arrive"`` or ``"wait"``.
      key: the equation.
      branches: of conditionals around it.
      barrier: the allocation.
    """

    kind: str
    key: Key
    branches: Branches
    barrier: Any


def releases(uses: Sequence[BarrierUse]) -> Iterator[Key]:
    """The arrivals on barriers that only threads in other branches wait on."""
    waits: dict[int, set[Branches]] = {}
    for use in uses:
        if use.kind == "wait":
            waits.setdefault(id(use.barrier), set()).add(use.branches[:1])
    for use in uses:
        places = waits.get(id(use.barrier))
        if use.kind == "arrive" and use.branches and places and use.branches[:1] not in places:
            yield use.key
