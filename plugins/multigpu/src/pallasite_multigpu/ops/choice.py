"""Which method, how many blocks and how large tiles: from the sizes, as measured on two H200."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Literal

import jax

from pallasite.plugin import plugins, select_target
from pallasite_multigpu.ops.tiles import Tiles, elements_of_tile, tiles_of

WRITES_FROM = 2 << 20
"""Bytes of an array from which on devices write what others get."""
ONE_STEP = 1 << 20
"""Bytes that a device reads at most, where all read all arrays."""
GATHERED_AT_MOST = 4 << 20
"""Bytes of all devices' keys and values up to which attention gathers them first: the launches of a
ring take longer than that."""
GRADIENTS_GATHERED_AT_MOST = 256 << 20
"""The same of gradients. On two H200, forward and backward of 16 heads of 128 took 342 us in a ring
and 242 gathered with 1024 tokens for each device (16 MiB), 7597 and 6973 with 8192 (128 MiB)."""
PIPELINED_FROM = 32 << 20
"""Bytes of an array from which on sums are made by stores in pieces (two devices, 64 MiB: 253 us,
in one step 261, in two 269; 256 MiB: 966, 1034 and 1001; 4 MiB: 32.1, 31.1 and 32.8)."""
UNROLL = 8
"""Vectors of 16 bytes that a lane has in flight."""
UNROLL_PIPELINED = 16
"""The same of sums that are made by stores in pieces."""
UNROLL_TWO_STEPS = 32
"""The same of sums in two steps from :data:`LARGER_TILES_FROM` on, of elements of 32 bits or more:
the kernel takes 18.8 us of 4 MiB on two H200, in place of 19.5, and 30.8 of 8 MiB, not 31.9."""
LARGER_TILES_FROM = 4 << 20
"""Bytes of an array."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How an operation is carried out.

    Attributes:
      blocks: of the kernel, at most.
      tile: elements that a block moves at once.
      writes: whether devices write what the others get, rather than read.
    """

    blocks: int
    tile: int
    writes: bool = False

    def tiles(self, rows: int, columns: int) -> Tiles:
        """The tiles of an array of these extents."""
        return tiles_of(rows, columns, self.tile, self.blocks)


def plan(
    itemsize: int,
    size: int,
    arrays: int,
    num_blocks: int | None,
    tile_size: int | None,
    unroll: int | None = None,
) -> Plan:
    """How an operation is carried out.

    Args:
      itemsize: bytes of an element.
      size: elements of this device's array.
      arrays: how many arrays a lane holds tiles of at the same time.
      num_blocks, tile_size: what the caller wants, or None.
      unroll: vectors that a lane has in flight; by default :data:`UNROLL`.
    """
    blocks = num_blocks or select_target().multiprocessors or 132
    if tile_size is None:
        largest = elements_of_tile(itemsize, arrays, unroll or UNROLL)
        smallest = elements_of_tile(itemsize, arrays, 1)
        # Small arrays are shared by as many blocks as there are tiles of one vector.
        tile_size = max(min(largest, -(-size // blocks // smallest) * smallest), smallest)
    # Stores to peers are faster than loads from them, but have to be announced.
    return Plan(blocks, tile_size, writes=size * itemsize >= WRITES_FROM)


def method_of_all_reduce(nbytes: int, count: int) -> str:
    """Whether all devices read all arrays, or each reduces a part and writes it to the others; of
    large arrays in pieces, which takes as much memory again. Several processes have less of that:
    what others write to lies in the memory that they share.

    Two devices read as much in one step as in two, of which each takes a barrier; but in two, the
    result takes the place of the operand. In a loop of one sum of 16 KiB, a step takes 10.5 us in
    two steps, and 16.9 in one, with a copy; eight sums in a row 8.1 and 7.7 each.

    Args:
      nbytes: of this device's array.
      count: devices.
    """
    if nbytes >= PIPELINED_FROM and jax.process_count() == 1:
        return "pipelined"
    if nbytes * (count - 1) > ONE_STEP:
        return "two_steps"
    return "two_steps" if count == 2 else "one_step"


def unroll_of_all_reduce(method: str, nbytes: int, itemsize: int) -> int:
    """Vectors of 16 bytes that a lane has in flight.

    Args:
      method: of :func:`method_of_all_reduce`.
      nbytes: of this device's array.
      itemsize: bytes of an element; narrower ones are added in float32, which takes more registers.
    """
    if method == "pipelined":
        return UNROLL_PIPELINED
    larger = method == "two_steps" and nbytes >= LARGER_TILES_FROM and itemsize >= 4
    return UNROLL_TWO_STEPS if larger else UNROLL


def method_of_ring_attention(nbytes: int) -> Literal["ring", "gather"]:
    """Whether keys and values travel around the ring, or are gathered first.

    Args:
      nbytes: of the keys and values of all devices.
    """
    return "gather" if nbytes <= GATHERED_AT_MOST else "ring"


def gathers_for_gradients(nbytes: int) -> bool:
    """Whether gradients of ring attention are made with all keys and values at once.

    Args:
      nbytes: of the keys and values of all devices; their gradients take as many.
    """
    return nbytes <= GRADIENTS_GATHERED_AT_MOST


def has_hopper() -> bool:
    """Whether the target has what Hopper's kernels need, and the plugin with them is loaded."""
    if "wgmma" not in select_target().features:
        return False
    if importlib.util.find_spec("pallasite_hopper") is None:
        return False
    return any(one.name == "hopper" and one.state == "loaded" for one in plugins.plugins())
