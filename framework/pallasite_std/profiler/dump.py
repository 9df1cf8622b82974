"""Writes the profile of a kernel to a file when the host has got it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import tempfile
import time
import warnings
from typing import Any

from pallasite.plugin import InvalidValueError
from pallasite.plugin.runtime import CompiledKernel, files
from pallasite_std.profiler.profile import chrome_trace, profile_of

_TEST_OUTPUTS = "sponge"
"""The directory's name that stands for the outputs of a test, or else the temporary directory."""
_ATTEMPTS = 1000
_counter = itertools.count()


class ProfileWarning(UserWarning):
    """A profile that is incomplete, or that could not be written."""


def consume(words: Any, kernel: CompiledKernel, **arguments: Any) -> None:
    """Writes the trace of one launch; called by the host with the kernel's hidden result."""
    del arguments  # They are the profile, which also knows which output it is.
    write_trace(words, kernel)


def write_trace(words: Any, compiled: CompiledKernel) -> pathlib.Path | None:
    """Writes the trace of one launch to a new file in ``profile_dir``.

    The name is ``{kernel}-{time in ns}-{counter}-trace.json``. The file appears when it is
    complete, and never takes the place of another one.

    Returns:
      The file, or None if it could not be written, which gives a :class:`ProfileWarning`.
    """
    launch = compiled.launch
    profile = profile_of(compiled)
    if profile is None:
        raise InvalidValueError(
            f"kernel {compiled.name!r} is not profiled", hint="CompilerParams(profile_space=...)"
        )
    trace = chrome_trace(
        words,
        profile,
        kernel=compiled.name,
        grid=launch.grid,
        cluster=launch.cluster,
        block=launch.block,
    )
    lost = trace["otherData"]["lost events"]
    if lost:
        warnings.warn(
            f"kernel {compiled.name!r} recorded {lost} more profiler events than it has room for:"
            f" {profile.events} for each {profile.scope}; raise profile_space",
            ProfileWarning,
            stacklevel=2,
        )
    folder = _folder(profile.directory)
    try:
        return _write_new(folder, compiled.name, json.dumps(trace))
    except OSError as error:
        message = f"cannot write the profile of kernel {compiled.name!r} to {folder}: {error}"
        warnings.warn(message, ProfileWarning, stacklevel=2)
        return None


def _folder(directory: str) -> pathlib.Path:
    if directory == _TEST_OUTPUTS:
        return pathlib.Path(os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR") or tempfile.gettempdir())
    return pathlib.Path(directory)


def _write_new(folder: pathlib.Path, kernel: str, text: str) -> pathlib.Path:
    files.make_folder(folder)
    for _ in range(_ATTEMPTS):
        path = folder / f"{kernel}-{time.time_ns()}-{next(_counter)}-trace.json"
        with contextlib.suppress(FileExistsError):
            files.write(path, text, mode=0o644, exclusive=True)
            return path
    raise FileExistsError(f"{path} and {_ATTEMPTS - 1} names before it are taken")
