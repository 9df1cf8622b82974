"""How a matrix product is cut into tiles, and which cuts are worth trying."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from pallasite.errors import InvalidValueError

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block may use on Hopper."""

_RESERVE = 1024
"""For barriers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """A way of computing a matrix product.

    Attributes:
      tile_m, tile_n: extents of the tile of the result that a block computes at a time. Its compute
        warpgroups share it.
      warpgroups: compute warpgroups of a block, 1 or 2.
      tile_k: depth of one step, in elements: a multiple of what fills the swizzle (128 bytes).
      stages: steps that are in flight.
      split: whether two warpgroups halve the rows (``"m"``) or the columns (``"n"``).
      cluster: blocks of a cluster: 1, 2 or 4. They compute tiles side by side along
        ``cluster_along``, and what all of them read is fetched once.
      cluster_along: ``"m"`` or ``"n"``.
      group: so many tiles along ``grid_minor`` are visited before going on along the other
        direction, so that what neighbours read stays in the L2 cache.
      grid_minor: ``"m"`` or ``"n"``.
      epilogue_n: columns that are written at a time.
      slots: buffers for them, for each warpgroup.
      swap: computes the transposed product b.T @ a.T (to which all other attributes then refer), so
        that a result of few rows does not waste the 64 rows of the matrix units.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    split: str = "m"
    cluster: int = 1
    cluster_along: str = "m"
    group: int = 8
    grid_minor: str = "m"
    epilogue_n: int = 64
    slots: int = 2
    warpgroups: int = 2
    swap: bool = False

    def __post_init__(self) -> None:
        for name in ("split", "cluster_along", "grid_minor"):
            if getattr(self, name) not in ("m", "n"):
                raise InvalidValueError(
                    f"MatmulConfig.{name} is neither",
                    got=getattr(self, name),
                    expected="'m' or 'n'",
                )
        for name, accepted in (("cluster", (1, 2, 4)), ("warpgroups", (1, 2))):
            if getattr(self, name) not in accepted:
                raise InvalidValueError(
                    f"MatmulConfig.{name} is none of its values",
                    got=str(getattr(self, name)),
                    expected=" or ".join(map(str, accepted)),
                )
        if self.warpgroup_m % 64 or self.warpgroup_n % 8:
            raise InvalidValueError(
                "a warpgroup's part of the tile does not fit the matrix units",
                got=f"{self.warpgroup_m} x {self.warpgroup_n}",
                expected="rows in multiples of 64, columns in multiples of 8",
            )
        if self.warpgroup_n % self.epilogue_n:
            raise InvalidValueError(
                "MatmulConfig.epilogue_n does not divide a warpgroup's columns",
                got=f"{self.epilogue_n} of {self.warpgroup_n}",
            )

    @property
    def warpgroup_m(self) -> int:
        """Rows of a warpgroup's part of a tile."""
        return self.tile_m // self.warpgroups if self.split == "m" else self.tile_m

    @property
    def warpgroup_n(self) -> int:
        """Columns of a warpgroup's part of a tile."""
        return self.tile_n // self.warpgroups if self.split == "n" else self.tile_n

    def shared_bytes(self, size: int, out_size: int) -> int:
        """Shared memory that the kernel takes.

        Args:
          size: bytes of an element of the operands.
          out_size: of the result.
        """
        step = (self.tile_m + self.tile_n) * self.tile_k * size
        staging = self.warpgroups * self.slots * self.warpgroup_m * self.epilogue_n * out_size
        return self.stages * step + staging + _RESERVE

    def fits(self, size: int, out_size: int) -> bool:
        """Whether shared memory suffices; see :meth:`shared_bytes`."""
        return self.shared_bytes(size, out_size) <= SHARED_MEMORY


def default_config(
    m: int, n: int, k: int, size: int, out_size: int, multiprocessors: int = 132
) -> MatmulConfig:
    """The configuration that is used without tuning.

    Args:
      m, n, k: extents of the product.
      size, out_size: bytes of an element of the operands and of the result.
      multiprocessors: of the GPU.
    """
    tile_k = 128 // size
    config = MatmulConfig(tile_k=tile_k)
    if m <= 64:
        config = MatmulConfig(tile_m=64, tile_n=256, tile_k=tile_k, split="n", epilogue_n=64)
    elif m <= 128 or -(-m // 128) * -(-n // 256) < multiprocessors // 2:
        config = MatmulConfig(tile_m=128, tile_n=128, tile_k=tile_k, epilogue_n=64)
    if n < config.tile_n:
        columns = 128 if n > 64 else 64
        config = dataclasses.replace(
            config, tile_m=128, tile_n=columns, split="m", epilogue_n=min(64, columns)
        )
    if out_size > 2:
        config = dataclasses.replace(config, epilogue_n=32)
    while config.stages > 2 and not config.fits(size, out_size):
        config = dataclasses.replace(config, stages=config.stages - 1)
    while config.stages < 6 and dataclasses.replace(config, stages=config.stages + 1).fits(
        size, out_size
    ):
        config = dataclasses.replace(config, stages=config.stages + 1)
    return config


def matmul_configs(m: int, n: int, k: int, dtype: Any, out_dtype: Any = None) -> list[MatmulConfig]:
    """Configurations that are worth measuring for a product, the default one first."""
    size = np.dtype(dtype).itemsize
    out_size = np.dtype(out_dtype or dtype).itemsize
    found = [default_config(m, n, k, size, out_size)]
    shapes = ((128, 256, "m"), (256, 128, "m"), (128, 128, "m"), (128, 256, "n"))
    clusters = ((1, "m"), (2, "m"), (2, "n"))
    for (tile_m, tile_n, split), (cluster, along), group, minor in itertools.product(
        shapes, clusters, (4, 8, 16), ("m", "n")
    ):
        for stages in (6, 5, 4, 3):
            config = MatmulConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                tile_k=128 // size,
                stages=stages,
                split=split,
                cluster=cluster,
                cluster_along=along,
                group=group,
                grid_minor=minor,
                epilogue_n=64 if out_size <= 2 else 32,
            )
            if config.fits(size, out_size):
                found.append(config)
                break
    return list(dict.fromkeys(found))
