"""Which device waits for which, when no thread of a kernel on several devices can go on.

A place in memory that is polled does not say who would write there. So each device that waits for a
semaphore is run on as if it had been signalled: the devices that wait for what it then writes are
those that wait for it. The simulation has failed by then, and what this does to its memory is of no
importance.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from pallasite_simulator.engine.memory import GLOBAL_BASE, GlobalMemory
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.launch import Waves
from pallasite_simulator.types import Array

SIGNALLED = 1 << 30
"""What a semaphore is set to, of which nobody waits for as much."""
ROUNDS = 64
"""How often the blocks of a device are run in turn, at most."""
WORD = 4


@dataclasses.dataclass(frozen=True)
class _Polled:
    """What threads of a device look at again and again.

    Attributes:
      words: offsets of words in global memory.
      semaphores: those of them that are semaphores.
    """

    words: frozenset[int]
    semaphores: frozenset[int]


def waits_between(
    parts: Sequence[Waves], memory: GlobalMemory, semaphores: Collection[int]
) -> list[str]:
    """Says which devices wait for which.

    Args:
      parts: the waves of each device.
      memory: of all devices.
      semaphores: offsets of the allocations that hold semaphores.
    """
    running = {number: list(one.running) for number, one in enumerate(parts)}
    polled = {
        number: _polled(waves, memory, semaphores) for number, waves in running.items() if waves
    }
    waits: dict[int, set[int]] = {number: set() for number, one in polled.items() if one.words}
    for device, own in polled.items():
        if not own.semaphores:
            continue
        places = {number: sorted(one.words) for number, one in polled.items() if number != device}
        before = {number: _words(memory, found) for number, found in places.items()}
        kept = _words(memory, sorted(own.semaphores))
        _set(memory, sorted(own.semaphores), [SIGNALLED] * len(kept))
        _run_on(running[device])
        _set(memory, sorted(own.semaphores), kept)
        for number, found in places.items():
            if _words(memory, found) != before[number]:
                waits[number].add(device)
                _set(memory, found, before[number])
    cycle = _cycle(waits)
    if cycle:
        links = ", which waits for ".join(f"device {one}" for one in cycle[1:])
        return [f"in a cycle, device {cycle[0]} waits for {links}"]
    return [_told(number, others) for number, others in sorted(waits.items())]


def _told(device: int, others: Collection[int]) -> str:
    if others:
        names = " and ".join(f"device {one}" for one in sorted(others))
        return f"device {device} waits for {names}"
    return f"device {device} waits for what no device that is left would do"


def _polled(waves: Sequence[Wave], memory: GlobalMemory, semaphores: Collection[int]) -> _Polled:
    """What threads look at, as seen by letting them look once more."""
    words: set[int] = set()
    for wave in waves:
        looked: list[Array] = []
        wave.polls = looked
        with contextlib.suppress(SimulationError):
            wave.run()
        wave.polls = None
        for addresses in looked:
            words.update((addresses.astype(np.int64) - GLOBAL_BASE).tolist())
    found = {one: memory.allocation_at(one) for one in words if one >= 0 and one % WORD == 0}
    inside = {word: one for word, one in found.items() if one is not None}
    return _Polled(
        frozenset(inside),
        frozenset(word for word, one in inside.items() if one.offset in semaphores),
    )


def _run_on(waves: Sequence[Wave]) -> None:
    """Runs blocks as far as they get."""
    for wave in waves:
        wave.observer = None
    try:
        for _ in range(ROUNDS):
            moved = [wave.run() for wave in waves if not wave.done]
            if not any(moved):
                return
    except Exception:
        # The kernel runs on with data that nobody has sent: what goes wrong says nothing of it.
        return


def _words(memory: GlobalMemory, offsets: Sequence[int]) -> list[int]:
    return [int(memory.bytes_at(GLOBAL_BASE + one, WORD).view(np.int32)[0]) for one in offsets]


def _set(memory: GlobalMemory, offsets: Sequence[int], values: Sequence[int]) -> None:
    for one, value in zip(offsets, values, strict=True):
        memory.bytes_at(GLOBAL_BASE + one, WORD).view(np.int32)[0] = value


def _cycle(waits: Mapping[int, Collection[int]]) -> list[int]:
    """Devices each of which waits for the next, the last of which is the first; or none."""
    for first in sorted(waits):
        path = {first: -1}
        pending = [first]
        while pending:  # Breadth first: a shortest cycle through the first device.
            device = pending.pop(0)
            for other in sorted(waits.get(device, ())):
                if other == first:
                    found = [first, device]
                    while found[-1] != first:
                        found.append(path[found[-1]])
                    return found[::-1] if len(found) > 1 else found
                if other not in path:
                    path[other] = device
                    pending.append(other)
    return []
