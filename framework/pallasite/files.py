"""Writing files that are never half-written: the one way in which Pallasite writes them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat

TEMPORARY = ".tmp-"
"""How the names of files begin that are being written; what is left of a killed process, too."""


def write(
    path: str | os.PathLike[str],
    data: bytes | str,
    *,
    mode: int | None = None,
    exclusive: bool = False,
) -> None:
    """Writes a file under a temporary name beside it, and gives it its name when it is complete.

    A reader sees the old content or the new one. If anything fails, the old file stays as it was,
    and no temporary file is left. A symbolic link stays one: what it leads to is replaced. What is
    there and is no regular file, such as a pipe, is written to directly.

    Args:
      path: the file; its folder exists.
      data: the content; text is written as UTF-8, with its line ends as they are.
      mode: the permissions; None keeps those of a file that is there, and gives a new one those of
        any new file of this process.
      exclusive: whether a file that is there is left alone.

    Raises:
      FileExistsError: ``exclusive``, and there is something under that name.
      OSError: the file cannot be written.
    """
    content = data.encode() if isinstance(data, str) else data
    path = pathlib.Path(path)
    if not exclusive:
        path = pathlib.Path(os.path.realpath(path))
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
    temporary = path.parent / f"{TEMPORARY}{os.urandom(8).hex()}"
    kept = stat.S_IMODE(path.stat().st_mode) if mode is None and path.is_file() else mode
    try:
        _write(temporary, content, kept)
        if exclusive:
            _claim(temporary, path)
        else:
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # Under its own name, it is no longer there.
            os.unlink(temporary)


def make_folder(path: str | os.PathLike[str], *, mode: int = 0o777) -> pathlib.Path:
    """Makes a folder and those that it is in, if they are not there; returns its path.

    Args:
      path: the folder.
      mode: permissions of those that are made, apart from what the process's umask takes away.

    Raises:
      OSError: it cannot be made, or something else has that name.
    """
    path = pathlib.Path(path)
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    return path


def remove(path: str | os.PathLike[str]) -> bool:
    """Removes a file; False if it cannot be removed, or is not there."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _write(path: pathlib.Path, content: bytes, mode: int | None) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
    handle = os.open(path, flags, 0o666 if mode is None else mode & 0o666)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    if mode is not None:
        os.chmod(path, mode)  # The umask does not count.


def _claim(temporary: pathlib.Path, path: pathlib.Path) -> None:
    """Gives a file its name; fails with FileExistsError if the name is taken."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # A file system without links.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.replace(temporary, path)
