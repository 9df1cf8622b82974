"""Profiles of kernels: reading what a kernel recorded, and showing it as a Chrome trace.

The form of the words is described at :class:`Profile`. A trace is JSON that
``chrome://tracing`` and https://ui.perfetto.dev open: a process for each multiprocessor, a thread
for each warpgroup (or warp) of each block, and a pair of events for each region.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallasite.plugin import InvalidValueError
from pallasite.plugin.runtime import CompiledKernel

PROFILE_RESULT = "standard.profile"
"""The name of the kernel's hidden result."""
PROFILE_HEADER_WORDS = 8
PROFILE_EXIT_BIT = 1 << 31

_PLAUSIBLE_CLOCKS = (0.05, 20.0)
"""Cycles per nanosecond. Others are measured where a kernel is shorter than the timer's step."""
_FALLBACK_CLOCK = 1.0


@dataclasses.dataclass(frozen=True)
class Profile:
    """The record of named regions that a kernel leaves in a hidden result.

    The result has a slot for each recorder of each block (x fastest), in 32-bit words: the number
    of events; the multiprocessor; the global timer at the start (low, high); the clock at the
    start; the clock at the end; the global timer at the end (low, high). Then the events, two words
    each: the region's number, with the highest bit set where it ends, and the clock.

    Attributes:
      output: which output of the kernel it is.
      names: of the regions, by number.
      scope: what a recorder is, ``"warpgroup"`` or ``"warp"``.
      recorders: how many of them a block has.
      events: how many a slot has room for; the count in the slot may be larger.
      directory: where traces are written.
    """

    output: int
    names: tuple[str, ...]
    scope: str
    recorders: int
    events: int
    directory: str

    @property
    def words(self) -> int:
        """Words of one slot."""
        return PROFILE_HEADER_WORDS + 2 * self.events


def profile_of(compiled: CompiledKernel) -> Profile | None:
    """What a compiled kernel records of its named regions; None if it is not profiled."""
    for result in compiled.launch.hidden_results:
        if result.name == PROFILE_RESULT:
            fields = json.loads(result.arguments)
            return Profile(result.output, **{**fields, "names": tuple(fields["names"])})
    return None


@dataclasses.dataclass(frozen=True)
class Event:
    """A region begins or ends.

    Attributes:
      name: of the region.
      begins: whether it begins here.
      time: nanoseconds since the first recorder of the grid started.
      block: number of the block, x fastest.
      recorder: number of the warpgroup (or warp) in the block.
      multiprocessor: where the block ran.
    """

    name: str
    begins: bool
    time: float
    block: int
    recorder: int
    multiprocessor: int


@dataclasses.dataclass(frozen=True)
class Recording:
    """What one recorder, a warpgroup or a warp, left behind.

    Attributes:
      block, recorder, multiprocessor: as in :class:`Event`.
      start, end: when the kernel began and ended here, in nanoseconds as in :class:`Event`.
      events: in the order in which they were recorded.
      lost: how many more there were than there was room for.
    """

    block: int
    recorder: int
    multiprocessor: int
    start: float
    end: float
    events: tuple[Event, ...]
    lost: int = 0


def decode(words: Any, profile: Profile) -> list[Event]:
    """The events of a launch, recorder by recorder, each in order.

    Args:
      words: the hidden output of the kernel.
      profile: ``profile_of(compiled)``.

    Raises:
      InvalidValueError: the number of words is not that of whole blocks.
    """
    return [event for recording in recordings(words, profile) for event in recording.events]


def recordings(words: Any, profile: Profile) -> list[Recording]:
    """What each recorder of a launch left behind; see :func:`decode`.

    The clock has 32 bits, and counts on from zero when they are full: after about two seconds.
    Times are right as long as no two events that follow each other are further apart than that.
    """
    slots = _slots(words, profile)
    counts = slots[:, 0].astype(np.int64)
    kept = np.minimum(counts, profile.events)
    starts, ends = _timer(slots, 2), _timer(slots, 6)
    cycles = [_cycles(slot, count) for slot, count in zip(slots, kept, strict=True)]
    rate = cycles_per_nanosecond([int(c[-1]) for c in cycles], ends - starts)
    first = starts.min() if len(starts) else np.uint64(0)
    result = []
    for number, (slot, elapsed) in enumerate(zip(slots, cycles, strict=True)):
        block, recorder = divmod(number, profile.recorders)
        multiprocessor = int(slot[1])
        start = float(starts[number] - first)
        times = start + elapsed / rate
        region_words = slot[PROFILE_HEADER_WORDS::2][: kept[number]]
        events = tuple(
            Event(
                name=_name(int(word), profile.names),
                begins=not int(word) & PROFILE_EXIT_BIT,
                time=float(time),
                block=block,
                recorder=recorder,
                multiprocessor=multiprocessor,
            )
            for word, time in zip(region_words, times, strict=False)
        )
        lost = int(counts[number] - kept[number])
        result.append(
            Recording(block, recorder, multiprocessor, start, float(times[-1]), events, lost)
        )
    return result


def _slots(words: Any, profile: Profile) -> np.ndarray[Any, Any]:
    array = np.asarray(words)
    if array.dtype != np.uint32 or array.size % (profile.words * profile.recorders):
        raise InvalidValueError(
            "these are not the words of this profile",
            got=f"{array.dtype}{list(array.shape)}",
            expected=f"uint32, {profile.recorders} slots of {profile.words} words for each block",
        )
    return array.reshape(-1, profile.words)


def _timer(slots: np.ndarray[Any, Any], position: int) -> np.ndarray[Any, Any]:
    low, high = slots[:, position].astype(np.uint64), slots[:, position + 1].astype(np.uint64)
    return high << np.uint64(32) | low


def _cycles(slot: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """Cycles from the start to each event, and last to the end, over any wraps of the clock."""
    events = slot[PROFILE_HEADER_WORDS + 1 :: 2][:count]
    clocks = np.concatenate([slot[4:5], events, slot[5:6]])
    return np.cumsum(np.diff(clocks).astype(np.int64))  # uint32 differences are modulo 2**32


def cycles_per_nanosecond(cycles: Sequence[int], nanoseconds: Any) -> float:
    """The speed of the clock by the global timer, over all recorders.

    The timer has steps of up to a microsecond, so a single short recording says little.
    """
    total = int(np.sum(np.asarray(nanoseconds, dtype=np.int64)))
    rate = sum(cycles) / total if total > 0 else 0.0
    low, high = _PLAUSIBLE_CLOCKS
    return rate if low <= rate <= high else _FALLBACK_CLOCK


def _name(word: int, names: Sequence[str]) -> str:
    number = word & ~PROFILE_EXIT_BIT
    return names[number] if number < len(names) else f"damaged event {word:#x}"


def chrome_trace(
    words: Any,
    profile: Profile,
    *,
    kernel: str = "kernel",
    grid: tuple[int, int, int] | None = None,
    cluster: tuple[int, int, int] | None = None,
    block: tuple[int, int, int] | None = None,
) -> dict[str, Any]:
    """The Chrome trace of a launch, to be written as JSON; times are in microseconds.

    Every event that begins a region has one that ends it: a region whose end was lost ends with its
    recording, and says so.
    """
    read = recordings(words, profile)
    events: list[dict[str, Any]] = []
    for multiprocessor in sorted({recording.multiprocessor for recording in read}):
        events.append(_label("process_name", f"SM {multiprocessor}", multiprocessor, 0))
    for recording in read:
        thread = 1 + recording.block * profile.recorders + recording.recorder
        name = f"block {_position(recording.block, grid)} {profile.scope} {recording.recorder}"
        events.append(_label("thread_name", name, recording.multiprocessor, thread))
        events.extend(
            {"name": event.name, "ph": "B" if begins else "E", "ts": event.time / 1000}
            | {"pid": 1 + event.multiprocessor, "tid": thread}
            | ({"args": {"end": "not recorded"}} if cut else {})
            for event, begins, cut in _balanced(recording)
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "kernel": kernel,
            "grid": grid,
            "cluster": cluster,
            "block": block,
            "lost events": sum(recording.lost for recording in read),
        },
    }


def _balanced(recording: Recording) -> Iterator[tuple[Event, bool, bool]]:
    """The events, whether each begins a region, and whether its end is made up."""
    open_: list[Event] = []
    for event in recording.events:
        if event.begins:
            open_.append(event)
            yield event, True, False
        elif open_ and open_[-1].name == event.name:
            open_.pop()
            yield event, False, False
    for event in reversed(open_):
        yield dataclasses.replace(event, time=recording.end), False, True


def _label(kind: str, name: str, multiprocessor: int, thread: int) -> dict[str, Any]:
    where = {"pid": 1 + multiprocessor, "tid": thread}
    return {"name": kind, "ph": "M", **where, "args": {"name": name}}


def _position(block: int, grid: tuple[int, int, int] | None) -> str:
    if grid is None:
        return str(block)
    x, y = grid[:2]
    return f"({block % x}, {block // x % y}, {block // (x * y)})"
