"""Loops whose iterations do the same again after some time: periods, and how many are left out.

If each thread of a block leaves out as many phases of each barrier, the others happen as before. So
long loops of several threads are shortened together, as far as the shortest of them allows.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pallasite.plugin import BarrierTables
from pallasite_std.checks import traces
from pallasite_std.checks import values as v

if TYPE_CHECKING:
    from pallasite_std.checks.traces import BarrierAt, Event

LONGEST_PERIOD = 8
MOST_KEPT = 400
"""Events of periods of one loop that stay because another loop is shorter."""

MOST_UNROLLED = 30_000
"""Events of all threads together, of which it is found out what comes before what."""


def keys(events: Sequence[Event]) -> tuple[Any, ...]:
    """What tells events apart, but for where they come from."""
    return tuple([event.key or _key(event) for event in events])


def _key(event: Event) -> tuple[Any, ...]:
    region = event.region
    where: Any = None
    if region is not None:
        boxes = region.ranges or ()
        ranges = region.ranges and [(_start(one.start), one.size) for one in boxes]
        where = (id(region.memory), region.member, region.form, ranges, region.exact)
    key = (
        *(event.kind, event.barrier, where, event.arrivals, event.expected, event.delivered),
        *(event.left, event.groups, event.count, *map(id, event.lost)),
        *((keys(warp.events), warp.complete) for warp in event.warps),
        *keys(event.period),
    )
    event.key = key  # Events of rings come again.
    return key


def alike(threads: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether threads of one block do what those of another one do."""
    return len(threads) == len(others) and all(
        one.complete == other.complete and keys(one.events) == keys(other.events)
        for one, other in zip(threads, others, strict=True)
    )


def _start(start: Any) -> Any:
    """An index; all that are not known are alike."""
    return start if isinstance(start, int | v.Form | v.Range) else None


def is_vague(event: Event) -> bool:
    """Whether an event is of memory at an index that is not known: it is another one when the
    event comes again."""
    region = event.region
    if region is not None and any(_start(one.start) is None for one in region.ranges or ()):
        return True
    inner = (*event.period, *(one for warp in event.warps for one in warp.events))
    return any(map(is_vague, inner))


def period_of(
    parts: Sequence[Any], states: Sequence[Sequence[Any]], carried: Sequence[int]
) -> int | None:
    """After how many iterations a loop seems to do the same again, or None.

    Of a whole period, only the last iteration is known to come again.

    Args:
      parts: keys of the events of each iteration.
      states: operands of each iteration, and of the next.
      carried: which of them the loop changes.
    """
    for period in range(1, min(LONGEST_PERIOD, len(parts) - 1) + 1):
        if parts[-1] != parts[-1 - period]:
            continue
        (before, last), (first, second) = states[-2:], states[-2 - period : len(states) - period]
        if all(_steady(last[n], second[n], before[n], first[n]) for n in carried):
            return period
    return None


def _steady(last: Any, second: Any, before: Any, first: Any) -> bool:
    """Whether a value changes by the same amount from one iteration to the one a period later as
    it did before, or not at all."""
    if isinstance(last, int | v.Form) and isinstance(second, int | v.Form):
        step = v.add(last, second, -1)
        both = isinstance(before, int | v.Form) and isinstance(first, int | v.Form)
        return isinstance(step, int) and both and step == v.add(before, first, -1)
    return bool(last is second or last == second)


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


def until_unknown(thread: Any) -> Thread:
    """The events of a thread up to the first that is not certain."""
    for number, event in enumerate(thread.events):
        if event.kind in (traces.Kind.UNKNOWN, traces.Kind.REPEAT):
            return Thread(thread.events[:number], False)
        if event.kind is traces.Kind.FORK:
            warps = tuple(until_unknown(warp) for warp in event.warps)
            if not all(warp.complete for warp in warps):
                return Thread([*thread.events[:number], _with_warps(event, warps)], False)
    return Thread(thread.events, thread.complete)


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


@dataclasses.dataclass(eq=False)
class _Loop:
    """A loop that is to be shortened: where it is, of which thread, and how often it runs."""

    event: Event
    events: list[Event]
    thread: tuple[int, ...]
    times: int


class _Tally:
    """What events do to barriers."""

    def __init__(self) -> None:
        self.waits: dict[BarrierAt, collections.Counter[Any]] = {}
        self.arrivals: collections.Counter[BarrierAt] = collections.Counter()
        self.bytes: collections.Counter[BarrierAt] = collections.Counter()

    def add(self, events: Sequence[Event], thread: tuple[int, ...], times: int) -> None:
        """Adds events of a thread that happen so often."""
        for event in events:
            for number, warp in enumerate(event.warps):
                self.add(warp.events, (*thread, number), times)
            self.add(event.period, thread, times * event.count)
            if event.barrier is None:
                continue
            if event.kind is traces.Kind.WAIT:
                waits = self.waits.setdefault(event.barrier, collections.Counter())
                waits[thread] += times
            self.arrivals[event.barrier] += event.arrivals * times
            self.bytes[event.barrier] += (event.expected - event.delivered) * times


def shortened(threads: Sequence[Any], tables: BarrierTables) -> list[Thread] | None:
    """The threads with few periods of each loop; None if their loops do not go together."""
    unknown = unknown_barriers(threads)
    copied = [_copy(one) for one in threads]
    waiting = _Tally()
    for number, one in enumerate(copied):
        waiting.add(one.events, (number,), 1)
    while True:
        loops = [
            loop for number, one in enumerate(copied) for loop in _innermost(one.events, (number,))
        ]
        if not loops:
            return copied
        dropped = _Tally()
        counts = {}
        for group in _groups(loops, unknown):
            # One period is kept, so that all that it does meets what the one before has done.
            least = min(loop.event.count for loop in group) - 1
            for loop in group:
                counts[loop] = least
                dropped.add(loop.event.period, loop.thread, loop.times * least)
        for barrier in {*dropped.waits, *dropped.arrivals}:
            if barrier.variable not in unknown and not _fits(barrier, dropped, waiting, tables):
                return None
        for loop in loops:
            kept = loop.event.count - counts[loop]
            if kept * len(loop.event.period) > MOST_KEPT:
                return None
            place = next(n for n, one in enumerate(loop.events) if one is loop.event)
            loop.events[place : place + 1] = [
                _again(one) for _ in range(kept) for one in loop.event.period
            ]


def _fits(barrier: BarrierAt, dropped: _Tally, waiting: _Tally, tables: BarrierTables) -> bool:
    """Whether all threads leave out the same phases of a barrier."""
    kind = tables.kind(barrier.dtype)
    if kind is None or dropped.bytes[barrier]:
        return False
    phases, rest = divmod(dropped.arrivals[barrier], kind.arrivals(barrier.dtype))
    left_out = dropped.waits.get(barrier, collections.Counter())
    return not rest and all(
        left_out.get(thread, 0) == phases for thread in waiting.waits.get(barrier, ())
    )


def _innermost(events: list[Event], thread: tuple[int, ...], times: int = 1) -> Iterator[_Loop]:
    for event in events:
        for number, warp in enumerate(event.warps):
            yield from _innermost(warp.events, (*thread, number), times)
        if event.kind is traces.Kind.REPEAT:
            period: Any = event.period  # A list, in copies.
            inner = list(_innermost(period, thread, times * event.count))
            yield from inner or [_Loop(event, events, thread, times)]


def _groups(loops: Sequence[_Loop], unknown: set[Any]) -> list[list[_Loop]]:
    """Loops that have barriers in common."""
    groups: list[tuple[set[Any], list[_Loop]]] = []
    for loop in loops:
        tally = _Tally()
        tally.add(loop.event.period, (), 1)
        barriers = {b.variable for b in {*tally.waits, *tally.arrivals}} - unknown
        members = [loop]
        apart = []
        for others, group in groups:
            if barriers & others:
                barriers |= others
                members += group
            else:
                apart.append((others, group))
        groups = [*apart, (barriers, members)]
    return [members for _, members in groups]


def unrolled(threads: Sequence[Any]) -> list[Thread] | None:
    """The threads with all iterations of their loops; None if these are too many."""
    if sum(_length(one.events) for one in threads) > MOST_UNROLLED:
        return None
    return [Thread(list(_unrolled(one.events)), one.complete) for one in threads]


def _length(events: Sequence[Event]) -> int:
    return sum(
        1 + sum(_length(warp.events) for warp in event.warps) + event.count * _length(event.period)
        for event in events
    )


def _unrolled(events: Sequence[Event]) -> Iterator[Event]:
    for event in events:
        if event.kind is traces.Kind.REPEAT:
            for _ in range(event.count):
                yield from map(_again, _unrolled(event.period))
        elif event.warps:
            warps = (Thread(list(_unrolled(w.events)), w.complete) for w in event.warps)
            yield _with_warps(event, tuple(warps))
        else:
            yield event


def _copy(thread: Any) -> Thread:
    """A copy whose loops can be changed."""
    return Thread([_copied(event) for event in thread.events], thread.complete)


def _copied(event: Event) -> Event:
    if event.warps:
        return _with_warps(event, tuple(_copy(warp) for warp in event.warps))
    if event.period:
        period: Any = [_copied(one) for one in event.period]
        return dataclasses.replace(event, period=period)
    return event


def _with_warps(event: Event, warps: tuple[Thread, ...]) -> Event:
    return dataclasses.replace(event, warps=warps)


def _again(event: Event) -> Event:
    """The same once more: an index that is not known is another one then."""
    if event.warps:
        warps = (Thread([_again(one) for one in w.events], w.complete) for w in event.warps)
        return _with_warps(event, tuple(warps))
    region = event.region
    if region is None or region.ranges is None or not is_vague(event):
        return event
    ranges = tuple(
        one if _start(one.start) is not None else dataclasses.replace(one, start=object())
        for one in region.ranges
    )
    return dataclasses.replace(event, region=dataclasses.replace(region, ranges=ranges))
