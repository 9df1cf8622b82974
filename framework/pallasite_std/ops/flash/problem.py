"""What attention is computed of, and what a tile of queries sees of the keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallasite_std.ops.softmax import LOG2_E, cap


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

    @property
    def group(self) -> int:
        """Query heads that share the keys and values of one head."""
        return self.q_heads // self.kv_heads

    def lengths_of(self, batch: Any, refs: tuple[Any, ...]) -> tuple[Any, Any]:
        """How many queries and keys of a batch exist; ``refs`` are the lengths that are given."""
        remaining = iter(refs)
        q_length = next(remaining)[batch] if self.q_lengths else jnp.int32(self.q_seq)
        kv_length = next(remaining)[batch] if self.kv_lengths else jnp.int32(self.kv_seq)
        return lax.min(q_length, self.q_seq), lax.min(kv_length, self.kv_seq)

    def keys_seen(self, start: Any, rows: int, lengths: tuple[Any, Any]) -> Any:
        """How many keys a tile of queries sees: all beyond are hidden from all of its rows."""
        q_length, kv_length = lengths
        seen = kv_length
        if self.causal:
            seen = lax.min(seen, start + rows + kv_length - q_length)
        return jnp.where(start < q_length, lax.max(seen, 0), 0)

    @property
    def factor(self) -> float:
        """Of what :meth:`capped` returns, in exponents of 2."""
        return LOG2_E * (self.scale if self.soft_cap is None else 1.0)

    def capped(self, products: Any) -> Any:
        """Scores from products of queries and keys; without their scale if there is no cap."""
        return products if self.soft_cap is None else cap(products, self.scale, self.soft_cap)

    def scores(self, products: Any) -> Any:
        """Scores times ``log2(e)`` from products of queries and keys."""
        return self.capped(products) * self.factor

    def slope(self, scores: Any) -> Any:
        """The derivative of the scores by the products; scores include ``log2(e)``."""
        if self.soft_cap is None:
            return self.scale
        ratio = scores * (1 / (self.soft_cap * LOG2_E))
        return (1 - ratio * ratio) * self.scale

    def masked(
        self, scores: Any, query: Any, key: Any, lengths: tuple[Any, Any], *, keys_axis: int
    ) -> Any:
        """Scores with minus infinity where a query does not see a key.

        Args:
          scores: of a tile.
          query, key: the first of the tile.
          lengths: how many there are.
          keys_axis: 1 if queries are rows and keys columns, 0 if it is the other way round.
        """
        q_length, kv_length = lengths
        keys = key + lax.broadcasted_iota(jnp.int32, scores.shape, keys_axis)
        queries = query + lax.broadcasted_iota(jnp.int32, scores.shape, 1 - keys_axis)
        shown = (keys < kv_length) & (queries < q_length)
        if self.causal:
            shown = shown & (keys <= queries + (kv_length - q_length))
        return jnp.where(shown, scores, -jnp.inf)

    def all_seen(
        self, query: Any, queries: int, key: Any, keys: int, lengths: tuple[Any, Any]
    ) -> Any:
        """Whether all queries of a tile see all of its keys."""
        q_length, kv_length = lengths
        seen = (key + keys <= kv_length) & (query + queries <= q_length)
        if self.causal:
            seen = seen & (key + keys - 1 <= query + (kv_length - q_length))
        return seen
