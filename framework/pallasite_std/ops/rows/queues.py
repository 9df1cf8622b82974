"""Short queues of the largest elements of parts of rows, from which the largest of whole rows are
taken one by one.

Of a row of many elements, hardly any part has more than a few of the largest ones. So each part
keeps a few in order, and only its first one is looked at when the next largest is searched for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

LENGTH = 4
"""Elements of a queue, at most."""

_MOST_FAILURES = 1 / 64
"""Share of rows of independent elements, about, of which a queue lacks one in the end."""

_LEAST = 2 * LENGTH
"""Elements of a part, at least: shorter ones are searched as fast."""

type Element = tuple[Any, ...]
"""A key that no other element has; or a key and a column, of which the lower one is first."""


def parts_of(width: int, k: int, lanes: int) -> int | None:
    """Into how many parts a row is divided, of which so many lanes search ``k`` elements; None if
    queues do not pay."""
    parts = lanes
    while math.comb(k, LENGTH) > _MOST_FAILURES * parts ** (LENGTH - 1):
        parts *= 2
    return parts if width >= _LEAST * parts else None


def queues_of(element: Element, parts: int, vector: int) -> list[Element]:
    """The largest elements of each part, in order.

    Args:
      element: (..., width), in the order of columns. A part has runs of ``vector`` neighbours, and
        all others have runs between two of them.
      parts: how many there are, which divide the runs.
      vector: a power of two.

    Returns:
      for each place in the queues (..., parts).
    """
    *lead, width = element[0].shape
    runs = width // (parts * vector)
    rows = tuple(one.reshape(*lead, runs, parts * vector) for one in element)
    lists = [[tuple(one[..., run, :] for one in rows)] for run in range(runs)]
    while len(lists) > 1:
        pairs = zip(lists[::2], lists[1::2], strict=False)
        lists = [
            *(merged(one, other, lower_first=True) for one, other in pairs),
            *lists[len(lists) // 2 * 2 :],
        ]
    (found,) = lists
    while vector > 1:
        vector //= 2
        shape = (*lead, parts * vector, 2)
        pairs_of = [tuple(one.reshape(shape) for one in each) for each in found]
        one, other = (
            [tuple(one[..., number] for one in each) for each in pairs_of] for number in range(2)
        )
        found = merged(one, other, lower_first=False)
    return found


def merged(
    first: Sequence[Element], second: Sequence[Element], *, lower_first: bool
) -> list[Element]:
    """The queue of two; with ``lower_first``, all columns of the first one are lower."""
    if len(first) != len(second) or len(first) not in (1, 2, LENGTH):
        queue = list(first)
        for one in second:
            queue = _inserted(queue, one)
        return queue
    others = second if len(first) < LENGTH else list(reversed(second))
    pairs = [
        _sorted(one, other, lower_first=lower_first)
        for one, other in zip(first, others, strict=True)
    ]
    if len(pairs) == 1:
        return list(pairs[0])
    if len(pairs) < LENGTH:
        (most, one), (other, least) = pairs
        return [most, *_sorted(one, other), least]
    # The larger ones of these pairs are the largest of both queues, rising first and then falling.
    a, b, c, d = (larger for larger, _ in pairs)
    (a, c), (b, d) = _sorted(a, c), _sorted(b, d)
    return [*_sorted(a, b), *_sorted(c, d)]


def _inserted(queue: Sequence[Element], one: Element) -> list[Element]:
    found = []
    for other in queue:
        larger, one = _sorted(other, one)
        found.append(larger)
    return found if len(found) == LENGTH else [*found, one]


def _sorted(one: Element, other: Element, *, lower_first: bool = False) -> tuple[Element, Element]:
    """The larger element, and the smaller one; with ``lower_first``, the first has the lower
    column."""
    if len(one) == 1:
        return (jnp.maximum(one[0], other[0]),), (jnp.minimum(one[0], other[0]),)
    (key, column), (other_key, other_column) = one, other
    before = key >= other_key if lower_first else key > other_key
    if not lower_first:
        before = before | ((key == other_key) & (column < other_column))
    pairs = list(zip(one, other, strict=True))
    return (
        tuple(jnp.where(before, a, b) for a, b in pairs),
        tuple(jnp.where(before, b, a) for a, b in pairs),
    )
