"""A register layout by name, and its proposal to layout inference: columns of their own for a warp.

Sums along columns then take no exchange between warps.
"""

from __future__ import annotations

from pallasite.plugin import InvalidValueError, LayoutProposal, NamedLayout, TargetPredicate
from pallasite.plugin.layouts import tiled_specification

SPECIFICATION = tiled_specification(((4, 64), (4, 16), (2,)), (-4,), (-3, -2))
"""Each warp has 16 of 64 columns, its lanes 4 rows of them with 2 neighbours in a register."""

WARP_COLUMNS = NamedLayout(name="WARP_COLUMNS", specification=SPECIFICATION)


def _propose(shape):
    if len(shape) != 2:
        return []
    try:
        return [SPECIFICATION.layout(shape)]
    except InvalidValueError:
        return []


PROPOSAL = LayoutProposal(
    name="warp-columns",
    propose=_propose,
    uses=("broadcast",),
    target=TargetPredicate(names=frozenset({"sm_90"})),
)
