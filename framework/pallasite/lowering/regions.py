"""Named regions: which ``jax.named_scope`` blocks are open while a jaxpr is lowered.

The equations of a jaxpr carry the names of the scopes around them, without those of the equation
that holds the jaxpr. So a nested jaxpr opens and closes regions inside those of its surroundings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallasite.lowering.launch import LaunchContext


class OpenRegions:
    """The regions that are open at a place in one jaxpr, outermost first.

    Regions are told apart by their names alone: two blocks of one name that follow each other
    immediately are one region. Without a listener, nothing happens.
    """

    def __init__(self, launch: LaunchContext):
        self._launch = launch
        self._open: list[tuple[str, contextlib.AbstractContextManager[None]]] = []

    def move_to(self, names: Sequence[str]) -> None:
        """Leaves the regions that do not contain the next equation, innermost first, and enters
        those that do and are not open yet."""
        if not self._launch.named_scopes:
            return
        common = 0
        for (name, _), wanted in zip(self._open, names, strict=False):
            if name != wanted:
                break
            common += 1
        self._close_to(common)
        for name in names[common:]:
            region = self._launch.named_region(name)
            region.__enter__()
            self._open.append((name, region))

    def close(self) -> None:
        """Leaves all regions; to be called where the code of the jaxpr ends."""
        self._close_to(0)

    def _close_to(self, depth: int) -> None:
        while len(self._open) > depth:
            _, region = self._open.pop()
            region.__exit__(None, None, None)
