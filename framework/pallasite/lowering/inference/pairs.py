"""Which layouts of operands and results go together, for broadcasts; and what states that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from pallasite.errors import PallasiteError
from pallasite.layouts.proposals import LayoutProposals
from pallasite.layouts.registers import Layout, RegisterLayout, SplatLayout
from pallasite.lowering.inference.problem import Pairs

type Pair = tuple[Layout, Layout]
"""Layouts of an operand and of a result with which an equation moves no data."""


def remembered(function: Callable[[Layout | None, Layout | None], Iterator[Pair]]) -> Pairs:
    """Remembers what was asked: equations of the same kind and shape share one such function."""

    @functools.lru_cache(maxsize=512)
    def listed(operand: Layout | None, result: Layout | None) -> tuple[Pair, ...]:
        return tuple(dict.fromkeys(function(operand, result)))

    return listed


def tried(function: Callable[[], Layout]) -> Layout | None:
    """The layout that a function makes; None if it refuses."""
    try:
        return function()
    except PallasiteError:
        return None


@functools.lru_cache(maxsize=256)
def broadcast(
    before: tuple[int, ...],
    after: tuple[int, ...],
    dims: tuple[int, ...],
    proposals: LayoutProposals,
) -> Pairs:
    """Of a broadcast: the operand's layout is the result's, reduced over what is new."""
    shape = tuple(after)
    new = [d for d in range(len(shape)) if d not in dims]
    stretched = [i for i, d in enumerate(dims) if before[i] != shape[d]]

    def reduced(layout: Layout) -> Layout:
        gone = sorted(new + [dims[i] for i in stretched])
        left = layout.reduce(gone)
        return left.expand_dims(stretched).layout if stretched else left

    def pairs(operand: Layout | None, result: Layout | None) -> Iterator[Pair]:
        if isinstance(result, RegisterLayout):
            before = tried(lambda: reduced(result))
            if operand is not None and (operand == before or _fits(operand, result)):
                yield operand, result
                return
            if before is not None and not isinstance(before, SplatLayout):
                yield before, result
        if isinstance(operand, RegisterLayout):
            for candidate in proposals.for_broadcast(shape):
                if _fits(operand, candidate):
                    yield operand, candidate
            after = tried(lambda: operand.broadcast_in_dim(shape, dims).layout)
            if after is not None:
                yield operand, after

    def _fits(operand: Layout, result: Layout) -> bool:
        return tried(lambda: operand.broadcast_with_target(result, dims).layout) is not None

    return remembered(pairs)
