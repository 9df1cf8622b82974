"""How attention is cut into tiles, and in which order the work is issued."""

from __future__ import annotations

import dataclasses

from pallasite.plugin import InvalidValueError

LARGEST_HEAD = 256
"""Elements of a head at most."""

HEAD_STEP = 32
"""Heads in shared memory are filled up to a multiple of this, with zeros by the copy engine."""

ROWS = 64
"""Rows of a tile that one consumer warpgroup works on."""

SHARED_BYTES = 227 * 1024
"""Shared memory that a block can use."""

BARRIER_BYTES = 256
"""Of that, for barriers."""

MULTIPROCESSORS = 132
"""Of an H100 or H200; more blocks than that would only wait."""


SPLITS = (1, 2, 4, 8)
"""Blocks that may share a tile of queries."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Configuration of the forward kernel.

    Attributes:
      warpgroups: consumer warpgroups of a block, 1 to 3; each has 64 rows of the queries.
      block_kv: keys in one step, a multiple of 16 up to 256.
      stages: blocks of keys, and of values, in flight, 2 to 8.
      ping_pong: whether the warpgroups alternate on the tensor cores, so that the softmax of one
        falls into the matmuls of another.
      persistent: whether a block goes through many tiles, so that the next tile's operands arrive
        while one is finished; otherwise every tile is a block of its own.
      cluster: blocks, 1, 2 or 4, that work on neighbouring tiles and fetch keys and values once,
        each a part for all of them, which takes load off the L2 cache.
      separate_out: whether results have shared memory of their own, so that the next queries need
        not wait for them; otherwise they take the place of the queries.
      polynomial: one of so many groups of 8 columns has its exponentials computed by a polynomial,
        which takes load off the special function units; 0 for none.
      cache_bytes: how many bytes of keys and values the tiles that run at the same time may share
        in the L2 cache; heads beyond are left for later.
      split: blocks of a cluster, 1, 2, 4 or 8, that share a tile, each with a part of the keys that
        it sees, and combine what they have. Goes with blocks that are not ``persistent``.
    """

    warpgroups: int = 2
    block_kv: int = 128
    stages: int = 2
    ping_pong: bool = True
    persistent: bool = True
    cluster: int = 1
    separate_out: bool = True
    polynomial: int = 0
    cache_bytes: int = 32 << 20
    split: int = 1

    def __post_init__(self) -> None:
        _within("warpgroups", self.warpgroups, 1, 3)
        _within("block_kv", self.block_kv, 16, 256)
        _within("stages", self.stages, 2, 8)
        _within("polynomial", self.polynomial, 0, 16)
        if self.cluster not in (1, 2, 4):
            raise InvalidValueError(
                "an attention configuration cannot have this cluster",
                got=self.cluster,
                expected="1, 2 or 4",
            )
        if self.split not in SPLITS:
            raise InvalidValueError(
                "blocks of a cluster cannot share a tile of attention",
                got=f"split={self.split}",
                expected="1, 2, 4 or 8",
            )
        if self.split > 1 and (self.cluster, self.persistent) != (1, False):
            raise InvalidValueError(
                "AttentionConfig.split does not go with the other options",
                got=self,
                expected="cluster=1, persistent=False",
            )
        if self.block_kv % 16:
            raise InvalidValueError(
                "block_kv does not fit the tensor cores",
                got=self.block_kv,
                expected="a multiple of 16",
            )

    @property
    def block_q(self) -> int:
        """Queries in one tile."""
        return ROWS * self.warpgroups

    def shared_bytes(self, head_dim: int, v_dim: int | None = None) -> int:
        """Shared memory of the kernel, barriers left out; values have ``v_dim`` elements if that is
        given, else as many as keys."""
        size = head_tile(head_dim)
        v_size = size if v_dim is None else head_tile(v_dim)
        rows = self.stages * self.block_kv
        keys = rows * size
        if self.split > 1:  # Sums in float32 take the place of the keys.
            keys = max(keys, 2 * self.block_q * v_size)
        results = self.block_q * v_size if self.separate_out else 0
        return 2 * (self.block_q * size + results + rows * v_size + keys)

    def fits(self, head_dim: int, v_dim: int | None = None) -> bool:
        """Whether shared memory suffices; see :meth:`shared_bytes`."""
        return self.shared_bytes(head_dim, v_dim) <= SHARED_BYTES - BARRIER_BYTES

    def heads_at_once(self, heads: int, group: int, kv_seq: int, head_dim: int) -> int:
        """How many heads of queries have their tiles at the same time: those whose keys and values,
        each for a ``group`` of them, have ``cache_bytes``."""
        groups = max(1, self.cache_bytes // max(1, 4 * kv_seq * head_dim))
        return min(groups * group, heads)


def head_tile(head_dim: int) -> int:
    """Columns of a head in shared memory."""
    return -(-head_dim // HEAD_STEP) * HEAD_STEP


def _within(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high:
        raise InvalidValueError(
            f"{name} of an attention configuration is out of range",
            got=value,
            expected=f"an integer from {low} to {high}",
        )
