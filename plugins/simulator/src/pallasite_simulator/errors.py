"""Errors of the simulator, all of them members of Pallasite's one family."""

from __future__ import annotations

from pallasite.plugin import CompilationError, ExecutionError, SourceLocation
from pallasite_simulator.ptx.syntax import Position


class PtxError(CompilationError):
    """PTX that is malformed, or that holds something that the simulator does not know.

    Args:
      message: what is wrong.
      position: where in the PTX.
      instruction: the text of the instruction or line.
      got, expected, hint, location: as for :class:`pallasite.errors.PallasiteError`.
    """

    def __init__(
        self,
        message: str,
        *,
        position: Position,
        instruction: str = "",
        got: object = None,
        expected: str | None = None,
        hint: str | None = None,
        location: SourceLocation | None = None,
    ):
        where = f"PTX {position}: {message}"
        if instruction:
            where += f", in: {instruction}"
        super().__init__(where, got=got, expected=expected, hint=hint, location=location)
        self.position = position
        self.instruction = instruction


class SimulationError(ExecutionError):
    """A kernel did something at run time that has no meaning, such as an access out of bounds.

    Attributes:
      printed: what the kernel printed before.
    """

    printed: str = ""


class DeadlockError(SimulationError):
    """No thread of the kernel can go on; the message says who waits for what."""


class TrapError(SimulationError):
    """A thread of the kernel has executed a trap."""


class WatchdogError(SimulationError):
    """A kernel has not ended in time; the message lists where its threads are."""


class SanitizerError(SimulationError):
    """The sanitizer found errors in a kernel; the message lists them."""
