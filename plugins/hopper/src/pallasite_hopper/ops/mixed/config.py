"""The tiling of a mixed-precision GEMM."""

from __future__ import annotations

import dataclasses
import functools
import itertools

from pallasite.plugin import InvalidValueError

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block may use on Hopper."""

_RESERVE = 1024
"""For barriers."""

_TILES_M = (128, 96, 64, 48, 32, 16, 8)
"""Rows of activations of a tile where there is one along them, up to 128."""

_MANY_TILES_M = range(64, 257, 8)
"""The same for more rows, in one tile or several."""

_BEGIN, _ADD_UP = 32e3, 64e3
"""Rows times steps of k that are multiplied in the time in which a tile begins and ends, or in
which blocks add up their sums: 1.2 microseconds, or twice that, where a row of one step takes 0.038
nanoseconds. That fits the times of 28 shapes within 3 %, on an H200 (2026-11,
``benchmarks/mixed_shapes.py``)."""
_FLAT_TILES, _FLAT_STEP, _BIT = 0.4, 53.0, 3.0
"""Rows that a step of a tile of fewer rows than 128 counts as, at least: for each of its rows, for
any, and for each bit of a weight. Measured there (tiles of 72 to 104 rows)."""
_SMALLER = 0.02
"""What a tile of half of the 256 rows takes more, since it reads more; measured there as well."""
_ROUNDS_OF_PAIRS = 4
"""Rounds of tiles of 256 rows from which two blocks fetch activations together, with weights of 4
bits: 1 % less time; with 8 bits it is the same."""
_SPLIT_STAGES = 4
"""Stages at least where blocks share the steps of a tile: with 3, they take up to a fourth more."""
_FEW_M_TILES, _FLAT = 8, 160
"""Where few tiles along m have so few rows, each line along m is visited as a whole; else 16 tiles
along n are visited together. Measured there, too."""


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
    def exchanges(self) -> bool:
        """Whether each block that shares a tile adds up and writes a part of its rows."""
        return self.split_k > 1 and self.tile_m % (8 * self.split_k) == 0

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
        sums = (self.split_k - 1) * self.tile_m * self.tile_n * 4
        if self.exchanges:
            sums //= self.split_k
        return self.stages * step + staging + sums + _RESERVE

    def filled(self, weight_bits: int, out_size: int, group: int = 0) -> MixedConfig:
        """The same with as many stages as shared memory has room for, 8 at most."""
        for stages in range(8, 2, -1):
            config = dataclasses.replace(self, stages=stages)
            if config.shared_bytes(weight_bits, out_size, group) <= SHARED_MEMORY:
                return config
        return dataclasses.replace(self, stages=2)


@functools.lru_cache(maxsize=1024)
def default_config(
    m: int,
    n: int,
    k: int,
    weight_bits: int,
    out_size: int,
    multiprocessors: int = 132,
    group: int = 0,
) -> MixedConfig:
    """The configuration that is used without tuning.

    Few rows are a matter of reading the weights at the speed of memory: all multiprocessors take
    part, if need be by splitting k, and steps are deep. With many rows, weights are converted once
    for as many rows as possible.

    Args:
      m, n, k: extents of the GEMM.
      weight_bits: of one weight.
      out_size: bytes of an element of the result.
      multiprocessors: of the GPU.
      group: elements along k that share a factor, or 0.
    """
    if m <= 128:
        tile_m = next(tile for tile in reversed(_TILES_M) if tile >= m)
        config = MixedConfig(tile_m=tile_m, tile_k=128, epilogue_m=min(tile_m, 16))
        most = _parts(-(-n // 128), k, 512, multiprocessors)
        shallow = dataclasses.replace(config, tile_k=64)
        configs = [config, shallow] if most > 1 and not group else [config]
        return _with_parts(configs, most, weight_bits, out_size, group)

    def by_time(tile_m: int) -> tuple[float, int, MixedConfig]:
        tiles = -(-m // tile_m) * -(-n // 128)
        few = -(-m // tile_m) <= _FEW_M_TILES and tile_m <= _FLAT
        order = ("m", _FEW_M_TILES) if few else ("n", 16)
        config = MixedConfig(tile_m=tile_m, grid_minor=order[0], group=order[1])
        # Steps of 128 wait less often, if there is room for several.
        depths = [dataclasses.replace(config, tile_k=128), config]
        most = _parts(tiles, k, 256, multiprocessors)
        found = _with_parts(depths, most, weight_bits, out_size, group)
        rounds = -(-tiles * found.split_k // multiprocessors)
        shared = weight_bits == 4 and tile_m == 256 and n % 256 == 0 and not group
        if shared and rounds >= _ROUNDS_OF_PAIRS:
            found = dataclasses.replace(found, cluster=2)
        step = max(tile_m, _FLAT_TILES * tile_m + _FLAT_STEP + _BIT * weight_bits)
        step *= 1 + _SMALLER * (256 / tile_m - 1)
        time = rounds * (step / found.split_k + _BEGIN / k)
        time += _ADD_UP / k if found.split_k > 1 else 0
        return time, -tile_m, found

    # Tiles of fewer rows have not been measured where scales take time, too.
    listed = [tile_m for tile_m in _MANY_TILES_M if tile_m >= 128 or not group]
    return min(map(by_time, listed), key=lambda each: each[:2])[2]


def _with_parts(
    configs: list[MixedConfig], split: int, weight_bits: int, out_size: int, group: int
) -> MixedConfig:
    """The first of them that has room for several stages, with so many parts of k or fewer."""
    while True:
        for config in configs:
            found = dataclasses.replace(config, split_k=split)
            found = found.filled(weight_bits, out_size, group)
            last = config is configs[-1]
            several = found.stages >= (_SPLIT_STAGES if split > 1 and len(configs) > 1 else 3)
            if several and (last or not group or found.fits_group(group)):
                return found
        if split == 1:
            return found
        split //= 2


def _parts(tiles: int, k: int, depth: int, multiprocessors: int) -> int:
    """Blocks that may share the steps of a tile, where there are few tiles."""
    split = 1
    while tiles * split * 2 <= multiprocessors and k >= depth * split * 2 and split < 8:
        split *= 2
    return split


def mixed_configs(
    m: int, n: int, k: int, weight_bits: int = 8, out_size: int = 2, group: int = 0
) -> list[MixedConfig]:
    """Candidate configurations of a GEMM, the default first.

    Args:
      m, n, k: extents of the GEMM.
      weight_bits: of one weight: 8 or 4.
      out_size: bytes of an element of the result.
      group: elements along k that share a factor, or 0.
    """
    default = default_config(m, n, k, weight_bits, out_size, group=group)
    found = [default]
    if m <= 128:
        for tile_k, pieces in ((128, 2), (128, 4), (256, 4), (256, 2), (64, 2)):
            for split, cluster in itertools.product((1, 2, 4, 8), (1, 2)):
                if split * cluster > 8 or (cluster == 2 and default.tile_m % 16):
                    continue
                config = dataclasses.replace(
                    default, tile_k=tile_k, pieces=pieces, split_k=split, cluster=cluster
                ).filled(weight_bits, out_size, group)
                if k >= tile_k * split and config.stages >= 3:
                    found.append(config)
        found = [one for one in found if not group or one.fits_group(group)]
        return list(dict.fromkeys(found))
    for tile_m, tile_n, tile_k, epilogue_m in (
        (256, 128, 64, 32),
        (192, 128, 64, 32),
        (128, 256, 64, 16),
        (128, 128, 64, 32),
        (128, 128, 128, 32),
        (256, 128, 128, 16),
    ):
        for order, minor, cluster in itertools.product((4, 8, 16), ("n", "m"), (1, 2)):
            config = MixedConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                tile_k=tile_k,
                cluster=cluster,
                group=order,
                grid_minor=minor,
                epilogue_m=epilogue_m,
            )
            found.append(config.filled(weight_bits, out_size, group))
    found = [one for one in found if not group or one.fits_group(group)]
    return list(dict.fromkeys(found))
