"""What the primitives of the standard library do to barriers, for plugins' tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pallasite.plugin import BarrierRole, BarrierUse
from pallasite.plugin.language import element_bits
from pallasite_std.primitives import barriers, cluster_launch, copies


def _of_copy(dtype: Any, params: Mapping[str, Any]) -> int | None:
    """A copy that belongs to a ``barrier_expect`` does not arrive itself; which block's barriers a
    copy by pairs of blocks arrives on is not known."""
    if not params["arrive"]:
        return 0
    return 1 if params["leader_tracked"] is None else None


def _announced(arguments: tuple[Any, ...], params: Mapping[str, Any]) -> int:
    del arguments
    return int(params["num_bytes"])


def _copied(arguments: tuple[Any, ...], params: Mapping[str, Any]) -> int:
    """What this block receives."""
    del params
    destination = arguments[1]
    return element_bits(destination.dtype, tuple(destination.shape)) // 8


def _elsewhere(dtype: Any, params: Mapping[str, Any]) -> None:
    """It arrives on the barrier of another block."""


USES = (
    BarrierUse(primitive=barriers.barrier_arrive_p, role=BarrierRole.ARRIVE, predicate=1),
    BarrierUse(primitive=barriers.barrier_wait_p, role=BarrierRole.WAIT),
    BarrierUse(primitive=barriers.barrier_test_p, role=BarrierRole.TEST),
    BarrierUse(
        primitive=copies.barrier_expect_p,
        role=BarrierRole.EXPECT,
        predicate=1,
        transfers=_announced,
    ),
    BarrierUse(
        primitive=copies.copy_gmem_to_smem_p,
        role=BarrierRole.COMPLETE,
        barrier=2,
        predicate=3,
        arrivals=_of_copy,
        transfers=_copied,
    ),
    BarrierUse(
        primitive=copies.async_store_smem_p,
        role=BarrierRole.COMPLETE,
        barrier=2,
        arrivals=_elsewhere,
    ),
    BarrierUse(primitive=cluster_launch.try_cluster_cancel_p, role=BarrierRole.COMPLETE, barrier=1),
)
