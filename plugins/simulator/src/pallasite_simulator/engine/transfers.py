"""Asynchronous copies: what the observer and the statistics are told of them, and their groups.

Copies take effect at once; what goes on afterwards is only noted.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.mbarrier import MBarriers
from pallasite_simulator.engine.observer import AsyncOperation
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array


class Transfer:
    """One execution of an instruction that copies asynchronously.

    Attributes:
      operation: for the observer; None if there is none.
      listens: whether anybody wants to know the places that are accessed.
    """

    def __init__(
        self, lanes: Lanes, instruction: Instruction, engine: str = "tma", proxy: str = "async"
    ):
        wave = self._wave = lanes.wave
        self._pieces: dict[tuple[str, str, int], tuple[list[Array], list[Array]]] = {}
        self.operation: AsyncOperation | None = None
        self.listens = wave.observer is not None or wave.traffic is not None
        if wave.observer is not None:
            self.operation = AsyncOperation(engine, lanes.numbers, instruction, proxy)
            wave.observer.begin(self.operation)

    def access(self, kind: str, space: str, offsets: Array, size: int, lanes: int | Array) -> None:
        """Notes that what a lane began (or several, one for each offset) reads (``"read"``), writes
        (``"write"``) or reduces (``"atomic"``) ``size`` bytes at each of some offsets."""
        found = self._pieces.setdefault((kind, space, size), ([], []))
        found[0].append(offsets)
        found[1].append(np.broadcast_to(lanes, offsets.shape))

    def moved(self, space: str, kind: str, count: int) -> None:
        """Counts bytes that were moved."""
        moved = self._wave.memory.bytes_moved
        moved[space, kind] = moved.get((space, kind), 0) + count

    def tell(self) -> None:
        """Tells of all accesses that were noted."""
        wave = self._wave
        wave.progress += 1
        for (kind, space, size), (pieces, lanes) in self._pieces.items():
            self.tell_of(kind, space, np.concatenate(pieces), size, np.concatenate(lanes))
        self._pieces.clear()

    def tell_of(
        self, kind: str, space: str, offsets: Array, size: int, owners: Array | None = None
    ) -> None:
        """Tells of accesses at once; ``owners`` as in :meth:`Observer.async_access`."""
        wave = self._wave
        if self.operation is not None and wave.observer is not None:
            wave.observer.async_access(self.operation, kind, space, offsets, size, owners)
        if wave.traffic is not None and space == "global":
            wave.traffic.touch(offsets, size, kind)

    def complete(
        self,
        barriers: MBarriers,
        numbers: Array,
        slots: Array,
        amounts: Array,
        instruction: Instruction,
    ) -> None:
        """The bytes have arrived, and mbarriers are told of it.

        Args:
          barriers: of the wave.
          numbers: lanes that began the copies.
          slots: of the mbarrier of each.
          amounts: bytes of each.
          instruction: for messages.
        """
        self.complete_on(barriers, numbers, slots)
        barriers.complete(numbers, slots, amounts, instruction)

    def complete_on(self, barriers: MBarriers, numbers: Array, slots: Array) -> None:
        """Tells the observer with which phases the copies of lanes complete."""
        observer = self._wave.observer
        if self.operation is not None and observer is not None:
            observer.completions(self.operation, numbers, slots, barriers.phase[slots])


@dataclasses.dataclass(slots=True, eq=False)
class _Pending:
    """An operation that its lanes have not all waited for.

    Attributes:
      groups: for each of its lanes, the number of the group it belongs to.
      waited, reads_waited: which of its lanes have waited for it, or for its reads.
    """

    operation: AsyncOperation
    groups: Array
    waited: Array
    reads_waited: Array


class AsyncGroups:
    """The groups of asynchronous operations of all threads: those of ``cp.async``, or of bulk
    copies (PTX ISA 9.7.9.25.1.1). It is not needed without an observer."""

    def __init__(self, wave: Wave):
        self._wave = wave
        self._committed = np.zeros(wave.lane_count, np.int64)
        self._pending: list[_Pending] = []

    def add(self, operation: AsyncOperation) -> None:
        """An operation that belongs to the next group which its lanes commit."""
        count = len(operation.lanes)
        self._pending.append(
            _Pending(
                operation,
                self._committed[operation.lanes],
                np.zeros(count, np.bool_),
                np.zeros(count, np.bool_),
            )
        )

    def commit(self, lanes: Lanes) -> None:
        """Lanes commit what they began to a group."""
        self._committed[lanes.index] += 1

    def wait(self, lanes: Lanes, allowed: int, *, reads_only: bool = False) -> None:
        """Lanes wait until at most ``allowed`` of their last groups are not complete; for -1 also
        for what they have not committed."""
        observer = self._wave.observer
        if observer is None:
            return
        limits = np.full(self._wave.lane_count, -1)
        limits[lanes.index] = lanes.of(self._committed) - allowed
        kept = []
        for one in self._pending:
            known = one.reads_waited if reads_only else one.waited
            over = (one.groups < limits[one.operation.lanes]) & ~known
            if over.any():
                observer.complete_for([one.operation], one.operation.lanes[over], reads_only)
                one.reads_waited |= over
                if not reads_only:
                    one.waited |= over
            if not one.waited.all():
                kept.append(one)
        self._pending = kept

    def pending(self, lanes: Lanes) -> list[tuple[AsyncOperation, Array]]:
        """What lanes began and have not waited for, and which of the lanes that is."""
        chosen = np.zeros(self._wave.lane_count, np.bool_)
        chosen[lanes.index] = True
        found = []
        for one in self._pending:
            mine = chosen[one.operation.lanes] & ~one.waited
            if mine.any():
                found.append((one.operation, one.operation.lanes[mine]))
        return found


def async_groups(wave: Wave, kind: str) -> AsyncGroups:
    """The groups of ``"cp.async"`` or ``"bulk"`` operations of a wave."""
    key = ("groups", kind)
    found = wave.resources.get(key)
    if found is None:
        found = wave.resources[key] = AsyncGroups(wave)
    assert isinstance(found, AsyncGroups)
    return found
