"""A kind of barriers on which one elected lane of each warp arrives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from pallasite.plugin import BarrierKind, BarrierPhase
from pallasite.plugin.ir import ops
from pallasite.plugin.layouts import WARPS
from pallasite_std.api import BarrierAllocation, BarrierDType


@dataclasses.dataclass(frozen=True)
class WarpBarrierType(BarrierDType):
    """The element type of arrays of such barriers."""

    name: ClassVar[str] = "warp_barrier"
    title: ClassVar[str] = "WarpBarrier"
    num_arrivals: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarpBarrier(BarrierAllocation):
    """Describes barriers for ``scratch_types``; ``num_arrivals`` threads arrive in each phase."""

    num_arrivals: int = 1
    num_barriers: int | Sequence[int] = ()

    def element_type(self):
        """Of the array of barriers."""
        return WarpBarrierType(self.num_arrivals)


def _arrive(ctx, barrier, condition, by):
    ctx.launch.warp_barrier()
    lane = ctx.launch.elected_lane
    with ops.when(lane if condition is None else ops.arith.andi(lane, condition)):
        text = "mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];"
        ops.inline_assembly(text, "r,~{memory}", barrier.address())


WARP_BARRIERS = BarrierKind(
    dtype=WarpBarrierType,
    phase=lambda dtype, geometry: BarrierPhase(hardware_arrivals=WARPS * dtype.num_arrivals),
    arrive=_arrive,
)
