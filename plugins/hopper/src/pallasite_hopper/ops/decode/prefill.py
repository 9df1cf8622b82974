"""Attention of many queries against a cache, as of prefill, by the kernel for whole sequences.

The kernels for decoding go through the cache once for every few queries. With many of them it takes
less time to bring the rows of a sequence together, and to compute tiles of 128 queries.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallasite_hopper.ops.decode.config import MOST_TOKENS
from pallasite_hopper.ops.flash.config import LARGEST_HEAD
from pallasite_std.api import DecodeProblem

LEAST_QUERIES = 128
"""Queries that share a head of the cache from which on rows are brought together: with so many that
took 0.76 of the portable kernel's time on an H200, with 2048 of them 0.17."""


def suits(q_shape: tuple[int, ...], dtype: Any, kv_heads: int, cache_dtype: Any) -> bool:
    """Whether there are so many queries.

    Args:
      q_shape: (batch, tokens, q_heads, head_dim), or without tokens.
      dtype: of queries.
      kv_heads: of the cache.
      cache_dtype: of the cache; those of 8 bits have factors, which the kernel does not take.
    """
    if len(q_shape) != 4 or q_shape[1] <= MOST_TOKENS or cache_dtype != dtype:
        return False
    queries = q_shape[1] * q_shape[2] // max(1, kv_heads)
    return queries >= LEAST_QUERIES and 0 < q_shape[3] <= LARGEST_HEAD


def run(problem: DecodeProblem, operands: list[Any]) -> jax.Array:
    """The attention of ``(q, k, v, lengths?, page_indices?)``, as of ``decode_call`` or
    ``paged_call``."""
    from pallasite_hopper.ops.flash.api import attention

    q, k, v, *rest = operands
    lengths: Any = None
    if problem.lengths:
        lengths = jnp.clip(rest[0].astype(jnp.int32), 0, problem.kv_len)
    if problem.page_size:
        numbers = jnp.arange(problem.pages_per_sequence)
        used = numbers * problem.page_size < lengths[:, None]
        pages = jnp.clip(jnp.where(used, rest[1], 0), 0, problem.pages - 1)
        k, v = (_of_pages(problem, one, pages) for one in (k, v))
    if lengths is not None:
        # The kernel multiplies rows that do not exist by zero, so these have to be finite.
        exists = jnp.arange(problem.kv_len) < lengths[:, None]
        k, v = (
            jnp.where(exists[:, :, None, None], one, jnp.zeros((), one.dtype)) for one in (k, v)
        )
    return attention(
        q, k, v, causal=True, scale=problem.scale, soft_cap=problem.soft_cap, kv_lengths=lengths
    )


def _of_pages(problem: DecodeProblem, source: Any, pages: Any) -> Any:
    """(batch, rows, kv_heads, head_dim)."""
    if problem.heads_first:
        found = jnp.moveaxis(source[:, pages], 0, 3)
    else:
        found = source[pages]
    return found.reshape(problem.batch, problem.kv_len, problem.kv_heads, problem.head_dim)
