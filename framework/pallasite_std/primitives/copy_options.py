"""How copies treat the edge of an array, and the blocks of a cluster."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar


class OOBFillMode(enum.IntEnum):
    """What a copy does where its window leaves the array in global memory."""

    #: The bytes have no defined value.
    UNDEFINED = 0
    #: The user promises that the window stays inside.
    PROMISE_IN_BOUNDS = 1
    #: Zeros.
    ZEROS = 2


class CopyPartition:
    """How a collective copy that only its leader block tracks is partitioned over the cluster.

    ``CopyPartition.PARTITIONED(axis)``: each block gets its slice of the window along ``axis``.
    ``CopyPartition.REPLICATED``: every block gets the whole window.
    """

    PARTITIONED: ClassVar[type[Partitioned]]
    REPLICATED: ClassVar[ReplicatedCopy]


@dataclasses.dataclass(frozen=True)
class Partitioned(CopyPartition):
    """Each block gets its slice along ``axis`` of the window (after integer indices)."""

    axis: int


@dataclasses.dataclass(frozen=True)
class ReplicatedCopy(CopyPartition):
    """Every block gets the whole window."""


CopyPartition.PARTITIONED = Partitioned
CopyPartition.REPLICATED = ReplicatedCopy()
