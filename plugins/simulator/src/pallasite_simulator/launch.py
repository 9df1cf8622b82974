"""Running one kernel: arguments in, arrays changed in place, a report out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pallasite_simulator.arguments import Argument as Argument
from pallasite_simulator.arguments import Arrays
from pallasite_simulator.arguments import Composed as Composed
from pallasite_simulator.arguments import Descriptor as Descriptor
from pallasite_simulator.arguments import Pointer as Pointer
from pallasite_simulator.arguments import Shared as Shared
from pallasite_simulator.engine.float_environment import exact_floats
from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.engine.memory import GlobalMemory
from pallasite_simulator.engine.program import Program
from pallasite_simulator.engine.residency import resident_blocks
from pallasite_simulator.engine.wave import Watchdog, Wave
from pallasite_simulator.errors import DeadlockError, SimulationError
from pallasite_simulator.sanitizer.findings import Findings
from pallasite_simulator.statistics.traffic import SECTOR_BYTES, Traffic
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.observer import Observer
    from pallasite_simulator.sanitizer.launch_state import LaunchState

PATIENCE = 5000
"""How often lanes that poll are run again, where nothing happens that another thread could notice,
before that counts as a deadlock: loops over strong loads may be long."""

PATIENCE_OF_DEVICES = 250
"""The same for several devices, each of which polls until it gives up in its turn."""

SHARED_SEMAPHORES = (
    "semaphores of scratch_types are of one block each, those of all blocks are"
    " pl.get_global(plgpu.SemaphoreType.REGULAR)"
)
"""A hint for waits that nobody can end, of several blocks."""

LANES_AT_ONCE = 16384
"""How many lanes a wave has if the grid has as many: enough for NumPy, little enough for caches."""

SHARED_BYTES_AT_ONCE = 1 << 26
"""How much shared memory the blocks of a wave have at most, if there is more than one."""

SANITIZED_BYTES_AT_ONCE = 1 << 24
"""The same with the sanitizer, which keeps up to 12 times as much."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
      program: the kernel.
      geometry: its grid.
      arguments: one for each parameter.
      arrays: further arrays, to which arguments refer by number.
      dynamic_shared_bytes: shared memory of each block beside the static.
      blocks: linear numbers of the blocks to run; None for all. Whole clusters are run.
      resident_blocks: how many blocks can wait for one another, as on a chip.
      make_observer: makes the observer of a wave, in place of the sanitizer.
      sanitizer: checks the launch; None for no checks but those that memory needs.
      progress: called with the number of blocks that have ended.
      statistics: whether accesses to memory are counted.
      processes: how many processes share the blocks, if nothing stands against it (see
        :func:`pallasite_simulator.parallel.team.obstacle_of`).
      timeout: after how many seconds a launch that has not ended is an error; None or 0 for never.
      unused_outputs: outputs that the kernel does not get, as it does not use them.
    """

    program: Program
    geometry: Geometry
    arguments: Sequence[Argument]
    arrays: Sequence[Pointer] = ()
    dynamic_shared_bytes: int = 0
    blocks: Sequence[int] | None = None
    resident_blocks: int = 132 * 16
    make_observer: Callable[[], Observer] | None = None
    sanitizer: LaunchState | None = None
    progress: Callable[[int], None] | None = None
    statistics: bool = False
    processes: int = 1
    unused_outputs: Sequence[Pointer] = ()
    timeout: float | None = None

    @property
    def shared_bytes(self) -> int:
        """Shared memory of each block."""
        return self.program.static_shared_bytes + self.dynamic_shared_bytes

    @property
    def recorded(self) -> bool:
        """Whether the sanitizer remembers accesses to memory."""
        return self.sanitizer is not None and self.sanitizer.records

    @property
    def order(self) -> Array:
        """Linear numbers of the blocks to run, cluster by cluster.

        Raises:
          SimulationError: there is no such block.
        """
        return _chosen(self.geometry, self.blocks)


@dataclasses.dataclass
class Execution:
    """What one launch did.

    Attributes:
      issued: for each instruction of the program, how many warps executed it.
      bytes_moved: by (state space, ``"read"``, ``"write"`` or ``"atomic"``).
      output: what the kernel printed.
      blocks: how many blocks ran.
      counters: further numbers that instructions keep, by name.
      accesses: by number of instruction: the space (``"shared"`` or ``"global"``), how many warps
        executed it, how many passes or sectors that took, how many are needed at least, and bytes.
      sectors: of global memory, which were read, and which were written; None if not counted.
      links: bytes that went from one device to another, by pair.
      device: which of several devices; None for one alone.
    """

    issued: Array
    bytes_moved: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    output: list[str] = dataclasses.field(default_factory=list)
    blocks: int = 0
    counters: dict[str, int] = dataclasses.field(default_factory=dict)
    accesses: dict[int, tuple[str, int, int, int, int]] = dataclasses.field(default_factory=dict)
    sectors: tuple[Array, Array] | None = None
    links: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    device: int | None = None

    @classmethod
    def empty(cls, program: Program) -> Execution:
        """Of a program that has not run."""
        return cls(np.zeros(len(program.code) + 1, np.int64))

    @property
    def touched_bytes(self) -> tuple[int, int]:
        """Bytes of global memory in sectors that were read, and that were written."""
        if self.sectors is None:
            return 0, 0
        read, written = map(np.count_nonzero, self.sectors)
        return int(read) * SECTOR_BYTES, int(written) * SECTOR_BYTES

    def add(self, other: Execution) -> None:
        """Adds what other blocks did, which came later."""
        self.issued = self.issued + other.issued
        for name in ("bytes_moved", "counters"):
            _accumulate(getattr(self, name), getattr(other, name))
        self.output += other.output
        self.blocks += other.blocks
        for pc, (space, *counts) in other.accesses.items():
            known = self.accesses.get(pc, (space, 0, 0, 0, 0))
            warps, units, ideal, bytes_ = (a + b for a, b in zip(known[1:], counts, strict=True))
            self.accesses[pc] = (space, warps, units, ideal, bytes_)
        if other.sectors is not None:
            if self.sectors is None:
                self.sectors = other.sectors
            else:
                read, written = zip(self.sectors, other.sectors, strict=True)
                self.sectors = (np.logical_or(*read), np.logical_or(*written))

    def add_traffic(self, program: Program, traffic: Traffic) -> None:
        """Adds what was counted of accesses to memory."""
        place = {id(entry.instruction): pc for pc, entry in reversed([*enumerate(program.code)])}
        for key, one in traffic.accesses.items():
            self.accesses[place[key]] = one.counts
        self.sectors = (traffic.sectors_read, traffic.sectors_written)
        _accumulate(self.links, traffic.links)


def run(launch: Launch, *, raise_findings: bool = True) -> Execution:
    """Runs a kernel to its end.

    Args:
      launch: what to run.
      raise_findings: whether what the sanitizer found is an error; else ``launch.sanitizer`` has
        it.

    Raises:
      SimulationError: the kernel did something that has no meaning, or no thread can go on, or the
        sanitizer found something; its ``printed`` is what the kernel printed.
    """
    program = launch.program
    checks_outputs = launch.sanitizer is not None and launch.blocks is None
    again = Again(launch) if checks_outputs else None
    memory = program.new_memory()
    arrays = Arrays(memory, launch.arrays, launch.arguments)
    parameters = arrays.parameters(program)
    with contextlib.ExitStack() as stack:
        share = _share(launch)
        if share is None:
            memory.seal()
        else:
            size = share.memory_bytes(launch, memory.size)
            file, contents = stack.enter_context(share.shared_bytes(size))
            memory.seal(contents[: memory.size])
        program.initialize(memory)
        arrays.write()
        execution = None
        if share is not None:
            execution = share.run_shared(launch, memory, parameters, file, contents)
            if execution is None:
                memory.region.bytes[:] = 0
                program.initialize(memory)
                arrays.write()
                assert launch.sanitizer is not None
                launch.sanitizer.findings = Findings(program.name)
        if execution is None:
            execution = run_blocks(launch, memory, parameters)
        arrays.read()
    if launch.sanitizer is not None and again is not None:
        outputs = [*arrays.outputs, *((one, None) for one in launch.unused_outputs)]
        launch.sanitizer.check_outputs(program, outputs, share is None, again.run)
    if launch.sanitizer is not None and raise_findings:
        try:
            launch.sanitizer.finish()
        except SimulationError as error:
            error.printed = "".join(execution.output)
            raise
    return execution


class Again:
    """What it takes to run a launch a second time, made before the first."""

    def __init__(self, launch: Launch):
        self._launch = launch
        given = [one for one in launch.arguments if isinstance(one, Pointer)]
        pointers = [*launch.arrays, *given]
        if not any(one.output is not None for one in pointers):
            pointers = []
        self._contents = {
            id(one): one.array.copy() if one.writable and not one.undefined else one.array
            for one in pointers
        }

    def run(self) -> Callable[[Pointer], Array] | None:
        """Runs it with other rubbish in memory that the kernel is to write; returns what gives the
        bytes of an array at the end, or None if it fails."""
        second, contents = self.prepared()
        try:
            run(second)
        except SimulationError:
            return None  # What it does depends on the rubbish.
        return contents

    def prepared(self) -> tuple[Launch, Callable[[Pointer], Array]]:
        """The launch with other rubbish, and what gives the bytes of an array of the first one."""
        from pallasite_simulator.sanitizer.outputs import OTHER_RUBBISH

        copies: dict[int, Pointer] = {}

        def copied[T](one: T) -> T | Pointer:
            if not isinstance(one, Pointer):
                return one
            array = self._contents[id(one)]
            if one.undefined:
                array = np.empty_like(array)
                array.reshape(-1).view(np.uint8)[:] = OTHER_RUBBISH
            copies[id(one)] = dataclasses.replace(one, array=array)
            return copies[id(one)]

        second = dataclasses.replace(
            self._launch,
            arguments=[copied(one) for one in self._launch.arguments],
            arrays=[copied(one) for one in self._launch.arrays],
            sanitizer=None,
            progress=None,
            statistics=False,
        )
        return second, lambda one: copies[id(one)].array.reshape(-1).view(np.uint8)


def _share(launch: Launch) -> Any:
    """What shares the blocks among processes; None if there is nothing to be shared."""
    if launch.processes < 2 or len(launch.order) <= launch.geometry.cluster_size:
        return None
    from pallasite_simulator.parallel import team

    return team if team.obstacle_of(launch) is None else None


def run_blocks(
    launch: Launch,
    memory: GlobalMemory,
    parameters: Array,
    order: Array | None = None,
    traffic: Traffic | None = None,
    watchdog: Watchdog | None = None,
) -> Execution:
    """Runs blocks of a launch on memory that is ready, in this process.

    Args:
      launch: the launch.
      memory: global memory.
      parameters: the parameter buffer.
      order: the blocks to run, whole clusters, instead of those that the launch says.
      traffic: counts accesses to memory; the execution then has nothing of them.
      watchdog: says when it has to end; None for what the launch says, from now on.

    Raises:
      SimulationError: the kernel did something that has no meaning, or no thread can go on.
    """
    own = Traffic(memory.size) if launch.statistics and traffic is None else None
    chosen = launch.order if order is None else order
    try:
        with exact_floats():
            waves = Waves(launch, memory, parameters, own or traffic, watchdog)
            run_together([waves], [chosen])
    except SimulationError as error:
        if launch.sanitizer is not None:
            launch.sanitizer.annotate(error)
        raise
    if own is not None:
        waves.execution.add_traffic(launch.program, own)
    return waves.execution


def run_together(parts: Sequence[Waves], orders: Sequence[Array]) -> None:
    """Runs blocks of several launches that may wait for one another, to their end.

    Args:
      parts: the waves of each launch, none of which has begun.
      orders: the blocks to run, for each launch.

    Raises:
      SimulationError: the kernel did something that has no meaning, or no thread can go on; its
        ``printed`` is what all of them printed.
    """
    patience = PATIENCE if len(parts) == 1 else PATIENCE_OF_DEVICES
    left = [one.rounds(order) for one, order in zip(parts, orders, strict=True)]
    vain = 0
    try:
        while left:
            steps = [(one, next(one, None)) for one in left]
            left = [one for one, moved in steps if moved is not None]
            # That the blocks of a launch have ended is progress, too.
            ended = len(left) < len(steps)
            vain = 0 if ended or any(moved for _, moved in steps) else vain + 1
            running = [wave for one in parts for wave in one.running]
            stuck = vain > patience or not any(one.polling for one in running)
            if running and vain and stuck:
                error = standstill(running)
                if any(one.has_semaphores_of_blocks for one in parts):
                    error.hint = f"{error.hint}; {SHARED_SEMAPHORES}"
                raise error
    except SimulationError as failed:
        failed.printed = "".join(text for one in parts for text in one.execution.output)
        failed.printed += "".join(
            text for one in parts for wave in one.running for text in wave.output
        )
        raise


def standstill(waves: Sequence[Wave]) -> DeadlockError:
    """The error for waves that can never go on: one device's first, then those of the others."""
    devices = {wave.geometry.device for wave in waves}
    if len(devices) == 1:
        return waves[0].standstill(waves[1:])
    shown: list[str] = []
    location = None
    for device in sorted(devices, key=str):
        first = next(wave for wave in waves if wave.geometry.device == device)
        found, place = first.situation("poll for something that no thread does, near")
        shown += found
        location = location or place
    return DeadlockError(
        f"deadlock in kernel {waves[0].program.name!r} on {len(devices)} devices: no thread can"
        " go on",
        got="\n    ".join(["", *shown]),
        hint="find the device that should have signalled, and see above what it waits for itself",
        location=location,
    )


class Waves:
    """The waves of a launch. They run one after the other; one that cannot go on, because it waits
    for a block that has not begun, is taken up again after others.

    Attributes:
      running: those that have begun and not ended.
      execution: what those that have ended did.
    """

    def __init__(
        self,
        launch: Launch,
        memory: GlobalMemory,
        parameters: Array,
        traffic: Traffic | None,
        watchdog: Watchdog | None = None,
    ):
        self.running: list[Wave] = []
        self.execution = Execution.empty(launch.program)
        self._launch = launch
        self._memory = memory
        self._parameters = parameters
        self._traffic = traffic
        self._watchdog = watchdog
        if watchdog is None and launch.timeout:
            self._watchdog = Watchdog(launch.timeout)
        self._late: Array = np.zeros(0, np.int64)

    @property
    def has_semaphores_of_blocks(self) -> bool:
        """Whether there are several blocks, with semaphores of which each has its own."""
        words, blocks = np.dtype(np.int32).itemsize, self._launch.geometry.blocks
        pointers = (*self._launch.arguments, *self._launch.arrays)
        semaphores = [one for one in pointers if isinstance(one, Pointer) and one.semaphores]
        return blocks > 1 and any(one.array.nbytes % (words * blocks) == 0 for one in semaphores)

    def rounds(self, order: Array) -> Iterator[bool]:
        """Runs blocks, in this order as far as nothing makes them wait; says after each round
        whether any thread made progress."""
        launch, running = self._launch, self.running
        size = wave_size(launch.geometry, launch.shared_bytes, launch.recorded)
        if launch.program.cancels:
            # Only clusters that do not fit on the chip can be cancelled.
            room = resident_blocks(launch.program, launch.geometry, launch.shared_bytes)
            order, self._late = order[:room], order[room:]
        pending = [order[start : start + size] for start in range(0, len(order), size)][::-1]
        while pending or running or len(self._late):
            moved = False
            if not pending and not running:
                pending, self._late = [self._late[:size]], self._late[size:]
            resident = sum(wave.block_count for wave in running)
            while pending and (
                not resident or resident + len(pending[-1]) <= launch.resident_blocks
            ):
                wave = self._begin(pending.pop())
                running.append(wave)
                moved |= self._go_on(wave)
                resident = sum(wave.block_count for wave in running)
            for wave in list(running):
                moved |= self._go_on(wave)
            yield moved

    def _begin(self, blocks: Array) -> Wave:
        launch = self._launch
        make_observer = launch.make_observer
        if make_observer is None and launch.sanitizer is not None:
            make_observer = launch.sanitizer.observer
        wave = Wave(
            launch.program,
            launch.geometry,
            blocks,
            self._memory,
            self._parameters,
            launch.shared_bytes,
            make_observer() if make_observer is not None else None,
            self._traffic,
        )
        wave.cancel_cluster = self._cancel_cluster
        wave.watchdog = self._watchdog
        return wave

    def _cancel_cluster(self) -> int | None:
        """Takes the next cluster away from those that wait for room on the chip."""
        if not len(self._late):
            return None
        first = int(self._late[0])
        self._late = self._late[self._launch.geometry.cluster_size :]
        return first

    def _go_on(self, wave: Wave) -> bool:
        """Runs a wave as far as it gets; returns whether it made progress."""
        moved = wave.run()
        if wave.done:
            self.running.remove(wave)
            _finish(wave, self._launch, self.execution)
            wave.release()
        return moved


def wave_size(geometry: Geometry, shared_bytes: int, sanitized: bool = False) -> int:
    """How many blocks run together: whole clusters, at least one."""
    lanes = -(-geometry.threads // 32) * 32
    blocks = max(1, LANES_AT_ONCE // lanes)
    if shared_bytes:
        limit = SANITIZED_BYTES_AT_ONCE if sanitized else SHARED_BYTES_AT_ONCE
        blocks = min(blocks, max(1, limit // shared_bytes))
    cluster = geometry.cluster_size
    return max(1, blocks // cluster) * cluster


def _chosen(geometry: Geometry, blocks: Sequence[int] | None) -> Array:
    order = geometry.order
    if blocks is None:
        return order
    wrong = [block for block in blocks if not 0 <= block < geometry.blocks]
    if wrong:
        raise SimulationError(
            "there is no such block in the grid",
            got=wrong[0],
            expected=f"0 to {geometry.blocks - 1}",
        )
    clusters = order.reshape(-1, geometry.cluster_size)
    return clusters[np.isin(clusters, list(blocks)).any(axis=1)].reshape(-1)


def _finish(wave: Wave, launch: Launch, execution: Execution) -> None:
    execution.issued += np.cumsum(wave.issued)
    _accumulate(execution.bytes_moved, wave.memory.bytes_moved)
    _accumulate(execution.counters, wave.counters)
    execution.output += wave.output
    execution.blocks += wave.block_count
    if launch.progress is not None:
        launch.progress(execution.blocks)


def _accumulate[Key](counts: dict[Key, int], more: Mapping[Key, int]) -> None:
    for key, count in more.items():
        counts[key] = counts.get(key, 0) + count
