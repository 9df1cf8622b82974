"""Which allocation of shared memory an access belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pallasite.plugin import SourceLocation
from pallasite_simulator.engine.memory import SHARED_BASE
from pallasite_simulator.ptx.syntax import Instruction, Position, Symbol
from pallasite_simulator.sanitizer.provenance import provenance, starts_of_accesses
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite.plugin.lowering import Allocation
    from pallasite_simulator.engine.program import Program

type Line = tuple[str, int, int]
"""A file, a line of it, and a column."""

_SHIFT = 4

_MOST_MEMBERS = 255


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """An allocation: ``start`` and ``end`` are byte offsets in a block's memory."""

    name: str
    start: int
    end: int
    location: SourceLocation | None = None
    lines: frozenset[Line] = frozenset()

    def holds(self, byte: int) -> bool:
        """Whether a byte of a block's memory is in it."""
        return self.start <= byte < self.end

    def covers(self, start: int, end: int) -> bool:
        """Whether all bytes from ``start`` to ``end`` of a block's memory are in it."""
        return self.start <= start and end <= self.end

    def __str__(self) -> str:
        where = f", from {self.location}" if self.location else ""
        return f"{self.name!r} ({self.end - self.start} bytes{where})"


class SharedAllocations:
    """All allocations of a block's shared memory: static variables, and what the dynamic shared
    memory is used for. They may overlap, if they are used one after the other.

    Attributes:
      pieces: ascending by start.
      members: of unions, with the lines that access them.
      discarded: arrays, and members of unions, whose contents are not used after they have been
        copied to global memory.
    """

    def __init__(
        self, program: Program, allocations: Sequence[Allocation], limit: int, stride: int
    ):
        self.pieces: list[Piece] = []
        self._of_variables: dict[str, Piece] = {}
        self._of_lines: dict[Line, list[Piece]] = {}
        nowhere = Instruction("", (), (), Position(0, 0), "")
        first = SHARED_BASE + program.static_shared_bytes
        variables = (*program.module.variables, *program.function.variables)
        for one in variables:
            if one.space == "shared" and one.bytes:
                _, start = program.symbol(Symbol(one.name), nowhere)
                if one.external:
                    # Dynamic shared memory, of which some compilers declare a byte.
                    first = min(first, start)
                    continue
                self.pieces.append(Piece(one.name, start, start + one.bytes))
                self._of_variables[one.name] = self.pieces[-1]
        dynamic = [one for one in allocations if one.space in ("smem", "barrier")]
        for asked in dynamic:
            piece = _piece(asked, first)
            self.pieces.append(piece)
            for line in piece.lines:
                self._of_lines.setdefault(line, []).append(piece)
        self.members = _pieces(allocations, "union member", first)[:_MOST_MEMBERS]
        self.discarded = _pieces(allocations, "discarded", first)
        self._members_of_line: dict[Line, list[int]] = {}
        for number, piece in enumerate(self.members, 1):
            for line in piece.lines:
                self._members_of_line.setdefault(line, []).append(number)
        # LLVM gives what it merges of several columns the column 0: it may access any of them.
        every: dict[Line, set[int]] = {}
        for (file, line_number, _), numbers in self._members_of_line.items():
            every.setdefault((file, line_number, 0), set()).update(numbers)
        self._members_of_line.update((line, sorted(numbers)) for line, numbers in every.items())
        self._discarded_by_line: dict[Line, list[Piece]] = {}
        for piece in self.discarded:
            for line in piece.lines:
                self._discarded_by_line.setdefault(line, []).append(piece)
        if not dynamic and limit > first:
            self.pieces.append(Piece("dynamic shared memory", first, limit))
        self.pieces.sort(key=lambda piece: (piece.start, piece.end))
        self.stride = stride
        self._known: dict[tuple[int, int], bool] = {}
        self._provenance = provenance(program, tuple(self._of_variables))
        self._first = first
        external = tuple(one.name for one in variables if one.space == "shared" and one.external)
        self._starts = starts_of_accesses(program, external)
        self._limits: dict[int, tuple[Piece, ...]] = {}
        whole = np.zeros(stride >> _SHIFT, np.bool_)
        for piece in self.pieces:
            whole[-(-piece.start >> _SHIFT) : piece.end >> _SHIFT] = True
        self._suspicious: Array = ~whole

    def suspicious(self, blocks: int) -> Array:
        """For each 16 bytes of the memory of some blocks, whether they do not lie in one allocation
        as a whole."""
        return np.tile(self._suspicious, blocks)

    @property
    def several_variables(self) -> bool:
        """Whether there are arrays that an access could confuse."""
        return len(self._of_variables) > 1 or sum(bool(one.lines) for one in self.pieces) > 1

    def limits(self, instruction: Instruction) -> tuple[Piece, ...]:
        """The arrays to one of which an access belongs; none if that is not known."""
        found = self._limits.get(id(instruction))
        if found is None:
            names = self._provenance.of(instruction) or ()
            found = tuple(self._of_variables[name] for name in sorted(names))
            found = found or self._arrays(instruction)
            self._limits[id(instruction)] = found
        return found

    def _arrays(self, instruction: Instruction) -> tuple[Piece, ...]:
        """The arrays of the dynamic shared memory that an instruction's line accesses.

        An instruction can have another one's line after optimization, and the constant part of an
        address can lie before its array. So what is known of both has to agree.
        """
        if instruction.location is None or not self._of_lines:
            return ()
        found = self._of_lines.get(_line(instruction.location), ())
        starts = self._starts.of(instruction) if found else None
        if not starts:
            return ()
        places = [self._first + start for start in starts]
        if not all(any(one.start <= at < one.end for one in found) for at in places):
            return ()
        return tuple(found)

    def members_of(self, instruction: Instruction) -> Sequence[int]:
        """The numbers of members, from 1 on, that the instruction's line accesses."""
        where = instruction.location
        return () if where is None else self._members_of_line.get(_line(where), ())

    def discarded_by(self, instruction: Instruction) -> Sequence[Piece]:
        """The arrays that the instruction's line copies to global memory, and that's the end of."""
        where = instruction.location
        return () if where is None else self._discarded_by_line.get(_line(where), ())

    def in_array(self, start: int, end: int) -> bool:
        """Whether bytes are in an array of which it is known what accesses it."""
        return any(
            piece.start <= start and end <= piece.end
            for piece in self.pieces
            if piece.lines or piece.name in self._of_variables
        )

    def inside(self, start: int, end: int) -> bool:
        """Whether the bytes, given by their offsets in a block's memory, are in one allocation."""
        key = (start, end)
        found = self._known.get(key)
        if found is None:
            found = any(piece.start <= start and end <= piece.end for piece in self.pieces)
            self._known[key] = found
        return found

    def describe(self, within: int) -> str:
        """What is at an offset in a block's memory."""
        found = [piece for piece in self.pieces if piece.start <= within < piece.end]
        if found:
            names = " or ".join(str(piece) for piece in found[:3])
            return f"byte {within - found[0].start} of {names}"
        return self.nearest(within)

    def nearest(self, within: int) -> str:
        """Where an offset outside of all allocations is."""
        before = [piece for piece in self.pieces if piece.end <= within]
        after = [piece for piece in self.pieces if piece.start > within]
        if before:
            piece = max(before, key=lambda one: one.end)
            return f"{within - piece.end} bytes behind the end of {piece}"
        if after:
            piece = min(after, key=lambda one: one.start)
            return f"{piece.start - within} bytes before {piece}"
        return f"byte {within - SHARED_BASE} of shared memory, where nothing is allocated"


def _piece(asked: Allocation, first: int) -> Piece:
    start = first + asked.offset
    lines = frozenset(_line(one) for one in asked.accessed_at)
    return Piece(asked.what, start, start + asked.amount, asked.location, lines)


def _pieces(allocations: Sequence[Allocation], space: str, first: int) -> list[Piece]:
    """The pieces of one space; those of several scopes that are alike are one."""
    found: dict[tuple[str, int, int], Piece] = {}
    for one in allocations:
        if one.space == space:
            piece = _piece(one, first)
            key = (piece.name, piece.start, piece.end)
            lines = piece.lines | (found[key].lines if key in found else frozenset())
            found[key] = dataclasses.replace(piece, lines=lines)
    return list(found.values())


def _line(location: SourceLocation) -> Line:
    return location.file, location.line, location.column
