"""The tiling of a mixed-precision GEMM."""

from __future__ import annotations

import dataclasses

from pallasite.plugin import InvalidValueError

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block may use on Hopper."""

_RESERVE = 1024
"""For barriers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedConfig:
    """The configuration of a mixed-precision GEMM kernel.

    Attributes:
      tile_m: rows of the result that a block computes at a time, a multiple of 8 up to 256.
      tile_n: columns, a multiple of 64 for each warpgroup.
      warpgroups: that share the columns, 1 or 2.
      tile_k: depth of one step, a multiple of 64.
      pieces: parts of a step that are converted and multiplied in turn, an even number of at least
        32 elements.
      stages: steps that are in flight.
      split_k: so many blocks share the work on a tile, each a part of k, as a cluster (so 1 to 8).
        Each adds up the sums of a part of the rows, if these are multiples of 8; else the first one
        has all of them.
      last_parts: blocks of a cluster, 1 or 2, that share the steps of one tile each of those that
        whole rounds of tiles leave. Not together with ``split_k`` and ``cluster``.
      cluster: blocks beside each other along n, 1 or 2, that fetch their activations together.
      group: so many tiles along ``grid_minor`` are visited before going on along the other
        direction.
      grid_minor: ``"m"`` or ``"n"``.
      epilogue_m: rows that are written at a time, a multiple of 8; the last ones may be fewer.
      fractions: whether weights of 8 bits are multiplied as fractions of 128, where activations
        are bfloat16, and the sums by 128 in the end: converting takes fewer instructions.
    """

    tile_m: int = 256
    tile_n: int = 128
    warpgroups: int = 2
    tile_k: int = 64
    pieces: int = 2
    stages: int = 4
    split_k: int = 1
    last_parts: int = 1
    cluster: int = 1
    group: int = 8
    grid_minor: str = "n"
    epilogue_m: int = 32
    fractions: bool = True

    def __post_init__(self) -> None:
        self._require(
            self.tile_m % 8 == 0 and 0 < self.tile_m <= 256, "tile_m", "a multiple of 8 up to 256"
        )
        self._require(self.warpgroups in (1, 2), "warpgroups", "1 or 2")
        fits = self.tile_n % (64 * self.warpgroups) == 0 and self.tile_n > 0
        self._require(fits, "tile_n", "a multiple of 64 for each warpgroup")
        self._require(self.tile_k % 64 == 0 and self.tile_k > 0, "tile_k", "a multiple of 64")
        fits = self.pieces > 0 and self.pieces % 2 == 0 and self.tile_k % (32 * self.pieces) == 0
        self._require(fits, "pieces", "an even number of parts of tile_k, of 32 elements or more")
        self._require(self.stages >= 2, "stages", "at least 2")
        self._require(1 <= self.split_k <= 8, "split_k", "1 to 8")
        alone = self.last_parts == 1 or (self.last_parts == 2 and self.split_k == self.cluster == 1)
        self._require(alone, "last_parts", "1, or 2 without split_k and cluster")
        self._require(self.cluster in (1, 2), "cluster", "1 or 2")
        fits = self.cluster == 1 or self.tile_m % 16 == 0
        self._require(
            fits, "tile_m", "a multiple of 16, of which each block of a cluster loads half"
        )
        self._require(self.grid_minor in ("m", "n"), "grid_minor", "'m' or 'n'")
        fits = 0 < self.epilogue_m <= self.tile_m and self.epilogue_m % 8 == 0
        self._require(fits, "epilogue_m", "a multiple of 8 up to tile_m")

    def _require(self, fits: bool, name: str, expected: str) -> None:
        if not fits:
            raise InvalidValueError(
                f"MixedConfig.{name} does not fit", got=getattr(self, name), expected=expected
            )

    @property
    def warpgroup_n(self) -> int:
        """Columns that a warpgroup computes of a tile."""
        return self.tile_n // self.warpgroups

    @property
    def parts(self) -> int:
        """Blocks that share a tile, each tile or the last ones."""
        return max(self.split_k, self.last_parts)

    @property
    def exchanges(self) -> bool:
        """Whether each block that shares a tile adds up and writes a part of its rows."""
        return self.parts > 1 and self.tile_m % (8 * self.parts) == 0

    def scale_rows(self, group: int) -> int:
        """Rows of factors that one step reads, with groups of so many elements; 0 without."""
        return max(1, self.tile_k // group) if group else 0

    def fits_group(self, group: int) -> bool:
        """Whether groups of so many elements fit the steps along k and their pieces."""
        return group % 8 == 0 and all(
            whole % group == 0 or group % whole == 0
            for whole in (self.tile_k, self.tile_k // self.pieces)
        )

    def shared_bytes(self, weight_bits: int, out_size: int, group: int = 0) -> int:
        """Shared memory that the kernel takes.

        Args:
          weight_bits: of one weight.
          out_size: bytes of an element of the result.
          group: elements along k that share a factor, or 0.
        """
        step = self.tile_m * self.tile_k * 2 + self.tile_n * self.tile_k * weight_bits // 8
        step += self.scale_rows(group) * self.tile_n * 2
        staging = 2 * self.epilogue_m * self.tile_n * out_size
        sums = (self.parts - 1) * self.tile_m * self.tile_n * 4
        if self.exchanges:
            sums //= self.parts
        return self.stages * step + staging + sums + _RESERVE

    def filled(self, weight_bits: int, out_size: int, group: int = 0) -> MixedConfig:
        """The same with as many stages as shared memory has room for, 8 at most."""
        for stages in range(8, 2, -1):
            config = dataclasses.replace(self, stages=stages)
            if config.shared_bytes(weight_bits, out_size, group) <= SHARED_MEMORY:
                return config
        return dataclasses.replace(self, stages=2)
