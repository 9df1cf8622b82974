"""Layouts that plugins propose to layout inference, for operations that leave several open."""

from __future__ import annotations

import functools

from pallasite.extensions import LayoutProposal
from pallasite.layouts.registers import RegisterLayout
from pallasite.registry import Registry
from pallasite.targets import Target


class LayoutProposals:
    """What plugins propose on one target, remembered by shape.

    Args:
      proposals: the contributed records, in the order in which they are tried.
    """

    def __init__(self, proposals: tuple[LayoutProposal, ...]):
        self._proposals = proposals
        self._found: dict[tuple[str, tuple[int, ...]], tuple[RegisterLayout, ...]] = {}

    def for_broadcast(self, shape: tuple[int, ...]) -> tuple[RegisterLayout, ...]:
        """Layouts of ``shape`` for the result of a broadcast, or the operand of a reduction or a
        slice, where nothing else decides."""
        return self._of("broadcast", tuple(shape))

    def for_transpose(self, shape: tuple[int, ...]) -> tuple[RegisterLayout, ...]:
        """Layouts in which the lanes of a warp access both rows and columns of a tile in memory
        without bank conflicts, for arrays that are transposed on the way."""
        return self._of("transpose", tuple(shape))

    def _of(self, use: str, shape: tuple[int, ...]) -> tuple[RegisterLayout, ...]:
        key = (use, shape)
        if key not in self._found:
            self._found[key] = tuple(
                layout
                for proposal in self._proposals
                if use in proposal.uses
                for layout in proposal.propose(shape)
            )
        return self._found[key]


@functools.lru_cache(maxsize=64)
def proposals_for(registry: Registry, target: Target) -> LayoutProposals:
    """The proposals of a registry's plugins that are for a target."""
    return LayoutProposals(registry.layout_proposals(target))
