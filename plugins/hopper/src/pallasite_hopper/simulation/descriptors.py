"""Matrices in shared memory, as matrix descriptors describe them (PTX ISA 9.7.15.5.1.2).

A matrix is made of chunks of 16 bytes. The chunks of a K-major matrix lie along K, two for each row
of what one instruction reads; those of an MN-major one hold 8 elements of 16 bits along M or N.
Swizzling exchanges the chunks within each 128 bytes: bits 4 to 6 of an address are combined by
exclusive or with bits 7 to 9 (or fewer of them, for the smaller swizzles).
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.memory import SHARED_BASE
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

CHUNK = 16

ROW_CHUNKS = 2
"""Chunks of a row along K: all instructions read 32 bytes of it."""

ADDRESSES = 1 << 18
"""Descriptors hold addresses and offsets of 18 bits."""

PERIOD = 1024
"""The largest swizzle repeats itself after so many bytes."""

# The bits of the address of a matrix that are multiples of the period.
_PERIODS = np.uint64((ADDRESSES - PERIOD) >> 4)

_SWIZZLES = (1, 8, 4, 2)
"""Chunks that are exchanged with each other, by the descriptor's swizzling mode."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """What one instruction reads of a matrix.

    Attributes:
      rows: extent along M or N.
      k_major: whether the elements of a row (along K) lie side by side.
    """

    rows: int
    k_major: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """Addresses of chunks relative to a multiple of the period.

    Attributes:
      addresses: for K-major tiles of shape (rows, 2), else (K, rows / 8), in one dimension.
      low, high: the smallest and the largest.
    """

    addresses: Array
    low: int
    high: int


@functools.lru_cache(maxsize=4096)
def pattern(descriptor: int, tile: Tile) -> Pattern:
    """The chunks of a tile.

    Args:
      descriptor: with the multiple of the period taken off the start address.
      tile: what to read.
    """
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    base = descriptor >> 49 & 7
    span = _SWIZZLES[descriptor >> 62]
    if tile.k_major:
        row = np.arange(tile.rows)
        between = CHUNK if span > 1 else leading
        places = (row % 8 * span * CHUNK + row // 8 * stride)[:, None] + np.arange(
            ROW_CHUNKS
        ) * between
    else:
        k, chunk = np.arange(16)[:, None], np.arange(tile.rows // 8)
        # Without swizzling the roles of the two offsets are exchanged.
        along_k, along_rows = (stride, leading) if span > 1 else (leading, stride)
        places = (
            k % 8 * span * CHUNK
            + k // 8 * along_k
            + chunk % span * CHUNK
            + chunk // span * along_rows
        )
    places = start + places.reshape(-1)
    places ^= ((places >> 7) - base & span - 1) << 4
    return Pattern(places, int(places.min()), int(places.max()))


def chunks(lanes: Lanes, descriptors: Array, tile: Tile, instruction: Instruction) -> Array:
    """Where the chunks of tiles are in the wave's shared memory, in units of chunks.

    Args:
      lanes: one of each warpgroup.
      descriptors: one for each.
      tile: what each reads.
      instruction: for messages.

    Returns:
      An array of shape (warpgroups, chunks), of int64.

    Raises:
      SimulationError: outside of the block's shared memory.
    """
    memory = lanes.wave.memory
    bases = ((descriptors & _PERIODS) << np.uint64(4)).astype(np.int64)
    rest = descriptors & ~_PERIODS
    first = rest[0]
    if (rest == first).all():
        found = pattern(int(first), tile)
        places = bases[:, None] + found.addresses
        low, high = int(bases.min()) + found.low, int(bases.max()) + found.high
    else:
        kinds, which = np.unique(rest, return_inverse=True)
        patterns = np.stack([pattern(int(kind), tile).addresses for kind in kinds])
        places = bases[:, None] + patterns[which]
        low, high = int(places.min()), int(places.max())
    if high >= ADDRESSES:
        places %= ADDRESSES
        low, high = int(places.min()), int(places.max())
    if low < SHARED_BASE or high + CHUNK > memory.shared_limit:
        wrong = (places < SHARED_BASE) | (places + CHUNK > memory.shared_limit)
        _fail(lanes, descriptors, places, wrong, instruction)
    places += lanes.of(lanes.wave.lane_shared_offset)[:, None]
    places >>= 4
    return places


def _fail(
    lanes: Lanes, descriptors: Array, places: Array, wrong: Array, instruction: Instruction
) -> None:
    group = int(np.flatnonzero(wrong.any(axis=1))[0])
    address = int(places[group][wrong[group]][0])
    wave = lanes.wave
    descriptor = int(descriptors[group])
    raise SimulationError(
        f"the warpgroup of {wave.thread_name(int(lanes.numbers[group]))} reads a matrix beyond"
        f" the block's shared memory, in: {instruction.text}",
        got=f"byte {address - SHARED_BASE} of"
        f" {wave.memory.shared_limit - SHARED_BASE} bytes, from descriptor {descriptor:#018x}"
        f" ({describe(descriptor)})",
        location=instruction.location,
    )


def describe(descriptor: int) -> str:
    """The fields of a matrix descriptor, for messages."""
    swizzle = ("none", "128 bytes", "64 bytes", "32 bytes")[descriptor >> 62]
    return (
        f"start address {(descriptor & 0x3FFF) << 4:#x}, leading offset"
        f" {(descriptor >> 16 & 0x3FFF) << 4}, stride offset {(descriptor >> 32 & 0x3FFF) << 4},"
        f" base offset {descriptor >> 49 & 7}, swizzle {swizzle}"
    )
