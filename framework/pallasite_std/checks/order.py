"""What certainly comes before what in a block, as far as it is known what its threads do.

All threads go as far as they can, in any order: a wait ends when its barrier's phase is complete.
A clock for each thread says which events of the others, and which asynchronous copies, certainly
came before, by the barriers alone. Two accesses that no clock orders are a race, whichever happened
to come first here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import BarrierTables
from pallasite_std.checks import repeats
from pallasite_std.checks.traces import BarrierAt, Event, Kind, Trace
from pallasite_std.memory.regions import MemoryRegion

type Clock = dict[Any, int]

_ANYTHING = "anything"
"""In a clock: all that other threads have done may come before."""


def problems(traces: Sequence[Trace], tables: BarrierTables, *, fences: bool) -> list[Problem]:
    """What is certainly wrong with what the threads of a block do.

    Args:
      traces: of the threads.
      tables: what is known of barriers.
      fences: whether the program has to fence what it writes before copies read it.
    """
    if not repeats.has(traces, Kind.REPEAT):
        return _problems_of(traces, tables, fences)
    shortened = repeats.shortened(traces, tables)
    if shortened is not None and not _problems_of(shortened, tables, fences):
        return []
    # What goes wrong with few iterations need not do so with all of them.
    threads = repeats.unrolled(traces) or [repeats.until_unknown(one) for one in traces]
    return _problems_of(threads, tables, fences)


def is_certain(traces: Sequence[Trace]) -> bool:
    """Whether it is known all along what threads do."""
    return all(one.complete for one in traces) and not repeats.has(traces, Kind.UNKNOWN)


def _problems_of(threads: Sequence[Any], tables: BarrierTables, fences: bool) -> list[Problem]:
    """The problems of threads whose loops are unrolled."""
    if repeats.has(threads, Kind.UNKNOWN):
        # What comes before anything unknown is known best.
        first = [repeats.until_unknown(one) for one in threads]
        found = Block(first, tables, fences=fences).problems
        if found:
            return found
    return Block(threads, tables, fences=fences).problems


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that is certainly wrong.

    Attributes:
      kind: by which check it is reported: "transfers", "copies", "reuse" or "arrivals".
      event: where.
      other: an earlier event that it collides with.
      what: the case, which messages are made of.
      detail: numbers for messages.
    """

    kind: str
    event: Event
    what: str
    other: Event | None = None
    detail: tuple[Any, ...] = ()


class _Phase:
    """One phase of a barrier, so far."""

    def __init__(self) -> None:
        self.arrivals = self.expected = self.delivered = 0
        self.clock: Clock = {}
        self.announced: Event | None = None
        self.threads: set[int] = set()


class _Barrier:
    def __init__(self, needed: int):
        self.needed = needed
        self.phases: list[_Phase] = [_Phase()]
        self.threads: set[int] = set()
        self.lost = False
        self.seen = object()  # In clocks: the last phase that is known to be complete.
        self.first_waits: list[int] = []  # For each phase, how many problems were known then.

    @property
    def complete(self) -> int:
        """How many phases are complete."""
        return len(self.phases) - 1


@dataclasses.dataclass(eq=False, slots=True)
class _Access:
    """An access of a thread.

    Attributes:
      event: it.
      thread: whose.
      time: of the thread, or if it is asynchronous, which completion it is of ``key``.
      unsure: whether the thread may have waited for anything before.
      key: what clocks have the time by.
    """

    event: Event
    thread: int
    time: int
    unsure: bool
    key: Any

    def before(self, clock: Clock) -> bool:
        """Whether it is over for those who know what a clock does."""
        return clock.get(self.key, -1) >= self.time


class _Accesses:
    """The accesses of a region of shared memory.

    Attributes:
      region: the region.
      own: its accesses.
      overlapping: lists of those of each region that overlaps it, of its own also.
    """

    __slots__ = ("overlapping", "own", "region")

    def __init__(self, region: MemoryRegion):
        self.region = region
        self.own: list[_Access] = []
        self.overlapping: list[list[_Access]] = []


class _Ambiguous(Exception):
    """In which phase an arrival comes is not known; its argument is how many of the problems that
    were found do not depend on it, if those are not all."""


class Block:
    """The threads of one block.

    Attributes:
      problems: what was found.
    """

    def __init__(self, traces: Sequence[Any], tables: BarrierTables, *, fences: bool):
        """Runs the threads.

        Args:
          traces: of the threads.
          tables: what is known of barriers.
          fences: whether the program has to fence what it writes before copies read it.
        """
        self.traces: list[Any] = []
        self.unknown = repeats.unknown_barriers(traces)
        self.open_groups: set[int] = set()
        self.tables = tables
        self.fences = fences
        self.problems: list[Problem] = []
        self.barriers: dict[BarrierAt, _Barrier] = {}
        self.clocks: list[Clock] = []
        self.position: list[int] = []
        self.waited: list[dict[BarrierAt, int]] = []
        self.groups: list[list[list[_Access]]] = []
        self.stores: list[tuple[object, int]] = []
        self.unfenced: list[list[Event]] = []
        self.equations: list[set[int]] = []
        self.warps: dict[tuple[int, int], range] = {}
        self.regions: dict[Any, list[_Accesses]] = {}
        self.accesses: dict[int, _Accesses] = {}
        self.copies: list[_Access] = []
        self.overlaps: dict[tuple[int, int], bool] = {}
        self.arriving: dict[BarrierAt, set[int]] = {}
        for trace in traces:
            self._note_arrivals(trace)
            self._begin(trace, {}, {})
        try:
            self._run()
            self._end()
        except _Ambiguous as ambiguous:
            sure = self.problems[: ambiguous.args[0]] if ambiguous.args else self.problems
            rest = self.problems[len(sure) :]
            self.problems = sure + [one for one in rest if one.kind == "transfers"]
        # A slot that is filled too early collides with its readers, those with the copy, and so on.
        self.problems.sort(key=lambda one: _CONSEQUENCES.get(one.what, 0))

    def _note_arrivals(self, trace: Any) -> None:
        """Which threads and warps arrive on a barrier at all."""
        for event in trace.events:
            if event.arrivals and event.barrier is not None:
                self.arriving.setdefault(event.barrier, set()).add(id(trace))
            for warp in event.warps:
                self._note_arrivals(warp)

    def _begin(self, trace: Any, clock: Clock, waited: dict[BarrierAt, int]) -> None:
        """A thread, or a warp of one."""
        number = len(self.traces)
        self.traces.append(trace)
        self.clocks.append({**clock, number: 0})
        self.position.append(0)
        self.waited.append(dict(waited))
        self.groups.append([[]])
        self.stores.append((object(), 0))
        self.unfenced.append([])
        self.equations.append({id(event.equation) for event in trace.events})

    def _run(self) -> None:
        moved = True
        while moved or self._resolve():
            moved = False
            for thread, trace in enumerate(self.traces):  # Warps are added meanwhile.
                events = trace.events
                while self.position[thread] < len(events):
                    if not self._step(thread, events[self.position[thread]]):
                        break
                    self.position[thread] += 1
                    moved = True

    def _step(self, thread: int, event: Event) -> bool:
        """One event of a thread; whether it took place."""
        clock = self.clocks[thread]
        kind = event.kind
        if event.barrier is not None and event.barrier.variable in self.unknown:
            clock[thread] += 1
            if kind is Kind.WAIT:
                clock[_ANYTHING] = 1
            elif kind is Kind.COPY_IN:
                self._access(thread, event)
            return True
        arrives = kind in (Kind.ARRIVE, Kind.COPY_IN) and event.barrier is not None
        if arrives and self._is_ambiguous(thread, event):
            return False
        clock[thread] += 1
        if kind is Kind.WAIT:
            return self._wait(thread, event)
        if kind is Kind.FORK:
            return self._fork(thread, event)
        if kind is Kind.ARRIVE:
            self._arrive(thread, event, None)
        elif kind is Kind.COMMIT:
            self.groups[thread].append([])
        elif kind is Kind.AWAIT_COPIES:
            groups = self.groups[thread]
            # Groups of which nothing is known may be among those that are left.
            left = 0 if thread in self.open_groups else event.left
            for group in groups[: max(len(groups) - 1 - left, 0)]:
                clock.update((access.key, access.time) for access in group)
            del groups[: max(len(groups) - 1 - left, 0)]
        elif kind is Kind.UNKNOWN:
            self._anything(thread, event)
        elif kind is Kind.FENCE:
            self.unfenced[thread] = []
        else:
            self._access(thread, event)
        return True

    def _anything(self, thread: int, event: Event) -> None:
        """Something unknown, which may have waited for whatever it knows of."""
        clock = self.clocks[thread]
        if event.lost:
            clock[_ANYTHING] = 1
        if event.groups:
            self.open_groups.add(thread)
            clock.update((a.key, a.time) for group in self.groups[thread] for a in group)
            self.groups[thread] = [[]]
            self.unfenced[thread] = []

    def _fork(self, thread: int, event: Event) -> bool:
        """Begins the warps; later, whether all have come to their ends."""
        key = (thread, self.position[thread])
        if key not in self.warps:
            first = len(self.traces)
            for trace in event.warps:
                self._begin(trace, self.clocks[thread], self.waited[thread])
            self.warps[key] = range(first, len(self.traces))
        for warp in self.warps[key]:
            trace = self.traces[warp]
            if not trace.complete or self.position[warp] < len(trace.events):
                return False
        for warp in self.warps[key]:
            clock = self.clocks[thread]
            _merge(clock, self.clocks[warp])
            # The thread's waits may be for copies that its warps have started.
            stores, count = self.stores[warp]
            clock[stores] = count
            for barrier, number in self.waited[warp].items():
                self.waited[thread][barrier] = max(self.waited[thread].get(barrier, 0), number)
        return True

    # Barriers -------------------------------------------------------------------------------------

    def _barrier(self, at: BarrierAt | None) -> _Barrier:
        assert at is not None
        found = self.barriers.get(at)
        if found is None:
            kind = self.tables.kind(at.dtype)
            assert kind is not None
            found = self.barriers[at] = _Barrier(kind.arrivals(at.dtype))
        return found

    def _wait(self, thread: int, event: Event) -> bool:
        assert event.barrier is not None
        barrier = self._barrier(event.barrier)
        if barrier.lost:
            raise _Ambiguous
        number = self.waited[thread].get(event.barrier, 0)
        if barrier.complete <= number:
            return False
        self.waited[thread][event.barrier] = number + 1
        if number == len(barrier.first_waits):
            barrier.first_waits.append(len(self.problems))
        _merge(self.clocks[thread], barrier.phases[number].clock)
        return True

    def _arrive(self, thread: int, event: Event, copy: _Access | None) -> None:
        assert event.barrier is not None
        barrier = self._barrier(event.barrier)
        clock = self.clocks[thread]
        phase, number = barrier.phases[-1], barrier.complete
        if event.arrivals:
            barrier.threads.add(thread)
            phase.threads.add(thread)
        phase.arrivals += event.arrivals
        phase.expected += event.expected
        phase.delivered += event.delivered
        if event.expected and not event.delivered:
            phase.announced = event
        _merge(phase.clock, clock)
        if copy is not None:
            copy.key, copy.time = barrier, number
        if phase.delivered > phase.expected and barrier.threads <= {thread}:
            self._too_many_bytes(barrier, event)
        if phase.arrivals < barrier.needed or phase.delivered < phase.expected:
            return
        phase.clock[barrier] = phase.clock[barrier.seen] = clock[barrier.seen] = number
        barrier.phases.append(_Phase())

    def _is_ambiguous(self, thread: int, event: Event) -> bool:
        """Whether it is not known that an arrival comes in the current phase: others may have
        completed that one, or may not have completed the one before."""
        assert event.barrier is not None
        barrier = self._barrier(event.barrier)
        if barrier.lost:
            return False
        phase, number = barrier.phases[-1], barrier.complete
        if phase.arrivals + event.arrivals > barrier.needed:
            return True
        if len(self.arriving.get(event.barrier, ())) < 2:
            return False
        if self.clocks[thread].get(barrier.seen, -1) < number - 1:
            return True
        return event.arrivals > 0 and thread in phase.threads

    def _resolve(self) -> bool:
        """Goes on where only arrivals in unknown phases are left, if nobody waits for them."""
        for thread, trace in enumerate(self.traces):
            if self.position[thread] == len(trace.events):
                continue
            event = trace.events[self.position[thread]]
            if event.kind in (Kind.ARRIVE, Kind.COPY_IN) and event.barrier is not None:
                barrier = self._barrier(event.barrier)
                if barrier.first_waits:
                    before = max(barrier.complete - 1, 0)
                    raise _Ambiguous(*barrier.first_waits[before : before + 1])
                barrier.lost = True
                return True
        return False

    def _too_many_bytes(self, barrier: _Barrier, event: Event) -> None:
        """A copy whose bytes nothing has announced."""
        phase = barrier.phases[-1]
        expected, delivered, announced = phase.expected, phase.delivered, phase.announced
        if announced is None and barrier.complete:  # It follows those that were announced.
            before = barrier.phases[-2]
            announced = before.announced
            expected, delivered = before.expected, before.delivered + delivered
        what = "more" if announced else "none"
        where = announced or event
        self.problems.append(Problem("transfers", where, what, event, (expected, delivered)))
        raise _Ambiguous

    # Memory ---------------------------------------------------------------------------------------

    def _access(self, thread: int, event: Event) -> None:
        clock = self.clocks[thread]
        access = _Access(event, thread, clock[thread], _ANYTHING in clock, thread)
        if event.kind is Kind.COPY_OUT:
            access.key, count = self.stores[thread]
            access.time = count + 1
            self.stores[thread] = access.key, count + 1
        elif event.kind is Kind.COPY_IN:
            access.key = access  # Until it is known which phase it belongs to.
        if event.region is not None:
            known = self.accesses.get(id(event.region)) or self._accesses_of(event.region)
            others = _COLLIDING[event.kind]
            for accesses in known.overlapping:
                for earlier in accesses:
                    if earlier.event.kind in others and clock.get(earlier.key, -1) < earlier.time:
                        self._compare(earlier, access, clock)
            same = None
            for number, earlier in enumerate(known.own):
                if earlier.event is event and earlier.thread == thread and earlier.before(clock):
                    same = number
            if same is not None:
                # Who does not know of the earlier one does not know of this one either.
                del known.own[same]
            known.own.append(access)
        if event.kind is Kind.WRITE:
            self.unfenced[thread].append(event)
        elif event.kind is Kind.COPY_OUT:
            self.groups[thread][-1].append(access)
            self.copies.append(access)
            if self.fences:
                self._check_fence(thread, event)
        elif event.kind is Kind.COPY_IN:
            self.copies.append(access)
            if event.barrier is None or event.barrier.variable not in self.unknown:
                self._arrive(thread, event, access)

    def _check_fence(self, thread: int, event: Event) -> None:
        for write in self.unfenced[thread]:
            if self._overlap(write, event):
                self.problems.append(Problem("copies", event, "fence", write))
                return

    def _overlap(self, first: Event, second: Event) -> bool:
        one, other = first.region, second.region
        if one is None or other is None:
            return False
        # Events come again with the same regions, which they keep alive.
        key = id(one), id(other)
        found = self.overlaps.get(key)
        if found is None:
            found = self.overlaps[key] = one.overlaps(other)
        return found

    def _accesses_of(self, region: MemoryRegion) -> _Accesses:
        """The accesses of a region, which there have been none of."""
        # Events come again with the same regions, which they keep alive.
        found = self.accesses[id(region)] = _Accesses(region)
        if region.overlaps(region):
            found.overlapping.append(found.own)
        others = self.regions.setdefault(region.memory, [])
        for other in others:
            if other.region.overlaps(region):
                found.overlapping.append(other.own)
                other.overlapping.append(found.own)
        others.append(found)
        return found

    def _compare(self, earlier: _Access, later: _Access, clock: Clock) -> None:
        """Reports two accesses that collide, of which nothing is known to order them."""
        first, second = earlier.event, later.event
        kinds = (first.kind, second.kind)
        others = earlier.thread != later.thread or first.kind is Kind.COPY_IN
        if others and (earlier.unsure or _ANYTHING in clock):
            return
        if earlier.thread != later.thread:
            # Threads that write the same need not wait for one another.
            reads = first.kind in (Kind.READ, Kind.COPY_OUT)
            writer, other = (second, earlier) if reads else (first, later)
            if id(writer.equation) in self.equations[other.thread]:
                return
        if kinds == (Kind.COPY_IN, Kind.COPY_IN) and earlier.thread != later.thread:
            return
        check, what = _COLLISIONS[kinds]
        by_others = kinds == (Kind.COPY_IN, Kind.READ) and earlier.thread != later.thread
        if by_others and any(
            one.event.kind is Kind.COPY_IN and one.before(clock)
            for accesses in self.accesses[id(second.region)].overlapping
            for one in accesses
        ):
            # Whoever has waited for its own copy is not early, but the next copy is.
            what, first, second = "while read", second, first
        self.problems.append(Problem(check, second, what, first))

    # The end --------------------------------------------------------------------------------------

    def _end(self) -> None:
        ended = [n == len(t.events) for n, t in zip(self.position, self.traces, strict=True)]
        if any(end and not t.complete for end, t in zip(ended, self.traces, strict=True)):
            return
        if not all(ended):
            pairs = zip(self.position, self.traces, strict=True)
            events = [t.events[n] for n, t in pairs if n < len(t.events)]
            waits = [event for event in events if event.kind is Kind.WAIT]
            if waits:
                self._blocked(waits)
            return
        for copy in self.copies:
            if copy.event.kind is Kind.COPY_IN:
                at = copy.event.barrier
                if at is not None and at.variable in self.unknown:
                    continue
                if not any(copy.before(clock) for clock in self.clocks):
                    self.problems.append(Problem("copies", copy.event, "in"))
            elif not any(copy.before(clock) for clock in self.clocks):
                is_open = copy in self.groups[copy.thread][-1]
                self.problems.append(Problem("copies", copy.event, "open" if is_open else "out"))
        self._check_stages()

    def _check_stages(self) -> None:
        """Copies complete on some barriers of an array only: the others are for steps that there
        are not."""
        used: dict[Any, dict[tuple[int, ...], Event]] = {}
        for copy in self.copies:
            at = copy.event.barrier
            if at is not None and at.index:
                used.setdefault(at.variable, {}).setdefault(at.index, copy.event)
        for variable, events in used.items():
            if variable in self.unknown:
                continue
            count = math.prod(variable.aval.shape)
            others = any(b.variable is variable and b.index not in events for b in self.barriers)
            if 1 < len(events) < count and not others:
                (first, *_) = events.values()
                self.problems.append(Problem("stages", first, "more", None, (count, len(events))))

    def _blocked(self, waits: Sequence[Event]) -> None:
        """Waits that never end; the one whose phase has begun is the cause of the others."""
        event = max(waits, key=lambda one: self._barrier(one.barrier).phases[-1].arrivals)
        assert event.barrier is not None
        barrier = self._barrier(event.barrier)
        phase, number = barrier.phases[-1], barrier.complete
        if phase.arrivals >= barrier.needed:
            where = phase.announced or event
            detail: tuple[Any, ...] = (phase.expected, phase.delivered)
            self.problems.append(Problem("transfers", where, "fewer", event, detail))
        else:
            needed = (number + 1) * barrier.needed
            came = number * barrier.needed + phase.arrivals
            self.problems.append(
                Problem("arrivals", event, "never", None, (number + 1, needed, came))
            )


_COLLISIONS = {
    (Kind.COPY_IN, Kind.READ): ("reuse", "read"),
    (Kind.COPY_IN, Kind.COPY_OUT): ("reuse", "read"),
    (Kind.COPY_IN, Kind.WRITE): ("reuse", "written"),
    (Kind.COPY_IN, Kind.COPY_IN): ("reuse", "copied over"),
    (Kind.COPY_OUT, Kind.WRITE): ("reuse", "while stored"),
    (Kind.COPY_OUT, Kind.COPY_IN): ("reuse", "while stored"),
    (Kind.READ, Kind.COPY_IN): ("reuse", "while read"),
    (Kind.WRITE, Kind.COPY_IN): ("reuse", "while written"),
}


_COLLIDING = {
    kind: frozenset(first for first, second in _COLLISIONS if second is kind) for kind in Kind
}
"""For each kind, those of earlier accesses that it may collide with."""


_CONSEQUENCES = {"read": 1, "written": 2, "copied over": 3}


def _merge(clock: Clock, other: Clock) -> None:
    for key, time in other.items():
        if clock.get(key, -1) < time:
            clock[key] = time
