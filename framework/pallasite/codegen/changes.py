"""Code of plugins that changed a kernel or had another part in it, and errors that say so.

What it leaves may fail only later: in another rule, in LLVM, in the assembler, or in a run.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pallasite import _jax
from pallasite.codegen.compiled import Change
from pallasite.errors import (
    CompilationError,
    InternalError,
    PallasiteError,
    PluginError,
    SourceLocation,
)
from pallasite.known_plugins import is_own
from pallasite.plugin_values import NOTED


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
        if not changes and (not NOTED.get() or _jax.raised_by_user(error)):
            raise
        failure = (CompilationError if changes else InternalError)(
            f"{type(error).__name__}: {error}"
        )
        raise _attributed(failure, changes, kernel).at(location) from error


def _attributed(error: PallasiteError, changes: Sequence[Change], kernel: str) -> PallasiteError:
    noted, others = NOTED.get() or {}, [one for one in changes if not is_own(one.plugin)]
    told = isinstance(error, CompilationError)
    if isinstance(error, InternalError) and (noted or others):
        # Of what others did, more likely than not.
        given, told, hint = error, True, "report it to the plugin's authors"
        error = PluginError(error.message, got=error.got, hint=hint, location=error.location)
        error.__notes__ = getattr(given, "__notes__", [])
    space = "\n" if "\n" in error.message else "; "
    if told and noted and not any(what in error.message for what in noted):
        # What emits code before what only decides, the latest first.
        users = sorted(noted, key=lambda what: noted[what])[-3:]
        error.message += f"{space}kernel {kernel!r} uses {', '.join(reversed(users))}"
    if not isinstance(error, CompilationError):
        # Programs are wrong more often than passes that come with Pallasite.
        changes = others
    found = [one for one in changes if str(one) in error.message]
    if changes and not found:
        found = list(changes)
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
