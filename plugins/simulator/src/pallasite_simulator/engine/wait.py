"""Why lanes cannot go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from pallasite_simulator.types import Array


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Lanes that stop at an instruction until ``wave.wake(key)`` is called.

    Attributes:
      lanes: their numbers; a part of those that executed the step.
      key: what wakes them: any hashable value.
      describe: says what they wait for, for the report of a deadlock.
      again: whether they execute the instruction again when they are woken (else they go on behind
        it).
      may_give_up: whether the instruction may return without success, as ``mbarrier.try_wait`` may:
        if nothing else can run, it is executed again, with ``wave.giving_up`` set for its lanes,
        which it must clear when it returns for them.
    """

    lanes: Array
    key: Hashable
    describe: Callable[[], str]
    again: bool = False
    may_give_up: bool = False
