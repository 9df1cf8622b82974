"""The shape of a grid: blocks, clusters and threads."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from pallasite_simulator.types import Array

type Extent = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A launch in CUDA's order of dimensions, (x, y, z).

    Attributes:
      grid: blocks, including those of clusters.
      block: threads.
      cluster: blocks of a cluster; divides ``grid``.
      explicit_cluster: whether the kernel was launched with clusters.
      device: which of several devices, each with such a grid; None for one alone.
    """

    grid: Extent
    block: Extent
    cluster: Extent = (1, 1, 1)
    explicit_cluster: bool = False
    device: int | None = None

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return math.prod(self.grid)

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return math.prod(self.cluster)

    @property
    def clusters(self) -> Extent:
        """Clusters of the grid."""
        x, y, z = (g // c for g, c in zip(self.grid, self.cluster, strict=True))
        return x, y, z

    def block_index(self, block: int) -> Extent:
        """``(x, y, z)`` of a block, given its linear number (x fastest)."""
        x, y, _ = self.grid
        return block % x, block // x % y, block // (x * y)

    def block_name(self, block: int) -> str:
        """``(x, y, z)`` of a block, given its linear number, and its device if it has one."""
        device = "" if self.device is None else f" of device {self.device}"
        return f"{self.block_index(block)}{device}"

    @functools.cached_property
    def order(self) -> Array:
        """Linear numbers of all blocks, cluster by cluster, within clusters by rank."""
        numbers = np.arange(self.blocks).reshape(self.grid[::-1])
        (gx, gy, gz), (cx, cy, cz) = self.clusters, self.cluster
        split = numbers.reshape(gz, cz, gy, cy, gx, cx)
        return np.ascontiguousarray(split.transpose(0, 2, 4, 1, 3, 5)).reshape(-1)
