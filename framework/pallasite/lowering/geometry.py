"""Launch geometry: how the user's grid, cluster and threads become CUDA dimensions and ids.

The user's axes are row-major (the last one is fastest), CUDA's x is fastest, so everything is
reversed. A grid of more than three axes folds all but the last two into z. The user's grid counts
clusters; CUDA's counts blocks, so it is scaled by the cluster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

from pallasite.errors import InvalidValueError, SourceLocation
from pallasite.targets import Target

Dimensions = tuple[int, int, int]


def _three(extents: tuple[int, ...]) -> Dimensions:
    padded = (*reversed(extents), 1, 1, 1)[:3]
    return (padded[0], padded[1], padded[2])


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The launch geometry of one kernel.

    Attributes:
      grid: the user's grid, in the user's order, counting clusters.
      grid_names, cluster_names: axis names in the user's order.
      cluster: CUDA cluster extents (x, y, z).
      threads: warpgroups per block; ``thread_name`` is their axis, or None.
      cuda_grid: blocks along (x, y, z).
    """

    grid: tuple[int, ...]
    grid_names: tuple[Hashable, ...]
    cluster: Dimensions
    cluster_names: tuple[Hashable, ...]
    cluster_extents: tuple[int, ...]
    threads: int
    thread_name: Hashable | None
    cuda_grid: Dimensions

    @property
    def block_threads(self) -> int:
        """CUDA threads per block."""
        return 128 * self.threads

    @property
    def blocks(self) -> int:
        """Blocks in the whole grid."""
        return math.prod(self.cuda_grid)

    def folded(self) -> tuple[int, ...]:
        """The grid axes that share CUDA's z, major to minor; empty for up to three axes."""
        return self.grid[:-2] if len(self.grid) > 3 else ()

    def cluster_dimension(self, name: Hashable) -> int:
        """CUDA's dimension (0 for x) of a cluster axis.

        Raises:
          InvalidValueError: there is no cluster axis of that name.
        """
        if name not in self.cluster_names:
            raise InvalidValueError(
                f"{name!r} is not a cluster axis",
                expected=f"one of {list(self.cluster_names)}"
                if self.cluster_names
                else "a kernel with cluster= and cluster_names=",
            )
        return len(self.cluster_names) - 1 - self.cluster_names.index(name)


def launch_geometry(mesh: Any, target: Target, location: SourceLocation | None) -> Geometry:
    """Derives the launch geometry from a kernel's mesh.

    Raises:
      InvalidValueError: the cluster, the block or the grid exceeds what the target can launch.
    """
    grid = tuple(int(extent) for extent in mesh.grid)
    cluster_extents = tuple(int(extent) for extent in mesh.cluster)
    cluster = _three(cluster_extents)
    threads = mesh.num_threads or 1
    if math.prod(cluster) > target.max_cluster_size or (
        math.prod(cluster) > 1 and not target.has("cluster")
    ):
        limit = target.max_cluster_size if target.has("cluster") else 1
        raise InvalidValueError(
            f"a cluster of {math.prod(cluster)} blocks is too large for {target.name}",
            got=f"cluster={cluster_extents}",
            expected=f"at most {limit} blocks",
            location=location,
        )
    if 128 * threads > target.max_threads:
        raise InvalidValueError(
            f"a block of {threads} threads needs {128 * threads} CUDA threads",
            got=f"num_threads={threads}",
            expected=f"at most {target.max_threads // 128} on {target.name}",
            location=location,
        )
    folded = grid
    if len(grid) > 3:
        folded = (math.prod(grid[:-2]), grid[-2], grid[-1])
    base = _three(folded)
    cuda_grid = (base[0] * cluster[0], base[1] * cluster[1], base[2] * cluster[2])
    for dimension, limit in enumerate((2**31 - 1, 65535, 65535)):
        if cuda_grid[dimension] > limit:
            raise InvalidValueError(
                f"the grid has {cuda_grid[dimension]} blocks along CUDA's {'xyz'[dimension]}",
                got=f"grid={grid}, cluster={cluster_extents}",
                expected=f"at most {limit}",
                hint="move large extents to the last grid axis, which is CUDA's x",
                location=location,
            )
    return Geometry(
        grid=grid,
        grid_names=tuple(mesh.grid_names),
        cluster=cluster,
        cluster_names=tuple(mesh.cluster_names),
        cluster_extents=cluster_extents,
        threads=threads,
        thread_name=mesh.thread_name,
        cuda_grid=cuda_grid,
    )
