"""Barriers of one block, and barriers that the blocks of a cluster share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from pallasite.plugin.language import checks
from pallasite_std.barriers.base import BarrierAllocation, BarrierDType

TENSOR_CORE = "tensor_core"
"""The order of the tensor core's work, which the plugin of a generation provides."""


@dataclasses.dataclass(frozen=True)
class BarrierType(BarrierDType):
    """Element type of a reference to barriers of one block."""

    name: ClassVar[str] = "barrier"
    title: ClassVar[str] = "Barrier"

    num_arrivals: int
    orders_tensor_core: bool

    @property
    def orders(self) -> tuple[str, ...]:
        """The tensor core's work, if it is ordered."""
        return (TENSOR_CORE,) if self.orders_tensor_core else ()

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class ClusterBarrierType(BarrierDType):
    """Element type of a reference to barriers that the blocks of a cluster share."""

    name: ClassVar[str] = "cluster_barrier"
    title: ClassVar[str] = "ClusterBarrier"
    counts_bytes: ClassVar[bool] = False

    collective_axes: tuple[Any, ...]
    num_arrivals: int
    orders_tensor_core: bool
    leader_tracked: bool = False

    @property
    def orders(self) -> tuple[str, ...]:
        """The tensor core's work, if it is ordered."""
        return (TENSOR_CORE,) if self.orders_tensor_core else ()

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Barrier(BarrierAllocation):
    """Describes mbarriers in shared memory (PTX ISA, "Parallel Synchronization: mbarrier").

    Attributes:
      num_arrivals: how many arrivals complete a phase. One ``copy_gmem_to_smem`` and one
        ``barrier_arrive`` by a thread of the kernel (a warpgroup) count as one each.
      num_barriers: shape of the array of barriers; ``()`` is a single one that needs no index.
      orders_tensor_core: whether a wait also orders the tensor-core operations of the threads
        that arrive and wait. Such a barrier cannot be the target of ``copy_gmem_to_smem``.
    """

    num_arrivals: int = 1
    num_barriers: int | Sequence[int] = ()
    orders_tensor_core: bool = False

    def element_type(self) -> BarrierType:
        """The element type of the references."""
        return BarrierType(int(self.num_arrivals), bool(self.orders_tensor_core))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterBarrier(BarrierAllocation):
    """Describes mbarriers through which the blocks of a cluster synchronise.

    An arrival reaches the barrier in every block that differs from this one only along
    ``collective_axes``; a wait looks at the block's own. With several axes, an arrival reaches the
    blocks that differ along one of them.

    Attributes:
      collective_axes: names of cluster axes; a tuple of names counts as one axis.
      num_barriers: shape of the array of barriers.
      num_arrivals: arrivals per block that complete a phase.
      orders_tensor_core: as in :class:`Barrier`.
      leader_tracked: only the barrier of the first block along the axes counts arrivals.
    """

    collective_axes: tuple[Any, ...]
    num_barriers: int | Sequence[int] = ()
    num_arrivals: int = 1
    orders_tensor_core: bool = False
    leader_tracked: bool = False

    def __post_init__(self) -> None:
        axes = checks.axis_names(self.collective_axes, "collective_axes")
        if axes is None:
            raise checks.value_error(
                "a ClusterBarrier needs collective_axes", expected="names of cluster axes"
            )
        object.__setattr__(self, "collective_axes", axes)
        super().__post_init__()

    def element_type(self) -> ClusterBarrierType:
        """The element type of the references."""
        return ClusterBarrierType(
            self.collective_axes,
            int(self.num_arrivals),
            bool(self.orders_tensor_core),
            bool(self.leader_tracked),
        )
