"""Which earlier accesses are not known to have happened before an access."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.engine.lanes import WARP
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.sanitizer import entries
from pallasite_simulator.sanitizer.ordering import Ordering
from pallasite_simulator.sanitizer.shadow import Places
from pallasite_simulator.types import Array, Values

if TYPE_CHECKING:
    from pallasite_simulator.sanitizer.launch_state import LaunchState


@dataclasses.dataclass(slots=True)
class Accessor:
    """Who makes an access: lanes, or one asynchronous operation.

    Attributes:
      code: as in :mod:`.entries` without the time: one for each access, or for all.
      rows: of clocks: the same.
      lanes: lanes that make accesses themselves; None for an operation.
      time: the event of the access.
      proxy: whether writes must be visible to the asynchronous proxy.
    """

    code: Values
    rows: Values
    lanes: Array | None
    time: int
    proxy: bool = False

    def entry(self, position: int, flags: int) -> int:
        """The entry of one access."""
        code = self.code if isinstance(self.code, int) else int(self.code[position])
        return code | (self.time << entries.TIME_SHIFT) | flags


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """An access to one memory.

    Attributes:
      space: its state space.
      reads, writes: what it does.
      strong: whether it may race with other strong accesses.
      narrow: whether only with those of its block.
      instruction: which instruction does it.
      offsets, size, values, contents: as in :class:`Access`; None if they are not known.
    """

    space: str
    reads: bool
    writes: bool
    strong: bool
    instruction: Instruction
    offsets: Array | None = None
    size: int = 0
    values: Array | None = None
    narrow: bool = False
    contents: bool = True

    @property
    def needs_contents(self) -> bool:
        """Whether what it does depends on what was there before."""
        if self.reads:
            return self.instruction.opcode != "atom" or not self.instruction.has("exch")
        return self.instruction.opcode == "cp" and self.instruction.has("reduce") and self.writes

    @property
    def by_warp(self) -> bool:
        """Whether it is enough that it comes after something later of the same warp.

        The end of an mbarrier's life: one lane of the last warp that is ready invalidates it, as
        libcu++ does, after lanes of its warp that are known to be there by ``match.sync`` alone.
        """
        return self.instruction.opcode == "mbarrier" and self.instruction.has("inval")

    @property
    def flags(self) -> int:
        """The bits of an entry that say how strong it is."""
        return int(self.strong) | entries.NARROW * self.narrow

    @property
    def verb(self) -> str:
        """What it does."""
        if self.instruction.opcode == "mbarrier":
            return "initializes" if self.instruction.has("init") else "uses"
        if self.reads and self.writes:
            return "changes"
        if not self.reads and not self.writes:
            return "completes on"
        return "writes" if self.writes else "reads"


class History:
    """Compares accesses of one wave with what is known of earlier ones."""

    def __init__(self, launch: LaunchState, ordering: Ordering):
        self._launch = launch
        self._ordering = ordering
        one_cluster = launch.geometry.blocks == launch.geometry.cluster_size
        self._one_domain = one_cluster and launch.geometry.device is None

    def unordered(
        self,
        found: Array,
        places: Places,
        accessor: Accessor,
        operation: Operation,
        *,
        all_kinds: bool = False,
        visible: bool = False,
        reads: bool = False,
    ) -> Array | None:
        """Which earlier accesses are not known to have happened before.

        Args:
          found: entries of the earlier accesses, one for each granule.
          all_kinds: whether two strong accesses need an order too.
          visible: whether writes must be visible to the asynchronous proxy.
          reads: the earlier accesses are reads, so it is enough to know that they are over.

        Returns:
          Their positions, or None if there are none.
        """
        if not len(found):
            return None
        rows = accessor.rows
        own_domain = self._one_domain or operation.space != "global"
        if own_domain and not visible:
            limit = (self._ordering.floor(rows) + 1) << entries.TIME_SHIFT
            if int(found.max()) < limit:
                return None
            positions = np.flatnonzero(found >= limit)
        else:
            positions = np.flatnonzero(found)
            if not len(positions):
                return None
        picked, owners = found[positions], places.owners(positions)
        columns = entries.columns(picked)
        if not isinstance(rows, int):
            rows = rows[owners]
        clocks = self._launch.clocks
        table = clocks.fenced if visible else clocks.generic
        times = entries.times(picked)
        bad = (table[rows][columns] if isinstance(rows, int) else table[rows, columns]) < times
        if visible and operation.space == "global":
            # A fence for shared memory is none for this one.
            bad |= (times > clocks.global_fence) & (columns < clocks.threads)
        if reads and bad.any():
            bad &= ~self._over(columns, times, rows)
        foreign = None
        if not own_domain:
            code = accessor.code if isinstance(accessor.code, int) else accessor.code[owners]
            foreign = (entries.domains(picked) != entries.domains(code)) & (picked != 0)
            bad |= foreign
        if operation.by_warp and bad.any():
            bad &= ~self._known_of_warps(columns, times, rows, owners, accessor)
        if operation.strong and not all_kinds:
            included = entries.strong(picked)
            if self._launch.traits.narrow:
                narrow = entries.narrow(picked) | operation.narrow
                included &= ~(narrow & self._elsewhere(columns, owners, accessor, foreign))
            if self._launch.geometry.device is not None:
                included &= ~self._out_of_scope(picked, operation)
            bad &= ~included
        if not bad.any():
            return None
        bad = self._without_own(bad, columns, times, owners, accessor, foreign)
        if foreign is not None and (bad & foreign).any():
            bad = self._without_foreign(bad, foreign, rows, picked, table)
        wrong: Array = positions[bad]
        return wrong if len(wrong) else None

    def _over(self, columns: Array, times: Array, rows: Values) -> Array:
        """Whether it is known that something is over, though not what it wrote."""
        clocks = self._launch.clocks
        if isinstance(rows, int):
            known = clocks.generic[clocks.over[rows]][columns]
        else:
            distinct, inverse = np.unique(rows, return_inverse=True)
            over = np.array([clocks.over[row] for row in distinct.tolist()])[inverse]
            known = clocks.generic[over, columns]
        found: Array = known >= times
        return found

    def _known_of_warps(
        self, columns: Array, times: Array, rows: Values, owners: Array, accessor: Accessor
    ) -> Array:
        """Whether something is known that a thread's warp did at a time, or later."""
        clocks = self._launch.clocks
        width = clocks.threads
        known = clocks.generic[rows, :width].reshape(-1, width // WARP, WARP).max(axis=2)
        warps = np.minimum(columns, width - 1) // WARP
        places = np.zeros(len(columns), np.int64) if isinstance(rows, int) else np.arange(len(rows))
        found: Array = (columns < width) & (known[places, warps] >= times)
        if accessor.lanes is not None:
            own = self._ordering.column[accessor.lanes[owners]] // WARP
            found |= (columns < width) & (warps == own)
        return found

    def _elsewhere(
        self, columns: Array, owners: Array, accessor: Accessor, foreign: Array | None
    ) -> Array:
        """Which accesses were made by threads of other blocks."""
        code = accessor.code if isinstance(accessor.code, int) else accessor.code[owners]
        width = self._launch.threads_per_block
        elsewhere: Array = columns // width != entries.columns(code) // width
        return elsewhere if foreign is None else elsewhere | foreign

    def _out_of_scope(self, picked: Array, operation: Operation) -> Array:
        """Which strong accesses were made by threads of other devices, where not both have the
        scope of the system."""
        launch = self._launch
        own = self._ordering.wave.geometry.device
        devices = np.array([-1 if one is None else one for one in launch.devices])
        found: Array = (devices[entries.domains(picked)] != own) & (picked != 0)
        if operation.instruction.has("sys") and found.any():
            times = entries.times(picked)
            for time in np.unique(times[found]).tolist():
                instruction = launch.events[time]
                if instruction is not None and instruction.has("sys"):
                    found &= times != time
        return found

    def _without_own(
        self,
        bad: Array,
        columns: Array,
        times: Array,
        owners: Array,
        accessor: Accessor,
        foreign: Array | None,
    ) -> Array:
        """Takes out what lanes did themselves."""
        if accessor.lanes is None:
            return bad
        ordering = self._ordering
        lanes = accessor.lanes[owners]
        own = ordering.column[lanes]
        mine: Array = columns == own
        if ordering.copied is not None:
            behind = own + self._launch.clocks.threads
            mine |= (columns == behind) & (times <= ordering.copied[lanes])
        if foreign is not None:
            mine &= ~foreign
        left: Array = bad & ~mine
        return left

    def _without_foreign(
        self, bad: Array, foreign: Array, rows: Values, picked: Array, table: Array
    ) -> Array:
        """Takes out what is known of accesses of other domains."""
        clocks = self._launch.clocks
        bad = bad.copy()
        positions = np.flatnonzero(bad & foreign)
        chosen = picked[positions]
        domains, columns, times = (
            entries.domains(chosen),
            entries.columns(chosen),
            entries.times(chosen),
        )
        own = np.full(len(positions), rows) if isinstance(rows, int) else rows[positions]
        for row in np.unique(own):
            known = clocks.foreign[int(row)]
            if not known:
                continue
            for domain in np.unique(domains[own == row]):
                there = known.get(int(domain))
                if there is not None:
                    same = (own == row) & (domains == domain)
                    bad[positions[same]] = table[there][columns[same]] < times[same]
        return bad
