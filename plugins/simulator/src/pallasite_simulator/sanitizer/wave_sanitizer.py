"""The sanitizer of one wave: an observer that hands each event to those who check it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.engine.observer import Access, AsyncOperation, Observer
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.sanitizer.allocations import SharedAllocations
from pallasite_simulator.sanitizer.async_checks import AsyncChecks
from pallasite_simulator.sanitizer.divergence import DivergenceChecks
from pallasite_simulator.sanitizer.launch_state import LaunchState
from pallasite_simulator.sanitizer.memory_checks import MemoryChecks
from pallasite_simulator.sanitizer.ordering import Ordering
from pallasite_simulator.sanitizer.report import Reporter
from pallasite_simulator.sanitizer.undefined import UndefinedValues
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.lanes import Lanes
    from pallasite_simulator.engine.wave import Wave


_GROUPS_OF_MISUSE = {
    "wgmma": "registers",
    "cp": "async",
    "st": "async",
    "red": "async",
    "shfl": "initialized",
    "tcgen05": "async",
}
"""Groups of checks that other instructions than those of barriers belong to."""


_SCOPES = ("cta", "cluster", "gpu", "sys")


class WaveSanitizer(Observer):
    """Checks one wave; findings go to the launch."""

    _wave: Wave
    _ordering: Ordering
    _memory: MemoryChecks
    _asynchronous: AsyncChecks
    _divergence: DivergenceChecks
    _undefined: UndefinedValues
    _reporter: Reporter

    def __init__(self, launch: LaunchState):
        self.launch = launch
        self.groups = launch.groups
        self._synchronizes = bool(self.groups & {"races", "async"})

    def attach(self, wave: Wave) -> None:
        self._wave = wave
        launch = self.launch
        launch.prepare(wave)
        memory = wave.memory
        allocations = SharedAllocations(
            wave.program, launch.allocations, memory.shared_limit, memory.shared_stride
        )
        self._reporter = Reporter(wave, launch, allocations)
        self._ordering = Ordering(wave, launch)
        self._undefined = UndefinedValues(wave, self._reporter)
        launch.untold.append(self._undefined.finish)
        self._memory = MemoryChecks(
            wave, launch, self._ordering, self._reporter, self.groups, self._undefined
        )
        self._divergence = DivergenceChecks(wave, self._reporter)
        self._asynchronous = AsyncChecks(
            wave, launch, self._ordering, self._memory, self._reporter, self.groups, self
        )

    def checks(self, group: str) -> bool:
        return group in self.groups

    # Registers and memory -------------------------------------------------------------------------

    def undefined_register(self, lanes: Array, name: str, instruction: Instruction) -> None:
        if "initialized" in self.groups:
            self._reporter.simple(
                "read of a register without a value",
                lanes,
                f"reads {name}, which it has not written",
                instruction,
                "give it a value on every path",
            )

    def reads_undefined(
        self, lanes: Lanes, register: int, name: str, instruction: Instruction
    ) -> None:
        if "initialized" in self.groups:
            self._undefined.read(lanes, register, name, instruction)

    def follow(self, lanes: Lanes, instruction: Instruction) -> None:
        self._undefined.follow(lanes, instruction)

    def decides(self, instruction: Instruction) -> None:
        self._undefined.used()

    def shuffled(
        self,
        lanes: Lanes,
        registers: tuple[int, int],
        sources: Array,
        absent: Array,
        instruction: Instruction,
    ) -> None:
        if "initialized" in self.groups:
            self._undefined.shuffled(lanes, registers, sources, absent, instruction)

    def access(self, access: Access) -> None:
        self.launch.tidy()
        if "initialized" in self.groups:
            self._undefined.access(access)
        if access.kind == "atomic" and self.launch.traits.fences and self._synchronizes:
            self._synchronize(access)
        self._divergence.access(access.lanes, access.instruction)
        if self.launch.between_devices is not None and access.kind == "atomic":
            self.launch.between_devices.access(access)
        self._memory.access(access)
        if access.kind == "read" and access.space == "shared":
            contents = self._undefined.contents
            contents.loaded(access.instruction, access.lanes, access.offsets, access.size)

    def _synchronize(self, access: Access) -> None:
        """Strong accesses synchronize where fences are before and after them."""
        if access.space not in ("global", "shared") or access.instruction.opcode == "mbarrier":
            return
        scope = next((one for one in access.instruction.modifiers if one in _SCOPES), "gpu")
        order = np.argsort(access.offsets, kind="stable")
        lanes, offsets = access.lanes[order], access.offsets[order]
        starts = np.append(0, np.flatnonzero(offsets[1:] != offsets[:-1]) + 1)
        groups = np.split(lanes, starts[1:])
        keys = [("location", access.space, offset) for offset in offsets[starts].tolist()]
        if access.instruction.opcode != "st":
            for group, key in zip(groups, keys, strict=True):
                self._ordering.see(group, key, scope)
        if access.writes:
            for group, key in zip(groups, keys, strict=True):
                self._ordering.release_fenced(group, key, scope)

    def forget_contents(self, space: str, offsets: Array, size: int) -> None:
        self._memory.forget_contents(space, offsets, size)

    def registers_in_flight(self, operation: AsyncOperation, registers: Sequence[int]) -> None:
        self._asynchronous.registers(operation, registers)

    def registers_touched(
        self, lanes: Array, registers: frozenset[int], instruction: Instruction
    ) -> None:
        self._asynchronous.touched(lanes, registers, instruction)

    def registers_fenced(self, lanes: Array) -> None:
        self._asynchronous.fenced(lanes)

    # Synchronization ------------------------------------------------------------------------------

    def barrier(self, arrived: Array, left: Array, proxy: str = "generic") -> None:
        self._undefined.contents.passed(left)
        if self._synchronizes:
            self._ordering.barrier(arrived, left)

    def barriers(self, lanes: Array, groups: Array) -> None:
        self._undefined.contents.passed(lanes)
        if self._synchronizes:
            self._ordering.barriers(lanes, groups)

    def meets(self, lanes: Array) -> None:
        self._divergence.meets(lanes)

    def absent(self, waited: Array, absent: Array, instruction: Instruction) -> None:
        if "barriers" in self.groups:
            self._divergence.absent(waited, absent, instruction)

    def release(
        self, lanes: Array, key: Hashable, scope: str = "cta", relaxed: bool = False
    ) -> None:
        if not self._synchronizes:
            return
        if relaxed:
            self._ordering.release_fenced(lanes, key, scope)
        else:
            self._ordering.release(lanes, key, scope)

    def acquire(
        self, lanes: Array, key: Hashable, scope: str = "cta", relaxed: bool = False
    ) -> None:
        self._asynchronous.acquired(key)
        if not self._synchronizes:
            return
        if not relaxed:
            self._ordering.acquire(lanes, key, scope)
        elif self.launch.traits.fences:
            self._ordering.see(lanes, key, scope)

    def releases(
        self, lanes: Array, places: Array, phases: Array, scope: str = "cta", relaxed: bool = False
    ) -> None:
        if relaxed:
            super().releases(lanes, places, phases, scope, relaxed)
        elif self._synchronizes:
            self._ordering.releases(lanes, places, phases)

    def acquires(
        self, lanes: Array, places: Array, phases: Array, scope: str = "cta", relaxed: bool = False
    ) -> None:
        if relaxed:
            super().acquires(lanes, places, phases, scope, relaxed)
            return
        self._asynchronous.acquired_phases(places, phases)
        if self._synchronizes:
            self._ordering.acquires(lanes, places, phases)

    def forget(self, key: Hashable) -> None:
        self._ordering.forget(key)

    def proxy_fence(self, lanes: Array, kind: str) -> None:
        if self._synchronizes and kind.startswith("async"):
            self._ordering.proxy_fence(lanes, kind)

    def fence(self, lanes: Array, semantics: str, scope: str) -> None:
        if not self._synchronizes:
            return
        if semantics == "mbarrier_init":
            self._memory.publish_barriers(lanes)
        else:
            self._ordering.fence(lanes, scope)

    # Asynchronous operations ----------------------------------------------------------------------

    def begin(self, operation: AsyncOperation) -> None:
        self._asynchronous.begin(operation)

    def async_access(
        self,
        operation: AsyncOperation,
        kind: str,
        space: str,
        offsets: Array,
        size: int,
        owners: Array | None = None,
    ) -> None:
        self._asynchronous.access(operation, kind, space, offsets, size, owners)

    def complete_on(
        self, operation: AsyncOperation, key: Hashable, lanes: Array | None = None
    ) -> None:
        self._asynchronous.complete_on(operation, key, lanes)

    def completions(
        self, operation: AsyncOperation, lanes: Array, places: Array, phases: Array
    ) -> None:
        self._asynchronous.completions(operation, lanes, places, phases)

    def complete_for(
        self, operations: Sequence[AsyncOperation], lanes: Array, reads_only: bool = False
    ) -> None:
        self._asynchronous.complete_for(operations, lanes, reads_only)

    # Misuse and ends ------------------------------------------------------------------------------

    def misuse(self, lanes: Array, message: str, instruction: Instruction) -> None:
        group = _GROUPS_OF_MISUSE.get(instruction.opcode, "barriers")
        if group in self.groups:
            self._reporter.simple(
                f"misuse of {instruction.opcode}",
                lanes,
                message,
                instruction,
                "see what the instruction requires",
            )

    def exit(self, lanes: Array) -> None:
        self._asynchronous.exit(lanes)
        if self._synchronizes:
            for block, row in self._ordering.exit(lanes):
                self._memory.check_end(block, row)

    def finish(self) -> None:
        self._undefined.finish()
        self.launch.untold.remove(self._undefined.finish)
        self._asynchronous.finish()
        self._ordering.finish()
