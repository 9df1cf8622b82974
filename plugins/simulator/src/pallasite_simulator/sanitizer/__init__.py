"""The sanitizer: finds what is wrong with a kernel although its results may be right.

A launch with ``Launch(..., sanitizer=LaunchState(groups, allocations))`` is checked, and raises
:class:`SanitizerError` at its end if anything was found.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from pallasite_simulator.engine.observer import Observer
from pallasite_simulator.sanitizer.groups import GROUPS, parse_groups
from pallasite_simulator.sanitizer.launch_state import LaunchState

if TYPE_CHECKING:
    from pallasite.plugin.lowering import Allocation

__all__ = ["GROUPS", "LaunchState", "make", "parse_groups"]


def make(
    groups: Collection[str] = GROUPS,
    *,
    allocations: Sequence[Allocation] = (),
    launch_state: LaunchState | None = None,
) -> Observer:
    """An observer that checks one wave.

    Args:
      groups: what to check, of :data:`GROUPS`; for a new launch only.
      allocations: who asked for which piece of dynamic shared memory; for a new launch only.
      launch_state: what the waves of a launch share: it collects what they find.
    """
    if launch_state is None:
        launch_state = LaunchState(groups, allocations)
    return launch_state.observer()
