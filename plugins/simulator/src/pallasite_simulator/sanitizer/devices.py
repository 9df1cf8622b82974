"""What is checked between devices when a kernel has ended on all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.sanitizer import entries
from pallasite_simulator.sanitizer.findings import Finding, identity, place
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.memory import Allocation, GlobalMemory
    from pallasite_simulator.engine.observer import Access
    from pallasite_simulator.sanitizer.launch_state import LaunchState

_END = (
    "let each device wait until the others are done with its memory: pl.semaphore_signal(sem,"
    " device_id=...) after the access and pl.semaphore_wait here; or end the kernel on all devices"
    " at once: CompilerParams(exit_barrier=True)"
)
_SEMAPHORE = "wait for all that is signalled: pl.semaphore_wait(semaphore, all of it)"

SEMAPHORE_BYTES = 4


class DeviceChecks:
    """Watches the devices of one launch.

    Attributes:
      known: for each device, by domain, rows of clocks of what it knew when its blocks had ended.
      taken: offsets of semaphores that were decremented.
      watched: offsets of semaphores that were read to see how far they are.
    """

    def __init__(self, launch: LaunchState):
        self._launch = launch
        self.known: dict[int, Mapping[int, int]] = {}
        self.taken: set[int] = set()
        self.watched: set[int] = set()
        launch.hold(self._roots)

    def _roots(self) -> Iterable[int]:
        for known in self.known.values():
            yield from known.values()

    def ended(self, device: int, domain: int, row: int) -> None:
        """Threads of a domain of a device, who know what a row does, have ended."""
        clocks = self._launch.clocks
        known = clocks.join_foreign(clocks.foreign[row], {domain: clocks.plain(row)})
        self.known[device] = clocks.join_foreign(self.known.get(device), known) or {}

    def access(self, access: Access) -> None:
        """Notes how semaphores are waited for."""
        instruction = access.instruction
        if instruction.opcode == "atom" and instruction.has("cas"):
            self.taken.update(access.offsets.tolist())
        elif id(instruction) in self._launch.traits.takes:
            self.watched.difference_update(access.offsets.tolist())
        elif instruction.opcode == "ld" and id(instruction) not in self._launch.traits.guesses:
            self.watched.update(access.offsets.tolist())

    def finish(
        self, memory: GlobalMemory, lasting: Collection[int], semaphores: Collection[int]
    ) -> None:
        """Looks for accesses to memory whose kernel may have ended, and for semaphores that are
        not at zero.

        Args:
          memory: of all devices.
          lasting: offsets of allocations that are there before and after the kernel.
          semaphores: offsets of allocations that are semaphores.
        """
        segments = memory.segments
        assert segments is not None
        for device in range(segments.first, segments.first + segments.count):
            start = segments.start_of(device)
            end = min(start + segments.stride, memory.region.bytes.size >> 10 << 10)
            for verb, level, first, found in self._launch.global_memory.known(start, end):
                self._check_end(memory, device, lasting, verb, level, first, found)
        for one in memory.allocations:
            if one.offset in semaphores:
                self._check_semaphores(memory, one)

    def _check_end(
        self,
        memory: GlobalMemory,
        device: int,
        lasting: Collection[int],
        verb: str,
        level: int,
        first: int,
        found: Array,
    ) -> None:
        launch = self._launch
        positions = np.flatnonzero(found)
        picked = found[positions]
        devices = np.array([-1 if one is None else one for one in launch.devices])
        domains, columns = entries.domains(picked), entries.columns(picked)
        times = entries.times(picked)
        known = self.known.get(device, {})
        told: set[int] = set()
        for domain in np.unique(domains).tolist():
            if devices[domain] == device:
                continue
            chosen = domains == domain
            if domain in known:
                row = launch.clocks.generic[known[domain]]
                chosen &= row[columns] < times
            for number in np.flatnonzero(chosen).tolist():
                offset = (first + int(positions[number])) << level
                allocation = memory.allocation_at(offset)
                if allocation is None or allocation.offset in {*lasting, *told}:
                    continue
                told.add(allocation.offset)
                self._tell_end(allocation, device, verb, int(picked[number]), offset)

    def _tell_end(
        self, allocation: Allocation, device: int, verb: str, entry: int, offset: int
    ) -> None:
        launch = self._launch
        instruction = launch.events[int(entries.times(entry))]
        assert instruction is not None
        who = launch.name(int(entries.domains(entry)), int(entries.columns(entry)))
        launch.findings.add(
            ("end of device", identity(instruction), allocation.name),
            lambda: Finding(
                "memory of a device whose kernel may have ended",
                [
                    f"{who} {verb} byte {offset - allocation.offset} of {allocation.name}",
                    f"at {place(instruction)}",
                    f"but the kernel of device {device} may have ended before: nothing tells it"
                    " of the access",
                ],
                _END,
                instruction.location,
            ),
        )

    def _check_semaphores(self, memory: GlobalMemory, allocation: Allocation) -> None:
        contents = memory.region.bytes[allocation.offset : allocation.offset + allocation.size]
        values = contents.view(np.int32)
        for number in np.flatnonzero(values).tolist():
            offset = allocation.offset + SEMAPHORE_BYTES * number
            if offset in self.watched:
                continue  # It counts up, and its waits do not change it.
            self._tell_semaphore(allocation, number, int(values[number]), offset)

    def _tell_semaphore(self, allocation: Allocation, number: int, value: int, offset: int) -> None:
        launch = self._launch
        shadow = launch.global_memory
        (places,) = shadow.places(np.array([offset]), SEMAPHORE_BYTES)
        entry = int(shadow.strongly_written(places.level)[places.granules].max())
        instruction = launch.events[int(entries.times(entry))]
        if instruction is None:
            return
        who = launch.name(int(entries.domains(entry)), int(entries.columns(entry)))
        launch.findings.add(
            ("semaphore", identity(instruction)),
            lambda: Finding(
                "semaphore that is not at zero at the end",
                [
                    f"semaphore {number} of {allocation.name} is at {value} when the kernel has"
                    " ended on all devices",
                    f"the last to change it was {who}",
                    f"at {place(instruction)}",
                ],
                _SEMAPHORE,
                instruction.location,
            ),
        )
