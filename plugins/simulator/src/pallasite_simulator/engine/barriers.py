"""Barriers of a block (PTX ISA 9.7.13, ``barrier``) and of a cluster (``barrier.cluster``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.distinct import distinct, starts_of
from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.engine.wait import Wait
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array, Values

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave

type Deliver = Callable[[Lanes, Array], None]

BARRIERS = 16
"""Named barriers of a block."""


@dataclasses.dataclass(slots=True)
class Barrier:
    """One phase of a barrier.

    Attributes:
      expected: how many threads it needs; None for all threads that have not ended.
      arrived: groups of lanes that have arrived.
      waiting: those of them who wait.
      count: how many threads have arrived.
      instruction: the first that arrived.
      values: truth values of those who reduce.
      delivers: groups of lanes that reduce, and what gives them the result.
    """

    expected: int | None
    instruction: Instruction
    arrived: list[Array] = dataclasses.field(default_factory=list)
    waiting: list[Array] = dataclasses.field(default_factory=list)
    count: int = 0
    values: list[Array] = dataclasses.field(default_factory=list)
    delivers: list[tuple[Array, Deliver]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Reduction:
    """What ``barrier.red`` adds to an arrival.

    Attributes:
      values: a truth value of each lane.
      deliver: called with lanes and the truth values of all threads that reduced, when the barrier
        is complete.
    """

    values: Array
    deliver: Deliver


class Barriers:
    """All barriers of a wave's blocks and clusters."""

    def __init__(self, wave: Wave):
        self.wave = wave
        self._named: dict[tuple[int, int], Barrier] = {}
        self._generation: dict[tuple[int, int], int] = {}
        self._clusters: dict[int, _ClusterBarrier] = {}

    # Named barriers -------------------------------------------------------------------------------

    def arrive(
        self,
        lanes: Lanes,
        identifiers: Values,
        expected: Values | None,
        instruction: Instruction,
        wait: bool,
        reduction: Reduction | None = None,
    ) -> list[Wait] | None:
        """Lanes arrive at named barriers of their blocks, and wait there if ``wait``.

        Args:
          lanes: who.
          identifiers: which barrier, 0 to 15, for each lane or for all.
          expected: how many threads it needs, or None for all of the block.
          instruction: for messages.
          wait: whether they wait until it is complete.
          reduction: of ``barrier.red``.

        Raises:
          SimulationError: a wrong number, or more arrivals than expected.
        """
        wave = self.wave
        identifiers = np.asarray(identifiers)
        everybody = lanes.full and identifiers.ndim == 0 and identifiers < BARRIERS
        if everybody and wait and expected is None and reduction is None and not self._named:
            wave.progress += 1
            if wave.observer is not None:
                wave.observer.barriers(lanes.numbers, wave.lane_block)
            return None
        ids = np.broadcast_to(identifiers, (lanes.count,)).astype(np.int64)
        if int(ids.max()) >= BARRIERS:
            raise SimulationError(
                f"there is no such barrier, in: {instruction.text}",
                got=int(ids.max()),
                expected="0 to 15",
                location=instruction.location,
            )
        keys = lanes.of(wave.lane_block) * BARRIERS + ids
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        starts = starts_of(ordered)
        names, sizes = ordered[starts], np.append(starts[1:], len(ordered)) - starts
        needed = None
        if expected is not None:
            needed = np.broadcast_to(expected, (lanes.count,))[order][starts]
            wrong = (needed <= 0) | (needed % WARP != 0)
            if wrong.any():
                raise SimulationError(
                    f"a barrier needs whole warps, in: {instruction.text}",
                    got=f"{int(needed[wrong][0])} threads",
                    expected="a multiple of 32",
                    location=instruction.location,
                )
        if needed is not None and wave.lanes_per_block > wave.geometry.threads:
            sizes = sizes + np.add.reduceat(self._padding(lanes.numbers[order]), starts)
        if wait and reduction is None and self._complete_together(lanes, names, sizes, needed):
            return None
        waits: list[Wait] = []
        ends = np.append(starts[1:], len(order))
        for number, key in enumerate(names):
            chosen = order[starts[number] : ends[number]]
            waits += self._arrive(
                (int(key) // BARRIERS, int(key) % BARRIERS),
                lanes.numbers[chosen],
                None if needed is None else int(needed[number]),
                instruction,
                wait,
                None
                if reduction is None
                else Reduction(reduction.values[chosen], reduction.deliver),
            )
        return waits or None

    def _complete_together(
        self, lanes: Lanes, names: Array, sizes: Array, needed: Array | None
    ) -> bool:
        """Whether the lanes complete all their barriers at once, at which no lane was before: the
        usual case, in which nothing needs to be kept."""
        wave = self.wave
        if self._named and any(
            (int(key) // BARRIERS, int(key) % BARRIERS) in self._named for key in names
        ):
            return False
        if needed is None:
            needed = wave.living_threads[names // BARRIERS]
        if not np.array_equal(sizes, needed):
            return False
        wave.progress += 1
        if wave.observer is not None:
            groups = lanes.of(wave.lane_block)
            if len(names) != len(distinct(names // BARRIERS)):
                return False
            wave.observer.barriers(lanes.numbers, groups)
        return True

    def _arrive(
        self,
        name: tuple[int, int],
        numbers: Array,
        needed: int | None,
        instruction: Instruction,
        wait: bool,
        reduction: Reduction | None,
    ) -> list[Wait]:
        barrier = self._named.get(name)
        if barrier is None:
            barrier = self._named[name] = Barrier(needed, instruction)
        elif barrier.expected != needed:
            raise SimulationError(
                f"barrier {name[1]} of block {self.wave.block_name(name[0])} is used with different"
                f" numbers of threads, in: {instruction.text}",
                got=f"{self._count(name, needed)} threads",
                expected=f"{self._count(name, barrier.expected)},"
                f" as at {barrier.instruction.location or barrier.instruction.text}",
                location=instruction.location,
            )
        barrier.arrived.append(numbers)
        barrier.count += len(numbers)
        if needed is not None:
            barrier.count += int(self._padding(numbers).sum())
        self.wave.progress += 1
        if reduction is not None:
            barrier.values.append(reduction.values)
            barrier.delivers.append((numbers, reduction.deliver))
        if barrier.count > self._count(name, needed):
            raise SimulationError(
                f"too many threads arrive at barrier {name[1]} of block"
                f" {self.wave.block_name(name[0])}, in: {instruction.text}",
                got=barrier.count,
                expected=str(self._count(name, needed)),
                location=instruction.location,
            )
        generation = self._generation.setdefault(name, 0)
        key = ("barrier", name, generation)
        if wait:
            barrier.waiting.append(numbers)
        if barrier.count == self._count(name, needed):
            self._complete(name, barrier)
            return []
        if not wait:
            return []
        if self.wave.observer is not None:
            self.wave.observer.meets(numbers)
        return [Wait(numbers, key, lambda: self._describe(name, barrier))]

    def _complete(self, name: tuple[int, int], barrier: Barrier) -> None:
        generation = self._generation[name]
        self._generation[name] = generation + 1
        del self._named[name]
        arrived = np.concatenate(barrier.arrived)
        left = np.concatenate(barrier.waiting) if barrier.waiting else arrived[:0]
        if barrier.values:
            values = np.concatenate(barrier.values)
            for numbers, deliver in barrier.delivers:
                deliver(self.wave.lanes(numbers), values)
        if self.wave.observer is not None:
            self._tell(name[0], barrier, arrived)
            self.wave.observer.barrier(arrived, left)
        self.wave.wake(("barrier", name, generation))

    def _tell(self, block: int, barrier: Barrier, arrived: Array) -> None:
        """Tells the observer of threads that did not come."""
        wave = self.wave
        observer = wave.observer
        assert observer is not None
        if barrier.expected is None and len(arrived) < wave.geometry.threads:
            first = block * wave.lanes_per_block
            everybody = np.arange(first, first + wave.geometry.threads)
            absent = np.setdiff1d(everybody, arrived, assume_unique=True)
            observer.absent(arrived, absent, barrier.instruction)

    def _padding(self, numbers: Array) -> Array:
        """For each lane, how many places without a thread its arrival counts for as well: numbers
        of threads are in whole warps, and the last thread fills up the last warp."""
        wave = self.wave
        last = wave.lane_thread[numbers] == wave.geometry.threads - 1
        found: Array = last * (wave.lanes_per_block - wave.geometry.threads)
        return found

    def _count(self, name: tuple[int, int], expected: int | None) -> int:
        if expected is not None:
            return expected
        return int(self.wave.living_threads[name[0]])

    def _describe(self, name: tuple[int, int], barrier: Barrier) -> str:
        return (
            f"barrier {name[1]}, where {barrier.count} of"
            f" {self._count(name, barrier.expected)} threads have arrived,"
        )

    # Cluster barriers -----------------------------------------------------------------------------

    def cluster_arrive(self, lanes: Lanes, instruction: Instruction, release: bool = True) -> None:
        """Lanes arrive at the barrier of their cluster.

        Raises:
          SimulationError: a lane arrives twice without waiting.
        """
        wave = self.wave
        clusters = lanes.of(wave.lane_block) // wave.cluster_size
        for cluster in np.unique(clusters):
            numbers = lanes.numbers[clusters == cluster]
            barrier = self._clusters.setdefault(int(cluster), _ClusterBarrier.of(wave))
            local = numbers - int(cluster) * len(barrier.arrived)
            if (barrier.arrived[local] | barrier.owing[local]).any():
                raise SimulationError(
                    f"a thread arrives twice at its cluster's barrier, in: {instruction.text}",
                    got=wave.thread_name(int(numbers[0])),
                    expected="barrier.cluster.wait between two arrivals",
                    location=instruction.location,
                )
            barrier.arrived[local] = True
            wave.progress += 1
            if wave.observer is not None:
                key = barrier.key(int(cluster))
                wave.observer.release(numbers, key, "cluster", relaxed=not release)
            self._check_cluster(int(cluster), barrier)

    def cluster_wait(
        self, lanes: Lanes, instruction: Instruction, acquire: bool = True
    ) -> list[Wait] | None:
        """Lanes wait at the barrier of their cluster, at which they have arrived.

        Raises:
          SimulationError: a lane has not arrived.
        """
        wave = self.wave
        clusters = lanes.of(wave.lane_block) // wave.cluster_size
        waits = []
        for cluster in np.unique(clusters):
            numbers = lanes.numbers[clusters == cluster]
            barrier = self._clusters.setdefault(int(cluster), _ClusterBarrier.of(wave))
            local = numbers - int(cluster) * len(barrier.arrived)
            done = barrier.owing[local]
            absent = ~done & ~barrier.arrived[local]
            if absent.any():
                raise SimulationError(
                    "a thread waits at its cluster's barrier without having arrived,"
                    f" in: {instruction.text}",
                    got=wave.thread_name(int(numbers[absent][0])),
                    expected="barrier.cluster.arrive before barrier.cluster.wait",
                    location=instruction.location,
                )
            passed = numbers[done]
            if len(passed):
                barrier.owing[local[done]] = False
                if wave.observer is not None and acquire:
                    wave.observer.acquire(passed, barrier.last_key(int(cluster)), "cluster")
            if not done.all():
                waits.append(
                    Wait(
                        numbers[~done],
                        barrier.key(int(cluster)),
                        self._describer(int(cluster), barrier),
                        again=True,
                    )
                )
        return waits or None

    def _check_cluster(self, cluster: int, barrier: _ClusterBarrier) -> bool:
        wave = self.wave
        width = len(barrier.arrived)
        ended = wave.exited[cluster * width : (cluster + 1) * width]
        if not barrier.arrived.any() or not (barrier.arrived | ended).all():
            return False
        key = barrier.key(cluster)
        barrier.owing |= barrier.arrived
        barrier.arrived[:] = False
        barrier.generation += 1
        wave.wake(key)
        return True

    def _describer(self, cluster: int, barrier: _ClusterBarrier) -> _Description:
        return _Description(self.wave, cluster, barrier)

    # ----------------------------------------------------------------------------------------------

    def recheck(self) -> bool:
        """Completes barriers that lack only threads that have ended; whether there were any."""
        found = False
        for name, barrier in list(self._named.items()):
            if barrier.expected is None and barrier.count == self._count(name, None):
                self._complete(name, barrier)
                found = True
        for cluster, one in list(self._clusters.items()):
            found |= self._check_cluster(cluster, one)
        return found


@dataclasses.dataclass(slots=True)
class _ClusterBarrier:
    """``owing``: whose arrival is complete, and who has not waited yet."""

    arrived: Array
    owing: Array
    generation: int = 0

    @classmethod
    def of(cls, wave: Wave) -> _ClusterBarrier:
        width = wave.cluster_size * wave.lanes_per_block
        return cls(np.zeros(width, np.bool_), np.zeros(width, np.bool_))

    def key(self, cluster: int) -> Hashable:
        return ("cluster barrier", cluster, self.generation)

    def last_key(self, cluster: int) -> Hashable:
        return ("cluster barrier", cluster, self.generation - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Description:
    wave: Wave
    cluster: int
    barrier: _ClusterBarrier

    def __call__(self) -> str:
        count = int(self.barrier.arrived.sum())
        threads = self.wave.geometry.threads * self.wave.cluster_size
        return f"the barrier of its cluster, where {count} of {threads} threads have arrived,"
