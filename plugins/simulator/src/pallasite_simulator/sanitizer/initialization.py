"""Reads of memory that holds no value: nobody has written it, or it is not to be read any more."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.sanitizer.contents import Unreadable
from pallasite_simulator.sanitizer.history import Accessor, Operation
from pallasite_simulator.sanitizer.outputs import READ_BEFORE, UNWRITTEN
from pallasite_simulator.sanitizer.report import Reporter
from pallasite_simulator.sanitizer.shadow import Places, granule
from pallasite_simulator.sanitizer.undefined import Origin, UndefinedValues
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.wave import Wave


class Initialization:
    """Checks the reads of one wave."""

    def __init__(self, wave: Wave, reporter: Reporter, undefined: UndefinedValues):
        self.wave = wave
        self.reporter = reporter
        self._undefined = undefined

    def check_initialized(
        self, before: Array, places: Places, accessor: Accessor, operation: Operation
    ) -> None:
        """Reports reads of what nobody has written, or of what is not to be read any more."""
        unreadable = None
        if operation.space == "shared" and operation.offsets is not None:
            one, offsets, loads = operation.instruction, operation.offsets, _is_load(operation)
            contents = self._undefined.contents
            unreadable = contents.unreadable(
                one, offsets, operation.size, lanes=accessor.lanes, undefined=loads
            )
        if unreadable is None and before.all():
            return
        if accessor.lanes is not None and _is_load(operation):
            self._load_undefined(before, places, accessor, operation, unreadable)
            return
        if unreadable is not None:
            self.report_unreadable(unreadable, accessor.lanes, operation)
            return
        positions = np.flatnonzero(before == 0)
        if not len(positions):
            return
        offset = granule(places, int(positions[0])) << places.level
        where = self.reporter.where(operation.space, offset)
        text = f"reads {where}, which is uninitialized"
        hint = "write it before, or load it and wait for the load"
        kind = f"read of uninitialized {operation.space} memory"
        if accessor.lanes is not None:
            lanes = accessor.lanes[np.unique(places.owners(positions))]
            self.reporter.simple(kind, lanes, text, operation.instruction, hint)
            return
        owner = int(places.owners(positions[:1])[0])
        entry = accessor.entry(owner, operation.flags)
        self.reporter.operation(kind, entry, text, operation.instruction, hint)

    def check_outputs(
        self,
        before: Array,
        strong: Array | None,
        places: Places,
        accessor: Accessor,
        operation: Operation,
    ) -> None:
        """Reports reads of outputs and scratch that nobody has written."""
        known = before if strong is None else before | strong
        if known.all():
            return
        positions = np.flatnonzero(known == 0)
        first = granule(places, int(positions[0])) << places.level
        memory = self.wave.memory.global_memory
        found = memory.allocation_at(first)
        if found is None or not found.undefined:
            return
        if accessor.lanes is not None and _is_load(operation):
            self._load_undefined(known, places, accessor, operation, None)
            return
        owner = int(places.owners(positions[:1])[0])
        self.reporter.operation(
            READ_BEFORE,
            accessor.entry(owner, operation.flags),
            f"{operation.verb} {self.reporter.where('global', first)}, which nobody has written",
            operation.instruction,
            UNWRITTEN,
        )

    def check_contents(
        self, what: Operation, lanes: Array, offsets: Array, size: int, *, copied_out: bool
    ) -> None:
        """Checks that an asynchronous operation may read what shared memory holds, or notes that it
        writes it."""
        contents = self._undefined.contents
        if not what.reads:
            contents.written(what.instruction, offsets, size)
            return
        found = contents.unreadable(what.instruction, offsets, size, undefined=copied_out)
        if found is not None:
            what = dataclasses.replace(what, offsets=offsets)
            self.report_unreadable(found, lanes, what)
        if copied_out:
            contents.copied_out(offsets, size)

    def report_unreadable(
        self, found: Unreadable, lanes: Array | None, operation: Operation
    ) -> None:
        """Reports bytes that accesses, one for each of the operation's offsets, must not read."""
        assert operation.offsets is not None and lanes is not None
        row, byte = np.argwhere(found.wrong)[0]
        where = self.reporter.where("shared", int(operation.offsets[row] + byte))
        wrong = lanes if len(lanes) != len(found.wrong) else lanes[found.wrong.any(axis=1)]
        self.reporter.simple(
            found.kind,
            wrong,
            f"reads {where}{found.text}",
            operation.instruction,
            found.hint,
            location=found.location,
        )

    def _load_undefined(
        self,
        before: Array,
        places: Places,
        accessor: Accessor,
        operation: Operation,
        unreadable: Unreadable | None,
    ) -> None:
        """Notes which bytes that lanes load are uninitialized."""
        lanes, offsets, size = accessor.lanes, operation.offsets, operation.size
        assert lanes is not None and offsets is not None
        wrong = np.zeros((len(lanes), size), np.bool_)
        positions = np.flatnonzero(before == 0)
        owners = places.owners(positions)
        if places.each == 1:
            wrong[owners] = True
        else:
            wrong.reshape(len(lanes), places.each, -1)[owners, positions % places.each] = True
        kind, text = f"read of uninitialized {operation.space} memory", ", which is uninitialized"
        hint = "write it before, or load it and wait for the load"
        if unreadable is not None:
            chosen = slice(None) if places.chosen is None else places.chosen
            wrong[chosen] |= unreadable.wrong[chosen]
            kind, text, hint = unreadable.kind, unreadable.text, unreadable.hint
        if not wrong.any():
            return
        first = np.argwhere(wrong)[0]
        where = self.reporter.where(operation.space, int(offsets[first[0]] + first[1]))
        origin = Origin(
            kind,
            f"reads {where}{text}",
            operation.instruction,
            UNWRITTEN if operation.space == "global" else hint,
            lanes[wrong.any(axis=1)],
        )
        self._undefined.loaded(lanes, wrong, origin)


def _is_load(operation: Operation) -> bool:
    return operation.instruction.opcode == "ld"
