"""Asynchronous operations: what they access, who waits for them, and what they leave behind."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.distinct import distinct, distinct_inverse
from pallasite_simulator.engine.lanes import WARP
from pallasite_simulator.engine.observer import AsyncOperation, Observer
from pallasite_simulator.engine.program import registers_in
from pallasite_simulator.ptx.syntax import Address, Instruction
from pallasite_simulator.sanitizer import entries
from pallasite_simulator.sanitizer.clocks import NOTHING
from pallasite_simulator.sanitizer.columns import Columns
from pallasite_simulator.sanitizer.history import Accessor, Operation
from pallasite_simulator.sanitizer.memory_checks import MemoryChecks
from pallasite_simulator.sanitizer.ordering import Ordering
from pallasite_simulator.sanitizer.report import Reporter
from pallasite_simulator.types import Array, Values

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave
    from pallasite_simulator.sanitizer.launch_state import LaunchState

PIECE = 16
"""Bytes that asynchronous operations access at once."""

_PIECES_TOGETHER = 1 << 16
"""How many pieces of several operations are looked at together."""


@dataclasses.dataclass(slots=True, eq=False)
class State:
    """What the sanitizer keeps with an operation.

    Its parts are what each lane, or each group of lanes, began: arrays have an element for each.
    Those of ``cp.async`` are looked at by lane instead.

    Attributes:
      time: the event of its reads; that of its writes is the next.
      names: numbers of the groups of lanes, ascending.
      firsts: the first lane of each.
      domains: of the lanes.
      columns: of the engines, in the clocks.
      rows: of the clocks: what happened before.
      over: of the clocks: what was over before, as whoever waits for it knows then.
      waited, reads_waited: whether it has been waited for, or for its reads.
      registers: that it uses until it is waited for.
      in_flight: for each lane of the wave, whether it still uses the registers of the lane.
    """

    time: int
    names: Array
    firsts: Array
    domains: Array
    columns: Array
    rows: Array
    over: Array
    waited: Array
    reads_waited: Array
    registers: frozenset[int] = frozenset()
    in_flight: Array | None = None


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
        observer: Observer,
    ):
        self.wave = wave
        # The observer has these checks: so they are freed with it.
        self.observer: Observer = weakref.proxy(observer)
        self.launch = launch
        self.ordering = ordering
        self.memory = memory
        self.reporter = reporter
        self.report_pending = "async" in groups
        self.report_registers = "registers" in groups
        self._follows = bool(set(groups) & {"races", "async", "registers", "initialized"})
        self._columns = Columns(ordering)
        self._pending: dict[AsyncOperation, State] = {}
        self._using: dict[AsyncOperation, State] = {}
        # Registers that products have used so far; where they were written since the last fence.
        self._watched: set[int] = set()
        self._unfenced: dict[int, Array] = {}
        self._written: dict[int, frozenset[int]] = {}
        self._keys: dict[Hashable, list[tuple[AsyncOperation, Array]]] = {}
        self._copies_begun = np.zeros(wave.lane_count, np.int64)
        self._copies_done = np.zeros(wave.lane_count, np.int64)
        launch.hold(self.roots)

    def roots(self) -> Iterable[int]:
        """Rows in use."""
        for state in self._pending.values():
            yield from distinct(state.rows).tolist()
            yield from distinct(state.over).tolist()

    # Beginning ------------------------------------------------------------------------------------

    def begin(self, operation: AsyncOperation) -> None:
        """Called for each operation when it begins."""
        if not self._follows:
            return
        lanes, clocks = operation.lanes, self.launch.clocks
        if _is_copy(operation):
            time = self._events(operation)
            none = np.zeros(0, np.int64)
            operation.detail = State(time, none, none, none, none, none, none, none, none)
            clocks.last[self.ordering.column[lanes] + clocks.threads] = time + 1
            self._copies_begun[lanes] = time + 1
            return
        numbers = self._group_numbers(operation, lanes)
        starts = np.append(0, np.flatnonzero(numbers[1:] != numbers[:-1]) + 1)
        firsts = lanes[starts]
        rows = np.broadcast_to(self._rows(lanes, starts), (len(starts),))
        time = self._events(operation)
        domains = self.ordering.domain[firsts]
        columns = self._columns.of(operation, firsts, rows, time + 1)
        if operation.in_order:
            # Each knows what it does itself, and so all that was begun before it.
            each = zip(rows.tolist(), columns.tolist(), strict=True)
            known = [clocks.advance(row, one, time + 1, fenced=False) for row, one in each]
            rows = np.array(known)
        clocks.began(columns, time, time + 1)
        no = np.zeros(len(starts), np.bool_)
        over = self._over_before(operation, firsts)
        state = State(time, numbers[starts], firsts, domains, columns, rows, over, no, no.copy())
        operation.detail = state
        if operation.title:
            self.launch.titles[operation.engine] = (operation.title, operation.hint)
        self._pending[operation] = state

    def _events(self, operation: AsyncOperation) -> int:
        """Two events, one for reads and one for writes; returns the first."""
        time = self.launch.event(operation.instruction)
        self.launch.event(operation.instruction)
        return time

    def _rows(self, lanes: Array, starts: Array) -> Values:
        """What happens before the operations of groups of lanes. The warps of a warpgroup do not
        wait for one another, so each must know it."""
        ordering = self.ordering
        if len(lanes) <= WARP * len(starts):
            return ordering.publish_groups(lanes, starts)
        known = ordering.rows_of(lanes)
        if isinstance(known, int):
            return known
        found = []
        for group in np.split(lanes, starts[1:]):
            warps = ordering.groups(group, group // WARP)
            found.append(self.launch.clocks.common([ordering.publish(warp) for warp in warps]))
        return np.array(found)

    def _over_before(self, operation: AsyncOperation, firsts: Array) -> Array:
        """What is over when lanes begin bulk copies: what they have waited for, not what they did
        themselves. Copies do not make it visible, but come after it: who waits for the copy may
        overwrite what was read."""
        if operation.engine != "tma":
            return np.zeros(len(firsts), np.int64)
        rows = self.ordering.rows_of(firsts)
        all_over = self.launch.clocks.all_over
        if isinstance(rows, int):
            return np.full(len(firsts), all_over(rows))
        known, inverse = distinct_inverse(rows)
        found: Array = np.array([all_over(row) for row in known.tolist()])[inverse]
        return found

    def _group_numbers(self, operation: AsyncOperation, lanes: Array) -> Array:
        """Numbers of what lanes begin together; ascending with the lanes."""
        together = max(1, operation.together)
        if together == 1:
            return lanes
        wave = self.wave
        each = -(-wave.lanes_per_block // together)
        numbers: Array = wave.lane_block[lanes] * each + wave.lane_thread[lanes] // together
        return numbers

    def _parts(self, operation: AsyncOperation, state: State, lanes: Array) -> Array:
        """For each lane, which part it is of."""
        if len(state.names) == 1:
            return np.zeros(len(lanes), np.int64)
        numbers = self._group_numbers(operation, lanes)
        found: Array = np.searchsorted(state.names, numbers)
        return found

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
        memory = self.memory
        if not (space in ("shared", "global") or memory.added(space)) or not len(offsets):
            return
        if space == "global" and kind != "write":
            memory.note_early(offsets, size, operation.instruction)
        if not (memory.recording or memory.initialized or memory.bounds):
            return
        if space == "global" and not (memory.recording and memory.writable(offsets, size)):
            return
        reads = kind == "read"
        what = Operation(space, reads, not reads, kind == "atomic", operation.instruction)
        lanes = operation.lanes if owners is None else owners
        if space == "shared" and memory.initialized:
            copied_out = _is_bulk(operation)
            memory.initialization.check_contents(what, lanes, offsets, size, copied_out=copied_out)
        if not self._follows:
            self.memory.check_pieces(what, lanes, offsets, size)
            return
        state = _state(operation)
        if _is_copy(operation):
            memory.check_bounds(what, lanes, offsets, size)
            behind = self.launch.clocks.threads << entries.COLUMN_SHIFT
            codes, known = self.ordering.code[lanes] + behind, self.ordering.rows_of(lanes)
            time = state.time + what.writes
            self._check(what, offsets, size, Accessor(codes, known, lanes, time))
            return
        if space == "global":
            rows = self.ordering.rows_of_global(state.firsts, state.rows)
            state = dataclasses.replace(state, rows=rows)
        parts = np.zeros(len(offsets), np.int64)
        if len(state.names) > 1:
            parts = self._parts(operation, state, lanes)
        if size <= PIECE and not size & (size - 1):
            memory.check_bounds(what, state.firsts[parts], offsets, size)
            self._check_together(operation, state, what, offsets, size, parts)
            return
        for part, chosen in self._by_part(offsets, parts):
            self._check_extent(what, chosen, size, state.firsts[part : part + 1])
        if len(state.names) > 1 and _in_pieces(offsets, size):
            offsets_of_pieces = (offsets[:, None] + np.arange(0, size, PIECE)).reshape(-1)
            parts = np.repeat(parts, size // PIECE)
            self._check_together(operation, state, what, offsets_of_pieces, PIECE, parts)
            return
        for part, chosen in self._by_part(offsets, parts):
            code = entries.encode(0, int(state.domains[part]), int(state.columns[part]))
            accessor = self._accessor(operation, state, what, code, int(state.rows[part]))
            shadow = self.memory.shadow(space)
            for places in shadow.ranges(chosen, size):
                memory.check(shadow, places, accessor, what)

    def _check_together(
        self,
        operation: AsyncOperation,
        state: State,
        what: Operation,
        offsets: Array,
        size: int,
        parts: Array,
    ) -> None:
        """Small accesses of many parts."""
        codes = entries.encode(0, state.domains, state.columns)[parts]
        same = bool((state.rows == state.rows[0]).all())
        rows: Values = int(state.rows[0]) if same else state.rows[parts]
        self._check(what, offsets, size, self._accessor(operation, state, what, codes, rows))

    def _accessor(
        self, operation: AsyncOperation, state: State, what: Operation, code: Values, rows: Values
    ) -> Accessor:
        time = state.time + what.writes
        proxy = operation.proxy == "async" and what.space in ("shared", "global")
        return Accessor(code, rows, None, time, proxy=proxy)

    def _check(self, what: Operation, offsets: Array, size: int, accessor: Accessor) -> None:
        shadow = self.memory.shadow(what.space)
        for places in shadow.places(offsets, size):
            self.memory.check(shadow, places, accessor, what)

    def _by_part(self, offsets: Array, parts: Array) -> Iterator[tuple[int, Array]]:
        """The accesses of each part."""
        if len(parts) > 1 and (parts[1:] < parts[:-1]).any():
            order = np.argsort(parts, kind="stable")
            offsets, parts = offsets[order], parts[order]
        starts = np.append(0, np.flatnonzero(parts[1:] != parts[:-1]) + 1).tolist()
        for start, end in zip(starts, [*starts[1:], len(parts)], strict=True):
            yield int(parts[start]), offsets[start:end]

    def _check_extent(self, what: Operation, offsets: Array, size: int, lanes: Array) -> None:
        """Reports large pieces of shared memory that are not in one allocation."""
        if what.space != "shared" or not self.memory.bounds:
            return
        allocations = self.reporter.allocations
        first, last = int(offsets.min()), int(offsets.max())
        start = first % allocations.stride
        if allocations.inside(start, start + last - first + size):
            return
        for one in offsets.tolist():
            start = one % allocations.stride
            if not allocations.inside(start, start + size):
                self.memory.out_of_bounds(lanes, what.reads, one, size, what.instruction)
                return

    # Ending ---------------------------------------------------------------------------------------

    def complete_on(self, operation: AsyncOperation, key: Hashable, lanes: Array | None) -> None:
        """The completion becomes part of a key."""
        if not self._follows:
            return
        clocks, state = self.launch.clocks, _state(operation)
        if _is_copy(operation):
            chosen = operation.lanes if lanes is None else lanes
            self._copies_done[chosen] = np.maximum(self._copies_done[chosen], state.time + 1)
            generic = np.zeros(clocks.width, np.int32)
            generic[self.ordering.column[chosen] + clocks.threads] = state.time + 1
            self.ordering.add_to_key(key, clocks.add(generic, np.zeros_like(generic), None))
            return
        parts = np.arange(len(state.names))
        if lanes is not None:
            parts = distinct(self._parts(operation, state, lanes))
        rows = self._rows_of_completions(operation, state, parts, state.time + 1)
        for row in rows.tolist():
            self.ordering.add_to_key(key, row)
        self._keys.setdefault(key, []).append((operation, parts))

    def _row_of_completion(
        self,
        operation: AsyncOperation,
        column: int,
        time: int,
        before: int = NOTHING,
        over: int = NOTHING,
    ) -> int:
        fenced = operation.proxy == "async"
        return self.launch.clocks.advance(before, column, time, fenced=fenced, over=over)

    def completions(
        self, operation: AsyncOperation, lanes: Array, places: Array, phases: Array
    ) -> None:
        """The completion of what lanes began becomes part of phases of mbarriers."""
        if not self._follows:
            return
        if _is_copy(operation):
            Observer.completions(self.observer, operation, lanes, places, phases)
            return
        state = _state(operation)
        parts = self._parts(operation, state, lanes)
        signals = operation.proxy == "async" and not operation.in_order
        if signals and operation.instruction.opcode not in ("st", "red"):
            codes = entries.encode(0, state.domains, state.columns)[parts]
            accessor = Accessor(codes, state.rows[parts], None, state.time + 1, proxy=True)
            self.memory.complete_on_barriers(places * 8, accessor, operation.instruction)
        ends = np.flatnonzero((places[1:] != places[:-1]) | (phases[1:] != phases[:-1])) + 1
        starts, together = np.append(0, ends), np.split(parts, ends)
        at, then = places[starts], phases[starts]
        for key, some in zip(zip(at.tolist(), then.tolist(), strict=True), together, strict=True):
            self._keys.setdefault(("mbarrier", *key), []).append((operation, some))
        if operation.in_order or len(starts) == len(parts):
            rows = self._rows_of_completions(operation, state, parts, state.time + 1)
            self.ordering.add_to_phases(places, phases, rows)
            return
        rows = np.array([self._row_of_completions(operation, state, some) for some in together])
        self.ordering.add_to_phases(at, then, rows)

    def _row_of_completions(self, operation: AsyncOperation, state: State, parts: Array) -> int:
        """The row that knows that all these parts are complete."""
        fenced, time, clocks = operation.proxy == "async", state.time + 1, self.launch.clocks
        columns, over = state.columns[parts], state.over[parts]
        each = [(columns[over == one], one) for one in distinct(over).tolist()]
        return clocks.join_all(
            clocks.advance_all(some, time, fenced=fenced, over=one) for some, one in each
        )

    def _rows_of_completions(
        self, operation: AsyncOperation, state: State, parts: Array, time: int
    ) -> Array:
        columns = state.columns[parts]
        if operation.in_order:
            # Where it is over, all that it came after is over too.
            each = zip(columns.tolist(), state.rows[parts].tolist(), strict=True)
            ordered = [self._row_of_completion(operation, one, time, row) for one, row in each]
            return np.array(ordered)
        over = state.over[parts]
        pairs = columns << 32 | over
        some, inverse = distinct_inverse(pairs)
        rows = [
            self._row_of_completion(operation, one >> 32, time, over=one & (1 << 32) - 1)
            for one in some.tolist()
        ]
        found: Array = np.array(rows)[inverse]
        return found

    def acquired_phases(self, places: Array, phases: Array) -> None:
        """Lanes have waited for phases of mbarriers."""
        if not self._keys:
            return
        first = np.append(0, np.flatnonzero(places[1:] != places[:-1]) + 1)
        for place, phase in zip(places[first].tolist(), phases[first].tolist(), strict=True):
            self.acquired(("mbarrier", place, phase))

    def acquired(self, key: Hashable) -> None:
        """A key has been waited for."""
        for operation, parts in self._keys.pop(key, ()):
            self._over(operation, parts, reads_only=False)

    def complete_for(
        self, operations: Sequence[AsyncOperation], lanes: Array, reads_only: bool
    ) -> None:
        """Lanes have waited for operations."""
        if not self._follows:
            return
        for operation in operations:
            state = _state(operation)
            if _is_copy(operation):
                self._copied(operation, state, lanes)
                continue
            parts = self._parts(operation, state, lanes)
            time = state.time + (not reads_only)
            rows = self._rows_of_completions(operation, state, parts, time)
            self.ordering.learn_each(lanes, rows)
            self._over(operation, distinct(parts), reads_only)
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

    def _over(self, operation: AsyncOperation, parts: Array, reads_only: bool) -> None:
        state = _state(operation)
        state.reads_waited[parts] = True
        if not reads_only:
            state.waited[parts] = True
        # Whoever began a bulk copy in a group may end when its reads are over.
        enough = state.reads_waited if _is_bulk(operation) else state.waited
        if enough.all():
            self._pending.pop(operation, None)

    # Registers ------------------------------------------------------------------------------------

    def registers(self, operation: AsyncOperation, registers: Sequence[int]) -> None:
        """The operation uses registers until it is waited for."""
        if not self._follows:
            return
        state = _state(operation)
        if not registers or not self.report_registers:
            return
        state.registers |= frozenset(registers)
        if state.in_flight is None:
            state.in_flight = np.zeros(self.wave.lane_count, np.bool_)
        state.in_flight[operation.lanes] = True
        self._using[operation] = state
        self._check_fenced(operation, state.registers)
        self._watched |= state.registers
        self.wave.in_flight |= state.registers

    def _check_fenced(self, operation: AsyncOperation, registers: frozenset[int]) -> None:
        wrong = [
            number
            for number, lanes in self._unfenced.items()
            if number in registers and lanes[operation.lanes].any()
        ]
        if wrong:
            names = self.wave.program.register_names()
            listed = ", ".join(sorted(names[number] for number in wrong)[:4])
            self.observer.misuse(
                operation.lanes,
                f"wgmma.mma_async uses {listed}, written since the last wgmma.fence",
                operation.instruction,
            )
            for number in wrong:
                del self._unfenced[number]

    def fenced(self, lanes: Array) -> None:
        """The lanes execute a fence that orders what they wrote to registers."""
        for number, unfenced in list(self._unfenced.items()):
            unfenced[lanes] = False
            if not unfenced.any():
                del self._unfenced[number]

    def _note_writes(self, lanes: Array, instruction: Instruction) -> None:
        """Notes which registers of products an instruction writes: those of its first operand."""
        written = self._written.get(id(instruction))
        if written is None:
            first = instruction.operands[:1]
            stores = bool(first) and isinstance(first[0], Address)
            named = [] if stores else registers_in(first)
            written = frozenset(map(self.wave.program.register, named))
            self._written[id(instruction)] = written
        for number in written & self._watched:
            unfenced = self._unfenced.get(number)
            if unfenced is None:
                unfenced = self._unfenced[number] = np.zeros(self.wave.lane_count, np.bool_)
            unfenced[lanes] = True

    def _release_registers(self, operation: AsyncOperation) -> None:
        self._using.pop(operation, None)

    def touched(self, lanes: Array, registers: frozenset[int], instruction: Instruction) -> None:
        """Lanes use registers that an operation in flight may use."""
        if instruction.opcode == "wgmma":
            # Products that accumulate into the same registers are done in order.
            return
        self._note_writes(lanes, instruction)
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
            instruction = self.launch.events[int(self._copies_begun[chosen[0]])]
            assert instruction is not None
            self._pending_at_end(chosen, instruction, "cp.async.wait_all")
        if not self._pending:
            return
        ended = np.zeros(self.wave.lane_count, np.bool_)
        ended[lanes] = True
        for operation, state in self._pending.items():
            product = operation.engine == "wgmma"
            if product or _is_bulk(operation):
                late = state.firsts[~state.reads_waited & ended[state.firsts]]
                wait = "wgmma.wait_group 0" if product else "cp.async.bulk.wait_group.read 0"
                if len(late):
                    self._pending_at_end(late, operation.instruction, wait)

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
            if operation.engine == "wgmma" or _is_bulk(operation) or not operation.required:
                continue
            self.reporter.simple(
                "kernel ends before its asynchronous operation",
                state.firsts[~state.waited],
                "began an operation, but no thread waited for the mbarrier that it completes on",
                operation.instruction,
                "wait for it before the end (in Pallas: plgpu.barrier_wait)",
            )


def _state(operation: AsyncOperation) -> State:
    assert isinstance(operation.detail, State)
    return operation.detail


def _is_copy(operation: AsyncOperation) -> bool:
    return operation.engine == "cp.async"


def _is_bulk(operation: AsyncOperation) -> bool:
    """Whether it is waited for as a part of a group of bulk copies: those to global memory."""
    return operation.instruction.has("bulk_group")


def _in_pieces(offsets: Array, size: int) -> bool:
    """Whether large accesses are made of not too many whole pieces."""
    if size % PIECE or len(offsets) * (size // PIECE) > _PIECES_TOGETHER:
        return False
    return not int(np.bitwise_or.reduce(offsets)) % PIECE
