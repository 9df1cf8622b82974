"""What attention is computed of, and what a tile of queries sees of the keys."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite_std.ops.flash import dropout
from pallasite_std.ops.flash.arguments import AttentionCall
from pallasite_std.ops.softmax import LOG2_E, broadcast_rows, cap


@dataclasses.dataclass(frozen=True)
class Problem:
    """What attention is computed of.

    Attributes:
      batch, q_seq, kv_seq, q_heads, kv_heads, head_dim, v_dim: extents.
      dtype: of queries, keys, values and results.
      scale: factor of the scores.
      soft_cap: bound of the scores, or None.
      left, right: keys before and after a query's own position that it sees; None for all.
      dropout: the fraction of the weights that are dropped.
      mask_block: queries and keys of a block of the block mask.
      period: if given, queries and keys are sequences of so many, one after the other, and queries
        see keys of their own sequence only; windows are of the whole.
      operands: which arrays the kernels get beside queries, keys and values, and their order.
      of_batch, of_head: which of these have an entry for each batch, for each head.
    """

    batch: int
    q_seq: int
    kv_seq: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: Any
    scale: float
    soft_cap: float | None = None
    left: int | None = None
    right: int | None = None
    dropout: float = 0.0
    mask_block: tuple[int, int] = (128, 128)
    period: int | None = None
    operands: tuple[str, ...] = ()
    of_batch: frozenset[str] = frozenset()
    of_head: frozenset[str] = frozenset()

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, call: AttentionCall, period: int | None = None) -> Self:
        """What is computed of queries, keys and values, without further operands."""
        batch, q_seq, q_heads, head_dim = q.shape
        left, right = call.window
        return cls(
            batch=batch,
            q_seq=q_seq,
            kv_seq=k.shape[1],
            q_heads=q_heads,
            kv_heads=k.shape[2],
            head_dim=head_dim,
            v_dim=v.shape[3],
            dtype=np.dtype(q.dtype),
            scale=call.scale,
            soft_cap=call.soft_cap,
            left=left,
            right=right,
            dropout=call.dropout,
            mask_block=call.mask_block,
            period=period,
        )

    @property
    def group(self) -> int:
        """Query heads that share the keys and values of one head."""
        return self.q_heads // self.kv_heads

    def has(self, operand: str) -> bool:
        """Whether the kernels get such an array."""
        return operand in self.operands

    @property
    def biased(self) -> bool:
        """Whether something is added to the scores."""
        return self.has("bias") or self.has("slopes")

    @property
    def factor(self) -> float:
        """Of the scores that :meth:`View.scores` returns, in exponents of 2."""
        return LOG2_E * (self.scale if self.soft_cap is None and not self.biased else 1.0)

    def capped(self, products: Any) -> Any:
        """Scores without bias from products of queries and keys, without their scale if
        :attr:`factor` has it."""
        if self.soft_cap is not None:
            return cap(products, self.scale, self.soft_cap)
        return products * self.scale if self.biased else products

    def slope(self, capped: Any) -> Any:
        """The derivative of the scores by the products."""
        if self.soft_cap is None:
            return self.scale
        ratio = capped * (1 / self.soft_cap)
        return (1 - ratio * ratio) * self.scale


@dataclasses.dataclass(frozen=True)
class View:
    """A head of a batch, inside a kernel.

    Attributes:
      problem: what is computed.
      refs: the arrays of ``problem.operands``, by name.
      batch, head: the indices.
      q_length, kv_length: how many queries and keys there are.
    """

    problem: Problem
    refs: dict[str, Any]
    batch: Any
    head: Any
    q_length: Any
    kv_length: Any

    @classmethod
    def of(cls, problem: Problem, refs: tuple[Any, ...], batch: Any, head: Any) -> View:
        """The view; ``refs`` are in the order of ``problem.operands``."""
        named = dict(zip(problem.operands, refs, strict=True))
        lengths = [
            lax.min(named[name][batch], most) if name in named else jnp.int32(most)
            for name, most in (("q_lengths", problem.q_seq), ("kv_lengths", problem.kv_seq))
        ]
        return cls(problem, named, batch, head, *lengths)

    def with_head(self, head: Any) -> View:
        """The same for another head of the queries."""
        return dataclasses.replace(self, head=head)

    def entry(self, name: str, head: Any = None) -> tuple[Any, Any]:
        """Indices by batch and head into an array that may have one entry for all."""
        head = self.head if head is None else head
        batch = self.batch if name in self.problem.of_batch else 0
        return batch, head if name in self.problem.of_head else 0

    @property
    def offset(self) -> Any:
        """The position among the keys of the first query: the last query has the last key's."""
        return self.kv_length - self.q_length

    # What is seen ---------------------------------------------------------------------------------

    def keys_seen(self, query: Any, queries: int) -> tuple[Any, Any]:
        """Keys [begin, end) outside of which a tile of queries sees none."""
        begin, end = jnp.int32(0), self.kv_length
        if self.problem.left is not None:
            begin = lax.max(query + self.offset - self.problem.left, 0)
        if self.problem.right is not None:
            end = lax.min(end, query + queries + self.offset + self.problem.right)
        if self.problem.period is not None:
            begin, end = self._of_sequences(query, queries, begin, end)
        return begin, jnp.where(query < self.q_length, lax.max(end, 0), 0)

    def queries_seeing(self, key: Any, keys: int) -> tuple[Any, Any]:
        """Queries [begin, end) outside of which none sees a tile of keys."""
        begin, end = jnp.int32(0), self.q_length
        if self.problem.right is not None:
            begin = lax.max(key - self.offset - self.problem.right, 0)
        if self.problem.left is not None:
            end = lax.min(end, key + keys - self.offset + self.problem.left)
        if self.problem.period is not None:
            begin, end = self._of_sequences(key, keys, begin, end)
        return begin, jnp.where(key < self.kv_length, lax.max(end, 0), 0)

    def _of_sequences(self, first: Any, count: int, begin: Any, end: Any) -> tuple[Any, Any]:
        """[begin, end) without what lies before and after the sequences of a tile."""
        period = self.problem.period
        assert period is not None
        after = (lax.div(first + (count - 1), period) + 1) * period
        return lax.max(begin, lax.div(first, period) * period), lax.min(end, after)

    def all_seen(self, query: Any, queries: int, key: Any, keys: int) -> Any:
        """Whether all queries of a tile see all of its keys, as far as lengths and window say."""
        problem = self.problem
        seen = (key + keys <= self.kv_length) & (query + queries <= self.q_length)
        if problem.right is not None:
            seen = seen & (key + keys - 1 <= query + self.offset + problem.right)
        if problem.left is not None:
            seen = seen & (key >= query + queries - 1 + self.offset - problem.left)
        return seen

    def masked(self, scores: Any, query: Any, key: Any, keys_axis: int) -> Any:
        """Scores with minus infinity where a query does not see a key.

        Args:
          scores: of a tile.
          query, key: the first of the tile.
          keys_axis: 1 if queries are rows and keys columns, 0 if it is the other way round.
        """
        shape = scores.shape
        keys = key + lax.broadcasted_iota(jnp.int32, shape, keys_axis)
        queries = query + lax.broadcasted_iota(jnp.int32, shape, 1 - keys_axis)
        shown = (keys < self.kv_length) & (queries < self.q_length)
        if self.problem.right is not None:
            shown = shown & (keys <= queries + (self.offset + self.problem.right))
        if self.problem.left is not None:
            shown = shown & (keys >= queries + (self.offset - self.problem.left))
        if self.problem.period is not None:
            start = key if keys_axis == 0 else query
            of_rows = lax.div(start + lax.iota(jnp.int32, shape[0]), self.problem.period)
            begin = broadcast_rows(of_rows * self.problem.period, shape[1])
            columns = queries if keys_axis == 0 else keys
            shown = shown & (columns >= begin) & (columns < begin + self.problem.period)
        if self.problem.has("q_segments"):
            of_queries = self.refs["q_segments"][self.batch, pl.ds(query, shape[1 - keys_axis])]
            of_keys = self.refs["kv_segments"][self.batch, pl.ds(key, shape[keys_axis])]
            shown = shown & (
                _along(of_queries, shape, 1 - keys_axis) == _along(of_keys, shape, keys_axis)
            )
        return jnp.where(shown, scores, -jnp.inf)

    # Scores and weights ---------------------------------------------------------------------------

    def scores(self, products: Any, query: Any, key: Any, keys_axis: int) -> tuple[Any, Any]:
        """Scores, to be multiplied by ``problem.factor``, and the same without bias.

        Args: as of :meth:`masked`.
        """
        problem, shape = self.problem, products.shape
        capped = scores = problem.capped(products)
        tile = (pl.ds(query, shape[1 - keys_axis]), pl.ds(key, shape[keys_axis]))
        if problem.has("bias"):
            bias = self.refs["bias"].at[self.entry("bias")]
            if keys_axis == 0:
                bias, tile = plgpu.transpose_ref(bias, (1, 0)), tile[::-1]
            scores = scores + bias[tile].astype(jnp.float32)
        if problem.has("slopes"):
            slope = self.refs["slopes"][self.entry("slopes")]
            keys = key + lax.broadcasted_iota(jnp.int32, shape, keys_axis)
            queries = query + lax.broadcasted_iota(jnp.int32, shape, 1 - keys_axis)
            distance = jnp.abs(queries + self.offset - keys).astype(jnp.float32)
            scores = scores - slope * distance
        return scores, capped

    def dropped(self, weights: Any, query: Any, key: Any, keys_axis: int) -> Any:
        """Weights, or what comes back to them: some zero, the others larger.

        Args: as of :meth:`masked`.
        """
        rate = self.problem.dropout
        if not rate:
            return weights
        seed = self.refs["seed"]
        row = self.batch * self.problem.q_heads + self.head
        number = dropout.key_of_head((seed[0], seed[1]), row)
        kept = dropout.kept(number, weights.shape, query, key, keys_axis, rate)
        return jnp.where(kept, weights * dropout.growth(rate), 0.0)


def _along(values: Any, shape: tuple[int, ...], axis: int) -> Any:
    """A vector along an axis of a matrix."""
    if axis == 0:
        return broadcast_rows(values, shape[1])
    return lax.broadcast_in_dim(values, shape, (1,))
