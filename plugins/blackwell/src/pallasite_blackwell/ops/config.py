"""The tiling of a GEMM with tensor memory."""

from __future__ import annotations

import dataclasses

from pallasite.plugin import InvalidValueError
from pallasite_blackwell.tensor_core.types import operand_bits

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block may use."""

ROW = 128
"""Bytes of a row of an operand in one step: the widest swizzle."""

_RESERVE = 2048
"""For barriers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """The configuration of a GEMM kernel with tensor memory.

    Attributes:
      tile_n: columns of the tile of 128 rows that a block computes at a time: a multiple of 32, at
        most 256.
      stages: steps along k, of 128 bytes, that are in flight.
      pair: whether two blocks compute tiles of 256 rows together, each with half of the columns of
        b; then ``tile_n`` is a multiple of 64.
      group: so many tiles along ``grid_minor`` are visited before going on along the other
        direction, so that what neighbours read stays in the L2 cache.
      grid_minor: ``"m"`` or ``"n"``.
      epilogue_n: columns that are written at a time.
    """

    tile_n: int = 128
    stages: int = 4
    pair: bool = False
    group: int = 8
    grid_minor: str = "m"
    epilogue_n: int = 32

    def __post_init__(self) -> None:
        if self.grid_minor not in ("m", "n"):
            raise InvalidValueError(
                "MatmulConfig.grid_minor is neither", got=self.grid_minor, expected="'m' or 'n'"
            )
        unit = 64 if self.pair else 32
        if self.tile_n % unit or not 0 < self.tile_n <= 256:
            raise InvalidValueError(
                "MatmulConfig.tile_n does not fit the tensor core",
                got=str(self.tile_n),
                expected=f"a multiple of {unit}, at most 256"
                + (", with pair=True" if self.pair else ""),
            )
        if self.epilogue_n < 8 or self.tile_n % self.epilogue_n or self.epilogue_n % 8:
            raise InvalidValueError(
                "MatmulConfig.epilogue_n does not divide the columns of a tile",
                got=f"{self.epilogue_n} of {self.tile_n}",
                expected="a multiple of 8 that divides tile_n",
            )
        if self.stages < 1 or self.group < 1:
            raise InvalidValueError(
                "MatmulConfig.stages and group are positive",
                got=f"stages={self.stages}, group={self.group}",
                expected="at least 1",
            )

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return 2 if self.pair else 1

    @property
    def tile_m(self) -> int:
        """Rows of a block's tile."""
        return 128

    def shared_bytes(self, out_size: int) -> int:
        """Shared memory that the kernel takes, for results of ``out_size`` bytes."""
        columns = self.tile_n // self.blocks
        steps = self.stages * (self.tile_m + columns) * ROW
        return steps + 2 * self.tile_m * self.epilogue_n * out_size + _RESERVE

    def fits(self, out_size: int) -> bool:
        """Whether shared memory suffices."""
        return self.shared_bytes(out_size) <= SHARED_MEMORY


def depth(dtype: object) -> int:
    """Elements along k of one step."""
    return ROW * 8 // operand_bits(dtype)


def matmul_configs(m: int, n: int, out_size: int) -> list[MatmulConfig]:
    """Configurations worth trying for a product, the likely best first."""
    found = []
    for pair in (True, False):
        for tile_n in (256, 192, 128, 64):
            if pair and m <= 128 or tile_n > 64 and tile_n >= 2 * n:
                continue
            for stages in (8, 6, 5, 4, 3):
                config = MatmulConfig(tile_n=tile_n, stages=stages, pair=pair)
                if config.fits(out_size):
                    found.append(config)
                    break
    return found


def default_config(m: int, n: int, out_size: int, multiprocessors: int) -> MatmulConfig:
    """The configuration whose last wave of tiles is fullest, of those with the widest tiles."""

    def time(config: MatmulConfig) -> tuple[float, int]:
        rows = config.tile_m * config.blocks
        tiles = -(-m // rows) * -(-n // config.tile_n)
        waves = -(-tiles // (multiprocessors // config.blocks))
        # What a tile takes goes with its columns, and beyond them with what is read for them.
        return waves * (config.tile_n + 32 + 64 / config.blocks), -config.tile_n

    return min(matmul_configs(m, n, out_size), key=time)
