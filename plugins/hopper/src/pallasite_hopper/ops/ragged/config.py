"""The tiling of grouped (ragged) GEMM."""

from __future__ import annotations

import dataclasses

from pallasite.plugin import InvalidValueError
from pallasite_hopper.ops.dense.candidates import with_most_stages
from pallasite_hopper.ops.dense.config import MatmulConfig

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block may use on Hopper."""

_RESERVE = 1024
"""For barriers."""

_WIDE_BAND = 16
"""Tiles along m of a band where there are so many: 1 % less time of the transposed product of 4096
x 4096 (an H200), never more than with 8."""

_SIZE = 2
"""Bytes of an element of the operands."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedConfig:
    """The configuration of a grouped GEMM kernel.

    Attributes:
      tile_m, tile_n: extents of the tile of the result that a block computes at a time. Two compute
        warpgroups share it. In ``ragged_matmul`` a tile has rows of one group.
      tile_k: depth of one step, a multiple of 64.
      stages: steps that are in flight.
      split: whether the two warpgroups halve the rows (``"m"``) or the columns (``"n"``).
      band: so many tiles along m are visited for each tile along n, so that what neighbours read
        stays in the L2 cache.
      epilogue_n: columns that are written at a time.
      epilogue_buffers: buffers for them, for each warpgroup.
      halves: whether the last tile of a group is half as high if it has so few rows: then the
        warpgroups halve its columns, and two such tiles are a unit of work. Of ``ragged_matmul``.
      skip: whether a warpgroup multiplies nothing where no row of its part is of the group. Of
        ``ragged_matmul`` with ``split="m"``.
      share: blocks that may share the columns of a tile of the last round, 1, 2 or 4. Of
        ``ragged_matmul``.
      stream: whether all blocks share the steps of what is left for the last round evenly
        (stream-K), instead of the columns of its tiles. Of ``ragged_matmul``; not together with
        ``halves``.
      cluster: blocks of a cluster, 1 or 2. Their tiles are side by side along n, and what both read
        of the rows is fetched once. Of ``ragged_matmul``; not together with ``halves``.
      alternate: whether the two warpgroups take turns: each computes a tile of its own, and writes
        it while the other one multiplies. Of ``transposed_ragged_matmul``.
      transposed: the configuration of the transposed GEMM, whose tiles have any multiple of 8 rows;
        the other attributes but for ``widths`` do not count then. Of ``ragged_matmul``; without
        parts of k, last tiles that blocks share, and a rest.
      widths: so many different numbers of rows tiles have with it, of which the last one of a group
        has the least that suffice.
      last: whether these come after all others then: so blocks end at about the same time, but read
        the matrices once more.
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    split: str = "m"
    band: int = 8
    epilogue_n: int = 64
    epilogue_buffers: int = 2
    halves: bool = False
    skip: bool = False
    share: int = 4
    stream: bool = False
    cluster: int = 1
    alternate: bool = False
    transposed: MatmulConfig | None = None
    widths: int = 3
    last: bool = False

    def __post_init__(self) -> None:
        self._require(self.split in ("m", "n"), "split", "'m' or 'n'")
        self._require(self.tile_k > 0 and self.tile_k % 64 == 0, "tile_k", "a multiple of 64")
        rows = self.warpgroup_m > 0 and self.warpgroup_m % 64 == 0
        self._require(rows, "tile_m", "64 rows, or a multiple, for each warpgroup")
        columns = self.warpgroup_n > 0 and self.warpgroup_n % 64 == 0
        self._require(columns, "tile_n", "64 columns, or a multiple, for each warpgroup")
        self._require(self.stages >= 2, "stages", "at least 2")
        self._require(self.band >= 1, "band", "at least 1")
        divides = self.epilogue_n in (32, 64) and self.warpgroup_n % self.epilogue_n == 0
        self._require(divides, "epilogue_n", "32 or 64, a divisor of a warpgroup's columns")
        self._require(self.epilogue_buffers > 0, "epilogue_buffers", "at least 1")
        fits = self.tile_m % 128 == 0 and self.tile_n % (2 * self.epilogue_n) == 0
        self._require(fits or not self.halves, "halves", "tiles that can be halved either way")
        self._require(self.share in (1, 2, 4), "share", "1, 2 or 4")
        by_rows = self.split == "m" and not self.halves
        self._require(by_rows or not self.skip, "skip", "split = 'm', and no halves")
        self._require(not (self.stream and self.halves), "stream", "no halves")
        tiles = self.transposed
        fits = tiles is None or (
            tiles.swap
            and tiles.split_k == tiles.parts == tiles.last_parts == tiles.cluster_n == 1
            and tiles.rest is None
            and not tiles.epilogue_in_stages
        )
        self._require(fits, "transposed", "swap, and no parts of k, last parts, rest")
        self._require(1 <= self.widths <= 4, "widths", "1 to 4")
        alone = self.cluster == 1 or (self.cluster == 2 and not self.halves)
        self._require(alone, "cluster", "1, or 2 without halves")

    def _require(self, fits: bool, name: str, expected: str) -> None:
        if not fits:
            raise InvalidValueError(
                f"RaggedConfig.{name} does not fit", got=getattr(self, name), expected=expected
            )

    @property
    def warpgroup_m(self) -> int:
        """Rows of a warpgroup's part of a tile."""
        return self.tile_m // 2 if self.split == "m" and not self.alternate else self.tile_m

    @property
    def warpgroup_n(self) -> int:
        """Columns of a warpgroup's part of a tile."""
        return self.tile_n // 2 if self.split == "n" and not self.alternate else self.tile_n

    def shared_bytes(self, out_size: int) -> int:
        """Shared memory that the kernel takes, with results of ``out_size`` bytes."""
        step = (self.tile_m + self.tile_n) * self.tile_k * _SIZE
        staging = 2 * self.epilogue_buffers * self.warpgroup_m * self.epilogue_n * out_size
        return self.stages * step + staging + _RESERVE

    def filled(self, out_size: int) -> RaggedConfig:
        """The same with as many stages as shared memory has room for, 8 at most."""
        if self.transposed is not None:
            tiles = with_most_stages(self.transposed, _SIZE, out_size)
            return dataclasses.replace(self, transposed=tiles)
        config = self if out_size <= 2 else dataclasses.replace(self, epilogue_n=32)
        for stages in range(8, 2, -1):
            deep = dataclasses.replace(config, stages=stages)
            if deep.shared_bytes(out_size) <= SHARED_MEMORY:
                return deep
        return dataclasses.replace(config, stages=2)


def default_config(rows: int, columns: int, out_size: int) -> RaggedConfig:
    """The configuration that is used without tuning.

    Args:
      rows: of a group's result; the average where they differ.
      columns: of the result.
      out_size: bytes of an element of the result.
    """
    if rows <= 64:
        config = RaggedConfig(tile_m=64, tile_n=256 if columns > 128 else 128, split="n")
    elif columns <= 128:
        config = RaggedConfig(tile_m=256 if rows >= 512 else 128, tile_n=128)
    else:
        config = RaggedConfig()
    tiles = -(-rows // config.tile_m)
    if tiles >= _WIDE_BAND:  # Blocks that work at the same time read less.
        config = dataclasses.replace(config, band=_WIDE_BAND)
    return config.filled(out_size)


def ragged_configs(rows: int, columns: int, out_size: int = 2) -> list[RaggedConfig]:
    """Candidate configurations, the default one first.

    Args:
      rows: of a group's result; the average where they differ.
      columns: of the result.
      out_size: bytes of an element of the result.
    """
    found = [default_config(rows, columns, out_size)]
    for tile_m, tile_n, split in (
        (128, 256, "m"),
        (256, 128, "m"),
        (128, 128, "m"),
        (64, 256, "n"),
        (64, 128, "n"),
        (128, 256, "n"),
    ):
        for band in (4, 8, 16):
            config = RaggedConfig(tile_m=tile_m, tile_n=tile_n, split=split, band=band)
            if config.warpgroup_m * config.warpgroup_n > 128 * 64 and split == "n":
                # Room for a fourth stage.
                config = dataclasses.replace(config, epilogue_buffers=1)
            found.append(config.filled(out_size))
    return list(dict.fromkeys(found))
