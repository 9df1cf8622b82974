"""The tiling of a GEMM, and the candidates for tuning."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block may use on Hopper."""

_RESERVE = 1024
"""For barriers."""

MAXIMUM_STAGES = 12
"""More steps in flight than this hide nothing more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """The configuration of a GEMM kernel.

    Attributes:
      tile_m, tile_n: extents of the tile of the result that a block computes at a time. Its compute
        warpgroups share it.
      warpgroups: consumer warpgroups of a block, 1 or 2.
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
        that a result of few rows does not waste the 64 rows of the tensor cores.
      split_k: blocks of a cluster that share the steps of one tile and add up their sums, 1, 2 or
        4, so that few large tiles keep all multiprocessors busy.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    split: str = "n"
    cluster: int = 1
    cluster_along: str = "m"
    group: int = 8
    grid_minor: str = "m"
    epilogue_n: int = 64
    slots: int = 1
    warpgroups: int = 2
    swap: bool = False
    split_k: int = 1

    def __post_init__(self) -> None:
        for name in ("split", "cluster_along", "grid_minor"):
            if getattr(self, name) not in ("m", "n"):
                raise InvalidValueError(
                    f"MatmulConfig.{name} is neither",
                    got=getattr(self, name),
                    expected="'m' or 'n'",
                )
        for name, accepted in (
            ("cluster", (1, 2, 4)),
            ("warpgroups", (1, 2)),
            ("split_k", (1, 2, 4)),
        ):
            if getattr(self, name) not in accepted:
                raise InvalidValueError(
                    f"MatmulConfig.{name} is none of its values",
                    got=str(getattr(self, name)),
                    expected=" or ".join(map(str, accepted)),
                )
        if self.warpgroup_m % 64 or self.warpgroup_n % 8:
            raise InvalidValueError(
                "a warpgroup's part of the tile does not fit the tensor cores",
                got=f"{self.warpgroup_m} x {self.warpgroup_n}",
                expected="rows in multiples of 64, columns in multiples of 8",
            )
        if self.warpgroup_n % (self.epilogue_n * self.split_k):
            raise InvalidValueError(
                "MatmulConfig.epilogue_n does not divide the columns that a warpgroup writes",
                got=f"{self.epilogue_n} of {self.warpgroup_n} / {self.split_k}",
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
        sums = self.warpgroups * self.warpgroup_m * self.warpgroup_n * 4
        received = sums * (self.split_k - 1) // self.split_k
        return self.stages * step + staging + received + _RESERVE

    def fits(self, size: int, out_size: int) -> bool:
        """Whether shared memory suffices; see :meth:`shared_bytes`."""
        return self.shared_bytes(size, out_size) <= SHARED_MEMORY


FEW_ROWS = 256
"""The largest number of rows of a skinny GEMM, for which the transposed product is considered."""

_EFFICIENCY = {(128, 256): 1.0, (256, 128): 0.98, (128, 128): 0.86, (128, 64): 0.6, (64, 256): 0.7}
"""Share of the tensor cores' best rate that tiles reach, relative to the largest ones."""


def default_config(
    m: int, n: int, k: int, size: int, out_size: int, multiprocessors: int = 132
) -> MatmulConfig:
    """The configuration that is used without tuning.

    Args:
      m, n, k: extents of the GEMM.
      size, out_size: bytes of an element of the operands and of the result.
      multiprocessors: of the GPU.
    """
    if m <= FEW_ROWS // 2 and n > m:
        config = _few_rows(m, n, k, size, multiprocessors)
    else:
        config = min(
            (_large(*tile, k, size) for tile in _EFFICIENCY),
            key=lambda config: _time(config, m, n, multiprocessors),
        )
    epilogue = config.epilogue_n
    while epilogue > 8 and epilogue * out_size > 128:
        epilogue //= 2
    return _as_deep_as_fits(dataclasses.replace(config, epilogue_n=epilogue), size, out_size)


def _few_rows(m: int, n: int, k: int, size: int, multiprocessors: int) -> MatmulConfig:
    """For products that only have to read ``b`` as fast as memory can."""
    columns = max(8, 1 << (m - 1).bit_length())
    narrow, wide = columns <= 32, 32 < columns <= 64
    # All blocks read all of ``a`` through the L2 cache. With many columns that takes as long as
    # reading ``b``, unless blocks with larger tiles share the steps among them.
    shared = columns > 64 and -(-n // 128) * 2 <= multiprocessors and k * size >= 4096
    return MatmulConfig(
        swap=True,
        tile_m=128 if wide or shared else 64,
        tile_n=columns,
        tile_k=(256 if narrow else 128) // size,
        warpgroups=2 if wide or shared else 1,
        split="m",
        split_k=2 if shared else 1,
        group=1,
        epilogue_n=32 if shared else min(columns, 64),
        slots=1,
    )


def _large(tile_m: int, tile_n: int, k: int, size: int) -> MatmulConfig:
    narrow = tile_m == 64
    split = "n" if tile_n > tile_m else "m"
    part = tile_n // 2 if split == "n" else tile_n
    return MatmulConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=128 // size,
        split=split,
        group=16 if k * size >= 8192 and not narrow else 8,
        epilogue_n=min(part, 64),
        slots=1,
    )


def _time(config: MatmulConfig, m: int, n: int, multiprocessors: int) -> float:
    """Relative time: rounds of tiles, each as long as a tile takes."""
    tiles = -(-m // config.tile_m) * -(-n // config.tile_n)
    rounds = -(-tiles // multiprocessors)
    area = config.tile_m * config.tile_n
    return rounds * area / _EFFICIENCY[config.tile_m, config.tile_n]


def _as_deep_as_fits(config: MatmulConfig, size: int, out_size: int) -> MatmulConfig:
    for stages in range(MAXIMUM_STAGES, 1, -1):
        deep = dataclasses.replace(config, stages=stages)
        if deep.fits(size, out_size):
            return deep
    raise InvalidValueError(
        "two steps of this tile do not fit in shared memory",
        got=f"tiles of {config.tile_m} x {config.tile_n} x {config.tile_k}",
        expected=f"at most {SHARED_MEMORY} bytes, see MatmulConfig.shared_bytes",
    )


def matmul_configs(m: int, n: int, k: int, dtype: Any, out_dtype: Any = None) -> list[MatmulConfig]:
    """Candidate configurations of a GEMM, the default first.

    Args:
      m, n, k: extents of the GEMM.
      dtype: of the operands.
      out_dtype: of the result; by default ``dtype``.
    """
    size = np.dtype(dtype).itemsize
    out_size = np.dtype(out_dtype or dtype).itemsize
    found = [default_config(m, n, k, size, out_size)]
    base = found[0]
    if m <= FEW_ROWS:
        columns = max(8, 1 << (min(m, 128) - 1).bit_length())
        found += [
            dataclasses.replace(
                base,
                swap=True,
                tile_m=64 * warpgroups,
                tile_n=columns,
                tile_k=depth // size,
                warpgroups=warpgroups,
                split="m",
                cluster=cluster,
                cluster_along="m",
                group=1,
                epilogue_n=min(columns // split, base.epilogue_n),
                split_k=split,
            )
            for warpgroups, depth, (cluster, split) in itertools.product(
                (1, 2), (128, 256), ((1, 1), (2, 1), (1, 2), (1, 4))
            )
            if columns // split >= 8
        ]
    for (tile_m, tile_n), cluster, group, minor in itertools.product(
        _EFFICIENCY, (1, 2), (4, 8, 16), ("m", "n")
    ):
        if m <= FEW_ROWS and (tile_m > 128 or cluster > 1 or group > 4):
            continue
        large = _large(tile_m, tile_n, k, size)
        epilogue = min(large.epilogue_n, 128 // out_size)
        found.append(
            dataclasses.replace(
                large, cluster=cluster, group=group, grid_minor=minor, epilogue_n=epilogue
            )
        )
    deep = [_as_deep_as_fits(config, size, out_size) for config in found]
    return list(dict.fromkeys(deep))
