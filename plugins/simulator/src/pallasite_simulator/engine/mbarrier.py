"""The mbarriers of a wave (PTX ISA 9.7.13.15): counts, phases, and who waits for them.

An mbarrier is known by its slot: its byte offset in the shared memory of the wave, divided by 8. So
lanes of different blocks of a cluster that mean one barrier find one object. What it holds is also
written to its 8 bytes, as the hardware does, so that stores that destroy it are noticed.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from pallasite_simulator.distinct import distinct
from pallasite_simulator.engine.grouping import Groups
from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.memory import SHARED_BASE
from pallasite_simulator.engine.wait import Wait
from pallasite_simulator.engine.wave import Wave
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array, Values

BYTES = 8

MAXIMUM = (1 << 20) - 1
"""The largest count of arrivals, and of bytes (PTX ISA 9.7.13.15.2)."""

_COUNT_BITS = np.int64(MAXIMUM)
_TRANSACTION_BITS = np.int64((1 << 21) - 1)


def mbarriers(wave: Wave) -> MBarriers:
    """The mbarriers of a wave."""
    found = wave.resources.get("mbarriers")
    if found is None:
        found = wave.resources["mbarriers"] = MBarriers(wave)
    assert isinstance(found, MBarriers)
    return found


def pending_count(states: Array) -> Array:
    """The pending arrivals that states hold (uint32), as ``mbarrier.pending_count`` gives them."""
    field = (states >> np.uint64(43)).astype(np.int64) & _COUNT_BITS
    count: Array = (-field & _COUNT_BITS).astype(np.uint32)
    return count


class MBarriers:
    """All mbarriers of a wave; arrays have an element for each slot.

    Attributes:
      valid: whether there is an mbarrier.
      expected: arrivals that the next phase needs.
      pending: arrivals that the current phase lacks.
      transactions: bytes that the current phase lacks; negative if more came than were expected.
      phase: number of the current phase, whose lowest bit is its parity. It goes on growing if the
        barrier is made anew.
      first: number of its first phase.
      word: what its memory holds.
      in_use: whether there is any mbarrier.
    """

    def __init__(self, wave: Wave):
        self.wave = wave
        self._memory = wave.memory.regions["shared"].views[BYTES]
        slots = len(self._memory)
        self.valid = np.zeros(slots, np.bool_)
        self.expected = np.zeros(slots, np.int64)
        self.pending = np.zeros(slots, np.int64)
        self.transactions = np.zeros(slots, np.int64)
        self.phase = np.zeros(slots, np.int64)
        self.first = np.zeros(slots, np.int64)
        self.word = np.zeros(slots, np.uint64)
        self.in_use = False
        self._slots_per_block = wave.memory.shared_stride // BYTES
        # The slot that each lane waits for; the last one stands for none.
        self._awaited = np.full(wave.lane_count, slots)
        self._awaited_phase = np.zeros(wave.lane_count, np.int64)
        self._changed = np.zeros(slots + 1, np.bool_)

    # Addresses ------------------------------------------------------------------------------------

    def locate(
        self,
        lanes: Lanes,
        space: str,
        addresses: Values,
        instruction: Instruction,
        *,
        kind: str = "atomic",
        local: bool = False,
    ) -> Array:
        """The slots at addresses.

        Args:
          lanes: who uses them.
          space: in which the addresses are: one of shared memory, or ``"generic"``.
          addresses: one for each lane, or a scalar.
          instruction: for messages.
          kind: of the access, for the observer.
          local: whether they must be in the memory of the lane's own block.

        Raises:
          SimulationError: not in shared memory, misaligned, or out of bounds.
        """
        memory = self.wave.memory
        if space == "generic":
            parts = memory.resolve(lanes, addresses)
            for name, mask, _ in parts:
                if name != "shared":
                    lane = lanes.numbers[0] if mask is None else lanes.numbers[mask][0]
                    raise SimulationError(
                        f"{self.wave.thread_name(int(lane))} uses an mbarrier that is not in shared"
                        f" memory, in: {instruction.text}",
                        got=f"an address of {name} memory",
                        location=instruction.location,
                    )
            ((_, _, addresses),) = parts
        _, offsets = memory.locate(lanes, "shared", addresses, BYTES, instruction, kind)
        slots: Array = offsets >> 3
        if local and self.wave.cluster_size > 1:
            foreign = slots // self._slots_per_block != lanes.of(self.wave.lane_block)
            if foreign.any():
                lane = int(lanes.numbers[foreign][0])
                raise SimulationError(
                    f"{self.wave.thread_name(lane)} uses an mbarrier of another block as one of"
                    f" its own, in: {instruction.text}",
                    got=self.wave.memory.describe("shared", int(slots[foreign][0]) * BYTES),
                    location=instruction.location,
                )
        return slots

    def key(self, slot: int, phase: int | None = None) -> Hashable:
        """What threads synchronize through: a phase (by default the current one) of a barrier."""
        return ("mbarrier", slot, int(self.phase[slot]) if phase is None else phase)

    # Operations -----------------------------------------------------------------------------------

    def initialize(
        self, lanes: Lanes, slots: Array, counts: Values, instruction: Instruction
    ) -> None:
        """``mbarrier.init``: makes barriers that expect ``counts`` arrivals.

        Raises:
          SimulationError: a count that is zero or too large, or a barrier that is in use.
        """
        counts = np.broadcast_to(counts, (lanes.count,)).astype(np.int64)
        wrong = (counts < 1) | (counts > MAXIMUM)
        if wrong.any():
            self._fail(
                lanes.numbers[wrong],
                slots[wrong],
                "initializes an mbarrier with a wrong count",
                instruction,
                got=int(counts[wrong][0]),
                expected=f"1 to {MAXIMUM}",
            )
        self._check_unused(lanes, slots, "initializes", instruction)
        observer = self.wave.observer
        live = self.valid[slots] & (self._memory[slots] == self.word[slots])
        if observer is not None and live.any():
            observer.misuse(
                lanes.numbers[live],
                f"initializes an mbarrier that is one already: {self.describe(slots[live])};"
                " mbarrier.inval must come first",
                instruction,
            )
        self.valid[slots] = True
        self.in_use = True
        self.expected[slots] = counts
        self.pending[slots] = counts
        self.transactions[slots] = 0
        self.phase[slots] = (self.phase[slots] + 3) & -2
        self.first[slots] = self.phase[slots]
        self._write(slots)

    def invalidate(self, lanes: Lanes, slots: Array, instruction: Instruction) -> None:
        """``mbarrier.inval``: the memory may be used for something else."""
        groups = Groups(slots)
        self._check(lanes, groups, "invalidates", instruction)
        self._check_unused(lanes, slots, "invalidates", instruction)
        self.valid[slots] = False
        self.in_use = bool(self.valid.any())
        observer = self.wave.observer
        if observer is not None:
            for slot in groups.distinct:
                observer.forget(self.key(int(slot)))

    def expect(self, lanes: Lanes, slots: Array, amounts: Values, instruction: Instruction) -> None:
        """``mbarrier.expect_tx``: the current phases lack more bytes."""
        groups = Groups(slots)
        self._check(lanes, groups, "expects bytes on", instruction)
        self._add_transactions(lanes.numbers, groups, amounts, instruction)
        self._settle(groups.distinct)

    def complete(
        self,
        numbers: Array,
        slots: Array,
        amounts: Values,
        instruction: Instruction,
        scope: str | None = None,
    ) -> None:
        """Bytes have arrived: ``mbarrier.complete_tx``, and the end of asynchronous copies.

        Args:
          numbers: of the lanes that did it, or began it; not necessarily each just once.
          slots: one for each of ``numbers``.
          amounts: in bytes.
          instruction: for messages.
          scope: of a thread's own instruction, which releases what a fence before it covers.
        """
        observer = self.wave.observer
        if observer is not None and scope is not None:
            observer.releases(numbers, slots, self.phase[slots], scope, relaxed=True)
        groups = Groups(slots)
        self._check(numbers, groups, "completes bytes on", instruction)
        self._add_transactions(numbers, groups, -np.asarray(amounts, np.int64), instruction)
        self._settle(groups.distinct)

    def arrive(
        self,
        lanes: Lanes,
        slots: Array,
        counts: Values,
        instruction: Instruction,
        *,
        transactions: Values | None = None,
        drop: bool = False,
        may_complete: bool = True,
        release: str | None = None,
        states: bool = False,
    ) -> Array | None:
        """``mbarrier.arrive``: takes ``counts`` from the pending arrivals, as if lane by lane.

        Args:
          lanes: who arrives.
          slots: where.
          counts: of arrivals of each lane.
          instruction: for messages.
          transactions: bytes that each lane adds to what is expected, before it arrives.
          drop: whether it also takes ``counts`` from the arrivals that later phases expect.
          may_complete: whether it may complete the phase.
          release: scope of the release, or None.
          states: whether to return states.

        Returns:
          The states before each lane's arrival (uint64), or None.

        Raises:
          SimulationError: no barrier, or a wrong count.
        """
        groups = Groups(slots)
        self._check(lanes, groups, "arrives at", instruction)
        counts = np.asarray(counts, np.int64)
        totals = groups.sum(counts)
        distinct = groups.distinct
        if (totals > self.pending[distinct]).any():
            if lanes.count == 1:
                self._overflow(lanes, groups, int(totals[0]), instruction)
            return self._arrive_one_by_one(
                lanes, slots, counts, instruction, transactions, drop, may_complete, release
            )
        if counts.min() < 1:
            one = np.broadcast_to(counts < 1, (lanes.count,))
            self._fail(
                lanes.numbers[one],
                slots[one],
                "arrives at an mbarrier with a wrong count",
                instruction,
                got=int(counts.min()),
                expected=f"1 to {MAXIMUM}",
            )
        if transactions is not None:
            self._add_transactions(lanes.numbers, groups, transactions, instruction)
        before = None
        if states:
            earlier = groups.sum_before(counts)
            before = self._pack(slots, self.pending[slots] - earlier)
        observer = self.wave.observer
        if observer is not None:
            phases, scope = self.phase[slots], release or "cta"
            observer.releases(lanes.numbers, slots, phases, scope, relaxed=release is None)
        if drop:
            self.expected[distinct] -= totals
        self.pending[distinct] -= totals
        if not may_complete:
            last = (self.pending[distinct] == 0) & (self.transactions[distinct] == 0)
            if last.any():
                where = np.isin(slots, distinct[last])
                self.pending[distinct] += totals
                self._fail(
                    lanes.numbers[where],
                    slots[where],
                    "completes a phase of an mbarrier with .noComplete",
                    instruction,
                )
        self._settle(distinct)
        return before

    def _arrive_one_by_one(
        self,
        lanes: Lanes,
        slots: Array,
        counts: Array,
        instruction: Instruction,
        transactions: Values | None,
        drop: bool,
        may_complete: bool,
        release: str | None,
    ) -> Array:
        """Arrivals of several phases at once."""
        states = np.zeros(lanes.count, np.uint64)
        counts = np.broadcast_to(counts, (lanes.count,))
        if transactions is not None:
            transactions = np.broadcast_to(transactions, (lanes.count,))
        for place in range(lanes.count):
            part = slice(place, place + 1)
            state = self.arrive(
                Lanes(self.wave, lanes.numbers[part]),
                slots[part],
                counts[part],
                instruction,
                transactions=None if transactions is None else transactions[part],
                drop=drop,
                may_complete=may_complete,
                release=release,
                states=True,
            )
            assert state is not None
            states[part] = state
        return states

    def increment(self, lanes: Lanes, slots: Array, instruction: Instruction) -> None:
        """Checks that an arrival which was not counted on may be added to the pending ones, as
        ``cp.async.mbarrier.arrive`` does before it arrives."""
        groups = Groups(slots)
        self._check(lanes, groups, "arrives at", instruction)
        many = self.pending[slots] + groups.sum_before(np.ones(1, np.int64)) + 1 > MAXIMUM
        if many.any():
            self._fail(
                lanes.numbers[many],
                slots[many],
                "adds too many arrivals to an mbarrier",
                instruction,
                expected=f"at most {MAXIMUM}",
            )

    # Waiting --------------------------------------------------------------------------------------

    def completed(
        self,
        lanes: Lanes,
        slots: Array,
        parities: Values,
        instruction: Instruction,
        acquire: str | None,
    ) -> Array:
        """For each lane, whether the phase of a parity is complete.

        Args:
          lanes: who asks.
          slots: of which barrier.
          parities: of the phase that is meant, the current one or that before; the lowest bit
            counts.
          instruction: for messages.
          acquire: scope in which lanes see what happened before, if it is; or None.
        """
        groups = Groups(slots)
        self._check(lanes, groups, "waits at", instruction)
        numbers, phases = lanes.numbers, self.phase[slots]
        found: Array = (phases & 1) != (np.asarray(parities) & 1)
        # Suspended lanes go on when the phase is complete, whatever became of the next ones.
        found |= (self._awaited[numbers] == slots) & (self._awaited_phase[numbers] < phases)
        observer = self.wave.observer
        if observer is not None and found.any():
            there = found & (self.phase[slots] > self.first[slots])
            if there.any():
                places, scope = slots[there], acquire or "cta"
                observer.acquires(
                    lanes.numbers[there],
                    places,
                    self.phase[places] - 1,
                    scope,
                    relaxed=acquire is None,
                )
        return found

    def live(self, slots: Array) -> Array:
        """Whether there are mbarriers in slots that nothing has overwritten."""
        found: Array = self.valid[slots] & (self._memory[slots] == self.word[slots])
        return found

    def block(self, numbers: Array, slots: Array) -> list[Wait]:
        """Makes lanes wait until the current phase of their slot is complete."""
        self._awaited[numbers] = slots
        self._awaited_phase[numbers] = self.phase[slots]
        groups = Groups(slots % self._slots_per_block)
        return [
            Wait(
                part,
                ("mbarriers", slot),
                _Description(self, self._awaited[part]),
                again=True,
                may_give_up=True,
            )
            for part, slot in groups.split(numbers)
        ]

    def describe(self, slots: Array) -> str:
        """What the first of some barriers lacks."""
        slot = int(slots[0])
        block, within = divmod(slot, self._slots_per_block)
        place = within * BYTES - SHARED_BASE
        text = f"the mbarrier at byte {place} of shared memory"
        if self.wave.cluster_size > 1:
            text += f" of block {self.wave.block_name(block)}"
        if not self.valid[slot]:
            return f"{text}, which is not initialized"
        number = int(self.phase[slot] - self.first[slot])
        pending, missing = int(self.pending[slot]), int(self.transactions[slot])
        text += f", whose phase {number} (parity {number & 1}) lacks {pending} of"
        text += f" {int(self.expected[slot])} arrivals"
        if missing > 0:
            text += f" and {missing} bytes"
        elif missing < 0:
            text += f" and has got {-missing} bytes more than it was told to expect"
        return text

    # Details --------------------------------------------------------------------------------------

    def _pack(self, slots: Array, pending: Array) -> Array:
        """The words of barriers: phase, pending arrivals, bytes and expected arrivals."""
        words = (self.phase[slots] & 1) << 63
        words |= (-pending & _COUNT_BITS) << 43
        words |= (self.transactions[slots] & _TRANSACTION_BITS) << 22
        words |= (-self.expected[slots] & _COUNT_BITS) << 1
        packed: Array = words.view(np.uint64)
        return packed

    def _write(self, slots: Array) -> None:
        words = self._pack(slots, self.pending[slots])
        self.word[slots] = words
        self._memory[slots] = words
        self.wave.progress += 1

    def _settle(self, slots: Array) -> None:
        """Completes phases that lack nothing any more; slots are distinct."""
        done = (self.pending[slots] == 0) & (self.transactions[slots] == 0)
        if not done.any():
            self._write(slots)
            return
        complete = slots[done]
        self.phase[complete] += 1
        self.pending[complete] = self.expected[complete]
        self._write(slots)
        wave = self.wave
        wave.phase_completed()
        for within in distinct(complete % self._slots_per_block).tolist():
            key = ("mbarriers", within)
            if wave.waiting(key):
                self._changed[complete] = True
                wave.wake(key, self._changed[self._awaited])
                self._changed[complete] = False

    def _add_transactions(
        self, numbers: Array, groups: Groups, amounts: Values, instruction: Instruction
    ) -> None:
        amounts = np.asarray(amounts)
        if amounts.dtype != np.int64:
            amounts = amounts.astype(np.int64)
        distinct = groups.distinct
        totals = self.transactions[distinct] + groups.sum(amounts)
        wrong = (abs(totals) > MAXIMUM) | (abs(amounts).max() > MAXIMUM)
        if wrong.any():
            first = groups.first[wrong]
            self._fail(
                numbers[first],
                distinct[wrong],
                "moves the count of bytes of an mbarrier out of its range",
                instruction,
                got=int(totals[wrong][0]),
                expected=f"{-MAXIMUM} to {MAXIMUM}",
            )
        self.transactions[distinct] = totals

    def _check(
        self, lanes: Lanes | Array, groups: Groups, what: str, instruction: Instruction
    ) -> None:
        """Raises :class:`SimulationError` unless there are barriers in all slots."""
        distinct = groups.distinct
        good = self.valid[distinct] & (self._memory[distinct] == self.word[distinct])
        if good.all():
            return
        numbers = lanes.numbers if isinstance(lanes, Lanes) else lanes
        bad = ~good
        slots = distinct[bad]
        overwritten = bool(self.valid[slots[0]])
        raise self._error(
            numbers[groups.first[bad]],
            slots,
            f"{what} an mbarrier that "
            + ("was overwritten by an access of memory" if overwritten else "is not initialized"),
            instruction,
            hint=None
            if overwritten
            else "mbarrier.init must have been executed before, and be ordered before this",
        )

    def _check_unused(
        self, lanes: Lanes, slots: Array, what: str, instruction: Instruction
    ) -> None:
        """Raises :class:`SimulationError` if lanes wait for one of the barriers."""
        waited = [
            one
            for one in distinct(slots % self._slots_per_block).tolist()
            if self.wave.waiting(("mbarriers", one))
        ]
        if not waited:
            return
        self._changed[slots] = True
        busy = self._awaited[self._changed[self._awaited]]
        self._changed[slots] = False
        self._changed[busy] = True
        where = self._changed[slots]
        self._changed[busy] = False
        if where.any():
            self._fail(
                lanes.numbers[where],
                slots[where],
                f"{what} an mbarrier for which"
                f" {np.count_nonzero(self._awaited == slots[where][0])} threads wait",
                instruction,
            )

    def released(self, numbers: Array) -> None:
        """Lanes do not wait any more."""
        self._awaited[numbers] = len(self.valid)

    def _overflow(self, lanes: Lanes, groups: Groups, count: int, instruction: Instruction) -> None:
        slot = int(groups.distinct[0])
        self._fail(
            lanes.numbers,
            groups.distinct,
            "arrives more often at an mbarrier than it expects",
            instruction,
            got=f"{count} more",
            expected=f"at most the {int(self.pending[slot])} that are pending,"
            f" of {int(self.expected[slot])}",
        )

    def _fail(
        self,
        numbers: Array,
        slots: Array,
        what: str,
        instruction: Instruction,
        got: object = None,
        expected: str | None = None,
    ) -> None:
        raise self._error(numbers, slots, what, instruction, got, expected)

    def _error(
        self,
        numbers: Array,
        slots: Array,
        what: str,
        instruction: Instruction,
        got: object = None,
        expected: str | None = None,
        hint: str | None = None,
    ) -> SimulationError:
        found = self.describe(slots[:1])
        return SimulationError(
            f"{self.wave.thread_name(int(numbers[0]))} {what}, in: {instruction.text}",
            got=found if got is None else f"{got}, for {found}",
            expected=expected,
            hint=hint,
            location=instruction.location,
        )


class _Description:
    """Says what lanes wait for, at the time when it is asked."""

    def __init__(self, barriers: MBarriers, slots: Array):
        self._barriers = barriers
        self._slots = slots

    def __call__(self) -> str:
        return self._barriers.describe(self._slots) + ","
