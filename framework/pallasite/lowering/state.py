"""State that a plugin keeps for one kernel while it is lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallasite.lowering.context import KernelContext


@dataclasses.dataclass(frozen=True, eq=False)
class StateKey[T]:
    """Names one piece of state of a kernel; ``kernel.state(KEY)`` is the state itself.

    A key is made once, as a constant of a module, and only who imports it can reach the state: two
    keys of one name are two pieces of state.

    Attributes:
      name: for messages, such as ``"my-plugin.counters"``.
      create: ``create(kernel)`` makes the state of a kernel when it is first asked for.
    """

    name: str
    create: Callable[[KernelContext], T]
