"""The statistics of one launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pallasite.plugin import SourceLocation, Target
from pallasite_simulator.statistics import roofline
from pallasite_simulator.statistics.chips import Chip, chip_for
from pallasite_simulator.statistics.kinds import KINDS, kind_of, tensor_work

if TYPE_CHECKING:
    from pallasite_simulator.engine.program import Program
    from pallasite_simulator.launch import Execution

TENSOR_COUNTER = "tensor operations "
"""Beginning of the counters in which instructions count operations that their names do not say; the
type of the multiplicands follows, as in :data:`.chips.Chip.tensor_rates`. The counter without a
type holds all of them, and is not shown again."""


@dataclasses.dataclass(frozen=True)
class AccessLine:
    """The accesses of one instruction to shared or global memory.

    Attributes:
      space: ``"shared"`` or ``"global"``.
      location: the user's line, if known.
      instruction: the text of the instruction.
      warps: how many times a warp executed it.
      units: how many passes over the banks (``shared``) or sectors of 32 bytes (``global``).
      ideal: how many the same bytes need at least.
      bytes: how many the lanes asked for.
    """

    space: str
    location: SourceLocation | None
    instruction: str
    warps: int
    units: int
    ideal: int
    bytes: int

    @property
    def excess(self) -> int:
        """How many could be saved."""
        return self.units - self.ideal

    @property
    def factor(self) -> float:
        """How many times as many as needed."""
        return self.units / max(self.ideal, 1)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What one launch did.

    Attributes:
      kernel: its name.
      target: what it was compiled for; empty if not known.
      blocks: how many ran, of ``grid_blocks``.
      kinds: by kind of instruction (see :mod:`.kinds`), how many warps executed one.
      bytes_moved: bytes that lanes and copies asked for, by (space, ``"read"``, ``"write"`` or
        ``"atomic"``).
      memory_read, memory_written: bytes of global memory in the sectors that were touched at all,
        which is what must come from and go to the memory outside of the chip.
      accesses: by instruction, those with the most to save first.
      tensor_operations: multiplications and additions of the tensor cores, by type of the
        multiplicands.
      counters: further numbers that instructions keep, by name.
      estimate: a lower bound of the time on a chip; None if there are no figures of one.
      device: which of several devices this is; None for one alone.
      links: bytes that went from one device to another, by pair, on all devices.
    """

    kernel: str
    target: str
    blocks: int
    grid_blocks: int
    kinds: Mapping[str, int]
    bytes_moved: Mapping[tuple[str, str], int]
    memory_read: int
    memory_written: int
    accesses: tuple[AccessLine, ...]
    tensor_operations: Mapping[str, int]
    counters: Mapping[str, int]
    estimate: roofline.Estimate | None = None
    device: int | None = None
    links: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)

    @property
    def link_bytes(self) -> int:
        """Bytes that came from other devices, or went to them, whichever are more."""
        sent = sum(count for (origin, _), count in self.links.items() if origin == self.device)
        received = sum(count for (_, end), count in self.links.items() if end == self.device)
        return max(sent, received)

    @property
    def warp_instructions(self) -> int:
        """How many instructions warps executed."""
        return sum(self.kinds.values())

    @property
    def shared_passes(self) -> int:
        """Passes over the banks of shared memory."""
        return sum(line.units for line in self.accesses if line.space == "shared")

    @property
    def bank_conflicts(self) -> int:
        """Passes over the banks beyond those that the bytes need."""
        return sum(line.excess for line in self.accesses if line.space == "shared")

    @property
    def shared_bytes_of_engines(self) -> int:
        """Bytes of shared memory that copies and tensor cores moved by themselves."""
        moved = sum(n for (space, _), n in self.bytes_moved.items() if space == "shared")
        return moved - sum(line.bytes for line in self.accesses if line.space == "shared")

    @property
    def sectors(self) -> int:
        """Sectors of 32 bytes that warps asked global memory for."""
        return sum(line.units for line in self.accesses if line.space == "global")

    def as_json(self) -> dict[str, Any]:
        """Everything, as what JSON can hold; sizes in bytes, times in seconds."""
        moved: dict[str, dict[str, int]] = {}
        for (space, kind), count in self.bytes_moved.items():
            moved.setdefault(space, {})[kind] = count
        return {
            "kernel": self.kernel,
            "target": self.target,
            "blocks": self.blocks,
            "grid_blocks": self.grid_blocks,
            "warp_instructions": self.warp_instructions,
            "instructions": dict(self.kinds),
            "bytes": moved,
            "memory_read": self.memory_read,
            "memory_written": self.memory_written,
            "shared_passes": self.shared_passes,
            "bank_conflicts": self.bank_conflicts,
            "sectors": self.sectors,
            "accesses": [
                {
                    "space": line.space,
                    "file": line.location.file if line.location else None,
                    "line": line.location.line if line.location else None,
                    "instruction": line.instruction,
                    "warps": line.warps,
                    "passes" if line.space == "shared" else "sectors": line.units,
                    "ideal": line.ideal,
                    "bytes": line.bytes,
                }
                for line in self.accesses
            ],
            "tensor_operations": dict(self.tensor_operations),
            "counters": dict(self.counters),
            "links": [
                {"from": origin, "to": end, "bytes": count}
                for (origin, end), count in sorted(self.links.items())
            ],
            "estimate": _estimate_json(self.estimate),
        }

    def __str__(self) -> str:
        from pallasite_simulator.statistics.text import describe

        return describe(self)


def summarize(
    program: Program,
    execution: Execution,
    grid_blocks: int,
    target: Target | None = None,
    chip: Chip | None = None,
) -> Statistics:
    """Puts the numbers of an execution together.

    Args:
      program: what ran.
      execution: what was counted.
      grid_blocks: of the whole grid.
      target: what the kernel was compiled for.
      chip: what the estimate is for; by default the one that stands for the target.
    """
    kinds: dict[str, int] = {}
    tensor: dict[str, int] = {}
    for entry, count in zip(program.code, execution.issued.tolist(), strict=False):
        if not count:
            continue
        kind = kind_of(entry.instruction)
        kinds[kind] = kinds.get(kind, 0) + count
        work = tensor_work(entry.instruction)
        if work is not None:
            tensor[work[0]] = tensor.get(work[0], 0) + count * work[1]
    counters = {}
    for name, count in execution.counters.items():
        if name.startswith(TENSOR_COUNTER):
            multiplicands = name.removeprefix(TENSOR_COUNTER)
            tensor[multiplicands] = tensor.get(multiplicands, 0) + count
        elif name != TENSOR_COUNTER.strip():
            counters[name] = count
    if chip is None and target is not None:
        chip = chip_for(target.compute_capability)
    read, written = execution.touched_bytes
    found = Statistics(
        kernel=program.name,
        target=target.name if target is not None else program.module.target,
        blocks=execution.blocks,
        grid_blocks=grid_blocks,
        kinds=dict(sorted(kinds.items(), key=_order)),
        bytes_moved=dict(sorted(execution.bytes_moved.items())),
        memory_read=read,
        memory_written=written,
        accesses=tuple(_lines(program, execution)),
        tensor_operations=tensor,
        counters=counters,
        device=execution.device,
        links=dict(execution.links),
    )
    if chip is not None and found.warp_instructions:
        found = dataclasses.replace(found, estimate=roofline.estimate(found, chip))
    return found


def _lines(program: Program, execution: Execution) -> Iterable[AccessLine]:
    lines = []
    for pc, (space, warps, units, ideal, moved) in execution.accesses.items():
        one = program.code[pc].instruction
        lines.append(AccessLine(space, one.location, one.text, warps, units, ideal, moved))
    return sorted(lines, key=lambda line: (-line.excess, -line.units))


def _order(item: tuple[str, int]) -> int:
    whole = item[0]
    found = [place for place, kind in enumerate(KINDS) if whole.startswith(kind)]
    return found[0] if found else len(KINDS)


def _estimate_json(estimate: roofline.Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    return {
        "chip": estimate.chip.name,
        "multiprocessors": estimate.multiprocessors,
        "seconds": estimate.seconds,
        "binding": estimate.binding,
        "bounds": {bound.resource: bound.seconds for bound in estimate.bounds},
        "utilization": dict(estimate.utilization),
    }
