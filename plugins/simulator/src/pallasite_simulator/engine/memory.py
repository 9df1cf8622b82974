"""Memory: state spaces, allocations, and how addresses become places in NumPy arrays.

Addresses are those that a program sees. A generic address of global memory is its global address;
other spaces have windows in the generic space (PTX ISA 6.4.1). A shared address holds the rank of
its block within the cluster above bit 24, as on hardware, so it is valid as ``shared::cluster``
too; the first 1024 bytes of each block's shared memory belong to the system.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.observer import Access
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array, Values

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave

GLOBAL_BASE = 0x7F00_0000_0000
SHARED_WINDOW = 0x7E00_0000_0000
LOCAL_WINDOW = 0x7D00_0000_0000
PARAM_WINDOW = 0x7C00_0000_0000
MULTICAST_WINDOW = 0x7B00_0000_0000
"""Where an address means the same place on all devices, for instructions that know of that."""

WINDOW_SHIFT = 40

SHARED_BASE = 1024
RANK_SHIFT = 24
RANK_MASK = (1 << RANK_SHIFT) - 1

POISON = 0xCD
"""What each byte of outputs and scratch holds before the kernel writes them."""

RUBBISH = 0x7B
"""The same for shared and local memory: a large number in all types, so that a sum or maximum that
nobody began with zeros is wrong; and another one, so that outputs made of it count as written."""

GUARD = 256
"""Bytes between allocations in global memory that belong to none of them."""

WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}
_SPACE_OF_WINDOW = {
    GLOBAL_BASE >> WINDOW_SHIFT: "global",
    SHARED_WINDOW >> WINDOW_SHIFT: "shared",
    LOCAL_WINDOW >> WINDOW_SHIFT: "local",
    PARAM_WINDOW >> WINDOW_SHIFT: "param",
}

_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
"""Bytes of an access to the type that copies so many at once. Complex numbers are moved, never
computed with."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceSegments:
    """Where the memory of each of several devices is in one global memory: all alike.

    Attributes:
      start: the offset of that of the first device.
      stride: bytes from one to the next.
      count: how many devices there are.
      first: the number of the first device.
    """

    start: int
    stride: int
    count: int
    first: int = 0

    def multicast_distance(self, device: int) -> int:
        """What to add to an address on a device for that of the same place on all devices."""
        return MULTICAST_WINDOW - GLOBAL_BASE - self.start_of(device)

    def start_of(self, device: int) -> int:
        """The offset of the memory of a device."""
        return self.start + (device - self.first) * self.stride

    def devices(self, offsets: Array) -> Array:
        """Which devices own byte offsets; -1 for what all have in common."""
        found: Array = (offsets - self.start) // self.stride + self.first
        return np.where(offsets < self.start, -1, found)


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """A piece of a memory: ``offset`` and ``size`` in bytes; ``undefined`` until it is written."""

    name: str
    offset: int
    size: int
    writable: bool = True
    undefined: bool = False


class Region:
    """The memory of one space: a byte array and typed views of it.

    Attributes:
      space: its name.
      bytes: the contents (uint8); its size is a multiple of 16.
      views: by bytes of an access.
    """

    def __init__(self, space: str, contents: Array):
        self.space = space
        self.bytes = contents
        self.views: dict[int, Any] = {
            width: contents.view(dtype) for width, dtype in _WIDTHS.items()
        }


def aligned_bytes(size: int) -> Array:
    """A zeroed byte array of at least ``size`` bytes, padded to a multiple of 16."""
    return np.zeros(-(-size // 16) * 16, np.uint8)


def rubbish_bytes(size: int) -> Array:
    """The same of memory that hardware does not zero either: with :data:`RUBBISH`."""
    return np.full(-(-size // 16) * 16, RUBBISH, np.uint8)


class GlobalMemory:
    """Global memory of a launch, which all its blocks share.

    Attributes:
      allocations: ascending by offset.
      region: the memory; made by :meth:`seal`.
      heap: what is used of the heap: sizes by address, and how many bytes in ``"used"``.
      segments: the parts of several devices; None for one alone.
      resources: further state of the launch that instructions keep, by a key of their own.
    """

    def __init__(self) -> None:
        self.segments: DeviceSegments | None = None
        self.allocations: list[Allocation] = []
        self.resources: dict[Hashable, object] = {}
        self.heap: dict[int | str, int] = {}
        self.region: Region
        self._size = 0
        self._offsets: list[int] = []
        self._constant: Array
        self._starts: Array
        self._ends: Array

    def allocate(
        self,
        name: str,
        size: int,
        alignment: int = 256,
        writable: bool = True,
        offset: int | None = None,
        undefined: bool = False,
    ) -> int:
        """Reserves memory, behind what there is unless ``offset`` is given; returns its address."""
        if offset is None:
            offset = -(-(self._size + GUARD) // alignment) * alignment
        self.allocations.append(Allocation(name, offset, size, writable, undefined))
        self._size = offset + size
        return GLOBAL_BASE + offset

    def skip_to(self, offset: int) -> None:
        """Leaves out what is before an offset: nothing is allocated there any more."""
        self._size = max(self._size, offset)

    @property
    def size(self) -> int:
        """Bytes that :meth:`seal` needs."""
        return -(-(self._size + GUARD) // 16) * 16

    def seal(self, contents: Array | None = None) -> None:
        """Makes the memory, zeroed unless given; nothing can be allocated afterwards."""
        self.region = Region("global", aligned_bytes(self.size) if contents is None else contents)
        self._offsets = [one.offset for one in self.allocations]
        self._constant = np.array([not one.writable for one in self.allocations], np.bool_)
        self._starts = np.array(self._offsets, np.int64)
        self._ends = np.array([one.offset + one.size for one in self.allocations], np.int64)

    def bytes_at(self, address: int, size: int) -> Array:
        """A view of the bytes at an address."""
        offset = address - GLOBAL_BASE
        return self.region.bytes[offset : offset + size]

    def allocation_at(self, offset: int) -> Allocation | None:
        """The allocation that holds a byte offset, or None."""
        place = bisect.bisect_right(self._offsets, offset) - 1
        if place < 0:
            return None
        found = self.allocations[place]
        return found if offset < found.offset + found.size else None

    def outside(self, low: int, high: int, offsets: Array, size: int) -> Array | None:
        """Which accesses are not inside one allocation; None if all are.

        Args:
          low, high: the smallest and the largest of the offsets.
          offsets: of the accesses.
          size: of each.
        """
        found = self.allocation_at(low)
        if found is not None and high + size <= found.offset + found.size:
            return None
        if not len(self._starts):
            return np.ones(len(offsets), np.bool_)
        place = np.searchsorted(self._starts, offsets, "right") - 1
        wrong: Array = (place < 0) | (offsets > self._ends[place] - size)
        return wrong if wrong.any() else None

    def read_only(self, offsets: Array) -> Array | None:
        """Which byte offsets, all inside allocations, cannot be written; None if all can."""
        if not self._constant.any():
            return None
        wrong: Array = self._constant[np.searchsorted(self._starts, offsets, "right") - 1]
        return wrong if wrong.any() else None


class Memory:
    """All memory that the lanes of one wave see.

    Attributes:
      regions: by space. Shared memory has ``shared_stride`` bytes for each block, local memory
        ``local_stride`` for each lane, one after the other.
      describes: for spaces that plugins add to the regions: what names a byte offset.
      bytes_moved: bytes by (space, ``"read"``, ``"write"`` or ``"atomic"``).
    """

    def __init__(
        self,
        wave: Wave,
        global_memory: GlobalMemory,
        parameters: Array,
        shared_bytes: int,
        local_bytes: int,
    ):
        self.wave = wave
        self.global_memory = global_memory
        self.shared_start: int = wave.program.shared_start
        self.shared_limit: int = SHARED_BASE + shared_bytes
        self.shared_stride = -(-self.shared_limit // 1024) * 1024
        self.local_limit = local_bytes
        self.local_stride = -(-local_bytes // 16) * 16
        self.regions = {
            "global": global_memory.region,
            "shared": Region("shared", self._shared_bytes(wave.block_count)),
            "local": Region("local", rubbish_bytes(self.local_stride * wave.lane_count)),
            "param": Region("param", parameters),
        }
        self.regions["const"] = self.regions["global"]
        self.regions["shared::cluster"] = self.regions["shared::cta"] = self.regions["shared"]
        self.bytes_moved: dict[tuple[str, str], int] = {}
        self.describes: dict[str, Callable[[int], str]] = {}
        self._parameter_bytes = len(parameters)

    def _shared_bytes(self, blocks: int) -> Array:
        """Rubbish, and zeros in the part of reserved memory that programs may use."""
        contents = rubbish_bytes(self.shared_stride * blocks)
        if self.shared_start < SHARED_BASE:
            by_block = contents.reshape(blocks, self.shared_stride)
            by_block[:, self.shared_start : SHARED_BASE] = 0
        return contents

    # Access ---------------------------------------------------------------------------------------

    def load(
        self,
        lanes: Lanes,
        space: str,
        addresses: Values,
        size: int,
        instruction: Instruction,
        kind: str = "read",
    ) -> Array:
        """Reads ``size`` bytes (1, 2, 4, 8, 16, or 32) for each lane.

        Args:
          lanes: who.
          space: a state space; ``"generic"`` for generic addresses.
          addresses: one for each lane, or a scalar.
          size: bytes for each lane; addresses must be multiples of it.
          instruction: for messages.
          kind: ``"read"``, or ``"atomic"`` for strong accesses.

        Returns:
          A new array of ``size`` bytes for each lane: unsigned integers up to 8 bytes, complex
          numbers for 16; for 32 bytes it has two columns of 16. Use ``.view`` to get at the parts.

        Raises:
          SimulationError: misaligned, or out of bounds.
        """
        parts = self._parts(lanes, space, addresses)
        if len(parts) > 1:
            width = min(size, 16)
            shape = (lanes.count,) if size <= 16 else (lanes.count, 2)
            result: Array = np.empty(shape, _WIDTHS[width])
            for one, mask, inner in parts:
                assert mask is not None
                chosen = lanes.where(mask)
                assert chosen is not None
                result[mask] = self.load(chosen, one, inner, size, instruction, kind)
            return result
        ((space, _, addresses),) = parts
        region, offsets = self.locate(lanes, space, addresses, size, instruction, kind, False)
        if size == 32:
            places = offsets >> 4
            view = region.views[16]
            return np.stack([view[places], view[places + 1]], axis=1)
        found: Array = region.views[size][offsets >> (size.bit_length() - 1)]
        return found

    def store(
        self,
        lanes: Lanes,
        space: str,
        addresses: Values,
        values: Array,
        size: int,
        instruction: Instruction,
        kind: str = "write",
    ) -> None:
        """Writes ``size`` bytes for each lane; ``values`` as :meth:`load` returns them.

        Of several lanes that write to one place, the last wins.
        """
        parts = self._parts(lanes, space, addresses)
        if len(parts) > 1:
            for one, mask, inner in parts:
                assert mask is not None
                chosen = lanes.where(mask)
                assert chosen is not None
                self.store(chosen, one, inner, values[mask], size, instruction, kind)
            return
        ((space, _, addresses),) = parts
        region, offsets = self.locate(
            lanes, space, addresses, size, instruction, kind, values=values
        )
        self.wave.progress += 1
        if size == 32:
            places = offsets >> 4
            region.views[16][places] = values[:, 0]
            region.views[16][places + 1] = values[:, 1]
        else:
            region.views[size][offsets >> (size.bit_length() - 1)] = values

    def locate(
        self,
        lanes: Lanes,
        space: str,
        addresses: Values,
        size: int,
        instruction: Instruction,
        kind: str,
        writes: bool = True,
        values: Array | None = None,
    ) -> tuple[Region, Array]:
        """Where in a region the addresses are (byte offsets, int64), after all checks.

        ``space`` must not be generic. Tells the observer, and counts the bytes.

        Args:
          writes: whether the access may change memory (for ``kind`` ``"atomic"``).
          values: what is going to be written, for the observer, if it is known.

        Raises:
          SimulationError: misaligned, out of bounds, or a write to constants or parameters.
        """
        addresses = np.asarray(addresses)
        if addresses.ndim == 0:
            addresses = np.full(lanes.count, addresses)
        offsets = self.offsets(lanes, space, addresses, size, instruction)
        if space.startswith("shared"):
            space = "shared"
        self.check_alignment(lanes, space, addresses, size, size, instruction)
        writes = writes and kind != "read"
        if writes:
            wrong = self._read_only(space, offsets)
            if wrong is not None:
                self._fail(lanes, space, addresses, wrong, size, instruction, "read-only")
        moved = self.bytes_moved
        moved[space, kind] = moved.get((space, kind), 0) + size * lanes.count
        traffic = self.wave.traffic
        if traffic is not None:
            if space == "shared":
                traffic.shared(lanes, offsets, size, instruction)
            elif space == "global":
                traffic.global_(lanes, offsets, size, instruction, kind)
        observer = self.wave.observer
        if observer is not None and space != "param":
            observer.access(
                Access(kind, space, lanes.numbers, offsets, size, instruction, writes, values)
            )
        return self.regions[space], offsets

    def offsets(
        self, lanes: Lanes, space: str, addresses: Array, size: int, instruction: Instruction
    ) -> Array:
        """Byte offsets in the memory of a space (int64), for accesses of ``size`` bytes.

        Raises:
          SimulationError: out of bounds.
        """
        low, high = int(addresses.min()), int(addresses.max())
        if space in ("global", "const"):
            if low < GLOBAL_BASE or high >= GLOBAL_BASE + (1 << WINDOW_SHIFT):
                wrong = addresses - np.uint64(GLOBAL_BASE) >= np.uint64(1 << WINDOW_SHIFT)
                self._fail(lanes, space, addresses, wrong, size, instruction)
            offsets: Array = (addresses - np.uint64(GLOBAL_BASE)).view(np.int64)
            outside = self.global_memory.outside(
                low - GLOBAL_BASE, high - GLOBAL_BASE, offsets, size
            )
            if outside is not None:
                self._fail(lanes, space, addresses, outside, size, instruction)
            return offsets
        if space.startswith("shared"):
            return self.shared_offsets(lanes, addresses, size, instruction, low, high)
        if space not in ("local", "param"):
            raise SimulationError(
                f"there is no memory for state space {space!r}", location=instruction.location
            )
        limit = self.local_limit if space == "local" else self._parameter_bytes
        if high + size > limit:
            wrong = addresses > np.float64(limit - size)
            self._fail(lanes, space, addresses, wrong, size, instruction)
        offsets = addresses.astype(np.int64)
        return offsets + lanes.numbers * self.local_stride if space == "local" else offsets

    def check_alignment(
        self,
        lanes: Lanes,
        space: str,
        addresses: Array,
        size: int,
        alignment: int,
        instruction: Instruction,
    ) -> None:
        """Raises :class:`SimulationError` unless all addresses are multiples of ``alignment``, a
        power of two."""
        if int(np.bitwise_or.reduce(addresses)) & (alignment - 1):
            misaligned = (addresses & np.uint64(alignment - 1)) != 0
            hint = f"the address must be a multiple of {alignment}"
            self._fail(lanes, space, addresses, misaligned, size, instruction, "misaligned", hint)

    def shared_offsets(
        self,
        lanes: Lanes,
        addresses: Array,
        size: int,
        instruction: Instruction,
        low: int,
        high: int,
    ) -> Array:
        """Offsets in the shared memory of the wave, for 32-bit shared addresses (of any block of
        the lane's cluster) of extent ``size``.

        Raises:
          SimulationError: out of bounds.
        """
        wave = self.wave
        if wave.cluster_size == 1:
            if low < self.shared_start or high + size > self.shared_limit:
                low_end, high_end = np.uint64(self.shared_start), self.shared_limit - size
                wrong = (addresses < low_end) | (addresses > np.float64(high_end))
                self._fail(lanes, "shared", addresses, wrong, size, instruction)
            return addresses.astype(np.int64) + lanes.of(wave.lane_shared_offset)
        places = addresses.astype(np.int64)
        rank, within = places >> RANK_SHIFT, places & RANK_MASK
        wrong = (
            (rank < 0)
            | (rank >= wave.cluster_size)
            | (within < self.shared_start)
            | (within + size > self.shared_limit)
        )
        if wrong.any():
            self._fail(lanes, "shared", addresses, wrong, size, instruction)
        blocks = lanes.of(wave.lane_cluster_block) + rank
        found: Array = blocks * self.shared_stride + within
        return found

    def resolve(self, lanes: Lanes, addresses: Values) -> list[tuple[str, Array | None, Values]]:
        """Splits generic addresses by state space.

        Returns:
          For each space: its name, which of the lanes have addresses in it (None: all), and these
          lanes' addresses in that space.
        """
        window = addresses >> np.uint64(WINDOW_SHIFT)
        names: list[tuple[str, Array | None]]
        if window.ndim == 0:
            names = [(_SPACE_OF_WINDOW.get(int(window), "global"), None)]
        else:
            first = int(window[0])
            if (window == window[0]).all():
                names = [(_SPACE_OF_WINDOW.get(first, "global"), None)]
            else:
                split: dict[str, Array] = {}
                for value in np.unique(window):
                    name = _SPACE_OF_WINDOW.get(int(value), "global")
                    mask = window == value
                    split[name] = split[name] | mask if name in split else mask
                names = list(split.items())
        found: list[tuple[str, Array | None, Values]] = []
        for name, mask in names:
            chosen = addresses if mask is None else addresses[mask]
            base = WINDOWS.get(name)
            found.append((name, mask, chosen if base is None else chosen - np.uint64(base)))
        return found

    def describe(self, space: str, offset: int) -> str:
        """Names the allocation of a byte offset, for messages."""
        if space in ("global", "const"):
            found = self.global_memory.allocation_at(offset)
            if found is None:
                return "no array"
            return f"byte {offset - found.offset} of {found.name} ({found.size} bytes)"
        if space == "shared":
            block, within = divmod(offset, self.shared_stride)
            return (
                f"byte {within - SHARED_BASE} of the {self.shared_limit - SHARED_BASE} bytes of"
                f" shared memory of block {self.wave.block_name(block)}"
            )
        if space in self.describes:
            return self.describes[space](offset)
        return f"byte {offset} of {space} memory"

    # Details --------------------------------------------------------------------------------------

    def _parts(
        self, lanes: Lanes, space: str, addresses: Values
    ) -> list[tuple[str, Array | None, Values]]:
        if space != "generic":
            return [(space, None, addresses)]
        return self.resolve(lanes, addresses)

    def _read_only(self, space: str, offsets: Array) -> Array | None:
        """Which of the offsets (not none) cannot be written; None if all can."""
        if space in ("const", "param"):
            return np.ones(len(offsets), np.bool_)
        return self.global_memory.read_only(offsets) if space == "global" else None

    def _fail(
        self,
        lanes: Lanes,
        space: str,
        addresses: Array,
        wrong: Array,
        size: int,
        instruction: Instruction,
        what: str = "out of bounds",
        hint: str | None = None,
    ) -> None:
        """Raises the error for the first of the accesses that are wrong."""
        first = int(np.flatnonzero(wrong)[0])
        lane, address = int(lanes.numbers[first]), int(addresses[first])
        where = f"{size} bytes at {space} address {address:#x}"
        if space in ("global", "const"):
            where += f": {self._nearest(address - GLOBAL_BASE)}"
        elif space.startswith("shared"):
            where += (
                f": byte {(address & RANK_MASK) - SHARED_BASE} of"
                f" {self.shared_limit - SHARED_BASE} bytes of shared memory"
            )
        raise SimulationError(
            f"{self.wave.thread_name(lane)} accesses memory {what}, in: {instruction.text}",
            got=f"{where} ({int(wrong.sum())} of {lanes.count} lanes)",
            hint=hint,
            location=instruction.location,
        )

    def _nearest(self, offset: int) -> str:
        """How a global offset lies to the allocation next to it."""
        memory = self.global_memory
        inside = memory.allocation_at(offset)
        if inside is not None:
            return self.describe("global", offset)
        best: str | None = None
        distance = 1 << 62
        for one in memory.allocations:
            before, after = one.offset - offset, offset - (one.offset + one.size)
            if 0 < before < distance:
                best, distance = f"{before} bytes before {one.name} ({one.size} bytes)", before
            if 0 <= after < distance:
                best, distance = f"{after} bytes behind {one.name} ({one.size} bytes)", after
        if offset + GLOBAL_BASE >> WINDOW_SHIFT == MULTICAST_WINDOW >> WINDOW_SHIFT:
            return "a multicast address, which only multimem and copies to global memory take"
        return best if best is not None and distance < 1 << 30 else "nowhere near any array"
