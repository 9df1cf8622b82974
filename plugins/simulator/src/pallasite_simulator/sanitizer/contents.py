"""Whether what shared memory holds may be read: it is no undefined value, was not given up, and is
read through the member of a union that it was written through."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from pallasite.plugin import SourceLocation
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.sanitizer.findings import place
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave
    from pallasite_simulator.sanitizer.allocations import SharedAllocations

_UNDEFINED, _DISCARDED = 1, 2

_SHIFT = 40
"""Bits of a number of barriers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unreadable:
    """Bytes that accesses read, but must not.

    Attributes:
      wrong: which bytes of each access.
      kind, text, hint: what a report says; the text goes on behind the first of the places.
      location: the line at fault, if it is not that of the access.
    """

    wrong: Array
    kind: str
    text: str
    hint: str
    location: SourceLocation | None = None


class Contents:
    """What the bytes of a wave's shared memory hold."""

    def __init__(self, wave: Wave, allocations: SharedAllocations):
        self._size = -(-len(wave.memory.regions["shared"].bytes) // 16) * 16
        self._allocations = allocations
        self._stride = allocations.stride
        self._state: Array | None = None
        self._copied_by: Array | None = None
        self._barriers: Array = np.zeros(wave.lane_count, np.int64)
        self._written_by: dict[int, Instruction] = {}
        self._members: Array | None = None
        if allocations.members:
            self._members = np.zeros(self._size, np.uint8)

    # Writes -----------------------------------------------------------------------------------

    def undefined(self, places: Array) -> None:
        """Undefined values were stored to some bytes."""
        self._states()[places] = _UNDEFINED

    def written(self, instruction: Instruction, offsets: Array, size: int) -> None:
        """Something was written to ``size`` bytes at each of the offsets."""
        if self._state is None and self._members is None:
            return
        if self._state is not None:
            _fill(self._state, offsets, size, 0)
        if self._members is not None:
            number = self._member(instruction, offsets, size)
            _fill(self._members, offsets, size, number)
            if number:
                self._written_by[number] = instruction

    def copied_out(self, offsets: Array, size: int) -> None:
        """What a copy to global memory has read; some arrays are not used after that."""
        low, high = self._extent(offsets, size)
        if any(piece.covers(low, high) for piece in self._allocations.discarded):
            where = _bytes(offsets, size)
            self._states()[where] = _DISCARDED
            if self._copied_by is not None:
                self._copied_by[where] = 0

    def loaded(self, instruction: Instruction, lanes: Array, offsets: Array, size: int) -> None:
        """What lanes have loaded, perhaps to copy it to global memory, and that's the end of it.

        Such a copy has no barrier inside, and may load some bytes more than once. So what tells the
        next one is that the same lane has been at a barrier since.
        """
        if not self._discards(instruction, offsets, size):
            return
        if self._copied_by is None:
            self._copied_by = np.zeros(self._size, np.int64)
        where = offsets[:, None] + np.arange(size)
        states = self._states()
        fresh = states[where] != _DISCARDED
        who = np.broadcast_to(self._copies(lanes)[:, None], where.shape)
        states[where] = _DISCARDED
        self._copied_by[where[fresh]] = who[fresh]

    def passed(self, lanes: Array) -> None:
        """Lanes were at a barrier."""
        self._barriers[lanes] += 1

    def _discards(self, instruction: Instruction, offsets: Array, size: int) -> bool:
        pieces = self._allocations.discarded_by(instruction)
        return bool(pieces) and any(one.covers(*self._extent(offsets, size)) for one in pieces)

    def _extent(self, offsets: Array, size: int) -> tuple[int, int]:
        """From where to where in a block's memory accesses are."""
        within = offsets % self._stride
        return int(within.min()), int(within.max()) + size

    def _copies(self, lanes: Array) -> Array:
        """For each lane, a number of it and of its last barrier."""
        found: Array = (lanes.astype(np.int64) + 1 << _SHIFT) | self._barriers[lanes]
        return found

    def _states(self) -> Array:
        if self._state is None:
            self._state = np.zeros(self._size, np.uint8)
        return self._state

    # Reads ------------------------------------------------------------------------------------

    def unreadable(
        self,
        instruction: Instruction,
        offsets: Array,
        size: int,
        *,
        lanes: Array | None = None,
        undefined: bool = True,
    ) -> Unreadable | None:
        """What an instruction must not read of ``size`` bytes at each of the offsets.

        Args:
          instruction: it.
          offsets: in the wave's shared memory.
          size: in bytes.
          lanes: that load them, if lanes do.
          undefined: whether undefined values count, too.
        """
        if self._state is None and self._members is None:
            return None
        where = _bytes(offsets, size)
        shape = (len(offsets), size)
        if self._state is not None:
            state = self._state[where].reshape(shape)
            wrong = state == _DISCARDED
            if self._copied_by is not None and lanes is not None and wrong.any():
                wrong &= self._before_copy(instruction, lanes, offsets, size)
            if wrong.any():
                return self._of_earlier_step(wrong, offsets)
            wrong = state == _UNDEFINED
            if undefined and wrong.any():
                return Unreadable(
                    wrong,
                    "read of uninitialized shared memory",
                    ", which is uninitialized",
                    "write it before, or load it and wait for the load",
                )
        if self._members is not None:
            number = self._member(instruction, offsets, size)
            found = self._members[where].reshape(shape)
            wrong = (found != number) & (found != 0)
            if number and wrong.any():
                return self._of_other_member(wrong, number, int(found[wrong][0]))
        return None

    def _before_copy(
        self, instruction: Instruction, lanes: Array, offsets: Array, size: int
    ) -> Array:
        """Of bytes that were copied: whether before the copy that an instruction is part of."""
        assert self._copied_by is not None
        if not self._discards(instruction, offsets, size):
            return np.ones((len(offsets), size), np.bool_)
        copied = self._copied_by[offsets[:, None] + np.arange(size)]
        mine = self._copies(lanes)[:, None]
        earlier: Array = (copied >> _SHIFT == mine >> _SHIFT) & (copied != mine)
        earlier |= copied == 0
        return earlier

    def _of_earlier_step(self, wrong: Array, offsets: Array) -> Unreadable:
        row, byte = np.argwhere(wrong)[0]
        within = int(offsets[row] + byte) % self._stride
        piece = next(one for one in self._allocations.discarded if one.holds(within))
        return Unreadable(
            wrong,
            "read of an output block that was not written",
            ", which still holds what was copied to global memory in an earlier step",
            "write the whole block in each step with another block index",
            piece.location,
        )

    def _of_other_member(self, wrong: Array, number: int, other: int) -> Unreadable:
        members = self._allocations.members
        mine, theirs = members[number - 1].name, members[other - 1].name
        return Unreadable(
            wrong,
            "read through another member of a RefUnion",
            f" as {mine!r}, which was written as {theirs!r} at {place(self._written_by[other])}",
            "read data through the member that wrote them, or write this member before",
        )

    def _member(self, instruction: Instruction, offsets: Array, size: int) -> int:
        """The number of the union's member that an instruction accesses; 0 if there is none, or if
        it may be any of several."""
        numbers = self._allocations.members_of(instruction)
        if not numbers:
            return 0
        low, high = self._extent(offsets, size)
        found = [n for n in numbers if self._allocations.members[n - 1].covers(low, high)]
        return found[0] if len(found) == 1 else 0


def _fill(states: Array, offsets: Array, size: int, value: int) -> None:
    """Sets the bytes at each of the offsets."""
    width = min(size, 8)
    aligned = not (
        width & (width - 1) or size % width or int(np.bitwise_or.reduce(offsets)) % width
    )
    if size > 16 or not aligned:
        states[_bytes(offsets, size)] = value
        return
    words, places = states.view(f"u{width}"), offsets // width
    for part in range(size // width):
        words[places + part] = value * (0x0101010101010101 & (1 << 8 * width) - 1)


def _bytes(offsets: Array, size: int) -> Array | slice:
    """The bytes at each of the offsets."""
    if len(offsets) == 1:
        return slice(int(offsets[0]), int(offsets[0]) + size)
    found: Array = offsets[:, None] + np.arange(size)
    return found
