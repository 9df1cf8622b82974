"""A register layout by name, and its proposal to layout inference: a row for each lane.

A sum along rows then takes no exchange between lanes.
"""

from __future__ import annotations

from pallasite.plugin import InvalidValueError, LayoutProposal, NamedLayout, TargetPredicate
from pallasite.plugin.layouts import LANES, WARPS, tiled_specification

_TILES = ((WARPS * LANES, 4), (LANES, 4), (1, 4))

SPECIFICATION = tiled_specification(_TILES, (-6,), (-4,))

ROW_PER_LANE = NamedLayout(name="ROW_PER_LANE", specification=SPECIFICATION)


def _propose(shape):
    """For matrices of a multiple of 128 rows and of 4 columns."""
    if len(shape) != 2:
        return
    try:
        yield SPECIFICATION.layout(shape)
    except InvalidValueError:
        return


ROWS = LayoutProposal(
    name="row-per-lane",
    propose=_propose,
    uses=("broadcast",),
    target=TargetPredicate(names=frozenset({"sm_90", "sm_121a"})),
)
