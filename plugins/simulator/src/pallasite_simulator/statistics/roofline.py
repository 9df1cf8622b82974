"""How long a kernel takes at least on a chip, and what it is that takes so long."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pallasite_simulator.statistics.chips import Chip
from pallasite_simulator.statistics.kinds import RESULTS_PER_CLOCK

if TYPE_CHECKING:
    from pallasite_simulator.statistics.summary import Statistics

WARP = 32
PASS_BYTES = 128
"""What one pass over the banks of shared memory moves at most."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """The time that one resource needs for the work of a kernel, if nothing else held it up.

    Attributes:
      resource: what.
      seconds: how long.
      work: how much, for people.
    """

    resource: str
    seconds: float
    work: str


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A lower bound of a kernel's time.

    The busiest resource binds; how busy the others are meanwhile is their utilization. Latencies,
    launch overhead and waiting are not counted, and the instructions are those of the PTX, which
    the assembler joins and splits: a real run takes longer.

    Attributes:
      chip: what the figures are for.
      multiprocessors: how many have a block to run.
      bounds: longest first.
    """

    chip: Chip
    multiprocessors: int
    bounds: tuple[Bound, ...]

    @property
    def seconds(self) -> float:
        """The bound of the resource that binds."""
        return self.bounds[0].seconds

    @property
    def binding(self) -> str:
        """The resource that binds."""
        return self.bounds[0].resource

    @property
    def utilization(self) -> Mapping[str, float]:
        """By resource, which part of the time it is busy."""
        whole = self.seconds or 1.0
        return {bound.resource: bound.seconds / whole for bound in self.bounds}


def estimate(statistics: Statistics, chip: Chip) -> Estimate:
    """The roofline of what was counted; if only some blocks ran, scaled to the whole grid."""
    whole = statistics.grid_blocks / max(statistics.blocks, 1)
    busy = max(1, min(chip.multiprocessors, statistics.grid_blocks))
    per_second = busy * chip.clock
    instructions = statistics.warp_instructions * whole
    bounds = [
        Bound(
            "instruction issue",
            instructions / (chip.issue * per_second),
            f"{instructions:.3g} warp instructions",
        )
    ]
    read, written = statistics.memory_read, statistics.memory_written
    moved = (read + written) * whole
    bounds.append(Bound("memory", moved / chip.memory_bandwidth, f"{moved:.3g} bytes"))
    if statistics.link_bytes and chip.link_bandwidth:
        sent = statistics.link_bytes * whole
        seconds = sent / chip.link_bandwidth
        bounds.append(Bound("links to other devices", seconds, f"{sent:.3g} bytes in a direction"))
    passes = statistics.shared_passes + max(0, statistics.shared_bytes_of_engines) / PASS_BYTES
    passes *= whole
    seconds = passes * PASS_BYTES / (chip.shared_bandwidth * per_second)
    bounds.append(Bound("shared memory", seconds, f"{passes:.3g} passes over the banks"))
    pipes: dict[str, float] = {}
    for kind, count in statistics.kinds.items():
        pipe = RESULTS_PER_CLOCK.get(kind)
        if pipe is not None and pipe in chip.pipes:
            pipes[pipe] = pipes.get(pipe, 0.0) + count * whole
    for pipe, amount in pipes.items():
        seconds = amount * WARP / (chip.pipes[pipe] * per_second)
        bounds.append(Bound(f"{pipe} arithmetic", seconds, f"{amount:.3g} warp instructions"))
    for name, operations in statistics.tensor_operations.items():
        rate = chip.tensor_rates.get(name)
        if rate:
            amount = operations * whole
            seconds = amount / (rate * busy / chip.multiprocessors)
            bounds.append(Bound(f"tensor cores ({name})", seconds, f"{amount:.3g} operations"))
    bounds.sort(key=lambda bound: -bound.seconds)
    return Estimate(chip, busy, tuple(bound for bound in bounds if bound.seconds))
