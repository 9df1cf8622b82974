"""Asynchronous operations: what they access, who waits for them, and what they leave behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.engine.lanes import WARP
from pallasite_simulator.engine.observer import AsyncOperation
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.sanitizer import entries
from pallasite_simulator.sanitizer.clocks import NOTHING, Clocks
from pallasite_simulator.sanitizer.memory_checks import Accessor, MemoryChecks, Operation
from pallasite_simulator.sanitizer.ordering import Ordering
from pallasite_simulator.sanitizer.report import Reporter
from pallasite_simulator.types import Array, Values

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave
    from pallasite_simulator.sanitizer.launch_state import LaunchState

_COLUMNS_OF_BARRIERS = 256
"""How many operations of a domain that complete on mbarriers are told apart at one time."""


@dataclasses.dataclass(slots=True, eq=False)
class Part:
    """What one lane, or one group of lanes, began with an operation.

    Attributes:
      lanes: who began it.
      domain: of the lanes.
      column: of the engine, in the clocks.
      row: what happened before it.
      waited, reads_waited: whether somebody has waited for it, or for its reads.
    """

    lanes: Array
    domain: int
    column: int
    row: int
    waited: bool = False
    reads_waited: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class State:
    """What the sanitizer keeps with an operation.

    Attributes:
      time: the event of its reads; that of its writes is the next.
      parts: by number of the group that began them; empty for ``cp.async``, whose lanes are looked
        at together.
      waiting: how many parts nobody has waited for.
      registers: that it uses until it is waited for.
      in_flight: for each lane, whether it still uses the registers of the lane.
    """

    time: int
    parts: dict[int, Part]
    waiting: int = 0
    registers: frozenset[int] = frozenset()
    in_flight: Array | None = None


class Slots:
    """Columns of clocks for operations that are over in any order, taken again when the operation
    that had one is known to be over."""

    def __init__(self, clocks: Clocks, engine: str, domains: int):
        self._clocks = clocks
        self._engine = engine
        self._columns: Array = np.zeros(0, np.int64)
        # For each domain and column, the event of the operation that has it.
        self._taken: Array = np.zeros((domains, 0), np.int64)
        self._next = 0

    def take(self, domains: Array, rows: Array, time: int) -> Array:
        """Columns for operations of different domains (their numbers in the wave), given the rows
        of what is known when they begin."""
        clocks = self._clocks
        known = clocks.generic[rows[:, None], self._columns] >= self._taken[domains]
        found = known.argmax(axis=1) if known.shape[1] else np.zeros(len(domains), np.int64)
        if not known.shape[1] or not known[np.arange(len(domains)), found].all():
            full = len(self._columns) >= _COLUMNS_OF_BARRIERS
            number = self._next if full else self._add()
            self._next = (number + 1) % _COLUMNS_OF_BARRIERS
            if known.shape[1]:
                found = np.where(known[np.arange(len(domains)), found], found, number)
            else:
                found[:] = number
        self._taken[domains, found] = time
        columns: Array = self._columns[found]
        return columns

    def _add(self) -> int:
        number = len(self._columns)
        column = self._clocks.column((self._engine, number))
        self._columns = np.append(self._columns, column)
        self._taken = np.pad(self._taken, ((0, 0), (0, 1)))
        return number


class AsyncChecks:
    """Checks the asynchronous operations of one wave."""

    def __init__(
        self,
        wave: Wave,
        launch: LaunchState,
        ordering: Ordering,
        memory: MemoryChecks,
        reporter: Reporter,
        groups: Collection[str],
    ):
        self.wave = wave
        self.launch = launch
        self.ordering = ordering
        self.memory = memory
        self.reporter = reporter
        self.report_pending = "async" in groups
        self.report_registers = "registers" in groups
        self._slots: dict[str, Slots] = {}
        self._pending: dict[AsyncOperation, State] = {}
        self._using: dict[AsyncOperation, State] = {}
        self._keys: dict[Hashable, list[tuple[AsyncOperation, Part]]] = {}
        self._copies_begun = np.zeros(wave.lane_count, np.int64)
        self._copies_done = np.zeros(wave.lane_count, np.int64)
        launch.hold(self.roots)

    def roots(self) -> Iterable[int]:
        """Rows in use."""
        for state in self._pending.values():
            for part in state.parts.values():
                yield part.row

    # Beginning ------------------------------------------------------------------------------------

    def begin(self, operation: AsyncOperation) -> None:
        """Called for each operation when it begins."""
        clocks = self.launch.clocks
        lanes = operation.lanes
        parts: dict[int, Part] = {}
        if not _is_copy(operation):
            for group in self.ordering.groups(lanes, self._group_numbers(operation, lanes)):
                domain = int(self.ordering.domain[group[0]])
                row = self._row(group)
                parts[self._group_number(operation, int(group[0]))] = Part(group, domain, -1, row)
        time = self.launch.event(operation.instruction)
        self.launch.event(operation.instruction)
        if _is_copy(operation):
            operation.detail = State(time, parts)
            clocks.last[self.ordering.column[lanes] + clocks.threads] = time + 1
            self._copies_begun[lanes] = time + 1
            return
        columns = self._columns(operation, list(parts.values()), time + 1)
        for part, column in zip(parts.values(), columns.tolist(), strict=True):
            part.column = column
        clocks.began(columns, time, time + 1)
        state = operation.detail = State(time, parts, len(parts))
        self._pending[operation] = state

    def _row(self, lanes: Array) -> int:
        """What happens before an operation that lanes begin together: its warps do not wait for one
        another, so each must know it."""
        if len(lanes) <= WARP:
            return self.ordering.publish(lanes)
        rows = self.ordering.rows_of(lanes)
        if isinstance(rows, int):
            return rows
        warps = self.ordering.groups(lanes, lanes // WARP)
        return self.launch.clocks.common([self.ordering.publish(warp) for warp in warps])

    def _together(self, operation: AsyncOperation) -> int:
        return 128 if operation.engine == "wgmma" else max(1, operation.together)

    def _group_numbers(self, operation: AsyncOperation, lanes: Array) -> Array:
        together = self._together(operation)
        if together == 1:
            return lanes
        wave = self.wave
        each = -(-wave.lanes_per_block // together)
        numbers: Array = wave.lane_block[lanes] * each + wave.lane_thread[lanes] // together
        return numbers

    def _group_number(self, operation: AsyncOperation, lane: int) -> int:
        return int(self._group_numbers(operation, np.array([lane]))[0])

    def _columns(self, operation: AsyncOperation, parts: Sequence[Part], time: int) -> Array:
        """The columns of clocks for the parts of an operation: those that are waited for in order
        share one."""
        clocks = self.launch.clocks
        kind = "wgmma" if operation.engine == "wgmma" else "bulk"
        if operation.engine == "wgmma" or _is_bulk(operation):
            firsts = self.ordering.column[[int(part.lanes[0]) for part in parts]].tolist()
            return np.array([clocks.column((kind, first)) for first in firsts])
        # Others are over in any order: one that is not known to be over keeps its column.
        engine = _ENGINES.get(operation.engine, operation.engine)
        slots = self._slots.get(engine)
        if slots is None:
            domains = len(self.ordering.rows) // self.ordering.width
            slots = self._slots[engine] = Slots(clocks, engine, domains)
        places = np.array([part.domain for part in parts]) - self.ordering.first_domain
        rows = np.array([part.row for part in parts])
        if len(parts) == 1 or (places[1:] > places[:-1]).all():
            return slots.take(places, rows, time)
        each = [slots.take(places[n : n + 1], rows[n : n + 1], time) for n in range(len(parts))]
        return np.concatenate(each)

    # Accesses -------------------------------------------------------------------------------------

    def access(
        self,
        operation: AsyncOperation,
        kind: str,
        space: str,
        offsets: Array,
        size: int,
        owners: Array | None,
    ) -> None:
        """Called for what an operation reads and writes."""
        if space not in ("shared", "global") or not len(offsets):
            return
        if not (self.memory.recording or self.memory.initialized):
            return
        if space == "global" and not (
            self.memory.recording and self.memory.writable(offsets, size)
        ):
            return
        state = operation.detail
        assert isinstance(state, State)
        what = Operation(
            space, kind == "read", kind != "read", kind == "atomic", operation.instruction
        )
        time = state.time + (kind != "read")
        shadow = self.memory.shared if space == "shared" else self.launch.global_memory
        if _is_copy(operation):
            lanes = operation.lanes if owners is None else owners
            self._check_extent(what, offsets, size, lanes)
            behind = self.launch.clocks.threads << entries.COLUMN_SHIFT
            accessor = Accessor(
                self.ordering.code[lanes] + behind, self.ordering.rows_of(lanes), lanes, time
            )
            for places in shadow.places(offsets, size):
                self.memory.check(shadow, places, accessor, what)
            return
        if len(state.parts) > 1 and size in (1, 2, 4, 8, 16):
            self._access_together(operation, state, what, offsets, size, owners)
            return
        for part, chosen in self._split(operation, state, offsets, owners):
            self._check_extent(what, chosen, size, part.lanes)
            code = int(entries.encode(0, part.domain, part.column))
            accessor = Accessor(code, part.row, None, time, proxy=operation.proxy == "async")
            for places in shadow.ranges(chosen, size):
                self.memory.check(shadow, places, accessor, what)

    def _access_together(
        self,
        operation: AsyncOperation,
        state: State,
        what: Operation,
        offsets: Array,
        size: int,
        owners: Array | None,
    ) -> None:
        """Small accesses of many parts."""
        lanes = operation.lanes if owners is None else owners
        numbers, which = np.unique(self._group_numbers(operation, lanes), return_inverse=True)
        parts = [state.parts[number] for number in numbers.tolist()]
        codes = np.array([int(entries.encode(0, p.domain, p.column)) for p in parts])
        rows: Values = np.array([part.row for part in parts])
        rows = int(rows[0]) if (rows == rows[0]).all() else rows[which]
        self._check_extent(what, offsets, size, lanes)
        time = state.time + what.writes
        accessor = Accessor(codes[which], rows, None, time, proxy=operation.proxy == "async")
        shadow = self.memory.shared if what.space == "shared" else self.launch.global_memory
        for places in shadow.places(offsets, size):
            self.memory.check(shadow, places, accessor, what)

    def _split(
        self, operation: AsyncOperation, state: State, offsets: Array, owners: Array | None
    ) -> Iterable[tuple[Part, Array]]:
        """The accesses of each part."""
        if len(state.parts) == 1:
            yield next(iter(state.parts.values())), offsets
            return
        if owners is None:
            owners = operation.lanes
        numbers = self._group_numbers(operation, owners)
        order = np.argsort(numbers, kind="stable")
        numbers, offsets = numbers[order], offsets[order]
        ends = [*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        start = 0
        for end in ends:
            yield state.parts[int(numbers[start])], offsets[start:end]
            start = end

    def _check_extent(self, what: Operation, offsets: Array, size: int, lanes: Array) -> None:
        """Reports pieces of shared memory that are not in one allocation."""
        if what.space != "shared" or not self.memory.bounds:
            return
        allocations = self.reporter.allocations
        first, last = int(offsets.min()), int(offsets.max())
        start = first % allocations.stride
        if first // allocations.stride == last // allocations.stride and allocations.inside(
            start, start + last - first + size
        ):
            return
        if size % 16 == 0 and len(offsets) > 1:
            within = np.unique(offsets % allocations.stride)
        else:
            within = offsets % allocations.stride
        for one in within.tolist():
            if not allocations.inside(one, one + size):
                offset = int(offsets[0]) // allocations.stride * allocations.stride + one
                self.memory.out_of_bounds(lanes[:1], what.reads, offset, size, what.instruction)
                return

    # Ending ---------------------------------------------------------------------------------------

    def complete_on(self, operation: AsyncOperation, key: Hashable, lanes: Array | None) -> None:
        """The completion becomes part of a key."""
        clocks = self.launch.clocks
        state = operation.detail
        assert isinstance(state, State)
        if _is_copy(operation):
            chosen = operation.lanes if lanes is None else lanes
            self._copies_done[chosen] = np.maximum(self._copies_done[chosen], state.time + 1)
            generic = np.zeros(clocks.width, np.int32)
            generic[self.ordering.column[chosen] + clocks.threads] = state.time + 1
            self.ordering.add_to_key(key, clocks.add(generic, np.zeros_like(generic), None))
            return
        for part in self._parts(operation, state, lanes):
            fenced = operation.proxy == "async"
            row = clocks.advance(NOTHING, part.column, state.time + 1, fenced=fenced)
            self.ordering.add_to_key(key, row)
            self._keys.setdefault(key, []).append((operation, part))

    def acquired(self, key: Hashable) -> None:
        """Somebody has waited for a key."""
        for operation, part in self._keys.pop(key, ()):
            self._over(operation, part, reads_only=False)

    def complete_for(
        self, operations: Sequence[AsyncOperation], lanes: Array, reads_only: bool
    ) -> None:
        """Lanes have waited for operations."""
        clocks, ordering = self.launch.clocks, self.ordering
        for operation in operations:
            state = operation.detail
            assert isinstance(state, State)
            if _is_copy(operation):
                self._copied(operation, state, lanes)
                continue
            time = state.time + (not reads_only)
            for part in self._parts(operation, state, lanes):
                first, last = int(part.lanes[0]), int(part.lanes[-1])
                begin, end = np.searchsorted(lanes, [first, last + 1])
                fenced = operation.proxy == "async"
                row = clocks.advance(NOTHING, part.column, time, fenced=fenced)
                ordering.learn(lanes[begin:end], row)
                self._over(operation, part, reads_only)
            if state.in_flight is not None and not reads_only:
                state.in_flight[lanes] = False
                if not state.in_flight.any():
                    self._release_registers(operation)

    def _copied(self, operation: AsyncOperation, state: State, lanes: Array) -> None:
        """Lanes have waited for their ``cp.async`` copies."""
        copied = self.ordering.copied
        assert copied is not None
        mine = operation.lanes
        if len(mine) != len(lanes) or not np.array_equal(mine, lanes):
            mine = np.intersect1d(mine, lanes, assume_unique=True)
        copied[mine] = np.maximum(copied[mine], state.time + 1)
        self._copies_done[mine] = np.maximum(self._copies_done[mine], state.time + 1)

    def _parts(
        self, operation: AsyncOperation, state: State, lanes: Array | None
    ) -> Iterable[Part]:
        if lanes is None:
            yield from state.parts.values()
            return
        if self._together(operation) == 1:
            yield from (state.parts[lane] for lane in lanes.tolist() if lane in state.parts)
            return
        for number in np.unique(self._group_numbers(operation, lanes)).tolist():
            if number in state.parts:
                yield state.parts[number]

    def _over(self, operation: AsyncOperation, part: Part, reads_only: bool) -> None:
        # Whoever began a bulk copy in a group may end when its reads are over.
        enough = part.reads_waited if reads_only or _is_bulk(operation) else part.waited
        part.reads_waited = True
        part.waited |= not reads_only
        state = operation.detail
        assert isinstance(state, State)
        if not enough and (part.waited or _is_bulk(operation)):
            state.waiting -= 1
            if not state.waiting:
                self._pending.pop(operation, None)

    # Registers ------------------------------------------------------------------------------------

    def registers(self, operation: AsyncOperation, registers: Sequence[int]) -> None:
        """The operation uses registers until it is waited for."""
        state = operation.detail
        assert isinstance(state, State)
        if not registers or not self.report_registers:
            return
        state.registers |= frozenset(registers)
        if state.in_flight is None:
            state.in_flight = np.zeros(self.wave.lane_count, np.bool_)
        state.in_flight[operation.lanes] = True
        self._using[operation] = state
        self.wave.in_flight |= state.registers

    def _release_registers(self, operation: AsyncOperation) -> None:
        if self._using.pop(operation, None) is not None:
            self.wave.in_flight.clear()
            for state in self._using.values():
                self.wave.in_flight |= state.registers

    def touched(self, lanes: Array, registers: frozenset[int], instruction: Instruction) -> None:
        """Lanes use registers that an operation in flight may use."""
        if instruction.opcode == "wgmma":
            # Products that accumulate into the same registers are done in order.
            return
        for operation, state in self._using.items():
            common = registers & state.registers
            if not common or state.in_flight is None:
                continue
            wrong = state.in_flight[lanes]
            if wrong.any():
                names = self.wave.program.register_names()
                listed = ", ".join(sorted(names[number] for number in common)[:4])
                began = operation.instruction
                self.reporter.simple(
                    f"register of a {operation.engine} in flight",
                    lanes[wrong],
                    f"uses {listed}, which {began.opcode} at {began.location or began.position}"
                    " uses until it is waited for",
                    instruction,
                    "wait for it before: wgmma.commit_group and wgmma.wait_group (in Pallas:"
                    " plgpu.wgmma_wait)",
                )
                return

    # Ends -----------------------------------------------------------------------------------------

    def exit(self, lanes: Array) -> None:
        """Lanes end: all that is to be waited for by the thread itself must be over."""
        if not self.report_pending:
            return
        wrong = self._copies_begun[lanes] > self._copies_done[lanes]
        if wrong.any():
            chosen = lanes[wrong]
            event = int(self._copies_begun[chosen[0]])
            instruction = self.launch.events[event]
            assert instruction is not None
            self._pending_at_end(chosen, instruction, "cp.async.wait_all")
        ended = None
        for operation, state in list(self._pending.items()):
            group = operation.engine == "wgmma" or _is_bulk(operation)
            if not group:
                continue
            if ended is None:
                ended = np.zeros(self.wave.lane_count, np.bool_)
                ended[lanes] = True
            late = [
                part
                for part in state.parts.values()
                if not part.reads_waited and ended[part.lanes[0]]
            ]
            if late:
                wait = (
                    "wgmma.wait_group 0"
                    if operation.engine == "wgmma"
                    else ("cp.async.bulk.wait_group.read 0")
                )
                first = np.array([int(part.lanes[0]) for part in late])
                self._pending_at_end(first, operation.instruction, wait)

    def _pending_at_end(self, lanes: Array, instruction: Instruction, wait: str) -> None:
        self.reporter.simple(
            "thread ends before its asynchronous operation",
            lanes,
            "ends, but never waited for the operation that it began",
            instruction,
            f"commit it and wait for it before the end: {wait}",
        )

    def finish(self) -> None:
        """All lanes have ended: all that completes on an mbarrier must have been waited for."""
        self.launch.drop(self.roots)
        if not self.report_pending:
            return
        for operation, state in self._pending.items():
            if operation.engine == "wgmma" or _is_bulk(operation):
                continue
            late = [int(part.lanes[0]) for part in state.parts.values() if not part.waited]
            self.reporter.simple(
                "kernel ends before its asynchronous operation",
                np.array(late),
                "began an operation, but no thread waited for the mbarrier that it completes on",
                operation.instruction,
                "wait for it before the end (in Pallas: plgpu.barrier_wait)",
            )


_ENGINES = {"tma": "mbarrier"}
"""Engines whose operations complete on mbarriers."""


def _is_copy(operation: AsyncOperation) -> bool:
    return operation.engine == "cp.async"


def _is_bulk(operation: AsyncOperation) -> bool:
    """Whether it is waited for as a part of a group of bulk copies."""
    return operation.instruction.has("bulk_group")
