"""Which weights dropout keeps: bits of a counter-based generator, whose counters are the places, so
that every tiling, and the backward, drops the same.

The generator is Philox 2x32 with 7 rounds, as few as pass BigCrush (J. Salmon et al., "Parallel
Random Numbers: As Easy as 1, 2, 3", 2011). Its 64 bits are 16 for each of four weights: of two
queries and two keys, of which the second comes eight after the first. In matrices of tensor cores,
a lane has all four of them, whether queries are rows or columns.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallasite.plugin import InvalidValueError
from pallasite_std.ops.arguments import in_32_bits
from pallasite_std.ops.softmax import broadcast_rows

BITS = 16
"""Of a weight: the rate is rounded to a multiple of ``2 ** -16``."""

_PAIR = 8
"""How far apart two queries, or keys, are that share a counter."""

_ROUNDS = 7
_MULTIPLIER = 0xD256D193
_WEYL = 0x9E3779B9

_MIXING = (0x21F0AAAD, 0x735A2D97)


def threshold(rate: float) -> int:
    """Weights with fewer bits than this, as a number, are dropped."""
    return min(round(rate * (1 << BITS)), (1 << BITS) - 1)


def growth(rate: float) -> float:
    """The factor of the weights that are kept."""
    return 1 / (1 - threshold(rate) / (1 << BITS))


def key_of_head(seed: tuple[Any, Any], head: Any) -> Any:
    """The generator's key.

    Args:
      seed: two words.
      head: the number of the head among those of all batches.
    """
    return _mixed(_mixed(_mixed(seed[0]) + seed[1]) + lax.convert_element_type(head, jnp.uint32))


def kept(
    key: Any, shape: tuple[int, ...], query: Any, first_key: Any, keys_axis: int, rate: float
) -> Any:
    """Whether weights of a tile are kept.

    Args:
      key: of :func:`key_of_head`.
      shape: of the tile.
      query, first_key: the first of the tile, multiples of 16.
      keys_axis: 1 if queries are rows and keys columns, 0 if it is the other way round.
      rate: the fraction that is dropped.
    """
    rows, columns = shape
    group = min(columns, _PAIR)
    first_row, first_column = (query, first_key) if keys_axis == 1 else (first_key, query)
    # What depends on the row is a vector: of scalars, LLVM sees that two rows have the same.
    row = lax.iota(jnp.int32, rows)
    of_row, later = (
        broadcast_rows(one, group)
        for one in (_counter(row & ~_PAIR, first_row), (row & _PAIR) != 0)
    )
    column, found = lax.broadcasted_iota(jnp.int32, (rows, group), 1), list[Any]()
    for start in range(0, columns, 2 * _PAIR):
        of_column = _counter(column + start, first_column)
        if keys_axis == 1:
            words = _philox(of_row, of_column, key)
            found += [jnp.where(later, one, one << BITS) for one in words]
        else:
            low, high = _philox(of_column, of_row, key)
            word = jnp.where(later, high, low)
            found += [word << BITS, word]
    bits = jnp.concatenate(found, axis=1)[:, :columns] if len(found) > 1 else found[0]
    return bits >= _like(bits, threshold(rate) << BITS)


def _counter(place: Any, first: Any) -> Any:
    """Of the first one of a pair, counted from the first row or column of the tile."""
    return lax.convert_element_type(place + first, jnp.uint32)


def _philox(first: Any, second: Any, key: Any) -> tuple[Any, Any]:
    """Two random words for each pair of counters."""
    for number in range(_ROUNDS):
        high, low = _product(first)
        round_key = key + jnp.uint32(number * _WEYL & 0xFFFFFFFF)
        first, second = high ^ lax.broadcast_in_dim(round_key, high.shape, ()) ^ second, low
    return first, second


def _product(words: Any) -> tuple[Any, Any]:
    """Both halves of products with the multiplier, which one instruction has if they are parts of
    one number."""
    with jax.enable_x64(True):
        whole = lax.convert_element_type(words, np.uint64)
        whole = lax.mul(whole, lax.full_like(whole, np.uint64(_MULTIPLIER)))
        whole = lax.optimization_barrier(whole)
        high = lax.shift_right_logical(whole, lax.full_like(whole, np.uint64(32)))
        found = [lax.convert_element_type(one, np.uint32) for one in (high, whole)]
    return found[0], found[1]


def _mixed(value: Any) -> Any:
    """A permutation of words in which each bit depends on all.

    Source: C. Wellons, "Prospecting for Hash Functions" (multipliers found by that method).
    """
    value = value ^ (value >> 16)
    for multiplier in _MIXING:
        value = value * jnp.uint32(multiplier)
        value = value ^ (value >> 15)
    return value


def _like(value: Any, number: int) -> Any:
    return jnp.full(value.shape, number, jnp.uint32)


@in_32_bits
def attention_dropout_mask(seed: Any, shape: tuple[int, int, int, int], rate: float) -> jax.Array:
    """Which weights ``attention`` keeps with dropout, as an array: for tests, and for programs that
    compute attention themselves.

    With ``keep`` of it, ``attention`` computes ``(keep * growth * softmax(scores)) @ v``, where
    ``growth = 1 / (1 - round(rate * 2**16) / 2**16)``.

    Args:
      seed: as ``dropout_seed`` of ``attention``.
      shape: (batch, q_heads, queries, keys).
      rate: as ``dropout_rate`` of ``attention``.

    Returns:
      An array of this shape, boolean.

    Raises:
      InvalidTypeError, InvalidValueError: arguments that do not say that.
    """
    from pallasite_std.ops.flash.arguments import dropout_fraction, dropout_words

    if len(shape) != 4 or not all(isinstance(one, int) and one >= 0 for one in shape):
        raise InvalidValueError(
            "a mask of dropout does not have this shape",
            got=repr(shape),
            expected="(batch, q_heads, queries, keys)",
        )
    batch, heads, *tile = shape
    fraction = dropout_fraction(rate, seed)
    if fraction == 0:
        return jnp.ones(shape, bool)
    words = dropout_words(seed)
    numbers = jnp.arange(batch * heads, dtype=jnp.uint32)

    def of_head(number: Any) -> Any:
        key = key_of_head((words[0], words[1]), number)
        zero = jnp.int32(0)
        return kept(key, tuple(tile), zero, zero, 1, fraction)

    return jax.vmap(of_head)(numbers).reshape(shape)
