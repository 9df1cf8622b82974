"""Statistics for people."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pallasite.plugin import SourceLocation
    from pallasite_simulator.statistics.roofline import Estimate
    from pallasite_simulator.statistics.summary import AccessLine, Statistics

SHOWN = 8
"""How many lines with conflicts or unused sectors are shown."""

WASTE = 1.1
"""From which factor on an access is shown."""


def describe(statistics: Statistics) -> str:
    """All numbers, in sections."""
    parts = [
        _head(statistics),
        _table("instructions", [(k, f"{n:,}") for k, n in statistics.kinds.items()]),
        _table("bytes asked for", _bytes(statistics)),
        _accesses(
            "bank conflicts: passes over the banks of shared memory", statistics, "shared", "passes"
        ),
        _accesses(
            "scattered accesses: sectors of 32 bytes of global memory",
            statistics,
            "global",
            "sectors",
        ),
        _table(
            "operations of tensor cores",
            [(name, f"{count:,}") for name, count in statistics.tensor_operations.items()],
        ),
        _table("bytes between devices", _links(statistics)),
        _table("others", [(name, f"{count:,}") for name, count in statistics.counters.items()]),
        _estimate(statistics.estimate) if statistics.estimate is not None else "",
    ]
    return "\n\n".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """``12.3 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def place(location: SourceLocation | None) -> str:
    """``file:line``, with a path from the present folder if the file is inside it."""
    if location is None:
        return "unknown line"
    relative = os.path.relpath(location.file)
    return f"{location.file if relative.startswith('..') else relative}:{location.line}"


def _head(statistics: Statistics) -> str:
    blocks = f"{statistics.blocks:,} blocks"
    if statistics.blocks != statistics.grid_blocks:
        blocks = f"{statistics.blocks:,} of {statistics.grid_blocks:,} blocks"
    return (
        f"kernel {statistics.kernel} for {statistics.target}: {blocks},"
        f" {statistics.warp_instructions:,} warp instructions"
    )


def _links(statistics: Statistics) -> list[tuple[str, str]]:
    return [
        (f"device {origin} to device {end}", f"{count:,}")
        for (origin, end), count in sorted(statistics.links.items())
    ]


def _bytes(statistics: Statistics) -> list[tuple[str, str]]:
    rows = [
        (f"{space} {kind}", f"{count:,}")
        for (space, kind), count in statistics.bytes_moved.items()
        if space != "param"
    ]
    if statistics.memory_read or statistics.memory_written:
        rows.append(("global memory read, each sector once", f"{statistics.memory_read:,}"))
        rows.append(("global memory written, each sector once", f"{statistics.memory_written:,}"))
    return rows


def _accesses(title: str, statistics: Statistics, space: str, unit: str) -> str:
    lines = [line for line in statistics.accesses if line.space == space]
    if not lines:
        return ""
    units, ideal = sum(line.units for line in lines), sum(line.ideal for line in lines)
    rows = [(f"all {unit}", f"{units:,}", f"{units / max(ideal, 1):.2f} times the least")]
    wasteful = [line for line in lines if line.factor >= WASTE]
    rows += [_access(line) for line in wasteful[:SHOWN]]
    if len(wasteful) > SHOWN:
        rows.append((f"and {len(wasteful) - SHOWN} more instructions", "", ""))
    return _table(title, rows)


def _access(line: AccessLine) -> tuple[str, str, str]:
    return place(line.location), f"{line.units:,}", f"{line.factor:.2f} times  {line.instruction}"


def _estimate(estimate: Estimate) -> str:
    rows = [
        (
            bound.resource,
            duration(bound.seconds),
            f"{100 * estimate.utilization[bound.resource]:.0f}%",
            bound.work,
        )
        for bound in estimate.bounds
    ]
    return _table(
        f"at least {duration(estimate.seconds)} on {estimate.chip.name} with"
        f" {estimate.multiprocessors} of {estimate.chip.multiprocessors} multiprocessors busy,"
        f" bound by {estimate.binding}",
        rows,
    )


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of a name, numbers aligned to the right, and a text."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [title]
    for name, *others in rows:
        cells = [name.ljust(widths[0])]
        for column, cell in enumerate(others, 1):
            last = column == len(widths) - 1 and column > 1
            cells.append(cell if last else cell.rjust(widths[column]))
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
