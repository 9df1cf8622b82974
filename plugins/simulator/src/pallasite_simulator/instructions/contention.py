"""Operations of several lanes on the same places, one after the other in the order of lanes.

PTX ISA 8.10.3 asks that the atomic operations on a place happen in some order; here it is that of
the lanes. Places are done at once, and so is a place's sequence wherever the operation permits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from pallasite_simulator.types import Array

type Binary = Callable[[Array, Array], Array]

type Sequential = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """Accesses sorted by place, in order of lanes within one place.

    Attributes:
      order: from the sorted accesses to the lanes.
      places: of each group, ascending.
      starts, lengths: of each group among the sorted accesses.
      group, rank: of each sorted access: its group, and its number within it.
    """

    order: Array
    places: Array
    starts: Array
    lengths: Array
    group: Array
    rank: Array


def group_by_place(places: Array) -> Groups | None:
    """Groups accesses by place (integers, one for each lane); None if all places differ."""
    count = len(places)
    if count < 2 or bool((places[1:] > places[:-1]).all()):
        return None
    order = stable_order(places)
    ordered = places[order]
    fresh = np.empty(count, np.bool_)
    fresh[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:])
    starts = np.flatnonzero(fresh)
    if len(starts) == count:
        return None
    group = fresh.cumsum() - 1
    return Groups(
        order,
        ordered[starts],
        starts,
        np.diff(np.append(starts, count)),
        group,
        np.arange(count) - starts[group],
    )


def stable_order(keys: Array) -> Array:
    """The order that sorts integers, and leaves equal ones in theirs."""
    low, high = int(keys.min()), int(keys.max())
    if high - low >> 32:
        return np.argsort(keys, kind="stable")
    # NumPy sorts 16-bit numbers by their digits, which is many times faster.
    small = (keys - low).astype(np.uint32)
    order = np.argsort(small.astype(np.uint16), kind="stable")
    if not high - low >> 16:
        return order
    upper = (small >> np.uint32(16)).astype(np.uint16)[order]
    return order[np.argsort(upper, kind="stable")]


def scan(operation: Binary, groups: Groups, held: Array, values: Array) -> Array:
    """What is in the places after each operation, if the operation is associative.

    Args:
      operation: of what is there and a value.
      held: contents of the places of all groups.
      values: of the sorted accesses.
    """
    running = values.copy()
    running[groups.starts] = operation(held, values[groups.starts])
    reach, longest = 1, int(groups.lengths.max())
    while reach < longest:
        behind = np.flatnonzero(groups.rank >= reach)
        running[behind] = operation(running[behind - reach], running[behind])
        reach *= 2
    return running


def scan_invertible(
    operation: Any, inverse: Binary, groups: Groups, held: Array, values: Array
) -> Array:
    """As :func:`scan`, for a ufunc that can be undone: ``inverse(operation(a, b), b) == a``."""
    sums: Array = operation.accumulate(values, dtype=values.dtype)
    before = inverse(sums[groups.starts], values[groups.starts])
    total: Array = operation(sums, inverse(held, before)[groups.group])
    return total


def accumulate(sequence: Sequential, groups: Groups, held: Array, values: Array) -> Array:
    """As :func:`scan`, for an operation whose order matters.

    Args:
      sequence: of a matrix that has a row for each of some places: first what is there, then
        the values in order. Returns what is there after each of the columns.
    """
    running = np.empty_like(values)
    # Places with about as many values each have a matrix in common, so that it has few gaps.
    kinds = np.ceil(np.log2(groups.lengths)).astype(np.int64)
    rows = np.empty(len(kinds), np.int64)
    for kind in np.unique(kinds):
        chosen = np.flatnonzero(kinds == kind)
        rows[chosen] = np.arange(len(chosen))
        members = np.flatnonzero(kinds[groups.group] == kind)
        matrix = np.zeros((len(chosen), int(groups.lengths[chosen].max()) + 1), values.dtype)
        matrix[:, 0] = held[chosen]
        places = rows[groups.group[members]] * matrix.shape[1] + groups.rank[members] + 1
        matrix.reshape(-1)[places] = values[members]
        running[members] = sequence(matrix).reshape(-1)[places]
    return running


def stepwise(operation: Binary, matrix: Array) -> Array:
    """What :func:`accumulate` wants of an operation, step by step."""
    result = matrix.copy()
    for column in range(1, matrix.shape[1]):
        result[:, column] = operation(result[:, column - 1], result[:, column])
    return result


def exchange_where(
    groups: Groups, held: Array, wanted: Array, values: Array, equal: Binary
) -> tuple[Array, Array]:
    """Compare-and-swap: for each access, what it finds, and whether it changes that.

    Each turn of the loop finds the next access of each place that changes it; the accesses up to
    that find what was there before.

    Args:
      held: contents of the places of all groups.
      wanted, values: of the sorted accesses.
      equal: compares elements.
    """
    found = held[groups.group]
    changes = np.zeros(len(wanted), np.bool_)
    # Exchanges of a value for itself change nothing, whenever they happen.
    possible = ~equal(wanted, values)
    done = np.full(len(groups.starts), -1)
    while True:
        ahead = possible & (groups.rank > done[groups.group]) & equal(wanted, found)
        candidates = np.flatnonzero(ahead)
        if not len(candidates):
            return found, changes
        which, first = np.unique(groups.group[candidates], return_index=True)
        hits = candidates[first]
        changes[hits] = True
        done[which] = groups.rank[hits]
        turned = np.zeros(len(done), np.int64)
        turned[which] = hits
        behind = (groups.rank > done[groups.group]) & np.isin(groups.group, which)
        found[behind] = values[turned[groups.group[behind]]]


def previous(groups: Groups, held: Array, running: Array) -> Array:
    """What each sorted access finds, given what is there after each."""
    found = np.empty_like(running)
    found[1:] = running[:-1]
    found[groups.starts] = held
    return found
