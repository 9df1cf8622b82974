"""How long attention's forward takes, by an estimate.

Blocks begin in the order of their tiles, wherever a multiprocessor is free, and take so long for
each step; the estimate is when the last one ends, or all of them have read their keys. That is what
decides between tiles of one, two or three warpgroups, and blocks that share the keys of a tile,
where tiles are few or, as with a causal mask, of very different lengths.
"""

from __future__ import annotations

import dataclasses

from pallasite_hopper.ops.flash.config import MULTIPROCESSORS, AttentionConfig, head_tile
from pallasite_hopper.ops.flash.steps import makespan, meeting


@dataclasses.dataclass(frozen=True)
class Work:
    """What a kernel computes.

    Attributes:
      heads: of all batches.
      q_seq, kv_seq, head_dim: extents.
      left, right: keys before and after its own position that a query sees; None for all.
      group: heads of queries that share keys.
    """

    heads: int
    q_seq: int
    kv_seq: int
    head_dim: int
    left: int | None = None
    right: int | None = None
    group: int = 1


@dataclasses.dataclass(frozen=True)
class _Step:
    """Microseconds of a step, of 128 keys of it and, for each 128 elements of a head, of these."""

    step: float
    keys: float
    elements: float


@dataclasses.dataclass(frozen=True)
class _Rates:
    """Microseconds of what begins and ends a kernel, and a tile, and for each 128 elements of a
    head; and of what it takes to combine the parts of blocks that share 64 queries. Fitted to 431
    kernels of 192 shapes (128 to 31715 tokens, heads of 8 to 256 elements, 1 to 4 blocks to a
    tile), timed by CUPTI on an H200: 0.93 to 1.07 of three quarters of the times.

    Attributes:
      steps: of blocks of one, two and three warpgroups.
      window: steps that the masks at both ends of a window take the time of.
      clusters: of so many blocks that run at the same time.
      megabyte: of keys and values that all blocks together read from the L2 cache.
      unaligned: the same of heads that are no multiples of 32 bytes, so that every other row begins
        within a sector; with a causal mask, where blocks read different rows at a time, the second.
    """

    steps: tuple[_Step, ...] = (
        _Step(0.12, 0.41, 0.54),
        _Step(0.22, 0.63, 0.72),
        _Step(0.14, 0.61, 1.58),
    )
    kernel: float = 0.56
    tile: float = 1.44
    tile_elements: float = 0.47
    combine: float = 1.43
    combine_elements: float = 1.25
    window: int = 1
    clusters: tuple[tuple[int, int], ...] = ((1, MULTIPROCESSORS), (2, 64), (4, 30))
    megabyte: float = 0.128
    unaligned: tuple[float, float] = (0.181, 0.287)


_RATES = _Rates()

_MANY = 16
"""Tiles of a multiprocessor beyond which they are not gone through: the last are a small part."""


def microseconds(work: Work, config: AttentionConfig) -> float:
    """The estimate, for blocks of which up to 4 share a tile."""
    rates, heads = _RATES, head_tile(work.head_dim) / 128
    of_step = rates.steps[config.warpgroups - 1]
    keys = config.block_kv / 128
    step = of_step.step + keys * (of_step.keys + of_step.elements * heads)
    tile = rates.tile + rates.tile_elements * heads
    if work.left is not None:
        tile += rates.window * step
    if config.split > 1:
        tile += rates.combine + rates.combine_elements * heads * config.warpgroups
    places = dict(rates.clusters)[config.split]
    seen = _steps(work, config)
    times = [tile + -(-count // config.split) * step for count in seen]
    if len(times) * work.heads > _MANY * places:
        of_blocks = sum(times) * work.heads / places + max(times) / 2
    else:
        of_blocks = makespan(_ordered(times, work, config), places)
    megabytes = 4e-6 * sum(seen) * work.heads * config.block_kv * work.head_dim
    reading = rates.unaligned[work.right == 0] if work.head_dim % 16 else rates.megabyte
    return rates.kernel + max(of_blocks, tile + megabytes * reading)


def _steps(work: Work, config: AttentionConfig) -> list[int]:
    """Of each tile of a head."""
    return meeting(
        work.q_seq,
        work.kv_seq,
        config.block_q,
        config.block_kv,
        before=work.left,
        after=work.right,
        shift=work.kv_seq - work.q_seq,
    )


def _ordered(times: list[float], work: Work, config: AttentionConfig) -> list[float]:
    """Of the tiles of all heads, in the order in which they begin."""
    if work.right != 0:
        return times * work.heads
    at_once = config.heads_at_once(work.heads, work.group, work.kv_seq, work.head_dim)
    found = []
    for first in range(0, work.heads, at_once):
        width = min(at_once, work.heads - first)
        found += [time for time in reversed(times) for _ in range(width)]
    return found
