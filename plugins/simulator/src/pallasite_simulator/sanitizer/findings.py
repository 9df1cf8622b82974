"""What the sanitizer found, each error once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from pallasite.plugin import SourceLocation
from pallasite_simulator.errors import SanitizerError, SimulationError
from pallasite_simulator.ptx.syntax import Instruction

LIMIT = 20
"""How many different errors are described."""


def place(instruction: Instruction) -> str:
    """Where an instruction is: the user's line, and the instruction itself."""
    where = f"{instruction.location}, " if instruction.location else f"{instruction.position}, "
    return f"{where}in: {instruction.text}"


def identity(instruction: Instruction) -> Hashable:
    """What tells places of a program apart: the user's line, or else the instruction."""
    location = instruction.location
    return instruction if location is None else (location.file, location.line, location.function)


@dataclasses.dataclass
class Finding:
    """One error.

    Attributes:
      kind: of the error, in a few words.
      lines: who did what, and where.
      hint: what to do.
      location: the user's line.
      count: how often it happened.
    """

    kind: str
    lines: list[str]
    hint: str
    location: SourceLocation | None = None
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return "\n       ".join([f"{self.kind}{times}:", *self.lines, f"try: {self.hint}"])


class Findings:
    """All errors of one launch.

    Attributes:
      kernel: its name.
      stop: whether the first error ends the launch.
      found: in order of appearance.
      more: others, beyond :data:`LIMIT`.
    """

    def __init__(self, kernel: str = "", *, stop: bool = False):
        self.kernel = kernel
        self.stop = stop
        self.found: dict[Hashable, Finding] = {}
        self.more: set[Hashable] = set()

    def add(self, key: Hashable, make: Callable[[], Finding], count: int = 1) -> None:
        """Counts an error, and describes it if it is the first with this key.

        Raises:
          SanitizerError: it is the first one, and that is to be the end.
        """
        known = self.found.get(key)
        if known is not None:
            known.count += count
            return
        if len(self.found) >= LIMIT:
            self.more.add(key)
            return
        finding = self.found[key] = make()
        finding.count = count
        if self.stop:
            raise self.error()

    def __bool__(self) -> bool:
        return bool(self.found)

    def describe(self) -> str:
        """All errors as a list."""
        lines = [f"\n  {number}. {one}" for number, one in enumerate(self.found.values(), 1)]
        if self.more:
            lines.append(f"\n  and {len(self.more)} more")
        return "".join(lines)

    def error(self) -> SanitizerError:
        """The errors as one, to be raised."""
        count = len(self.found) + len(self.more)
        first = next(iter(self.found.values()))
        return SanitizerError(
            f"the sanitizer found {count} error{'s' * (count > 1)} in kernel {self.kernel!r}:"
            + self.describe(),
            location=first.location,
        )

    def annotate(self, error: SimulationError) -> None:
        """Adds the errors to one that ended the launch: they may be its cause."""
        if self.found and not isinstance(error, SanitizerError):
            error.message += f"\n  before that, the sanitizer found:{self.describe()}"
            error.args = (error.message,)
