"""Passes of plugins that changed a kernel, and errors that say so.

What such a pass leaves may fail only later: in LLVM, in the assembler, or when the kernel runs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pallasite.codegen.compiled import Change
from pallasite.errors import CompilationError, PallasiteError, SourceLocation
from pallasite.known_plugins import is_own


@contextlib.contextmanager
def attributed_errors(
    changes: Sequence[Change], kernel: str, location: SourceLocation | None
) -> Iterator[None]:
    """What a ``with`` block raises has the line of a kernel, and names who changed the kernel.

    Args:
      changes: what changed it; those that the block adds count.
      kernel: its name.
      location: where it is defined.
    """
    try:
        yield
    except PallasiteError as error:
        raise _attributed(error, changes, kernel).at(location) from error.__cause__
    except Exception as error:
        if not changes:
            raise
        failure = CompilationError(f"{type(error).__name__}: {error}")
        raise _attributed(failure, changes, kernel).at(location) from error


def _attributed(error: PallasiteError, changes: Sequence[Change], kernel: str) -> PallasiteError:
    if not isinstance(error, CompilationError):
        # Programs are wrong more often than passes that come with Pallasite.
        changes = [one for one in changes if not is_own(one.plugin)]
    found = [one for one in changes if str(one) in error.message]
    if changes and not found:
        found = list(changes)
        space = "\n" if "\n" in error.message else "; "
        error.message += f"{space}kernel {kernel!r} was changed by {', '.join(map(str, found))}"
        if isinstance(error, CompilationError) and error.expected is None:
            error.expected = "valid code after each pass of a plugin"
    hints = [one.hint for one in found if one.hint not in (error.hint or "")]
    if hints:
        error.hint = "; ".join(filter(None, [error.hint, *hints]))
    return error


def refused_first(
    error: CompilationError, versions: Sequence[tuple[Change, str]], check: Callable[[str], Any]
) -> CompilationError | None:
    """The error that names the pass at fault for a text that is refused, or None: none of them is.

    Args:
      error: for the text after all passes.
      versions: passes, each with the text before it.
      check: raises :class:`CompilationError` for a text that is refused.
    """
    for change, before in reversed(versions):
        try:
            with warnings.catch_warnings(action="ignore"):
                check(before)
        except CompilationError as earlier:
            error = earlier
        else:
            error.message = f"{change} left invalid {change.stage.upper()}: {error.message}"
            error.expected = error.expected or "what is valid, as it was before this pass"
            return error
    return None
