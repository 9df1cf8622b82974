"""Folders for the time that a process, or a session of tests with all its processes, takes."""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import tempfile


def make(purpose: str) -> pathlib.Path:
    """A folder that this process removes at its end; those that are forked from it do not."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f"pallasite-{purpose}-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


def shared(purpose: str) -> pathlib.Path:
    """A folder for this process and all that it starts from now on, and theirs.

    The process of the session that starts the others asks for it first (``conftest.py`` does).
    """
    variable = f"TESTS_{purpose.upper()}_FOLDER"
    if variable not in os.environ:
        os.environ[variable] = str(make(purpose))
    return pathlib.Path(os.environ[variable])


def forget_the_oldest(folder: pathlib.Path, most_bytes: int) -> None:
    """Removes files that were written first until there are no more bytes in a folder."""
    files = [(one, one.stat()) for one in folder.iterdir() if one.is_file()]
    above = sum(status.st_size for _, status in files) - most_bytes
    for file, status in sorted(files, key=lambda one: one[1].st_mtime):
        if above <= 0:
            break
        file.unlink(missing_ok=True)
        above -= status.st_size


def _remove(folder: pathlib.Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
