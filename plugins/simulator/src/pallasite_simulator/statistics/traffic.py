"""What accesses cost: passes over the banks of shared memory, sectors of global memory."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallasite_simulator.engine.lanes import WARP, Lanes
from pallasite_simulator.engine.memory import DeviceSegments
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

BANKS = 32
BANK_BYTES = 4
SECTOR_BYTES = 32
"""What global memory moves at least, as a power of two."""

_SECTOR_SHIFT = SECTOR_BYTES.bit_length() - 1


@dataclasses.dataclass
class Accesses:
    """Accesses to shared or global memory by one instruction.

    Attributes:
      space: ``"shared"`` or ``"global"``.
      instruction: which.
      warps: how many times a warp executed it.
      units: how many passes over the banks, or sectors, that took.
      ideal: how many the same bytes need at least.
      bytes: how many the lanes asked for.
    """

    space: str
    instruction: Instruction
    warps: int = 0
    units: int = 0
    ideal: int = 0
    bytes: int = 0

    def add(self, warps: int, units: int, ideal: int, bytes: int) -> None:
        """Counts more of them."""
        self.warps += warps
        self.units += units
        self.ideal += ideal
        self.bytes += bytes

    @property
    def counts(self) -> tuple[str, int, int, int, int]:
        """The space and all numbers."""
        return self.space, self.warps, self.units, self.ideal, self.bytes


class Traffic:
    """Counts accesses by instruction, and remembers which global memory was touched.

    Shared memory has 32 banks of 4 bytes. A pass serves each bank once; accesses of 8 and 16 bytes
    are served in halves and quarters of a warp; lanes that access the same word share it. Global
    memory is accessed in sectors of 32 bytes: a warp's accesses to one sector count once.

    Attributes:
      accesses: by ``id`` of the instruction, which the record keeps alive.
      sectors_read, sectors_written: by sector of global memory, whether it was.
      links: bytes that went from one device to another, by pair.
    """

    def __init__(
        self, global_bytes: int, segments: DeviceSegments | None = None, device: int | None = None
    ):
        sectors = -(-global_bytes // SECTOR_BYTES)
        self.links: dict[tuple[int, int], int] = {}
        self._segments = segments
        self._device = device
        self.accesses: dict[int, Accesses] = {}
        self.sectors_read = np.zeros(sectors, np.bool_)
        self.sectors_written = np.zeros(sectors, np.bool_)

    def share(self, flags: Array) -> None:
        """Keeps what is touched in given memory: one bool for each sector that is read, and behind
        them one for each that is written."""
        count = len(self.sectors_read)
        self.sectors_read, self.sectors_written = flags[:count], flags[count : 2 * count]

    def shared(self, lanes: Lanes, offsets: Array, size: int, instruction: Instruction) -> None:
        """Counts one execution: ``size`` bytes at a byte offset of shared memory for each lane."""
        rows, repeats = _by_warp(lanes, offsets)
        passes, ideal = bank_passes(rows, size)
        self._found("shared", instruction).add(
            lanes.warp_count,
            int(passes.sum()) * repeats,
            int(ideal.sum()) * repeats,
            size * lanes.count,
        )

    def global_(
        self, lanes: Lanes, offsets: Array, size: int, instruction: Instruction, kind: str
    ) -> None:
        """Counts one execution: ``size`` bytes at a byte offset of global memory for each lane;
        ``kind`` is ``"read"``, ``"write"`` or ``"atomic"``."""
        rows, repeats = _by_warp(lanes, offsets, SECTOR_BYTES)
        touched = _distinct(np.where(rows < 0, -1, rows >> _SECTOR_SHIFT))[1].sum(axis=1)
        needed = -(-(np.count_nonzero(rows >= 0, axis=1) * size) // SECTOR_BYTES)
        ideal = np.minimum(touched, needed)
        self._found("global", instruction).add(
            lanes.warp_count,
            int(touched.sum()) * repeats,
            int(ideal.sum()) * repeats,
            size * lanes.count,
        )
        self.touch(offsets, size, kind)

    def touch(self, offsets: Array, size: int, kind: str) -> None:
        """Notes that pieces of global memory, ``size`` bytes at each offset, were accessed."""
        if self._segments is not None and self._device is not None:
            self._count_links(self._segments, self._device, offsets, size, kind)
        first, last = offsets >> _SECTOR_SHIFT, (offsets + (size - 1)) >> _SECTOR_SHIFT
        longest = int((last - first).max()) + 1 if len(offsets) else 0
        for step in range(longest):
            sectors = np.minimum(first + step, last)
            if kind != "write":
                self.sectors_read[sectors] = True
            if kind != "read":
                self.sectors_written[sectors] = True

    def _count_links(
        self, segments: DeviceSegments, own: int, offsets: Array, size: int, kind: str
    ) -> None:
        devices, counts = np.unique(segments.devices(offsets), return_counts=True)
        for device, count in zip(devices.tolist(), counts.tolist(), strict=True):
            if device not in (own, -1):
                pair = (device, own) if kind == "read" else (own, device)
                self.links[pair] = self.links.get(pair, 0) + count * size

    @property
    def touched_bytes(self) -> tuple[int, int]:
        """Bytes of global memory in sectors that were read, and that were written."""
        read, written = np.count_nonzero(self.sectors_read), np.count_nonzero(self.sectors_written)
        return int(read) * SECTOR_BYTES, int(written) * SECTOR_BYTES

    def _found(self, space: str, instruction: Instruction) -> Accesses:
        found = self.accesses.get(id(instruction))
        if found is None:
            found = self.accesses[id(instruction)] = Accesses(space, instruction)
        return found


class Touches(Traffic):
    """Only remembers which global memory was touched."""

    def shared(self, lanes: Lanes, offsets: Array, size: int, instruction: Instruction) -> None:
        """Counts nothing."""

    def global_(
        self, lanes: Lanes, offsets: Array, size: int, instruction: Instruction, kind: str
    ) -> None:
        """Notes that pieces of global memory were accessed."""
        self.touch(offsets, size, kind)


def bank_passes(rows: Array, size: int) -> tuple[Array, Array]:
    """How many passes over the banks accesses take, and how many they need at least.

    Args:
      rows: byte offsets, 32 for each warp; negative for lanes that do not take part.
      size: bytes that each lane accesses.

    Returns:
      Two numbers for each warp.
    """
    words_of_lane = max(1, min(size, 16) // BANK_BYTES)
    words = np.where(rows < 0, -1, rows // BANK_BYTES)
    if words_of_lane > 1:
        steps = np.arange(words_of_lane)
        words = np.where(words[..., None] < 0, -1, words[..., None] + steps)
    # One row for each group of lanes that is served together: 32 words.
    groups = words.reshape(-1, WARP)
    groups, distinct = _distinct(groups)
    banks = np.arange(len(groups))[:, None] * BANKS + groups % BANKS
    counts = np.bincount(banks[distinct], minlength=len(groups) * BANKS).reshape(-1, BANKS)
    passes = counts.max(axis=1)
    ideal = -(-counts.sum(axis=1) // BANKS)
    return (
        passes.reshape(-1, words_of_lane).sum(axis=1),
        ideal.reshape(-1, words_of_lane).sum(axis=1),
    )


def _by_warp(lanes: Lanes, offsets: Array, granule: int = BANKS * BANK_BYTES) -> tuple[Array, int]:
    """Offsets in rows of 32, one for each warp, -1 where a lane is missing; and how many warps each
    row stands for.

    Warps whose offsets differ by multiples of ``granule`` behave alike: if all do, there is one.
    """
    if lanes.whole_warps:
        rows = offsets.reshape(-1, WARP)
        alike = rows - rows[:, :1]
        start = rows[:, 0] % granule
        if (start == start[0]).all() and (alike == alike[0]).all():
            return rows[:1], len(rows)
        return rows, 1
    numbers = lanes.numbers
    places = np.searchsorted(lanes.warps, numbers // WARP)
    rows = np.full((lanes.warp_count, WARP), -1, np.int64)
    rows[places, numbers % WARP] = offsets
    return rows, 1


def _distinct(rows: Array) -> tuple[Array, Array]:
    """The rows sorted, and which of their elements are not negative and differ from the one
    before."""
    ordered = np.sort(rows, axis=1)
    distinct = ordered >= 0
    distinct[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    return ordered, distinct
