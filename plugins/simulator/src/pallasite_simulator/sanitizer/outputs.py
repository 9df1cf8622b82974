"""Outputs that a kernel did not write, as a whole or in part."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pallasite.plugin import SourceLocation
from pallasite_simulator.arguments import Pointer
from pallasite_simulator.engine.memory import POISON
from pallasite_simulator.sanitizer.findings import Finding, identity, place
from pallasite_simulator.types import Array

if TYPE_CHECKING:
    from pallasite_simulator.engine.program import Program
    from pallasite_simulator.sanitizer.launch_state import LaunchState
    from pallasite_simulator.sanitizer.shadow import Shadow

_CERTAIN_BYTES = 16
"""How many neighbouring bytes must hold poison to say that nobody wrote them, where it is not known
which were written: fewer may do so by chance."""

_PAGE = 1024

READ_BEFORE = "read of uninitialized global memory"
UNWRITTEN = (
    "write it before it is read or added to (in Pallas: o_ref[...] = ..., or input_output_aliases"
    " for an initial value)"
)

OTHER_RUBBISH = 0x5A
"""Unlike :data:`POISON` in as many bits as possible."""

_NEVER = "write it, or do not declare it as an output"
_IN_PART = (
    "see whether the grid is large enough, and which blocks leave elements out; alias an output to"
    " an input, if some of it is to stay as it is (input_output_aliases), or say that it does not"
    ' matter: CompilerParams(plugin_options={"standard": {"partial_outputs": True}})'
)


@dataclasses.dataclass(frozen=True)
class Unwritten:
    """What of an output was not written.

    Attributes:
      name: of the output.
      text: ``"float32[8, 16]"``.
      missing, total: elements that were not written, and all.
      first: index of the first.
    """

    name: str
    text: str
    missing: int
    total: int
    first: tuple[int, ...]

    def __str__(self) -> str:
        if self.missing == self.total:
            return f"{self.name} ({self.text}) was never written"
        return (
            f"{self.missing} of {self.total} elements of {self.name} ({self.text}) were never"
            f" written, the first at {list(self.first)}"
        )


def unwritten(pointer: Pointer, missing: Array) -> Unwritten | None:
    """What of an output was not written, given that for each byte; None if all was."""
    assert pointer.output is not None
    shape, dtype = pointer.output
    total = math.prod(shape)
    if not total or not missing.any():
        return None
    each = max(1, total // len(missing))
    size = max(1, len(missing) // total)
    elements = np.repeat(missing, each)[:total] if each > 1 else missing[: total * size]
    if size > 1:
        elements = elements.reshape(total, size).any(axis=1)
    count = int(np.count_nonzero(elements))
    if not count:
        return None
    first = np.unravel_index(int(elements.argmax()), shape) if shape else ()
    text = f"{dtype.name}[{', '.join(map(str, shape))}]"
    return Unwritten(pointer.name, text, count, total, tuple(int(one) for one in first))


def still_poisoned(pointer: Pointer) -> Unwritten | None:
    """The same, as far as it can be seen from what the output holds."""
    held = pointer.array.reshape(-1).view(np.uint8) == POISON
    whole = len(held) // _CERTAIN_BYTES * _CERTAIN_BYTES
    missing = np.zeros(len(held), np.bool_)
    runs = held[:whole].reshape(-1, _CERTAIN_BYTES).all(axis=1)
    missing[:whole] = np.repeat(runs, _CERTAIN_BYTES)
    if len(held) < _CERTAIN_BYTES or runs.all():
        missing[whole:] = held[whole:].all() and len(held) - whole >= 4 or bool(runs.any())
        missing &= held
    return unwritten(pointer, missing)


type Again = Callable[[], Callable[[Pointer], Array] | None]
"""Runs a launch again with memory that begins with :data:`OTHER_RUBBISH`; returns what gives the
bytes that an output then has at the end, or None if that run fails."""


def check_outputs(
    state: LaunchState,
    program: Program,
    outputs: Sequence[tuple[Pointer, int | None]],
    exact: bool,
    again: Again | None,
) -> None:
    """Adds an error for each output that was not written.

    Args:
      state: of the launch.
      program: the kernel.
      outputs: with their offsets in global memory; None for those that the kernel never gets.
      exact: whether the shadow of global memory knows all that was written.
      again: for outputs that seem unwritten, if it does not; None if nothing is to be said then.
    """
    second = functools.cache(again or (lambda: None))
    if not exact:
        _check_early_reads(state, outputs, second)
    for pointer, offset in outputs:
        if offset is None:
            found = unwritten(pointer, np.ones(pointer.array.nbytes, np.bool_))
        elif exact:
            found = unwritten(pointer, _missing(state.global_memory, offset, pointer.array.nbytes))
        elif state.findings and offset in state.early_reads:
            continue
        else:
            found = still_poisoned(pointer)
            contents = second() if found is not None else None
            if contents is not None:
                held = pointer.array.reshape(-1).view(np.uint8) == POISON
                found = unwritten(pointer, held & (contents(pointer) == OTHER_RUBBISH))
            else:
                found = None
        if found is not None:
            whole = found.missing == found.total
            location = _location(program)
            state.findings.add(
                ("output", pointer.name),
                functools.partial(
                    Finding,
                    "output never written" if whole else "output written in part",
                    [str(found), *([f"at {location}"] if location else [])],
                    _NEVER if whole else _IN_PART,
                    location,
                ),
            )


def _check_early_reads(
    state: LaunchState, outputs: Sequence[tuple[Pointer, int | None]], second: Again
) -> None:
    """Adds an error for each output that was read before anybody had written it, if other rubbish
    there makes a difference."""
    early = [(one, state.early_reads.get(-1 if at is None else at)) for one, at in outputs]
    if not any(instruction for _, instruction in early):
        return
    contents = second()
    if contents is None or not any(
        (one.array.reshape(-1).view(np.uint8) != contents(one)).any()
        for one, at in outputs
        if at is not None
    ):
        return
    for pointer, instruction in early:
        if instruction is not None:
            state.findings.add(
                ("early", identity(instruction), pointer.name),
                functools.partial(
                    Finding,
                    READ_BEFORE,
                    [
                        f"{pointer.name} is read or added to, which nobody has written before",
                        f"at {place(instruction)}",
                        "the results change with what was there",
                    ],
                    UNWRITTEN,
                    instruction.location,
                ),
            )


def _missing(shadow: Shadow, offset: int, size: int) -> Array:
    """For each byte of a piece of global memory, whether nobody wrote it."""
    start, end = offset // _PAGE * _PAGE, -(-(offset + size) // _PAGE) * _PAGE
    written = np.zeros(end - start, np.bool_)
    for verb, level, _, entries in shadow.known(start, end):
        if verb != "read":
            there = np.repeat(entries != 0, 1 << level)
            written[: len(there)] |= there
    missing: Array = ~written[offset - start : offset - start + size]
    return missing


def _location(program: Program) -> SourceLocation | None:
    """The user's line where the kernel begins."""
    found = (entry.instruction.location for entry in program.code)
    return next((one for one in found if one is not None), None)
