"""Operations of several lanes on the same places, one after the other in the order of lanes.

PTX ISA 8.10.3 asks that the atomic operations on a place happen in some order; here it is that of
the lanes. Places are done at once, and so is a place's sequence wherever the operation permits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from pallasite_simulator.types import Array

type Binary = Callable[[Array, Array], Array]


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
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    fresh = np.empty(count, np.bool_)
    fresh[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:])
    starts = np.flatnonzero(fresh)
    if len(starts) == count:
        return None
    group = np.cumsum(fresh) - 1
    return Groups(
        order,
        ordered[starts],
        starts,
        np.diff(np.append(starts, count)),
        group,
        np.arange(count) - starts[group],
    )


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


def accumulate(
    operation: Binary,
    groups: Groups,
    held: Array,
    values: Array,
    sequence: Callable[[Array], Array] | None = None,
) -> Array:
    """As :func:`scan`, for an operation whose order matters.

    Args:
      sequence: from a place's contents and the values that follow, what is there after each,
        behind an element of any value. Without it, a step is taken for each value of the longest
        sequence.
    """
    running = np.empty_like(values)
    lengths = groups.lengths
    together = int(lengths.max())
    if sequence is not None:
        # A step for all places at once up to some length of a sequence, then each place by itself.
        ordered = np.sort(lengths)
        steps = np.append(0, ordered)
        longer = len(ordered) - np.searchsorted(ordered, steps, "right")
        together = int(steps[np.argmin(steps + longer)])
    for rank in range(together):
        chosen = np.flatnonzero(lengths > rank)
        places = groups.starts[chosen] + rank
        before = running[places - 1] if rank else held[chosen]
        running[places] = operation(before, values[places])
    for number in np.flatnonzero(lengths > together).tolist():
        assert sequence is not None
        start = int(groups.starts[number])
        first, end = start + together, start + int(lengths[number])
        before = running[first - 1 : first] if together else held[number : number + 1]
        running[first:end] = sequence(np.concatenate((before, values[first:end])))[1:]
    return running


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
