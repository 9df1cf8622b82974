"""Running the user's code: what it prints, and what it raises."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator

from pallasite.errors import PallasiteError, SourceLocation


class UserCodeError(PallasiteError):
    """The user's Python code raised an exception; it is the cause of this one."""


@contextlib.contextmanager
def running(path: pathlib.Path) -> Iterator[None]:
    """Turns what the code of a file raises into an error that names its line.

    Standard output is for results, so what the code prints goes to standard error.

    Args:
      path: the file that the user named.

    Raises:
      UserCodeError: for anything but a :class:`PallasiteError`, which passes through.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except PallasiteError:
        raise
    except SystemExit as stop:
        raise UserCodeError(
            f"{path} ends the program when it is imported",
            hint='put what it runs as a script under: if __name__ == "__main__":',
        ) from stop
    except SyntaxError as error:
        where = SourceLocation(error.filename or str(path), error.lineno or 0)
        raise UserCodeError(f"SyntaxError: {error.msg}", location=where) from error
    except Exception as error:
        raise UserCodeError(
            f"{type(error).__name__}: {error}",
            location=_place(error, path),
            hint="--traceback shows where it was raised",
        ) from error


def prepare_jax() -> None:
    """Keeps JAX from taking all of a GPU's memory, which commands do not need."""
    if "jax" not in sys.modules:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _place(error: BaseException, path: pathlib.Path) -> SourceLocation | None:
    """The innermost line of the user's file that led to the exception."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if pathlib.Path(frame.filename) == path:
            return SourceLocation(frame.filename, frame.lineno or 0, 0, frame.name)
    return None
