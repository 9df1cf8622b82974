"""The tiling of a portable GEMM."""

from __future__ import annotations

import dataclasses

from pallasite.plugin import InvalidValueError

RESERVE = 1024
"""Bytes of shared memory for barriers."""

STEP_BYTES = 128
"""Of a row of an operand's tile, along k: what fills the widest swizzle."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """The configuration of a GEMM kernel with warp-level MMA.

    Attributes:
      tile_m, tile_n: extents of the tile of the result that a block of one warpgroup computes: 64
        rows in multiples of 8 columns, 32 in multiples of 16, or 16 in multiples of 32.
      stages: steps along k, each 128 bytes deep, that are in flight.
      group: so many tiles along m are visited before going on along n, so that what neighbours read
        stays in the L2 cache.
    """

    tile_m: int = 128
    tile_n: int = 128
    stages: int = 3
    group: int = 8

    def __post_init__(self) -> None:
        columns = {16: 32, 32: 16}.get(self.tile_m, 8)
        if self.tile_m not in (16, 32) and (self.tile_m <= 0 or self.tile_m % 64):
            self._refuse("tile_m", "16, 32, or a multiple of 64")
        if self.tile_n <= 0 or self.tile_n % columns:
            self._refuse("tile_n", f"a multiple of {columns} with tile_m={self.tile_m}")
        if self.stages < 2:
            self._refuse("stages", "at least 2")
        if self.group < 1:
            self._refuse("group", "at least 1")

    def _refuse(self, name: str, expected: str) -> None:
        raise InvalidValueError(
            f"MatmulConfig.{name} does not fit", got=getattr(self, name), expected=expected
        )

    def epilogue_n(self, out_size: int) -> int:
        """Columns that are written at a time: rows of 128 bytes at most."""
        width = self.tile_n
        while width * out_size > STEP_BYTES and width % 16 == 0:
            width //= 2
        return width

    def shared_bytes(self, out_size: int) -> int:
        """Shared memory that the kernel takes, with results of ``out_size`` bytes."""
        step = (self.tile_m + self.tile_n) * STEP_BYTES
        return self.stages * step + self.tile_m * self.epilogue_n(out_size) * out_size + RESERVE


def default_config(m: int, n: int, out_size: int, shared_memory: int) -> MatmulConfig:
    """The configuration that is used without tuning.

    Args:
      m, n: extents of the result.
      out_size: bytes of an element of the result.
      shared_memory: bytes that a block may use.
    """
    tile_m = next(tile for tile in (16, 32, 64, 128) if tile >= min(m, 128))
    tile_n = 64 if n <= 64 else 128
    return filled(MatmulConfig(tile_m=tile_m, tile_n=tile_n), out_size, shared_memory)


def filled(config: MatmulConfig, out_size: int, shared_memory: int) -> MatmulConfig:
    """The same with as many stages as half of the shared memory has room for, 2 to 4."""
    for stages in (4, 3):
        deep = dataclasses.replace(config, stages=stages)
        if deep.shared_bytes(out_size) <= shared_memory // 2:
            return deep
    return dataclasses.replace(config, stages=2)


def matmul_configs(
    m: int, n: int, out_size: int = 2, shared_memory: int = 99 << 10
) -> list[MatmulConfig]:
    """Candidate configurations of a GEMM, the default first.

    Args:
      m, n: extents of the result.
      out_size: bytes of an element of the result.
      shared_memory: bytes that a block may use.
    """
    found = [default_config(m, n, out_size, shared_memory)]
    for tile_m, tile_n in ((128, 128), (64, 128), (128, 64), (64, 64), (32, 128), (16, 128)):
        if tile_m > 64 and m <= tile_m // 2:
            continue
        for stages in (2, 3, 4):
            config = MatmulConfig(tile_m=tile_m, tile_n=tile_n, stages=stages)
            if config.shared_bytes(out_size) <= shared_memory:
                found.append(config)
    return list(dict.fromkeys(found))
