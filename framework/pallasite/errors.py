"""The one error family: every error that a user can cause is a :class:`PallasiteError`.

A message reads in a fixed order: the user's source line, what is wrong with the value that was
given, what would be accepted, and what to do. Errors that a Python programmer expects under a
standard type (``ValueError``, ``TypeError``, ``NotImplementedError``) also derive from that type.
"""

from __future__ import annotations

import dataclasses
import linecache
from typing import Any


@dataclasses.dataclass(frozen=True)
class SourceLocation:
    """A position in the user's Python code: file, 1-based line, 1-based column, function name."""

    file: str
    line: int
    column: int = 0
    function: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return f"{where} ({self.function})" if self.function else where


class PallasiteError(Exception):
    """Base of all errors that Pallasite raises for something that a user can cause.

    Args:
      message: what is wrong, naming the offending value.
      got: the offending value, when the message does not already show it.
      expected: what would be accepted.
      hint: what the user can do about it.
      location: the user's source line; the jaxpr walker fills it in when a rule leaves it out.
    """

    def __init__(
        self,
        message: str,
        *,
        got: Any = None,
        expected: str | None = None,
        hint: str | None = None,
        location: SourceLocation | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.got = got
        self.expected = expected
        self.hint = hint
        self.location = location

    def at(self, location: SourceLocation | None) -> PallasiteError:
        """Adds the user's source line, unless a more precise one is already known.

        Its text follows the message in tracebacks, whose frames do not show the kernel any more.
        """
        if self.location is None and location is not None:
            self.location = location
            text = linecache.getline(location.file, location.line).strip()
            if text:
                self.add_note(f"  line {location.line}: {text}")
        return self

    def __str__(self) -> str:
        lines = [self.message if self.location is None else f"{self.location}: {self.message}"]
        if self.got is not None:
            lines.append(f"  got: {self.got}")
        if self.expected is not None:
            lines.append(f"  expected: {self.expected}")
        if self.hint is not None:
            lines.append(f"  try: {self.hint}")
        return "\n".join(lines)


class InvalidValueError(PallasiteError, ValueError):
    """A value, shape, layout or combination of arguments that cannot work."""


class InvalidTypeError(PallasiteError, TypeError):
    """An argument of the wrong kind: not a reference, the wrong dtype, the wrong memory space."""


class UnsupportedError(PallasiteError, NotImplementedError):
    """Something that is meaningful but that this version or this target cannot do."""


class MissingRuleError(UnsupportedError):
    """No lowering rule for a primitive under the selected semantics and target."""


class ResourceError(InvalidValueError):
    """A kernel asks for more of a resource (shared memory, registers) than the target has."""


class MissingNameError(PallasiteError, AttributeError):
    """A name of ``pallasite.gpu`` that does not exist, or whose plugin is not there."""


class TargetError(InvalidValueError):
    """An unknown target, or one whose plugin is not installed."""


class PluginError(PallasiteError):
    """A plugin that fails to load, or that contradicts another one."""


class ConfigError(InvalidValueError):
    """An unknown configuration name or a value that it does not accept."""


class CompilationError(PallasiteError, RuntimeError):
    """A later stage (MLIR verification, LLVM, ptxas) refused what an earlier one produced."""


class ExecutionError(PallasiteError, RuntimeError):
    """A compiled kernel cannot be run here: no executor, wrong platform, wrong arguments."""


class InternalError(PallasiteError, RuntimeError):
    """A defect of Pallasite itself; the message asks for a report."""
