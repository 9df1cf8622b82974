"""The tiling of a GEMM."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallasite.plugin import InvalidValueError

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a block may use on Hopper."""

_RESERVE = 1024
"""For barriers."""

_SYSTEM = 1024
"""Of each block, which CUDA uses."""

_FEW_COLUMNS = 64

MAXIMUM_STAGES = 12
"""More steps in flight than this hide nothing more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulConfig:
    """The configuration of a GEMM kernel.

    Attributes:
      tile_m, tile_n: extents of the tile of the result that a block computes at a time. Its compute
        warpgroups share it.
      warpgroups: consumer warpgroups of a block, 1 or 2.
      alternate: whether the two warpgroups take turns: each computes a tile of its own, and writes
        it while the other one multiplies. Not together with ``split_k``, ``parts``, ``last_parts``.
      tile_k: depth of one step, in elements: a multiple of what fills the swizzle (128 bytes).
      stages: steps that are in flight.
      in_flight: steps, 1 or 0, whose MMA still runs while a warpgroup waits for the next one's
        operands: with 0 a stage is filled anew as soon as it was multiplied, which pays where
        operands come later than they are multiplied.
      split: whether two warpgroups halve the rows (``"m"``) or the columns (``"n"``).
      cluster: blocks of a cluster: 1, 2 or 4. They compute tiles side by side along
        ``cluster_along``, and what all of them read is fetched once.
      cluster_along: ``"m"`` or ``"n"``.
      cluster_across: blocks of a cluster along the other direction, 1, 2 or 4, at most 8 in all:
        then each operand is fetched once by those that read it. Not together with ``split_k`` and
        ``last_parts``.
      group: so many tiles along ``grid_minor`` are visited before going on along the other
        direction, so that what neighbours read stays in the L2 cache.
      grid_minor: ``"m"`` or ``"n"``.
      epilogue_n: columns that are written at a time, a divisor of a warpgroup's; with ``swap``, and
        without ``split_k``, any multiple of 8.
      epilogue_buffers: buffers for them, for each warpgroup.
      epilogue_in_stages: whether the columns are written where the stages were; each time has a
        buffer of its own, so none waits for another. For blocks that have one tile each; not
        together with ``alternate``, ``last_parts`` and ``rest``.
      swap: computes the transposed matmul b.T @ a.T (to which all other attributes then refer), so
        that a result of few rows does not waste the 64 rows of the tensor cores.
      split_k: blocks of a cluster that share the steps of one tile and add up their sums, 1 to 8,
        so that few tiles keep all multiprocessors busy.
      parts: parts of the K extent that are tiles of their own, whose sums a second kernel adds up;
        for still fewer tiles. Not together with ``split_k``.
      last_parts: blocks of a cluster, 1 or 2, that share the steps of one tile each of those that
        whole rounds of tiles leave: so fewer multiprocessors wait for the last of them. They need
        be no more than clusters, else nothing is shared. Not together with ``cluster``,
        ``split_k``, ``parts`` and ``rest``.
      resident: blocks that a multiprocessor has room for, 1 to 3. With several, each block has one
        tile, and multiprocessors get the next tile when they have done one, rather than as many
        as any other. Not together with ``alternate``, ``cluster``, ``split_k`` and ``last_parts``.
      evict_first: whether the L2 cache gives up first what nobody reads again: the left operand if
        all tiles have the same columns, the right one if they have the same rows.
      rest: the configuration of a second kernel, which computes what this one leaves: so whole
        rounds of tiles keep all multiprocessors busy, and what is left has tiles that suit it.
      rest_from: the first row or column of the result that the second kernel computes, a multiple
        of the tiles of this one.
      rest_along: whether it computes rows (``"m"``) or columns (``"n"``).
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    in_flight: int = 1
    split: str = "n"
    cluster: int = 1
    cluster_along: str = "m"
    cluster_across: int = 1
    group: int = 8
    grid_minor: str = "m"
    epilogue_n: int = 64
    epilogue_buffers: int = 1
    epilogue_in_stages: bool = False
    warpgroups: int = 2
    alternate: bool = False
    swap: bool = False
    split_k: int = 1
    parts: int = 1
    last_parts: int = 1
    resident: int = 1
    evict_first: bool = False
    rest: MatmulConfig | None = None
    rest_from: int = 0
    rest_along: str = "m"

    def __post_init__(self) -> None:
        for name in ("split", "cluster_along", "grid_minor", "rest_along"):
            if getattr(self, name) not in ("m", "n"):
                raise InvalidValueError(
                    f"MatmulConfig.{name} is neither",
                    got=getattr(self, name),
                    expected="'m' or 'n'",
                )
        for name, accepted in (
            ("cluster", (1, 2, 4)),
            ("cluster_across", (1, 2, 4)),
            ("warpgroups", (1, 2)),
            ("last_parts", (1, 2)),
            ("in_flight", (0, 1)),
            ("resident", (1, 2, 3)),
            ("split_k", tuple(range(1, 9))),
        ):
            if getattr(self, name) not in accepted:
                raise InvalidValueError(
                    f"MatmulConfig.{name} is none of its values",
                    got=str(getattr(self, name)),
                    expected=" or ".join(map(str, accepted)),
                )
        if self.parts < 1 or (self.parts > 1 and self.split_k > 1):
            raise InvalidValueError(
                "MatmulConfig.parts does not go together with split_k",
                got=f"parts={self.parts}, split_k={self.split_k}",
                expected="parts >= 1, and one of both to be 1",
            )
        if self.cluster_across > 1 and (self.split_k > 1 or not 2 < self.cluster_blocks <= 8):
            raise InvalidValueError(
                "MatmulConfig.cluster_across does not go together with cluster or split_k",
                got=f"cluster_across={self.cluster_across}, cluster={self.cluster}, "
                f"split_k={self.split_k}",
                expected="cluster > 1, at most 8 blocks, and split_k = 1",
            )
        others = (self.cluster_blocks, self.split_k, self.parts)
        if self.last_parts > 1 and (max(others) > 1 or self.rest is not None):
            raise InvalidValueError(
                "MatmulConfig.last_parts does not go together with other divisions",
                got=f"cluster={self.cluster}, split_k={self.split_k}, parts={self.parts}, "
                + ("a rest" if self.rest is not None else "no rest"),
                expected="cluster = split_k = parts = 1, no rest",
            )
        if self.alternate and (self.warpgroups == 1 or max(*others[1:], self.last_parts) > 1):
            raise InvalidValueError(
                "MatmulConfig.alternate does not go together with parts of k",
                got=f"warpgroups={self.warpgroups}, split_k={self.split_k}, parts={self.parts}, "
                f"last_parts={self.last_parts}",
                expected="two warpgroups, and split_k = parts = last_parts = 1",
            )
        several = max(self.cluster_blocks, self.split_k, self.last_parts)
        if self.resident > 1 and (self.alternate or several > 1):
            raise InvalidValueError(
                "MatmulConfig.resident does not go together with blocks that share a tile",
                got=f"resident={self.resident}, alternate={self.alternate}, "
                f"cluster={self.cluster}, split_k={self.split_k}, last_parts={self.last_parts}",
                expected="alternate = False, and cluster = split_k = last_parts = 1",
            )
        if self.epilogue_in_stages and (
            self.alternate or self.last_parts > 1 or self.rest is not None
        ):
            raise InvalidValueError(
                "MatmulConfig.epilogue_in_stages is for blocks that have one tile each",
                got=f"alternate={self.alternate}, last_parts={self.last_parts}, "
                + ("a rest" if self.rest is not None else "no rest"),
                expected="alternate = False, last_parts = 1, no rest",
            )
        if self.rest is not None:
            self._check_rest(self.rest)
        if self.warpgroup_m % 64 or self.warpgroup_n % 8:
            raise InvalidValueError(
                "a warpgroup's part of the tile does not fit the tensor cores",
                got=f"{self.warpgroup_m} x {self.warpgroup_n}",
                expected="rows in multiples of 64, columns in multiples of 8",
            )
        if not self._divides():
            raise InvalidValueError(
                "MatmulConfig.epilogue_n does not divide the columns that a warpgroup writes",
                got=f"{self.epilogue_n} of {self.warpgroup_n} / {self.split_k}",
            )

    def changed(self, **fields: Any) -> MatmulConfig:
        """As ``dataclasses.replace``, in a tenth of the time: for fields that are known to go
        together, since nothing is checked."""
        result = object.__new__(MatmulConfig)
        result.__dict__.update(self.__dict__, **fields)
        return result

    def _check_rest(self, rest: MatmulConfig) -> None:
        step = self.step_m if self.rest_along == "m" else self.step_n
        plain = not self.swap and self.parts == rest.parts == 1 and rest.rest is None
        if not plain or self.rest_from <= 0 or self.rest_from % step:
            raise InvalidValueError(
                "MatmulConfig.rest does not fit",
                got=f"from {self.rest_from} along {self.rest_along}, tiles of {step}",
                expected="whole tiles before, no parts, no swap of the first, one rest",
            )

    def _divides(self) -> bool:
        """Whether columns can be written ``epilogue_n`` at a time."""
        if self.swap and self.split_k == 1:  # They are rows of the result: any number of them.
            return self.epilogue_n > 0 and self.epilogue_n % 8 == 0
        return self.warpgroup_n % (self.epilogue_n * self.split_k) == 0

    @property
    def cluster_blocks(self) -> int:
        """Blocks that share operands."""
        return self.cluster * self.cluster_across

    @property
    def cluster_m(self) -> int:
        """Of them, those along m."""
        return self.cluster if self.cluster_along == "m" else self.cluster_across

    @property
    def cluster_n(self) -> int:
        """Those along n."""
        return self.cluster if self.cluster_along == "n" else self.cluster_across

    @property
    def step_m(self) -> int:
        """Rows that a cluster computes at a time."""
        return self.tile_m * self.cluster_m

    @property
    def step_n(self) -> int:
        """Columns that a cluster computes at a time."""
        return self.tile_n * self.cluster_n

    @property
    def warpgroup_m(self) -> int:
        """Rows of a warpgroup's part of a tile."""
        halved = self.split == "m" and not self.alternate
        return self.tile_m // self.warpgroups if halved else self.tile_m

    @property
    def warpgroup_n(self) -> int:
        """Columns of a warpgroup's part of a tile."""
        halved = self.split == "n" and not self.alternate
        return self.tile_n // self.warpgroups if halved else self.tile_n

    def stage_bytes(self, size: int) -> int:
        """Shared memory of a stage; see :meth:`shared_bytes`."""
        return (self.tile_m + self.tile_n) * self.tile_k * size

    @property
    def exchanges_last(self) -> bool:
        """Whether each block that shares a last tile writes a part of its columns, as with
        ``split_k``; else one of them gets all sums, since they are few."""
        width, rest = divmod(self.warpgroup_n, self.last_parts)
        fits = width % (8 if self.swap else self.epilogue_n) == 0 and not rest
        return self.last_parts > 1 and self.warpgroup_n > _FEW_COLUMNS and fits

    @property
    def sums_bytes(self) -> int:
        """Shared memory for the sums that a block gets from others."""
        sums = self.warpgroups * self.warpgroup_m * self.warpgroup_n * 4
        last = sums * (self.last_parts - 1)
        if self.exchanges_last:
            last //= self.last_parts
        return sums * (self.split_k - 1) // self.split_k + last

    @property
    def staging_buffers(self) -> int:
        """Buffers for columns that are written, for each warpgroup."""
        if not self.epilogue_in_stages:
            return self.epilogue_buffers
        return -(-self.warpgroup_n // (self.epilogue_n * self.split_k))

    def staging_bytes(self, out_size: int) -> int:
        """Shared memory that neither stages nor sums take; see :meth:`shared_bytes`."""
        return _RESERVE + (0 if self.epilogue_in_stages else self._columns_bytes(out_size))

    def _columns_bytes(self, out_size: int) -> int:
        written = out_size if self.parts == 1 else 4
        columns = self.epilogue_n * self.staging_buffers
        return self.warpgroups * self.warpgroup_m * columns * written

    def sums_in_stages(self, size: int, out_size: int) -> bool:
        """Whether the sums of others come where the stages were, for want of shared memory.

        Then blocks wait for each other before they send them; see :meth:`shared_bytes`.
        """
        apart = self.stages * self.stage_bytes(size) + self.sums_bytes
        return self.sums_bytes > 0 and apart + self.staging_bytes(out_size) > SHARED_MEMORY

    def shared_bytes(self, size: int, out_size: int) -> int:
        """Shared memory that the kernel takes.

        Args:
          size: bytes of an element of the operands.
          out_size: of the result.
        """
        stages, sums = self.stages * self.stage_bytes(size), self.sums_bytes
        if self.epilogue_in_stages:
            stages = max(stages, self._columns_bytes(out_size))
        both = max(stages, sums) if self.sums_in_stages(size, out_size) else stages + sums
        return both + self.staging_bytes(out_size)

    def fits(self, size: int, out_size: int) -> bool:
        """Whether shared memory suffices; see :meth:`shared_bytes`."""
        if self.epilogue_in_stages and self.sums_in_stages(size, out_size):
            return False
        return self.shared_bytes(size, out_size) <= self.shared_limit

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory that a block may use, so that all of them have room."""
        return (SHARED_MEMORY + _SYSTEM) // self.resident - _SYSTEM
