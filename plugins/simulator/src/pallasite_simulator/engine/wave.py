"""Some blocks of a grid that run together, lane by lane in step where their paths agree.

All lanes of all blocks of a wave that are at the same instruction execute it in one go: that is
what makes NumPy worth its while. Lanes that part company at a branch wait in ``ready`` under the
number of their next instruction, and are joined again there; :mod:`.schedule` says who goes first.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.engine import specials
from pallasite_simulator.engine.barriers import Barriers
from pallasite_simulator.engine.geometry import Geometry
from pallasite_simulator.engine.lanes import ALL, WARP, Lanes
from pallasite_simulator.engine.memory import GlobalMemory, Memory
from pallasite_simulator.engine.program import BRANCH, EXIT, INDEXED, STEP, TRAP, Entry, Program
from pallasite_simulator.engine.schedule import Schedule
from pallasite_simulator.engine.wait import Wait
from pallasite_simulator.engine.warp_barriers import WarpBarriers
from pallasite_simulator.errors import DeadlockError, SimulationError, TrapError, WatchdogError
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array, Values

if TYPE_CHECKING:
    from pallasite.plugin import SourceLocation
    from pallasite_simulator.engine.observer import Observer
    from pallasite_simulator.statistics.traffic import Traffic

_WATCH = 255
"""Time is looked at when these bits of the number of basic blocks are zero."""

IDLE_ROUNDS = 4
"""How many rounds of polling without any effect make a standstill."""

ROUNDS_AT_ONCE = 200
"""How many rounds of polling a wave has before others have their turn, whatever comes of it: loops
that poll may have effects of their own."""

_LANES = 256
"""How many groups of lanes are remembered."""


class Watchdog:
    """A time by which a launch must have ended.

    Attributes:
      seconds: how long it may take.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def late(self) -> bool:
        """Whether that time is over."""
        return time.monotonic() > self._end


class Wave:
    """Blocks that run together.

    Attributes:
      program: what they run.
      geometry: of the grid.
      blocks: linear numbers of the blocks; whole clusters.
      block_count, lane_count: how many; each block is padded to whole warps.
      lanes_per_block: a multiple of 32.
      registers: by number: an array over all lanes, or None while never written.
      undefined: for registers that are undefined in some lanes: which bits are (of predicates,
        and of registers of 128 bits: whether any).
      defined: for some of these registers: lanes in which no bit is. Whoever says that bits are
        undefined takes the register out.
      follow: set by the observer to be called behind the instruction that is executed.
      exited: which lanes have ended, or are padding.
      memory: what they see.
      barriers: the barriers of blocks and clusters.
      resources: further state that instructions keep, by a key of their own.
      observer: who is told of events, or None.
      traffic: who counts accesses to memory, or None.
      progress: grows with everything that another thread could notice.
      giving_up: which lanes have waited in vain, and may return from that without success once.
      polls: addresses at which lanes look for what others do, while somebody asks; else None.
      watchdog: ends launches that take too long; None for no limit.
      clock: instructions executed so far, for the clock registers.
      output: what the kernel printed.
      cancel_cluster: takes a cluster away from those that have not begun; returns the linear
        number of its first block, or None if there is none.
      at_end: called when all lanes have ended.
      at_standstill: called when no lane can go on by itself; each returns whether it has woken any,
        such as those that wait for what other waves have.
      counters: numbers for statistics, by name; instructions add their own.
    """

    def __init__(
        self,
        program: Program,
        geometry: Geometry,
        blocks: Array,
        global_memory: GlobalMemory,
        parameters: Array,
        shared_bytes: int,
        observer: Observer | None = None,
        traffic: Traffic | None = None,
    ):
        self.program: Program = program
        self.geometry: Geometry = geometry
        self.blocks: Array = blocks
        self.block_count: int = len(blocks)
        self.lanes_per_block: int = -(-geometry.threads // WARP) * WARP
        self.lane_count = self.block_count * self.lanes_per_block
        self.cluster_size: int = geometry.cluster_size
        self.shared_bytes: int = shared_bytes
        self.all_numbers = np.arange(self.lane_count)
        self.lane_block: Array = self.all_numbers // self.lanes_per_block
        self.lane_thread: Array = self.all_numbers % self.lanes_per_block
        self.lane_cluster_block = self.lane_block // self.cluster_size * self.cluster_size
        self.registers: list[Array | None] = [None] * len(program.register_types)
        self.undefined: dict[int, Array] = {}
        self.defined: dict[int, set[Lanes]] = {}
        self._undefined: dict[int, Array] = {}
        self._lanes: dict[bytes, Lanes] = {}
        self.follow: bool = False
        self.exited = self.lane_thread >= geometry.threads
        self.observer = observer
        self.traffic = traffic
        self.memory: Memory = Memory(
            self, global_memory, parameters, shared_bytes, program.local_bytes
        )
        self.lane_shared_offset = self.lane_block * self.memory.shared_stride
        self.shared_base: Array | None = None
        if self.cluster_size > 1:
            self.shared_base = (self.lane_block % self.cluster_size).astype(np.uint64) << np.uint64(
                24
            )
        self.barriers = Barriers(self)
        self.warp_barriers = WarpBarriers(self)
        self.resources: dict[Hashable, object] = {}
        self.in_flight: set[int] = set()
        self.progress = 0
        self.giving_up = np.zeros(self.lane_count, np.bool_)
        self.polls: list[Array] | None = None
        self.watchdog: Watchdog | None = None
        self.clock: int = 0
        self.output: list[str] = []
        self.cancel_cluster: Callable[[], int | None] = lambda: None
        self.at_end: list[Callable[[], None]] = []
        self.at_standstill: list[Callable[[], bool]] = []
        self.counters: dict[str, int] = {}
        self.issued = np.zeros(len(program.code) + 1, np.int64)
        self._specials: dict[tuple[str, str], Values] = {}
        self._schedule = Schedule(program.rank, self.lane_count)
        self._parked: dict[Hashable, list[tuple[int, Wait]]] = {}
        self._converging: dict[int, Array] = {}
        self._living: Array | None = None
        self._polled = False
        self._looked: Array | None = None
        self._idle = 0
        self._seen_progress = -1
        self._gave_up_at = -1
        if observer is not None:
            observer.attach(self)
        start = Lanes(self, np.flatnonzero(~self.exited)) if self.exited.any() else None
        self._schedule.put(0, start or Lanes(self, ALL))

    # What instructions use ------------------------------------------------------------------------

    def lanes(self, numbers: Array) -> Lanes:
        """Lanes by their numbers, ascending. The same numbers are the same lanes, for a while."""
        key = numbers.tobytes()
        found = self._lanes.get(key)
        if found is None:
            if len(self._lanes) > _LANES:
                self._lanes.clear()
            index = ALL if len(numbers) == self.lane_count else numbers
            found = self._lanes[key] = Lanes(self, index)
        return found

    def new_register(self, number: int) -> Array:
        """Zeros for all lanes, of a register's storage dtype."""
        return np.zeros(self.lane_count, self.program.register_types[number].storage)

    def special(self, name: str, component: str, lanes: Lanes) -> Values:
        """The value of a special register: one for each of the lanes, or a scalar."""
        key = (name, component)
        values = self._specials.get(key)
        if values is None:
            values, constant = specials.value(self, name, component)
            if constant:
                self._specials[key] = values
        return values if values.ndim == 0 else lanes.of(values)

    def undefined_register(
        self, lanes: Lanes, register: int, name: str, instruction: Instruction
    ) -> Array:
        """Called when some lane may read a register that it never wrote; returns its contents."""
        values = self.registers[register]
        if values is None:
            values = self.registers[register] = self.new_register(register)
            self.undefined[register] = self.new_undefined(register)
        if lanes in self.defined.get(register, ()):
            return values
        if not lanes.of(self.undefined[register]).any():
            self.note_defined(register, lanes)
            return values
        if self.observer is not None and register not in self.program.unspecified:
            self.observer.reads_undefined(lanes, register, name, instruction)
        return values

    def note_defined(self, register: int, lanes: Lanes) -> None:
        """Notes that no bit of a register is undefined in some lanes."""
        defined = self.defined.setdefault(register, set())
        if len(defined) > _LANES:
            defined.clear()
        defined.add(lanes)

    def new_undefined(self, register: int) -> Array:
        """For each lane, that all bits of a register are undefined."""
        bits = self.program.register_types[register].bits
        found = self._undefined.get(bits)
        if found is None:
            if bits in (8, 16, 32, 64):
                dtype = np.dtype(f"u{bits // 8}")
                found = np.full(self.lane_count, np.iinfo(dtype).max, dtype)
            else:
                found = np.ones(self.lane_count, np.bool_)
            self._undefined[bits] = found
        return found.copy()

    def poll(self, addresses: Array | None = None, lanes: Lanes | None = None) -> None:
        """Says that the instruction being executed looks whether another thread did something: its
        loop then lets others go first.

        Args:
          addresses: where it looks, if that is memory.
          lanes: who does, if they may wait for one another before their loop goes on.
        """
        self._polled = True
        if lanes is not None:
            if self._looked is None:
                self._looked = np.zeros(self.lane_count, np.bool_)
            self._looked[lanes.index] = True
        if self.polls is not None and addresses is not None:
            self.polls.append(addresses)

    def wake(self, key: Hashable, mask: Array | None = None) -> None:
        """Lets the lanes that wait for ``key`` go on, or those of them for which ``mask`` (one bool
        for each lane of the wave) is true."""
        self.progress += 1
        kept = []
        for pc, wait in self._parked.pop(key, ()):
            woken = wait.lanes
            if mask is not None:
                chosen = mask[woken]
                if not chosen.all():
                    kept.append((pc, dataclasses.replace(wait, lanes=woken[~chosen])))
                    woken = woken[chosen]
            if len(woken):
                self._schedule.wake(pc if wait.again else pc + 1, self.lanes(woken))
        if kept:
            self._parked[key] = kept

    def phase_completed(self) -> None:
        """Says that a phase of a barrier is complete, before those that wait for it are woken: all
        who can run, or look for it, then come before the next one."""
        self._schedule.phase_completed()

    def waiting(self, key: Hashable) -> bool:
        """Whether lanes wait for ``key``."""
        return key in self._parked

    @property
    def living_threads(self) -> Array:
        """How many threads of each block have not ended."""
        if self._living is None:
            living = ~self.exited.reshape(self.block_count, self.lanes_per_block)
            self._living = np.count_nonzero(living, axis=1)
        return self._living

    # Names ----------------------------------------------------------------------------------------

    def block_name(self, block: int) -> str:
        """``(x, y, z)`` of a block of the wave, and its device if there are several."""
        return self.geometry.block_name(int(self.blocks[block]))

    def thread_name(self, lane: int) -> str:
        """``thread t of block (x, y, z)``."""
        block, thread = divmod(lane, self.lanes_per_block)
        return f"thread {thread} of block {self.block_name(block)}"

    # Running --------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether all lanes have ended."""
        return not (self._schedule.ready or self._schedule.yielded or self._parked)

    @property
    def polling(self) -> bool:
        """Whether there are lanes that could run, though :meth:`run` has returned."""
        return bool(self._schedule.ready or self._schedule.yielded)

    # Integers wrap around, and floats become infinite, without NumPy's warnings.
    @np.errstate(all="ignore")
    def run(self) -> bool:
        """Runs until all lanes have ended, or none can go on by itself; returns whether any lane
        made progress."""
        start, schedule = self.progress, self._schedule
        rounds = 0
        while True:
            while schedule.ready:
                self._execute(*schedule.begin())
                schedule.end()
            if self._parked and self._retry():
                continue
            self._watch()
            rounds += 1
            if schedule.yielded and rounds >= ROUNDS_AT_ONCE:
                break
            if schedule.yielded and self._idle < IDLE_ROUNDS:
                self._idle = 0 if self.progress != self._seen_progress else self._idle + 1
                self._seen_progress = self.progress
                schedule.resume()
                continue
            if self._parked and self.progress != self._gave_up_at and self._give_up():
                continue
            break
        self._idle = 0
        schedule.resume()
        if self.done:
            for function in self.at_end:
                function()
            if self.observer is not None:
                self.observer.finish()
        return self.progress != start

    def release(self) -> None:
        """Lets go of all that there is, when nobody will ask any more. What a wave holds refers to
        it, and it takes too much memory to wait until Python looks for such cycles."""
        vars(self).clear()

    def standstill(self, others: Sequence[Wave] = ()) -> DeadlockError:
        """The error for lanes that can never go on, here and in other waves."""
        polling = "poll for something that no thread does, near"
        shown, location = self.situation(polling)
        for other in others:
            shown += other.situation(polling)[0]
        return DeadlockError(
            f"deadlock in kernel {self.program.name!r}: no thread can go on",
            got="\n    ".join(["", *shown]),
            hint="find the thread that should have arrived, signalled or copied, and see above"
            " what it waits for itself",
            location=location,
        )

    def _watch(self, running: tuple[int, Lanes] | None = None) -> None:
        """Raises :class:`WatchdogError` if the launch takes too long."""
        if self.watchdog is None or not self.watchdog.late:
            return
        shown, location = self.situation("run near", running)
        raise WatchdogError(
            f"kernel {self.program.name!r} has not ended after {self.watchdog.seconds:g} s",
            got="\n    ".join(["", *shown]),
            hint="look for a loop without an end, or allow more time: the option simulator_timeout"
            " (PALLASITE_SIMULATOR_TIMEOUT, in seconds; 0 for no limit)",
            location=location,
        )

    def situation(
        self, verb: str, running: tuple[int, Lanes] | None = None
    ) -> tuple[list[str], SourceLocation | None]:
        """Where all lanes are, and what those that wait do so for; and the first place."""
        lines: dict[str, list[Array]] = {}
        location = None
        if running is not None:
            instruction = self.program.code[running[0]].instruction
            location = instruction.location
            text = f"{verb} {instruction.location or instruction.text}"
            lines[text] = [running[1].numbers]
        for waits in self._parked.values():
            for pc, wait in waits:
                instruction = self.program.code[pc].instruction
                location = location or instruction.location
                text = f"wait for {wait.describe()} at {instruction.location or instruction.text}"
                lines.setdefault(text, []).append(wait.lanes)
        for pc, lanes in {**self._schedule.ready, **self._schedule.yielded}.items():
            instruction = self.program.code[pc].instruction
            location = location or instruction.location
            text = f"{verb} {instruction.location or instruction.text}"
            lines.setdefault(text, []).append(lanes.numbers)
        parts = [
            f"{self._crowd(np.unique(np.concatenate(groups)))} {text}"
            for text, groups in lines.items()
        ]
        return parts[:12] + [f"and {len(parts) - 12} more groups"] * (len(parts) > 12), location

    def _crowd(self, numbers: Array) -> str:
        """``threads 0-31, 64 of block (0, 0, 0) and of 3 more blocks``."""
        blocks, threads = numbers // self.lanes_per_block, numbers % self.lanes_per_block
        first = threads[blocks == blocks[0]]
        breaks = np.flatnonzero(np.diff(first) != 1)
        starts, ends = np.append(0, breaks + 1), np.append(breaks, len(first) - 1)
        ranges = [
            str(first[a]) if a == b else f"{first[a]}-{first[b]}"
            for a, b in zip(starts, ends, strict=True)
        ]
        if len(ranges) > 6:
            ranges = [*ranges[:6], "..."]
        text = f"threads {', '.join(ranges)} of block {self.block_name(int(blocks[0]))}"
        others = len(np.unique(blocks)) - 1
        return text + (f" and of {others} more block{'s' * (others > 1)}" if others else "")

    def _execute(self, pc: int, lanes: Lanes) -> None:
        code, rank, schedule = self.program.code, self.program.rank, self._schedule
        ready = schedule.ready
        start = pc
        self._polled = False
        while True:
            entry = code[pc]
            if entry.leader and pc != start:
                self._count(start, pc, lanes)
                start = pc
                schedule.turn += 1
                if not schedule.turn & _WATCH:
                    self._watch((pc, lanes))
                # The last block of a loop may stand before the first.
                if rank[pc] < rank[pc - 1] and self._lets_others_go(lanes):
                    schedule.put_off(pc, lanes)
                    return
                if ready and schedule.stop(pc):
                    schedule.put(pc, lanes)
                    return
            if entry.kind is STEP:
                remaining = self._step(pc, entry, lanes)
                if remaining is not lanes:
                    self._count(start, pc + 1, lanes)
                    if remaining is None:
                        return
                    start, lanes = pc + 1, remaining
                pc += 1
                continue
            self._count(start, pc + 1, lanes)
            taken: Lanes | None = lanes
            others: Lanes | None = None
            if entry.guard is not None:
                mask = entry.guard(lanes)
                if self.follow:
                    self._decide(entry)
                if entry.negated:
                    mask = np.logical_not(mask)
                taken = lanes.where(mask)
                if taken is not lanes:
                    others = lanes.where(np.logical_not(mask))
            if taken is None:
                pc += 1
                start = pc
                continue
            if entry.kind is BRANCH and others is None:
                back = rank[entry.target] <= rank[pc]
                if back and self._lets_others_go(taken):
                    schedule.put_off(entry.target, taken)
                    return
                pc = start = entry.target
                schedule.turn += 1
                if not schedule.turn & _WATCH:
                    self._watch((pc, taken))
                if ready and schedule.stop(pc):
                    schedule.put(pc, taken)
                    return
                continue
            if others is not None:
                schedule.put(pc + 1, others)
            self._leave(pc, entry, taken)
            return

    def _lets_others_go(self, lanes: Lanes) -> bool:
        """Whether lanes whose loop begins again have looked for what others do."""
        looked = self._looked
        if looked is None or not looked[lanes.index].any():
            return self._polled
        looked[lanes.index] = False
        return True

    def _step(self, pc: int, entry: Entry, lanes: Lanes) -> Lanes | None:
        """Executes a step; returns the lanes that go on behind it."""
        active: Lanes | None = lanes
        if entry.guard is not None:
            mask = entry.guard(lanes)
            if self.follow:
                self._decide(entry)
            if entry.negated:
                mask = np.logical_not(mask)
            active = lanes.where(mask)
            if active is None:
                return lanes
        assert active is not None
        if entry.members is not None:
            converged = self._converge(pc, entry, active)
            if converged is not active:
                passed = None if active is lanes else self._without(lanes, active)
                if converged is None:
                    return passed
                lanes = converged if passed is None else self._union(passed, converged)
                active = converged
        if self.in_flight and not self.in_flight.isdisjoint(entry.registers):
            self._touch(entry, active)
        waits = entry.step(active)
        if self.follow:
            self.follow = False
            if self.observer is not None:
                self.observer.follow(active, entry.instruction)
        if waits is not None:
            for wait in waits:
                self._parked.setdefault(wait.key, []).append((pc, wait))
                left = self._without(lanes, self.lanes(wait.lanes))
                if left is None:
                    return None
                lanes = left
        return lanes

    def _decide(self, entry: Entry) -> None:
        self.follow = False
        if self.observer is not None:
            self.observer.decides(entry.instruction)

    def _touch(self, entry: Entry, lanes: Lanes) -> None:
        observer = self.observer
        if observer is not None:
            touched = frozenset(self.in_flight & entry.registers)
            observer.registers_touched(lanes.numbers, touched, entry.instruction)

    def _leave(self, pc: int, entry: Entry, lanes: Lanes) -> None:
        """Lanes take a branch that not all take, or end."""
        if entry.kind is BRANCH:
            back = self.program.rank[entry.target] <= self.program.rank[pc]
            if back and self._lets_others_go(lanes):
                self._schedule.put_off(entry.target, lanes)
            else:
                self._schedule.put(entry.target, lanes)
        elif entry.kind is INDEXED:
            assert entry.selector is not None
            choice = entry.selector(lanes)
            if self.follow:
                self._decide(entry)
            choice = np.broadcast_to(choice, (lanes.count,))
            if int(choice.max()) >= len(entry.table):
                raise SimulationError(
                    f"brx.idx beyond its table, in: {entry.instruction.text}",
                    got=int(choice.max()),
                    expected=f"less than {len(entry.table)}",
                    location=entry.instruction.location,
                )
            for number in np.unique(choice):
                chosen = lanes.where(choice == number)
                assert chosen is not None
                self._schedule.put(entry.table[int(number)], chosen)
        elif entry.kind is EXIT:
            self.exited[lanes.index] = True
            self._living = None
            self.progress += 1
            if self.observer is not None:
                self.observer.exit(lanes.numbers)
        elif entry.kind is TRAP:
            raise TrapError(
                f"{self.thread_name(int(lanes.numbers[0]))} executes a trap",
                location=entry.instruction.location,
            )

    def _count(self, start: int, end: int, lanes: Lanes) -> None:
        warps = lanes.warp_count
        self.issued[start] += warps
        self.issued[end] -= warps
        self.clock += end - start

    # Convergence
    # --------------------------------------------------------------------------------------

    def _converge(self, pc: int, entry: Entry, lanes: Lanes) -> Lanes | None:
        """Those lanes, of these and of those that came before, whose partners are all there."""
        assert entry.members is not None
        members = entry.members(lanes)
        if self.follow:
            self._decide(entry)
        key = ("converge", pc)
        if lanes.whole_warps and key not in self._parked and bool((members == 0xFFFFFFFF).all()):
            return lanes
        masks = self._converging.setdefault(pc, np.zeros(self.lane_count, np.uint32))
        masks[lanes.index] = members
        numbers, bits = lanes.numbers, (np.uint32(1) << (lanes.numbers % WARP).astype(np.uint32))
        outside = (masks[numbers] & bits) == 0
        if outside.any():
            lane = int(numbers[outside][0])
            raise SimulationError(
                f"{self.thread_name(lane)} executes an instruction whose member mask does not name"
                f" it, in: {entry.instruction.text}",
                got=f"{int(masks[lane]):#010x} in lane {lane % WARP}",
                location=entry.instruction.location,
            )
        complete = self.with_partners(masks)
        converged = np.flatnonzero(complete)
        if self.observer is not None and len(converged):
            self.tell_absent(converged, masks, entry.instruction)
        masks[converged] = 0
        missing = ~complete[numbers]
        self._unpark(key, complete)
        if missing.any():
            late = numbers[missing]
            if self.observer is not None:
                self.observer.meets(late)
            self._parked.setdefault(key, []).append(
                (pc, Wait(late, key, lambda: "other lanes of the warp", again=True))
            )
        return self.lanes(converged) if len(converged) else None

    def with_partners(self, masks: Array) -> Array:
        """Which lanes have all partners, or partners that have ended, that their member masks name
        (masks of absent lanes are 0)."""
        arrived = np.packbits(masks != 0, bitorder="little").view(np.uint32)
        ended = np.packbits(self.exited, bitorder="little").view(np.uint32)
        there = np.repeat(arrived | ended, WARP)
        complete: Array = (masks != 0) & ((masks & ~there) == 0)
        return complete

    def tell_absent(self, numbers: Array, masks: Array, instruction: Instruction) -> None:
        """Tells the observer of lanes that have ended, though member masks of lanes name them."""
        assert self.observer is not None
        named = masks.reshape(-1, WARP)[np.unique(numbers // WARP)]
        warps = np.unique(numbers // WARP)
        named = np.bitwise_or.reduce(named, axis=1)
        bits = (named[:, None] >> np.arange(WARP, dtype=np.uint32) & 1).astype(np.bool_)
        places = warps[:, None] * WARP + np.arange(WARP)
        absent = places[bits & (masks[places] == 0) & self.exited[places]]
        absent = absent[self.lane_thread[absent] < self.geometry.threads]
        if len(absent):
            self.observer.absent(numbers, absent, instruction)

    def _unpark(self, key: Hashable, mask: Array) -> None:
        """Takes lanes out of those that wait for ``key``."""
        kept = []
        for pc, wait in self._parked.pop(key, ()):
            left = wait.lanes[~mask[wait.lanes]]
            if len(left):
                kept.append((pc, Wait(left, key, wait.describe, wait.again, wait.may_give_up)))
        if kept:
            self._parked[key] = kept

    # Getting on -----------------------------------------------------------------------------------

    def _retry(self) -> bool:
        """Completes what the end of other lanes has completed; whether anything was."""
        found = self.barriers.recheck()
        found |= self.warp_barriers.recheck()
        for pc, masks in self._converging.items():
            if self.with_partners(masks).any():
                # Executed again, it finds that all partners are there or have ended.
                key = ("converge", pc)
                if key in self._parked:
                    self.wake(key)
                    found = True
        for function in self.at_standstill:
            found |= function()
        return found

    def _give_up(self) -> bool:
        """Lets those go on that may return without success; whether there were any."""
        self._gave_up_at = self.progress
        keys = [k for k, waits in self._parked.items() if any(w.may_give_up for _, w in waits)]
        if not keys:
            return False
        before = self.progress
        for key in keys:
            for _, wait in self._parked[key]:
                self.giving_up[wait.lanes] = True
            self.wake(key)
        self.progress = before
        return True

    def _without(self, lanes: Lanes, some: Lanes) -> Lanes | None:
        mask = np.zeros(self.lane_count, np.bool_)
        mask[lanes.index] = True
        mask[some.index] = False
        numbers = np.flatnonzero(mask)
        return self.lanes(numbers) if len(numbers) else None

    def _union(self, *groups: Lanes) -> Lanes:
        mask = np.zeros(self.lane_count, np.bool_)
        for one in groups:
            mask[one.index] = True
        return self.lanes(np.flatnonzero(mask))
