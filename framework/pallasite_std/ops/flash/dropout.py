"""Which weights dropout keeps: a hash of the seed and the place, so that every tiling, and the
backward, drops the same."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)
_GOLDEN = 0x9E3779B9


def mixed(value: Any) -> Any:
    """A permutation of words of 32 bits in which each bit depends on all.

    Source: C. Wellons, "Prospecting for Hash Functions" (multipliers found by that method).
    """
    value = value ^ lax.shift_right_logical(value, _like(value, 16))
    for multiplier in _MULTIPLIERS:
        value = value * _like(value, multiplier)
        value = value ^ lax.shift_right_logical(value, _like(value, 15))
    return value


def of_queries(seed: tuple[Any, Any], head: Any, queries: Any) -> tuple[Any, Any]:
    """Two words for each query.

    Args:
      seed: two words.
      head: the number of the head among those of all batches.
      queries: their indices, int32.
    """
    start = mixed(mixed(seed[0]) + seed[1]) + head.astype(jnp.uint32)
    first = mixed(queries.astype(jnp.uint32) + mixed(start))
    return first, mixed(first + _like(first, _GOLDEN))


def kept(first: Any, second: Any, keys: Any, rate: float) -> Any:
    """Whether a weight is kept.

    Args:
      first, second: what :func:`of_queries` returns, as matrices.
      keys: the indices of the keys, int32, as a matrix.
      rate: the fraction that is dropped.
    """
    word = mixed(mixed(keys.astype(jnp.uint32) + first) ^ second)
    return word >= _like(word, min(round(rate * 2**32), 2**32 - 1))


def _like(value: Any, number: int) -> Any:
    return jnp.full(value.shape, number, jnp.uint32) if value.shape else jnp.uint32(number)
