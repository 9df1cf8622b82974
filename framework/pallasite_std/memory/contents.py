"""What a kernel does to an allocation of shared memory, for checks while the kernel runs."""

from __future__ import annotations

import dataclasses
import operator

from pallasite.plugin import SourceLocation
from pallasite.plugin.lowering import Allocation, LaunchContext

MEMBER = "union member"
"""The space of rows that say which lines access a member of a ``RefUnion``."""

DISCARDED = "discarded"
"""The space of rows of arrays whose contents are not used after a copy to global memory."""

COLUMNS = 1024
"""Accesses of one line that mean several things have columns so far apart."""

_KEY = operator.attrgetter("file", "line", "column", "function")


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of an allocation: all of an array, or a member of a union.

    ``start`` is relative to the allocation; ``is_member`` says whether others share the bytes.
    """

    what: str
    start: int
    size: int
    is_member: bool = False


@dataclasses.dataclass(eq=False, slots=True)
class AllocationUse:
    """What is done to one allocation.

    Attributes:
      lines: those that access it.
      members: those that access each member of a union.
      discarded: parts whose contents are not used once they have been copied to global memory,
        and the lines that copy them.
    """

    lines: set[SourceLocation] = dataclasses.field(default_factory=set)
    members: dict[Part, set[SourceLocation]] = dataclasses.field(default_factory=dict)
    discarded: dict[Part, set[SourceLocation]] = dataclasses.field(default_factory=dict)
    _meanings: dict[SourceLocation, list[tuple[Part | None, bool]]] = dataclasses.field(
        default_factory=dict
    )

    def access(
        self,
        line: SourceLocation,
        part: Part | None,
        *,
        discards: bool = False,
        own_line: bool = False,
    ) -> SourceLocation:
        """Notes a line that accesses a part, and perhaps discards it.

        Returns the line that its instructions are to have: with ``own_line``, one that means this
        alone. A line of the program, as that of a function, may access several members of a union,
        each of which then has a column of its own.
        """
        member = part if part is not None and part.is_member else None
        meanings = self._meanings.setdefault(line, [])
        if (member, discards) not in meanings:
            meanings.append((member, discards))
        number = meanings.index((member, discards))
        if own_line and number:
            line = dataclasses.replace(line, column=line.column + COLUMNS * number)
        self.lines.add(line)
        if member is not None:
            self.members.setdefault(member, set()).add(line)
        if discards and part is not None:
            self.discarded.setdefault(part, set()).add(line)
        return line


def note_use(launch: LaunchContext, row: Allocation, use: AllocationUse) -> None:
    """Adds what is done to an allocation to its row, and rows of its parts."""
    _note_lines(launch, row, use.lines)
    for part, lines in use.members.items():
        _note_lines(launch, _part_of(row, MEMBER, part), lines)
    for part, lines in use.discarded.items():
        _note_lines(launch, _part_of(row, DISCARDED, part), lines)


def _part_of(row: Allocation, space: str, part: Part) -> Allocation:
    """A row of some bytes of an allocation, which are none of a resource by themselves."""
    return Allocation(space, part.what, part.size, row.offset + part.start, row.location, "")


def _note_lines(launch: LaunchContext, row: Allocation, lines: set[SourceLocation]) -> None:
    """Adds lines to a row, of which there may be several where the scope was lowered before."""
    rows = launch.allocations
    same = [one for one in rows if dataclasses.replace(one, accessed_at=()) == row]
    lines = lines.union(*(one.accessed_at for one in same))
    rows[:] = [one for one in rows if one not in same]
    rows.append(dataclasses.replace(row, accessed_at=tuple(sorted(lines, key=_KEY))))
