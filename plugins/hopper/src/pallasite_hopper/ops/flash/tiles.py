"""Which tiles of the queries a block works on, and which keys each of them sees."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite_hopper.ops.flash.config import AttentionConfig, head_tile
from pallasite_hopper.ops.flash.terms import MASK_STEP, Terms, Visits


@dataclasses.dataclass(frozen=True)
class Problem:
    """What attention is computed of.

    Attributes:
      batch, q_seq, kv_seq, q_heads, kv_heads, head_dim: extents.
      dtype: of queries, keys and, unless it has 8 bits, values and results.
      causal: whether later keys are hidden.
      scale: factor of the scores.
      soft_cap: bound of the scores, or None.
      q_lengths, kv_lengths: whether batches have lengths of their own.
      left, right: keys before and after a query's own position that it sees, None for all; with
        ``causal`` none after it.
      save_residuals: whether log-sum-exp, or its parts, are returned.
      terms: what else decides which keys are seen and what is added to scores.
      mask_block: queries and keys of a block of the mask, if there is one.
      dropout: the fraction of the weights that are dropped.
      v_dim: elements of a value, None for as many as of a key.
      parts: how many batches of the result have a part each of the keys that a tile sees, one after
        the other; ``batch`` counts all of them.
      pairs: whether an operand, (batch, 2), says which batch of the queries and which one of the
        keys and values each batch of the result is made of.
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
    left: int | None = None
    right: int | None = None
    terms: Terms = Terms()
    mask_block: tuple[int, int] = (MASK_STEP, MASK_STEP)
    dropout: float = 0.0
    v_dim: int | None = None
    parts: int = 1
    pairs: bool = False

    @property
    def narrow(self) -> bool:
        """Whether queries and keys are 8-bit floats."""
        return bool(np.dtype(self.dtype).itemsize == 1)

    @property
    def out_dtype(self) -> Any:
        """Of values, weights and results."""
        return jnp.bfloat16 if self.narrow else self.dtype

    @property
    def two_numbers(self) -> bool:
        """Whether the parts of log-sum-exp are kept for gradients: one number of float32 cannot
        hold them where a bias is large."""
        return self.terms.biased

    @property
    def ahead(self) -> int | None:
        """Keys after its own position that a query sees; None for all."""
        return 0 if self.causal else self.right

    @property
    def head_tile(self) -> int:
        """Columns of a head in shared memory and registers."""
        return head_tile(self.head_dim)

    @property
    def value_dim(self) -> int:
        """Elements of a value, and of a result."""
        return self.head_dim if self.v_dim is None else self.v_dim

    @property
    def value_tile(self) -> int:
        """Columns of a value in shared memory and registers."""
        return head_tile(self.value_dim)

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
      first: the first of them.
      number: of the tile within its head.
      visits: the list of blocks of which ``first`` is a place, if there is one.
    """

    batch: Any
    head: Any
    kv_head: Any
    start: Any
    q_length: Any
    kv_length: Any
    blocks: Any
    first: Any = 0
    number: Any = 0
    visits: Visits | None = None

    @property
    def last(self) -> Any:
        """The last block of keys."""
        return self.blocks - 1 if isinstance(self.first, int) else self.first + self.blocks - 1

    def block(self, place: Any) -> Any:
        """The block of keys at a place from ``first`` to ``last``."""
        return place if self.visits is None else self.visits.tile(place)

    def place(self, block: Any) -> Any:
        """The place of a block, or of the next one that there is."""
        return block if self.visits is None else self.visits.place(block)


_OVERHEAD = 1.0
"""What a tile costs besides its blocks of keys, in such blocks."""


class Tiles:
    """The order of the tiles.

    A causal tile takes the longer the later its queries are. The longest come first, so that the
    short ones fill up what is left at the end; each goes to the cluster that will be free first,
    which is worked out beforehand. Heads are worked on in groups whose keys and values fit the L2
    cache together. The blocks of a cluster take neighbouring tiles and the same keys.

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
        sizes = problem.heads, problem.group, problem.kv_seq, problem.head_dim
        self.heads_at_once = config.heads_at_once(*sizes) if problem.causal else 1

    def table(self) -> np.ndarray[Any, Any] | None:
        """For each cluster (column) how many turns it has, then the numbers of their tiles.

        None where tiles are assigned round-robin.
        """
        if not self.problem.causal or self.clusters == self.count:
            return None
        costs = self._costs()
        free = [(0.0, cluster) for cluster in range(self.clusters)]
        given: list[list[int]] = [[] for _ in free]
        for number, cost in enumerate(costs):
            when, cluster = free[0]
            given[cluster].append(number)
            heapq.heapreplace(free, (when + cost, cluster))
        table = np.zeros((1 + max(map(len, given)), self.clusters), np.int32)
        for cluster, numbers in enumerate(given):
            table[0, cluster] = len(numbers)
            table[1 : 1 + len(numbers), cluster] = numbers
        return table

    def _costs(self) -> list[float]:
        """What each tile costs, in blocks of keys."""
        problem, config = self.problem, self.config
        costs = []
        for first in range(0, problem.heads, self.heads_at_once):
            width = min(self.heads_at_once, problem.heads - first)
            for position in reversed(range(self.per_head)):
                seen = (position + 1) * self.rows + problem.kv_seq - problem.q_seq
                hidden = 0
                if problem.left is not None:
                    hidden = max(0, seen - self.rows - problem.left) // config.block_kv
                blocks = max(1, -(-min(problem.kv_seq, seen) // config.block_kv) - hidden)
                costs += [blocks + _OVERHEAD] * width
        return costs

    def each(
        self,
        body: Callable[[Tile, Any], Any],
        carry: Any,
        lengths: Any,
        table: Any = None,
        given: dict[str, Any] | None = None,
    ) -> Any:
        """``carry = body(tile, carry)`` for each of this block's tiles.

        Args:
          body: what to do with a tile.
          carry: what is carried from tile to tile.
          lengths: references to the lengths of queries and keys, or None.
          table: a reference to :meth:`table`, if there is one.
          given: references to the arrays of the problem's terms, by name.
        """
        given = given or {}
        cluster = lax.axis_index("clusters")
        if self.clusters == self.count:
            return body(self._tile(cluster, lengths, given), carry)
        if table is None:
            turns, rest = divmod(self.count, self.clusters)
            total = turns + (cluster < rest).astype(jnp.int32) if rest else turns

            def step(turn: Any, carry: Any) -> Any:
                return body(self._tile(turn * self.clusters + cluster, lengths, given), carry)

            return lax.fori_loop(0, total, step, carry)

        def look_up(turn: Any, carry: Any) -> Any:
            number, carry = carry
            # The next number is read early, to hide its latency.
            following = table[lax.min(turn + 2, table.shape[0] - 1), cluster]
            return following, body(self._tile(number, lengths, given), carry)

        return lax.fori_loop(0, table[0, cluster], look_up, (table[1, cluster], carry))[1]

    def _tile(self, number: Any, lengths: Any, given: dict[str, Any]) -> Tile:
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
        q_length: Any = problem.q_seq
        kv_length: Any = problem.kv_seq
        if q_lengths is not None:
            q_length = lax.min(q_lengths[batch], q_length)
        if kv_lengths is not None:
            kv_length = lax.min(kv_lengths[batch], kv_length)
        seen = kv_length
        if problem.ahead is not None:
            until = first + self.rows + (kv_length - q_length)
            seen = lax.min(jnp.int32(seen), until + problem.ahead if problem.ahead else until)
        blocks = seen + (config.block_kv - 1)
        hidden: Any = 0
        if problem.left is not None:
            since = first + (kv_length - q_length) - problem.left
            hidden = lax.div(lax.max(0, since), config.block_kv)
            blocks = jnp.int32(blocks)
        blocks = (
            max(1, blocks // config.block_kv)
            if isinstance(blocks, int)
            else lax.max(1, lax.div(blocks, config.block_kv) - hidden)
        )
        if problem.terms:
            # What lies beyond the keys has no segments and no bias.
            hidden = lax.min(jnp.int32(hidden), -(-problem.kv_seq // config.block_kv) - 1)
        if problem.terms.segmented:
            begin, end = self._segments(batch, first, position, given.get("spans"))
            until = lax.min(end, hidden + blocks)
            hidden = lax.max(begin, hidden)
            blocks = lax.max(1, until - hidden)
        visits = None
        if problem.terms.has("visits"):
            entry = (*problem.terms.entry("visits", batch, head), position)
            visits = Visits(given["visits"].at[entry])
            begin, end = visits.place(hidden), visits.place(hidden + blocks)
            # A tile that sees no block has one of which no key exists.
            kv_length = jnp.where(begin < end, kv_length, 0)
            hidden, blocks = begin, lax.max(1, end - begin)
        parts = config.split * problem.parts
        if parts > 1:
            # A part without blocks has one of which no key exists.
            part = lax.rem(jnp.int32(batch), jnp.int32(problem.parts))
            if config.split > 1:
                part = part * config.split + lax.axis_index("cluster")
            before, end = (
                lax.div(jnp.int32(blocks) * one, jnp.int32(parts)) for one in (part, part + 1)
            )
            kv_length = jnp.where(before < end, jnp.int32(kv_length), 0)
            hidden, blocks = hidden + before, lax.max(1, end - before)
        return Tile(
            batch=batch,
            head=head,
            kv_head=lax.div(head, problem.group),
            start=start,
            q_length=q_length,
            kv_length=kv_length,
            blocks=blocks,
            first=hidden,
            number=position,
            visits=visits,
        )

    def _segments(self, batch: Any, start: Any, number: Any, spans: Any) -> tuple[Any, Any]:
        """Blocks of keys [begin, end) that may have those that a cluster's queries see."""
        period, size = self.problem.terms.period, self.config.block_kv
        if period is None and spans is None:
            return jnp.int32(0), jnp.int32(-(-self.problem.kv_seq // size))
        if period is None:
            return spans[batch, number, 0], spans[batch, number, 1]
        begin = lax.div(start, period) * period
        end = (lax.div(start + (self.rows - 1), period) + 1) * period
        return lax.div(begin, size), lax.div(end + (size - 1), size)
