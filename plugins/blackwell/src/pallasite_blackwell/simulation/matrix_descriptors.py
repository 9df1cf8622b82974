"""Matrices in shared memory, as matrix descriptors describe them (PTX ISA 9.7.16.4.1).

A matrix is made of chunks of 16 bytes. The chunks of a row of a K-major matrix lie along K; those
of an MN-major one along M or N. Swizzling exchanges chunks: bits 4 to 6 of an address are combined
by exclusive or with bits 7 to 9 (or fewer of them, for the smaller swizzles).
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from pallasite_blackwell.simulation.tensor_memory import TensorMemory
from pallasite_simulator.engine.memory import SHARED_BASE
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

CHUNK = 16

ADDRESSES = 1 << 18
"""Descriptors hold addresses and offsets of 18 bits."""

PERIOD = 1024
"""The largest swizzle repeats itself after so many bytes."""

_SPANS = {0: 16, 1: 128, 2: 128, 4: 64, 6: 32}
"""Bytes within which a swizzling mode moves data."""

_NAMES = {0: "none", 1: "128 bytes in atoms of 32", 2: "128 bytes", 4: "64 bytes", 6: "32 bytes"}


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """What one instruction reads of a matrix.

    Attributes:
      rows: extent along M or N, in elements.
      depth: extent along K, in elements.
      bits: of an element, with its padding.
      k_major: whether the elements of a row (along K) lie side by side.
    """

    rows: int
    depth: int
    bits: int
    k_major: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The chunks: (rows, along K), or (K, along rows)."""
        if self.k_major:
            return self.rows, -(-self.depth * self.bits // 128)
        return self.depth, -(-self.rows * self.bits // 128)


@functools.lru_cache(maxsize=4096)
def chunks(descriptor: int, tile: Tile) -> Array:
    """Where the chunks of a tile are.

    Args:
      descriptor: the descriptor; a multiple of 1024 bytes may be taken off its start address,
        unless its leading offset is an absolute address.
      tile: what to read.

    Returns:
      Byte addresses, of shape ``tile.shape``.
    """
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    base = descriptor >> 49 & 7
    mode = descriptor >> 61 & 7
    span = _SPANS[mode]
    if tile.k_major:
        row, chunk = np.arange(tile.rows)[:, None], np.arange(tile.shape[1])
        if mode == 0:
            along = chunk * leading
        elif descriptor >> 52 & 1:
            # What goes beyond the swizzled rows is at an address of its own (sm_103a).
            inside = (start % span) // CHUNK + chunk
            beyond = inside >= span // CHUNK
            along = np.where(beyond, leading - start + (inside - span // CHUNK) * CHUNK, chunk * 16)
        else:
            along = chunk * CHUNK
        places = row % 8 * span + row // 8 * stride + along
    else:
        k, chunk = np.arange(tile.depth)[:, None], np.arange(tile.shape[1])
        if mode == 0:
            places = k % 8 * CHUNK + k // 8 * leading + chunk * stride
        else:
            each = span // CHUNK
            depth = 4 if mode == 1 else 8
            places = k % depth * span + k // depth * stride + chunk % each * CHUNK
            places = places + chunk // each * leading
    places = start + places
    line = (places >> 7) - base
    if mode == 1:
        places ^= (line & 3) << 5
    elif mode:
        places ^= (line & (span // CHUNK - 1)) << 4
    return places


class SharedMatrix:
    """Reads tiles of the shared memory of blocks."""

    def __init__(self, memory: TensorMemory, instruction: Instruction):
        self._memory = memory
        self._instruction = instruction
        self._shared = memory.wave.memory
        self._view = self._shared.regions["shared"].views[CHUNK]

    def read(
        self, block: int, descriptor: int, tile: Tile, lane: int, what: str
    ) -> tuple[Array, Array]:
        """The bytes of a tile: of shape ``tile.shape`` times 16, and the offsets of its chunks in
        the wave's shared memory.

        Raises:
          SimulationError: a descriptor without meaning, or beyond the block's shared memory.
        """
        self._check(descriptor, lane, what)
        high, relative = 0, descriptor
        if not descriptor >> 52 & 1:
            high = (descriptor & 0x3FFF) << 4 & -PERIOD
            relative = descriptor & ~0x3FFF | descriptor & PERIOD - 1 >> 4
        places = (high + chunks(relative, tile)) % ADDRESSES
        low, top = int(places.min()), int(places.max())
        if low < SHARED_BASE or top + CHUNK > self._shared.shared_limit:
            outside = low if low < SHARED_BASE else top
            raise self._memory.failure(
                lane,
                f"reads {what} beyond the block's shared memory",
                self._instruction,
                got=f"byte {outside - SHARED_BASE} of"
                f" {self._shared.shared_limit - SHARED_BASE} bytes, from descriptor"
                f" {descriptor:#018x} ({describe(descriptor)})",
            )
        places = places + block * self._shared.shared_stride
        held = np.take(self._view, places >> 4, mode="clip")
        contents = held.view(np.uint8).reshape(*tile.shape, CHUNK)
        moved = self._shared.bytes_moved
        moved["shared", "read"] = moved.get(("shared", "read"), 0) + contents.size
        return contents, places

    def _check(self, descriptor: int, lane: int, what: str) -> None:
        version, mode = descriptor >> 46 & 7, descriptor >> 61 & 7
        if version in (0, 1) and mode in _SPANS and not descriptor >> 53 & 0xFF:
            return
        raise self._memory.failure(
            lane,
            f"gives a descriptor of {what} that has no meaning",
            self._instruction,
            got=f"{descriptor:#018x} ({describe(descriptor)})",
            expected="version 1 in bits 46 to 48, a swizzle of 0, 1, 2, 4 or 6 in bits 61 to 63,"
            " zeros in bits 53 to 60",
        )


def describe(descriptor: int) -> str:
    """The fields of a matrix descriptor, for messages."""
    mode = descriptor >> 61 & 7
    return (
        f"start address {(descriptor & 0x3FFF) << 4:#x}, leading offset"
        f" {(descriptor >> 16 & 0x3FFF) << 4}, stride offset {(descriptor >> 32 & 0x3FFF) << 4},"
        f" version {descriptor >> 46 & 7}, base offset {descriptor >> 49 & 7}, swizzle"
        f" {_NAMES.get(mode, mode)}"
    )
