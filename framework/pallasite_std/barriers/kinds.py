"""The kinds of barriers of the standard library, for plugins' tables."""

from __future__ import annotations

import math
from typing import Any

from pallasite.plugin import BarrierKind, BarrierPhase
from pallasite.plugin.lowering import Geometry
from pallasite_std.barriers.emission import LANES_OF_THREAD, arrive_in_cluster
from pallasite_std.barriers.types import BarrierType, ClusterBarrierType


def _block_phase(dtype: BarrierType, geometry: Geometry) -> BarrierPhase:
    """An arrival of a user's thread is one of each lane; on a barrier that orders more than memory,
    it is one of an elected lane."""
    del geometry
    return BarrierPhase((1 if dtype.orders else LANES_OF_THREAD) * dtype.num_arrivals)


def _cluster_phase(dtype: ClusterBarrierType, geometry: Geometry) -> BarrierPhase:
    """An arrival of a user's thread is one on the barrier of each block that differs from its own
    along one collective axis."""
    dimensions = tuple(
        tuple(
            geometry.cluster_dimension(name)
            for name in (axes if isinstance(axes, tuple) else (axes,))
        )
        for axes in dtype.collective_axes
    )
    extents = [math.prod(geometry.cluster[d] for d in group) for group in dimensions]
    return BarrierPhase(dtype.num_arrivals * (sum(extents) - len(extents) + 1), dimensions)


def _counted_in_cluster(dtype: Any) -> bool:
    return not dtype.leader_tracked


KINDS = (
    BarrierKind(dtype=BarrierType, phase=_block_phase),
    BarrierKind(
        dtype=ClusterBarrierType,
        phase=_cluster_phase,
        counted=_counted_in_cluster,
        arrive=arrive_in_cluster,
    ),
)
