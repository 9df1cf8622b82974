"""The texts of findings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from pallasite.plugin import SourceLocation
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.sanitizer import entries
from pallasite_simulator.sanitizer.allocations import SharedAllocations
from pallasite_simulator.sanitizer.findings import Finding, identity, place
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave
    from pallasite_simulator.sanitizer.launch_state import LaunchState

_BARRIER = (
    "order them with a barrier, an mbarrier or a semaphore (in Pallas: plgpu.barrier_arrive and"
    " plgpu.barrier_wait, or leave automatic barriers on)"
)
_GRID = (
    "let each block write its own part, accumulate with atomics, or order the blocks with a"
    " semaphore (release and acquire at .gpu scope)"
)
_DEVICES = (
    "order the devices with a semaphore (in Pallas: pl.semaphore_signal(sem, device_id=...) after"
    " the access and pl.semaphore_wait before the other one), at .sys scope on both sides"
)
_SCOPE = (
    "use a scope that both threads are in: .gpu for threads of different blocks, .cluster for those"
    " of one cluster"
)
_PROXY = (
    "fence.proxy.async by the threads that wrote, then a barrier, before the asynchronous operation"
    " (in Pallas: plgpu.commit_smem())"
)
_PROXY_OF_GLOBAL = (
    "fence.proxy.async or fence.proxy.async.global, by the threads that wrote before a barrier, or"
    " by the thread that begins the operation after it"
)
_INIT = (
    "fence.mbarrier_init.release.cluster (or fence.proxy.async) by the thread that initialized it,"
    " then a barrier"
)
_WAIT = {
    "mbarrier": "wait for the mbarrier that the copy completes on (in Pallas: plgpu.barrier_wait)",
    "bulk": "wait for the group of the copy: cp.async.bulk.wait_group, and a barrier for other"
    " threads (in Pallas: plgpu.wait_smem_to_gmem)",
    "wgmma": "wait for the group of the wgmma: wgmma.wait_group, and a barrier for other threads"
    " (in Pallas: plgpu.wgmma_wait)",
    "cp.async": "wait for the group of the copy: cp.async.wait_group, then a barrier for other"
    " threads (in Pallas: plgpu.wait_gmem_to_smem)",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """One side of a race.

    Attributes:
      verb: what it does: ``"reads"``, ``"writes"``, ``"changes"``.
      entry: who and when, as in :mod:`.entries`.
      instruction: which instruction did it.
      value: what it writes, if known.
    """

    verb: str
    entry: int
    instruction: Instruction
    value: str = ""


class Reporter:
    """Describes findings in one wave, and adds them to those of the launch."""

    def __init__(self, wave: Wave, launch: LaunchState, allocations: SharedAllocations):
        self.wave = wave
        self.launch = launch
        self.allocations = allocations

    def where(self, space: str, offset: int) -> str:
        """Names a place in a memory of the wave."""
        memory = self.wave.memory
        if space == "shared":
            block, within = divmod(offset, memory.shared_stride)
            what = self.allocations.describe(within)
            return f"{what} in shared memory of block {self.wave.block_name(block)}"
        if space == "local":
            return f"byte {offset % memory.local_stride} of local memory"
        return memory.describe(space, offset)

    def who(self, lanes: Array) -> str:
        """Names lanes."""
        others = len(lanes) - 1
        text = self.wave.thread_name(int(lanes[0]))
        return text + (f" (and {others} more thread{'s' * (others > 1)})" if others else "")

    def _name(self, entry: int) -> str:
        domain, column = int(entries.domains(entry)), int(entries.columns(entry))
        return self.launch.name(domain, column)

    def engine(self, entry: int) -> str:
        """``"thread"``, or the kind of asynchronous engine that made an access."""
        clocks = self.launch.clocks
        column = int(entries.columns(entry))
        if column < clocks.threads:
            return "thread"
        if column < clocks.fixed:
            return "cp.async"
        name = clocks.name(column)
        assert isinstance(name, tuple)
        return "thread" if name[0] == "init" else str(name[0])

    def simple(
        self,
        kind: str,
        lanes: Array,
        text: str,
        instruction: Instruction,
        hint: str,
        count: int | None = None,
        location: SourceLocation | None = None,
    ) -> None:
        """A finding about some lanes at one instruction, whose line is that of the finding unless
        there is a better one."""
        self.launch.findings.add(
            (kind, identity(instruction)),
            lambda: Finding(
                kind,
                [f"{self.who(lanes)} {text}", f"at {place(instruction)}"],
                hint,
                location or instruction.location,
            ),
            len(lanes) if count is None else count,
        )

    def operation(
        self, kind: str, entry: int, text: str, instruction: Instruction, hint: str
    ) -> None:
        """A finding about an asynchronous operation."""
        self.launch.findings.add(
            (kind, identity(instruction)),
            lambda: Finding(
                kind,
                [f"{self._name(entry)} {text}", f"at {place(instruction)}"],
                hint,
                instruction.location,
            ),
        )

    def race(
        self, space: str, offset: int, now: Side, before: Side, proxy: bool, count: int
    ) -> None:
        """Two accesses without an order; ``proxy``: only a proxy fence is missing."""
        self.launch.findings.add(
            ("race", space, identity(now.instruction), identity(before.instruction), proxy),
            lambda: self._race(space, offset, now, before, proxy),
            count,
        )

    def end_of_block(self, block: int, offset: int, verb: str, entry: int) -> None:
        """A block ended while others may still access its shared memory."""
        instruction = self.launch.events[int(entries.times(entry))]
        assert instruction is not None
        name = self.wave.block_name(block)
        self.launch.findings.add(
            ("end", identity(instruction)),
            lambda: Finding(
                "block ends while its shared memory is in use",
                [
                    f"{self._name(entry)} {verb} {self.where('shared', offset)}",
                    f"at {place(instruction)}",
                    f"but block {name} may have ended before: no thread of it waited for that",
                ],
                "synchronize the blocks of the cluster before they exit: barrier.cluster.arrive and"
                " barrier.cluster.wait",
                instruction.location,
            ),
        )

    def _race(self, space: str, offset: int, now: Side, before: Side, proxy: bool) -> Finding:
        engines = (self.engine(now.entry), self.engine(before.entry))
        across = entries.domains(now.entry) != entries.domains(before.entry)
        kind = f"data race in {space} memory"
        devices = self.launch.devices
        far = across and (
            devices[int(entries.domains(now.entry))] != devices[int(entries.domains(before.entry))]
        )
        if across:
            kind += " between devices" if far else " between blocks"
        hint = _DEVICES if far else _GRID if across else _BARRIER
        link = "nothing orders it after"
        if proxy and before.verb == "initialized":
            kind = "missing fence after mbarrier.init"
            hint = _INIT
            link = "the asynchronous proxy does not see"
        elif proxy:
            kind = f"missing fence.proxy.async in {space} memory"
            hint = _PROXY_OF_GLOBAL if space == "global" else _PROXY
            link = "the asynchronous proxy does not see"
        elif engines[1] != "thread":
            kind = f"asynchronous operation not waited for, in {space} memory"
            own = self.launch.titles.get(engines[1], ("", "wait for the operation"))
            hint = _WAIT.get(engines[1], own[1])
            link = "nothing says that it is over:"
        elif engines[0] != "thread":
            kind = f"data race with an asynchronous operation in {space} memory"
        elif _is_narrow(now.instruction) or _is_narrow(before.instruction):
            hint = _SCOPE
        verb = now.verb
        lines = [
            f"{self._name(now.entry)} {verb} {self.where(space, offset)}{_value(now)}",
            f"at {place(now.instruction)}",
            f"{link} {self._name(before.entry)}, which {before.verb} it{_value(before)}",
            f"at {place(before.instruction)}",
        ]
        return Finding(kind, lines, hint, now.instruction.location)


def _is_narrow(instruction: Instruction) -> bool:
    """Whether it is an atomic access with a scope that not all threads are in."""
    return instruction.opcode in ("ld", "st", "atom", "red") and (
        instruction.has("cta") or instruction.has("cluster")
    )


def _value(side: Side) -> str:
    return f" (value {side.value})" if side.value else ""


def show(contents: Array) -> str:
    """Bytes as one little-endian number."""
    return f"{int.from_bytes(np.ascontiguousarray(contents).tobytes(), 'little'):#x}"
