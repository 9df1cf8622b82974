"""Addresses that mean the same place in the memory of each of several devices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.engine.memory import (
    GLOBAL_BASE,
    MULTICAST_WINDOW,
    WINDOW_SHIFT,
    GlobalMemory,
)
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array, Values

_WINDOW = MULTICAST_WINDOW >> WINDOW_SHIFT


def on_each_device(lanes: Lanes, addresses: Values, instruction: Instruction) -> Iterator[Array]:
    """The addresses that multicast addresses mean, on one device after the other.

    Raises:
      SimulationError: they are no multicast addresses.
    """
    places = np.broadcast_to(addresses, (lanes.count,))
    segments = lanes.wave.memory.global_memory.segments
    wrong = places >> np.uint64(WINDOW_SHIFT) != _WINDOW
    if segments is not None:
        wrong |= places - np.uint64(MULTICAST_WINDOW) >= np.uint64(segments.stride)
    if segments is None or wrong.any():
        first = int(np.flatnonzero(wrong)[0]) if wrong.any() else 0
        raise SimulationError(
            f"{lanes.wave.thread_name(int(lanes.numbers[first]))} uses an address that is no"
            f" multicast address, in: {instruction.text}",
            got=f"{int(places[first]):#x}",
            expected="an address that means the memory of all devices",
            location=instruction.location,
        )
    within = places - np.uint64(MULTICAST_WINDOW)
    for device in range(segments.count):
        yield within + np.uint64(GLOBAL_BASE + segments.start + device * segments.stride)


def destinations(lanes: Lanes, addresses: Values, instruction: Instruction) -> Iterator[Array]:
    """The addresses to which something is copied: one set of them, or one for each device.

    Raises:
      SimulationError: some are multicast addresses, and some are not.
    """
    places = np.broadcast_to(addresses, (lanes.count,))
    if (places >> np.uint64(WINDOW_SHIFT) == _WINDOW).any():
        yield from on_each_device(lanes, places, instruction)
    else:
        yield places


def each_address(memory: GlobalMemory, address: int) -> list[int]:
    """What an address means: itself, or the address on each of the devices."""
    segments = memory.segments
    if address >> WINDOW_SHIFT != _WINDOW or segments is None:
        return [address]
    base = address - MULTICAST_WINDOW + GLOBAL_BASE + segments.start
    return [base + device * segments.stride for device in range(segments.count)]
