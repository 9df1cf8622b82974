"""Accesses to memory: races, uninitialized memory, and the bounds of allocations."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.distinct import distinct_inverse
from pallasite_simulator.engine.mbarrier import MBarriers
from pallasite_simulator.engine.memory import POISON
from pallasite_simulator.engine.observer import Access
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.sanitizer import entries
from pallasite_simulator.sanitizer.findings import place
from pallasite_simulator.sanitizer.history import Accessor, History, Operation
from pallasite_simulator.sanitizer.initialization import Initialization
from pallasite_simulator.sanitizer.ordering import Ordering
from pallasite_simulator.sanitizer.report import Reporter, Side, show
from pallasite_simulator.sanitizer.shadow import Places, Shadow, granule
from pallasite_simulator.sanitizer.undefined import Origin, UndefinedValues
from pallasite_simulator.types import Array, Values

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave
    from pallasite_simulator.sanitizer.launch_state import LaunchState

_FILL = 0x0101010101010101

_WORDS = 2
"""The level of granules of 4 bytes."""


def _only_stores(instruction: Instruction) -> bool:
    """Whether a strong access does not depend on what was there."""
    opcode = instruction.opcode
    return opcode == "st" or (opcode == "multimem" and instruction.has("st"))


class MemoryChecks:
    """Checks all accesses of one wave."""

    def __init__(
        self,
        wave: Wave,
        launch: LaunchState,
        ordering: Ordering,
        reporter: Reporter,
        groups: Collection[str],
        undefined: UndefinedValues,
    ):
        self.wave = wave
        self.launch = launch
        self.ordering = ordering
        self.reporter = reporter
        self.bounds = "bounds" in groups
        self.initialized = "initialized" in groups
        self.races = "races" in groups
        self.asynchronous = "async" in groups
        self.recording = self.races or self.asynchronous
        self.barriers = "barriers" in groups
        self.outputs = "outputs" in groups
        memory = wave.memory
        self.shared = Shadow(memory.shared_stride * wave.block_count, launch.traits.level)
        self._others: dict[str, Shadow] = {}
        self._local = np.zeros(-(-memory.local_stride * wave.lane_count // 16) * 16, np.uint8)
        self._new_barriers: list[tuple[Array, Array]] = []
        self._suspicious: Array | None = None
        self._suspicious_before: Array | None = None
        self._limited = False
        if self.bounds:
            suspicious = reporter.allocations.suspicious(wave.block_count)
            self._suspicious = suspicious if suspicious.any() else None
            self._limited = reporter.allocations.several_variables
        self._undefined = undefined
        self.initialization = Initialization(wave, reporter, undefined)
        undefined.local = self._local
        self._history = History(launch, ordering)

    # Accesses of threads --------------------------------------------------------------------------

    def access(self, access: Access) -> None:
        """Checks an access of lanes, and remembers it."""
        space = access.space
        if space == "local":
            if self.initialized:
                self._access_local(access)
            return
        strong = access.kind == "atomic"
        reads = access.kind == "read" or (strong and not _only_stores(access.instruction))
        writes = access.writes
        if access.instruction.opcode == "mbarrier" and _makes_ready(access.instruction):
            # Other threads must not use the mbarrier before they know that it is ready.
            strong = reads = False
            writes = True
            self._new_barriers.append((access.lanes, access.offsets))
        if self.added(space):
            if not (self.recording or self.initialized):
                return
            shadow = self.shadow(space)
        elif space == "shared":
            if self._suspicious is not None or self._limited:
                what = Operation(space, reads, writes, strong, access.instruction)
                self.check_bounds(what, access.lanes, access.offsets, access.size)
            if not (self.recording or self.initialized):
                return
            shadow = self.shared
        elif space == "global" and self.recording and self.writable(access.offsets, access.size):
            shadow = self.launch.global_memory
        else:
            if space == "global" and reads:
                self.note_early(access.offsets, access.size, access.instruction)
            return
        ordering = self.ordering
        code = ordering.code if ordering.whole(access.lanes) else ordering.code[access.lanes]
        time = self.launch.event(access.instruction)
        clocks = self.launch.clocks
        if ordering.whole(access.lanes):
            clocks.last[: clocks.threads] = time
        else:
            clocks.last[ordering.column[access.lanes]] = time
        accessor = Accessor(code, ordering.rows_of(access.lanes), access.lanes, time)
        operation = Operation(
            space,
            reads,
            writes,
            strong,
            access.instruction,
            access.offsets,
            access.size,
            access.values,
            strong and self._is_narrow(access),
            access.contents,
        )
        never_written = space == "global" and reads and access.instruction.has("nc")
        for places in shadow.places(access.offsets, access.size):
            if never_written and self._written_before(shadow, places, accessor, operation):
                return
            self.check(shadow, places, accessor, operation)

    def _written_before(
        self, shadow: Shadow, places: Places, accessor: Accessor, operation: Operation
    ) -> bool:
        """Reports loads through the non-coherent cache of what the kernel has written."""
        found = shadow.written(places.level)[places.granules]
        if places.level in shadow.strong:
            found = np.maximum(found, shadow.strong[places.level][places.granules])
        positions = np.flatnonzero(found)
        if not len(positions):
            return False
        writer = self.launch.events[int(entries.times(found[positions[0]]))]
        assert accessor.lanes is not None and writer is not None
        offset = granule(places, int(positions[0])) << places.level
        self.reporter.simple(
            "ld.global.nc of memory that the kernel writes",
            accessor.lanes[np.unique(places.owners(positions))],
            f"reads {self.reporter.where('global', offset)} through the non-coherent cache; it was"
            f" written by this kernel at {place(writer)}",
            operation.instruction,
            "read it with ld.global (in CUDA: no __restrict__, __ldg or const for what is written)",
        )
        return True

    def _is_narrow(self, access: Access) -> bool:
        """Whether the scope of a strong access to global memory is only a block."""
        if access.space != "global" or not self.launch.traits.narrow:
            return False
        one = access.instruction
        return one.has("cta") or (one.has("cluster") and self.wave.cluster_size == 1)

    def publish_barriers(self, lanes: Array) -> None:
        """``fence.mbarrier_init`` (PTX ISA 9.7.13.4): what the lanes initialized is visible to the
        asynchronous proxy, and to those who synchronize with a relaxed arrival of the lanes at a
        barrier of the cluster."""
        clocks, ordering = self.launch.clocks, self.ordering
        kept = []
        for owners, offsets in self._new_barriers:
            fenced = np.isin(owners, lanes)
            if not fenced.all():
                kept.append((owners[~fenced], offsets[~fenced]))
            if not fenced.any():
                continue
            owners, offsets = owners[fenced], offsets[fenced]
            threads, inverse = distinct_inverse(ordering.column[owners])
            # Initializations count as made by an engine of the thread's own.
            named = [clocks.column(("init", thread)) for thread in threads.tolist()]
            columns = np.array(named)[inverse]
            time = self.launch.event(self._initialized_by(offsets))
            clocks.began(np.array(named), time, time)
            codes = entries.encode(time, ordering.domain[owners], columns)
            for places in self.shared.places(offsets, 8):
                chosen = codes if places.chosen is None else codes[places.chosen]
                new = np.repeat(chosen, places.each)
                self.shared.written(places.level)[places.granules] = new
            ordering.initialized(owners, columns, time)
        self._new_barriers = kept

    def _initialized_by(self, offsets: Array) -> Instruction:
        """The instruction that initialized mbarriers."""
        (places,) = self.shared.places(offsets[:1], 8)
        entry = int(self.shared.written(places.level)[places.granules][0])
        found = self.launch.events[int(entries.times(entry))]
        assert found is not None
        return found

    def complete_on_barriers(
        self, offsets: Array, accessor: Accessor, instruction: Instruction
    ) -> None:
        """Asynchronous operations complete on mbarriers, one for each element of the accessor:
        these must have been initialized before, visibly to the asynchronous proxy."""
        if not self.asynchronous:
            return
        what = Operation("shared", False, False, True, instruction)
        for places in self.shared.places(offsets, 8):
            before = self.shared.written(places.level)[places.granules]
            self._compare(before, "wrote", places, accessor, what)

    def shadow(self, space: str) -> Shadow:
        """The shadow of shared or global memory, or of a space that a plugin added."""
        if space == "shared":
            return self.shared
        if not self.added(space):
            return self.launch.global_memory
        found = self._others.get(space)
        if found is None:
            size = self.wave.memory.regions[space].bytes.size
            found = self._others[space] = Shadow(size, _WORDS)
        return found

    def added(self, space: str) -> bool:
        """Whether a plugin added the space."""
        return space in self.wave.memory.describes

    def forget_contents(self, space: str, offsets: Array, size: int) -> None:
        """Nothing is known any more of ``size`` bytes at each of the offsets."""
        if not (self.recording or self.initialized):
            return
        shadow = self.shadow(space)
        for places in shadow.ranges(offsets, size):
            for entries_of in (shadow.writes, shadow.strong, shadow.first, shadow.last):
                if places.level in entries_of:
                    entries_of[places.level][places.granules] = 0

    def writable(self, offsets: Array, size: int) -> bool:
        """Whether any place in global memory is in an allocation that the kernel may change: there
        cannot be races in others."""
        memory = self.wave.memory.global_memory
        first = memory.allocation_at(int(offsets[0]))
        if first is None or first.writable:
            return True
        if memory.segments is not None:
            # Of the memory of other devices it matters how long it is used.
            own = self.wave.geometry.device
            if (memory.segments.devices(offsets) != own).any():
                return True
        if len(offsets) == 1:
            return False
        low, high = int(offsets.min()), int(offsets.max())
        if low >= first.offset and high + size <= first.offset + first.size:
            return False
        return any(
            one.writable and one.offset < high + size and low < one.offset + one.size
            for one in memory.allocations
        )

    def note_early(self, offsets: Array, size: int, instruction: Instruction) -> None:
        """Notes a read of rubbish in global memory, where nobody knows what was written."""
        if not self.outputs or self.recording:
            return
        memory = self.wave.memory.global_memory
        found = memory.allocation_at(int(offsets[0]))
        known = self.launch.early_reads
        if found is None or not found.undefined or found.offset in known:
            return
        inside = offsets[(offsets >= found.offset) & (offsets < found.offset + found.size)]
        contents = memory.region.bytes
        rubbish = contents[inside] == POISON
        if rubbish.any():
            rubbish &= contents[np.minimum(inside + size, found.offset + found.size) - 1] == POISON
        if rubbish.any():
            known[found.offset] = instruction

    def _access_local(self, access: Access) -> None:
        """Local memory is each lane's own: only its initialization is of interest."""
        width = min(access.size, 8)
        view = self._local.view(f"u{width}")
        full = _FILL & ((1 << 8 * width) - 1)
        places = access.offsets // width
        for part in range(access.size // width):
            if access.writes:
                view[places + part] = full
                continue
            wrong = view[places + part] != full
            if wrong.any():
                self._uninitialized(access)
                return

    def _uninitialized(self, access: Access) -> None:
        undefined = self._local[access.offsets[:, None] + np.arange(access.size)] == 0
        positions = np.flatnonzero(undefined.any(axis=1))
        first = int(access.offsets[positions[0]])
        origin = Origin(
            f"read of uninitialized {access.space} memory",
            f"reads {access.size} bytes at {self.reporter.where(access.space, first)}, which is"
            " uninitialized",
            access.instruction,
            "write it before",
            access.lanes[positions],
        )
        self._undefined.loaded(access.lanes, undefined, origin)

    # Bounds ---------------------------------------------------------------------------------------

    def check_bounds(self, what: Operation, lanes: Array, offsets: Array, size: int) -> None:
        """Reports accesses of up to 32 bytes, one for each lane, that are not in one allocation."""
        if self._limited and what.space == "shared":
            self._check_limits(what, lanes, offsets, size)
        if self._suspicious is None or what.space != "shared":
            return
        wrong = self._suspicious[offsets >> 4]
        if size > 16:
            wrong = wrong | self._suspicious[offsets + size - 1 >> 4]
        if not wrong.any():
            return
        allocations, positions = self.reporter.allocations, np.flatnonzero(wrong)
        within = offsets[positions] % allocations.stride
        starts, inverse = distinct_inverse(within)
        outside = np.array([not allocations.inside(one, one + size) for one in starts.tolist()])
        if outside.any():
            positions = positions[outside[inverse]]
            first = int(offsets[positions[0]])
            self.out_of_bounds(lanes[positions], what.reads, first, size, what.instruction)

    def _check_limits(self, what: Operation, lanes: Array, offsets: Array, size: int) -> None:
        """Reports accesses whose address comes from a variable, but which are in another one."""
        allocations = self.reporter.allocations
        limits = allocations.limits(what.instruction)
        if not limits:
            return
        within = offsets
        low, high = int(within.min()), int(within.max())
        if high >= allocations.stride:
            within = offsets % allocations.stride
            low, high = int(within.min()), int(within.max())
        if any(one.start <= low and high + size <= one.end for one in limits):
            return
        wrong = np.ones(len(within), np.bool_)
        for one in limits:
            wrong &= (within < one.start) | (within + size > one.end)
        if not wrong.any():
            return
        # What is in no array at all is reported as such.
        wrong[wrong] = [allocations.in_array(at, at + size) for at in within[wrong].tolist()]
        if not wrong.any():
            return
        verb = "reads" if what.reads else "writes"
        first = int(offsets[wrong][0])
        names = " or ".join(str(one) for one in limits[:3])
        self.reporter.simple(
            "access of shared memory out of bounds",
            lanes[wrong],
            f"{verb} {size} bytes at {self.reporter.where('shared', first)},"
            f" by an address of {names}",
            what.instruction,
            "see the indices: arrays that are neighbours here need not be",
        )

    def check_pieces(self, what: Operation, lanes: Array, offsets: Array, size: int) -> None:
        """Reports pieces of any size that are not in one allocation."""
        if self._suspicious is None or what.space != "shared":
            return
        allocations = self.reporter.allocations
        if self._suspicious_before is None:
            # Blocks are alike; pieces may reach into the next one.
            two = allocations.suspicious(2)
            self._suspicious_before = np.append(0, np.cumsum(two, dtype=np.int32))
        counts, within = self._suspicious_before, offsets % allocations.stride
        last = np.minimum(within + size - 1 >> 4, len(counts) - 2)
        wrong = counts[last + 1] != counts[within >> 4]
        for offset in np.unique(offsets[wrong]).tolist():
            start = offset % allocations.stride
            if not allocations.inside(start, start + size):
                self.out_of_bounds(lanes[:1], what.reads, offset, size, what.instruction)
                return

    def out_of_bounds(
        self, lanes: Array, reads: bool, offset: int, size: int, instruction: Instruction
    ) -> None:
        """Reports an access to shared memory that no allocation holds."""
        allocations, where = self.reporter.allocations, self.reporter.where
        verb = "reads" if reads else "writes"
        text = f"{verb} {size} bytes at {where('shared', offset)}"
        within = offset % allocations.stride
        if allocations.inside(within, within + 1):
            text += ", and goes on behind its end"
        self.reporter.simple(
            "access of shared memory out of bounds",
            lanes,
            text,
            instruction,
            "see which index or size is too large",
        )

    # Shadow memory --------------------------------------------------------------------------------

    def check(
        self, shadow: Shadow, places: Places, accessor: Accessor, operation: Operation
    ) -> None:
        """Checks accesses to granules of one size, and remembers them."""
        granules, level = places.granules, places.level
        written = shadow.written(level)
        before = written[granules]
        strong = shadow.strong[level][granules] if level in shadow.strong else None
        checked = operation.space == "shared" or self.added(operation.space)
        if checked and operation.reads and operation.contents and self.initialized:
            known = before if strong is None else before | strong
            self.initialization.check_initialized(known, places, accessor, operation)
        if operation.space == "global" and operation.needs_contents and self.outputs:
            self.initialization.check_outputs(before, strong, places, accessor, operation)
        if self.recording:
            self._compare(before, "wrote", places, accessor, operation)
            if strong is not None and (not operation.strong or self.launch.traits.narrow):
                self._compare(strong, "changed", places, accessor, operation)
        new = self._new(places, accessor, operation)
        if operation.writes and operation.space == "shared" and self.barriers:
            self._check_barriers(places, accessor, operation)
        if operation.writes:
            if self.recording and level in shadow.first:
                for reads in shadow.reads(level):
                    self._compare(reads[granules], "read", places, accessor, operation)
            if operation.strong:
                strongly_written = shadow.strongly_written(level)
                strongly_written[granules] = new
                if operation.narrow and not isinstance(new, int):
                    self._check_scopes(strongly_written, new, places, accessor, operation)
                return
            written[granules] = new
            if not isinstance(new, int) and len(new) > 1:
                self._check_together(written, new, places, accessor, operation)
        elif self.recording:
            self._remember_read(shadow, places, accessor, operation, new)

    def _new(self, places: Places, accessor: Accessor, operation: Operation) -> Values:
        """Entries for the granules."""
        fixed = (accessor.time << entries.TIME_SHIFT) | operation.flags
        code = accessor.code
        if isinstance(code, int):
            return code | fixed
        if places.chosen is not None:
            code = code[places.chosen]
        code = code | fixed
        return code if places.each == 1 else np.repeat(code, places.each)

    def _remember_read(
        self,
        shadow: Shadow,
        places: Places,
        accessor: Accessor,
        operation: Operation,
        new: Values,
    ) -> None:
        granules = places.granules
        first, last = shadow.reads(places.level)
        # The first of the reads stays, until there is one that is ordered after it.
        kept = self._history.unordered(first[granules], places, accessor, operation, all_kinds=True)
        if kept is None:
            if isinstance(granules, slice):
                first[granules] = new
            else:
                # Of lanes that read the same place, the first stays, and below the last.
                first[granules[::-1]] = new if isinstance(new, int) else new[::-1]
        elif isinstance(granules, slice):
            ordered = np.ones(granules.stop - granules.start, np.bool_)
            ordered[kept] = False
            first[granules][ordered] = new
        else:
            ordered = np.ones(len(granules), np.bool_)
            ordered[kept] = False
            first[granules[ordered][::-1]] = new if isinstance(new, int) else new[ordered][::-1]
        last[granules] = new

    # Races ----------------------------------------------------------------------------------------

    def _compare(
        self,
        found: Array,
        verb: str,
        places: Places,
        accessor: Accessor,
        operation: Operation,
    ) -> None:
        """Reports earlier accesses that are not ordered before."""
        visible = accessor.proxy and verb != "read"
        wrong = self._history.unordered(
            found, places, accessor, operation, visible=visible, reads=verb == "read"
        )
        if wrong is not None and self.launch.traits.guesses:
            wrong = self._without_guesses(wrong, found, verb, operation)
        if wrong is None:
            return
        if verb == "wrote" and operation.values is not None:
            wrong = self._changing(wrong, places, operation)
            if not len(wrong):
                return
        plain = None
        if visible:
            plain = self._history.unordered(found, places, accessor, operation)
        picked = found[wrong]
        for time in np.unique(entries.times(picked))[:8]:
            same = wrong[entries.times(picked) == time]
            first = int(same[0])
            self._report(
                places,
                first,
                accessor,
                operation,
                verb,
                int(found[first]),
                len(same),
                proxy=visible and (plain is None or first not in plain),
            )

    def _without_guesses(
        self, wrong: Array, found: Array, verb: str, operation: Operation
    ) -> Array | None:
        """Takes out loads whose values are only what an atomic compare-and-swap expects: they may
        race with atomic operations."""
        guesses = self.launch.traits.guesses
        if verb == "changed" and id(operation.instruction) in guesses:
            return None
        if verb == "read" and operation.strong:
            times = entries.times(found[wrong])
            events = self.launch.events
            known = {int(one): id(events[int(one)]) in guesses for one in np.unique(times)}
            wrong = wrong[[not known[one] for one in times.tolist()]]
        return wrong if len(wrong) else None

    def _report(
        self,
        places: Places,
        position: int,
        accessor: Accessor,
        operation: Operation,
        verb: str,
        entry: int,
        count: int,
        *,
        proxy: bool = False,
    ) -> None:
        owner = int(places.owners(np.array([position]))[0])
        now = accessor.entry(owner, operation.flags)
        before = self.launch.events[int(entries.times(entry))]
        assert before is not None
        engines = {self.reporter.engine(now), self.reporter.engine(entry)}
        if not (self.races if engines == {"thread"} else self.asynchronous):
            return
        if before.opcode == "mbarrier":
            verb = "initialized" if before.has("init") else "used"
        offset = granule(places, position) << places.level
        value = ""
        if operation.values is not None and operation.writes:
            value = show(_bytes_of(operation.values, operation.size)[owner])
        self.reporter.race(
            operation.space,
            offset,
            Side(operation.verb, now, operation.instruction, value),
            Side(verb, entry, before),
            proxy,
            count,
        )

    def _changing(self, wrong: Array, places: Places, operation: Operation) -> Array:
        """Those writes that change what is there: that two threads write the same is harmless."""
        assert operation.values is not None
        size = 1 << places.level
        owners = places.owners(wrong)
        new = _bytes_of(operation.values, operation.size).reshape(-1, size)
        new = new[owners * places.each + wrong % places.each]
        memory = self.wave.memory.regions[operation.space].bytes
        assert operation.offsets is not None
        starts = operation.offsets[owners] + wrong % places.each * size
        old = memory[starts[:, None] + np.arange(size)]
        changed: Array = wrong[(new != old).any(axis=1)]
        return changed

    def _check_together(
        self,
        written: Array,
        new: Values,
        places: Places,
        accessor: Accessor,
        operation: Operation,
    ) -> None:
        """Reports lanes that write different values to one place with one instruction."""
        winner = written[places.granules]
        lost = np.flatnonzero(winner != new)
        if not len(lost):
            return
        if operation.values is not None:
            each = places.each
            contents = _bytes_of(operation.values, operation.size).reshape(-1, 1 << places.level)
            order = np.argsort(new, kind="stable")
            other = order[np.searchsorted(new[order], winner[lost])]
            mine = contents[places.owners(lost) * each + lost % each]
            theirs = contents[places.owners(other) * each + lost % each]
            lost = lost[(mine != theirs).any(axis=1)]
            if not len(lost):
                return
        first = int(lost[0])
        self._report(places, first, accessor, operation, "wrote", int(winner[first]), len(lost))

    def _check_barriers(self, places: Places, accessor: Accessor, operation: Operation) -> None:
        """Reports writes to the memory of an mbarrier that was not invalidated."""
        barriers = self.wave.resources.get("mbarriers")
        if not isinstance(barriers, MBarriers) or not barriers.in_use:
            return
        one = operation.instruction
        if operation.strong and (one.opcode not in ("atom", "red", "st") or one.has("async")):
            # The use of an mbarrier by an asynchronous operation.
            return
        if one.opcode == "mbarrier":
            return
        granules, level = places.granules, places.level
        if isinstance(granules, slice):
            granules = np.arange(granules.start, granules.stop)
        first = granules << level >> 3
        live = barriers.live(first)
        if level > 3:
            live |= barriers.live(first + 1)
        if not live.any():
            return
        position = int(np.flatnonzero(live)[0])
        entry = accessor.entry(int(places.owners(np.array([position]))[0]), operation.flags)
        where = self.reporter.where("shared", granule(places, position) << level)
        self.reporter.operation(
            "memory of an mbarrier used for something else",
            entry,
            f"{operation.verb} {where}, where an mbarrier is",
            operation.instruction,
            "mbarrier.inval before its memory is used again, and a barrier between them",
        )

    def _check_scopes(
        self,
        written: Array,
        new: Array,
        places: Places,
        accessor: Accessor,
        operation: Operation,
    ) -> None:
        """Reports lanes of different blocks that change one place with one instruction, whose scope
        is only a block."""
        winner, width = written[places.granules], self.wave.lanes_per_block
        lost = entries.domains(winner) != entries.domains(new)
        lost |= entries.columns(winner) // width != entries.columns(new) // width
        positions = np.flatnonzero(lost)
        if len(positions):
            first = int(positions[0])
            entry = int(winner[first])
            self._report(places, first, accessor, operation, "changed", entry, len(positions))

    # The end of blocks ----------------------------------------------------------------------------

    def check_end(self, block: int, row: int) -> None:
        """Reports accesses of other blocks to the shared memory of one that has ended, unless its
        threads, who know what a row does, know that they are over."""
        clocks, stride = self.launch.clocks, self.wave.memory.shared_stride
        rank = block % self.wave.cluster_size
        width = self.wave.lanes_per_block
        for verb, level, start, found in self.shared.known(block * stride, (block + 1) * stride):
            positions = np.flatnonzero(found)
            picked = found[positions]
            columns, times = entries.columns(picked), entries.times(picked)
            own = (columns < clocks.fixed) & (columns % clocks.threads // width == rank)
            wrong = ~own & (clocks.generic[row][columns] < times)
            if wrong.any():
                first = int(np.flatnonzero(wrong)[0])
                offset = start + int(positions[first]) << level
                self.reporter.end_of_block(block, offset, verb, int(picked[first]))


def _makes_ready(instruction: Instruction) -> bool:
    return instruction.has("init") or instruction.has("inval")


def _bytes_of(values: Array, size: int) -> Array:
    """A row of bytes for each lane."""
    contents: Array = np.ascontiguousarray(values).view(np.uint8).reshape(-1, size)
    return contents
