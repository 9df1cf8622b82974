"""Folders for the time that a process takes."""

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


def _remove(folder: pathlib.Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
