"""Loops whose iterations do the same again after some time: what tells that they do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pallasite_std.checks import values as v

if TYPE_CHECKING:
    from pallasite_std.checks.traces import Event

LONGEST_PERIOD = 8


def keys(events: Sequence[Event]) -> tuple[Any, ...]:
    """What tells events apart, but for where they come from."""
    return tuple(_key(event) for event in events)


def _key(event: Event) -> tuple[Any, ...]:
    region = event.region
    where: Any = None
    if region is not None:
        boxes = region.ranges or ()
        ranges = region.ranges and [(_start(one.start), one.size) for one in boxes]
        where = (id(region.memory), region.member, region.form, ranges, region.exact)
    return (
        *(event.kind, event.barrier, where, event.arrivals, event.expected, event.delivered),
        *(event.left, event.groups, event.count, *map(id, event.lost)),
        *((keys(warp.events), warp.complete) for warp in event.warps),
        *keys(event.period),
    )


def _start(start: Any) -> Any:
    """An index; all that are not known are alike."""
    return start if isinstance(start, int | v.Form | v.Range) else None


def period_of(
    parts: Sequence[Any], states: Sequence[Sequence[Any]], carried: Sequence[int]
) -> int | None:
    """After how many iterations a loop seems to do the same again, or None.

    Args:
      parts: keys of the events of each iteration.
      states: operands of each iteration, and of the next.
      carried: which of them the loop changes.
    """
    for period in range(1, min(LONGEST_PERIOD, len(parts) // 2) + 1):
        if parts[-period:] != parts[-2 * period : -period]:
            continue
        last, before, first = states[-1], states[-1 - period], states[-1 - 2 * period]
        if all(_steady(last[one], before[one], first[one]) for one in carried):
            return period
    return None


def _steady(last: Any, before: Any, first: Any) -> bool:
    """Whether a value changes by the same amount again, or not at all."""
    if isinstance(last, int | v.Form) and isinstance(before, int | v.Form):
        step = v.add(last, before, -1)
        return (
            isinstance(step, int)
            and isinstance(first, int | v.Form)
            and (step == v.add(before, first, -1))
        )
    return bool(last is before or last == before)


def advanced(
    latest: Sequence[Any], earlier: Sequence[Any], carried: Sequence[int], number: Any
) -> list[Any]:
    """The operands of an iteration after so many further periods, from those of two of them."""
    found = list(latest)
    for one in carried:
        if isinstance(latest[one], int | v.Form):
            step = v.add(latest[one], earlier[one], -1)
            found[one] = v.add(latest[one], v.multiply(number, step))
    return found


@dataclasses.dataclass(eq=False)
class Thread:
    """A thread or a warp: its events, and whether they are all that it does."""

    events: list[Event]
    complete: bool


def has(threads: Sequence[Any], kind: Any) -> bool:
    """Whether there is an event of a kind."""
    return any(
        event.kind is kind or has(event.warps, kind) for one in threads for event in one.events
    )


def unknown_barriers(threads: Sequence[Any]) -> set[Any]:
    """The arrays of barriers of which it is not known what happens to them."""
    found: set[Any] = set()
    for thread in threads:
        for event in thread.events:
            found.update(event.lost)
            if event.warps:
                found |= unknown_barriers(event.warps)
            if event.period:
                found |= unknown_barriers([Thread(list(event.period), True)])
    return found
