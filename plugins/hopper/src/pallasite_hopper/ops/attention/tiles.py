"""Which tiles of the queries a block works on, and which keys each of them sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasite_hopper.ops.attention.config import AttentionConfig


@dataclasses.dataclass(frozen=True)
class Problem:
    """What attention is computed of.

    Attributes:
      batch, q_seq, kv_seq, q_heads, kv_heads, head_dim: extents.
      dtype: of queries, keys, values and results.
      causal: whether later keys are hidden.
      scale: factor of the scores.
      soft_cap: bound of the scores, or None.
      q_lengths, kv_lengths: whether batches have lengths of their own.
      save_residuals: whether log-sum-exp is returned.
    """

    batch: int
    q_seq: int
    kv_seq: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: Any
    causal: bool
    scale: float
    soft_cap: float | None = None
    q_lengths: bool = False
    kv_lengths: bool = False
    save_residuals: bool = False

    @property
    def heads(self) -> int:
        """Heads of all batches."""
        return self.batch * self.q_heads

    @property
    def group(self) -> int:
        """Query heads that share the keys and values of one head."""
        return self.q_heads // self.kv_heads


@dataclasses.dataclass(frozen=True)
class Tile:
    """One tile of queries; values of the kernel.

    Attributes:
      batch, head, kv_head: indices.
      start: the first query.
      q_length, kv_length: how many queries and keys there are.
      blocks: blocks of keys to go through, at least 1.
    """

    batch: Any
    head: Any
    kv_head: Any
    start: Any
    q_length: Any
    kv_length: Any
    blocks: Any


class Tiles:
    """The order of the tiles.

    A causal tile takes the longer the later its queries are. The longest come first, so that the
    short ones fill up what is left at the end. Blocks take them forwards and backwards in turn,
    which gives all about the same amount. Heads are worked on in groups whose keys and values fit
    the L2 cache together. The blocks of a cluster take neighbouring tiles and the same keys.

    Attributes:
      rows: queries that a cluster works on at a time.
      per_head: how many times that makes for a head.
      count: for all heads of all batches.
      clusters: clusters that are launched.
      heads_at_once: heads in a group.
    """

    def __init__(self, problem: Problem, config: AttentionConfig, multiprocessors: int):
        self.problem, self.config = problem, config
        self.rows = config.block_q * config.cluster
        self.per_head = -(-problem.q_seq // self.rows)
        self.count = self.per_head * problem.heads
        most = multiprocessors // config.cluster
        self.clusters = min(self.count, most) if config.persistent else self.count
        shared = 4 * problem.kv_seq * problem.head_dim
        groups = max(1, config.cache_bytes // shared) * problem.group
        self.heads_at_once = min(groups, problem.heads) if problem.causal else 1

    def each(self, body: Callable[[Tile, Any], Any], carry: Any, lengths: Any) -> Any:
        """``carry = body(tile, carry)`` for each of this block's tiles."""
        block = lax.axis_index("clusters")
        if self.clusters == self.count:
            return body(self._tile(block, lengths), carry)

        def one(turn: Any, carry: Any) -> Any:
            number = turn * self.clusters + block
            if self.problem.causal:
                back = turn * self.clusters + (self.clusters - 1 - block)
                number = lax.select(lax.rem(turn, 2) == 1, back, number)
            return body(self._tile(number, lengths), carry)

        turns, rest = divmod(self.count, self.clusters)
        total: Any = turns
        if rest:
            position = self.clusters - 1 - block if self.problem.causal and turns % 2 else block
            total = turns + (position < rest).astype(jnp.int32)
        return lax.fori_loop(0, total, one, carry)

    def _tile(self, number: Any, lengths: Any) -> Tile:
        problem, config = self.problem, self.config
        at_once = self.heads_at_once
        section = lax.div(number, at_once * self.per_head)
        inside = lax.rem(number, at_once * self.per_head)
        width: Any = at_once
        if problem.heads % at_once:
            width = lax.min(at_once, problem.heads - section * at_once)
        position = lax.div(inside, width)
        index = section * at_once + lax.rem(inside, width)
        if problem.causal:
            position = self.per_head - 1 - position
        batch, head = lax.div(index, problem.q_heads), lax.rem(index, problem.q_heads)
        first = position * self.rows
        start = first
        if config.cluster > 1:
            start = first + lax.axis_index("cluster") * config.block_q
        q_lengths, kv_lengths = lengths
        q_length = problem.q_seq if q_lengths is None else q_lengths[batch]
        kv_length = problem.kv_seq if kv_lengths is None else kv_lengths[batch]
        seen = kv_length
        if problem.causal:
            seen = lax.min(jnp.int32(seen), first + self.rows + (kv_length - q_length))
        blocks = seen + (config.block_kv - 1)
        blocks = (
            max(1, blocks // config.block_kv)
            if isinstance(blocks, int)
            else lax.max(1, lax.div(blocks, config.block_kv))
        )
        return Tile(
            batch=batch,
            head=head,
            kv_head=lax.div(head, problem.group),
            start=start,
            q_length=q_length,
            kv_length=kv_length,
            blocks=blocks,
        )
