"""Attention of many queries against a cache, as of prefill, by the kernel for whole sequences.

The kernels for decoding go through the cache once for every few queries. With many of them it takes
less time to bring the rows of a sequence together, and to compute tiles of 128 queries.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallasite_hopper.ops.decode.config import MOST_TOKENS
from pallasite_hopper.ops.flash.config import LARGEST_HEAD
from pallasite_hopper.ops.flash.forward_choice import default_config
from pallasite_hopper.ops.flash.forward_time import Work, microseconds
from pallasite_std.api import DecodeProblem

_ROWS = 16
"""Of a product of the portable kernel: with no more queries that share a head, it takes as long as
reading the cache does (268 MB and 10 queries: 63 microseconds on an H200; 200 by bringing rows
together)."""

_KEYS = 4096
"""Of a sequence, for the estimates: of more keys both ways take more time alike."""


@dataclasses.dataclass(frozen=True)
class _Rates:
    """Microseconds, fitted to 15 shapes (9 to 8192 queries that share a head of the cache, 1 to 16
    sequences of 2048 to 16384 keys), timed on an H200.

    Attributes:
      together: of bringing rows together, for each megabyte of the cache: read, and written.
      portable: of the portable kernel, for each megabyte and 64 queries that share a head of 128
        elements; those of 64 take half.
      copies, portable_kernels: of each way besides.
    """

    together: float = 0.5
    portable: float = 0.73
    copies: float = 8.0
    portable_kernels: float = 5.0


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
    batch, _, heads, head_dim = q_shape
    # Errors of shapes are the operation's.
    fits = kv_heads > 0 and heads % kv_heads == 0 and 0 < head_dim <= LARGEST_HEAD
    return fits and batch * heads > 0 and gains(q_shape, kv_heads)


@functools.lru_cache(maxsize=1024)
def gains(q_shape: tuple[int, ...], kv_heads: int) -> bool:
    """Whether rows that are brought together take less time, by estimates of both ways."""
    batch, tokens, heads, head_dim = q_shape
    keys, group = max(_KEYS, tokens), heads // kv_heads
    if tokens * group <= _ROWS:
        return False
    config = default_config(head_dim, True, tokens, heads=batch * heads, group=group, kv_seq=keys)
    work = Work(batch * heads, tokens, keys, head_dim, right=0, group=group)
    rates, megabytes = _Rates(), 4e-6 * batch * keys * kv_heads * head_dim
    together = rates.copies + rates.together * megabytes + microseconds(work, config)
    tiles, size = -(-tokens * group // 64), min(max(head_dim, 64), 128) / 128
    return together < rates.portable_kernels + rates.portable * size * megabytes * tiles


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
