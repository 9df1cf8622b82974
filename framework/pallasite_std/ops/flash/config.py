"""How portable attention is cut into tiles."""

from __future__ import annotations

import dataclasses
import math

from pallasite.plugin import InvalidValueError

LARGEST_HEAD = 256
"""Elements of a head; larger ones do not fit the registers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """A way of computing attention with warp-level MMA.

    Attributes:
      block_q: queries of a block: 32 or 64.
      block_kv: keys of one step, a multiple of 16.
      stages: steps that are in flight.
    """

    block_q: int = 64
    block_kv: int = 64
    stages: int = 2

    def __post_init__(self) -> None:
        if self.block_q not in (32, 64):
            self._refuse("block_q", "32 or 64")
        if self.block_kv <= 0 or self.block_kv % 16:
            self._refuse("block_kv", "a multiple of 16")
        if self.stages < 2:
            self._refuse("stages", "at least 2")

    def _refuse(self, name: str, expected: str) -> None:
        raise InvalidValueError(
            f"AttentionConfig.{name} does not fit", got=getattr(self, name), expected=expected
        )

    def shared_bytes(self, head_dim: int, size: int) -> int:
        """Shared memory of the forward kernel, with elements of ``size`` bytes."""
        # Weights of 32 bits become an operand of the second product by way of shared memory.
        weights = self.block_q * self.block_kv * 4 if size == 4 else 0
        tiles = (self.block_q + 2 * self.stages * self.block_kv) * head_dim * size
        return tiles + weights + 1024


def default_config(
    q_seq: int,
    head_dim: int,
    size: int,
    shared_memory: int = 99 << 10,
    mask_block: tuple[int, int] | None = None,
) -> AttentionConfig:
    """The configuration that is used without tuning.

    Args:
      q_seq: queries of a sequence.
      head_dim: elements of a head.
      size: bytes of an element.
      shared_memory: bytes that a block may use.
      mask_block: queries and keys of a block of the block mask, if there is one.
    """
    keys = 64 if head_dim * size <= 256 else 32 if head_dim * size <= 512 else 16
    queries = 32 if q_seq <= 32 else 64
    if mask_block is not None:
        # Blocks are multiples of 32.
        queries = min(queries, math.gcd(mask_block[0], 64))
        keys = math.gcd(mask_block[1], keys)
    wanted = AttentionConfig(block_q=queries, block_kv=keys)
    smaller = [
        AttentionConfig(block_q=block_q, block_kv=block_kv)
        for block_q, block_kv in ((queries, keys), (queries, 16), (32, keys), (32, 16))
    ]
    fitting = (one for one in smaller if one.shared_bytes(head_dim, size) <= shared_memory)
    return next(fitting, wanted)


def attention_configs(
    q_seq: int,
    head_dim: int,
    size: int = 2,
    shared_memory: int = 99 << 10,
    mask_block: tuple[int, int] | None = None,
) -> list[AttentionConfig]:
    """Candidate configurations, the default one first.

    Args:
      q_seq: queries of a sequence.
      head_dim: elements of a head.
      size: bytes of an element.
      shared_memory: bytes that a block may use.
      mask_block: queries and keys of a block of the block mask, if there is one.
    """
    found = [default_config(q_seq, head_dim, size, shared_memory, mask_block)]
    queries, keys = mask_block or (64, 128)
    for block_q in (32, 64):
        for block_kv in (16, 32, 64, 128):
            if queries % block_q or keys % block_kv:
                continue
            for stages in (2, 3):
                config = AttentionConfig(block_q=block_q, block_kv=block_kv, stages=stages)
                if config.shared_bytes(head_dim, size) <= shared_memory:
                    found.append(config)
    return list(dict.fromkeys(found))
