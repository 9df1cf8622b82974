"""Writing files that are never half-written, and reading those of which that matters."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat

TEMPORARY = ".tmp-"
"""How the names of files begin that are being written; what is left of a killed process, too."""


class NotOwnError(PermissionError):
    """A file or folder that somebody else can write."""


class BrokenFileError(OSError):
    """Something that cannot be a file of ours."""


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
        path = pathlib.Path(os.path.realpath(path) if os.path.islink(path) else path)
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


def read(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """The content of a file of the present user's own (or the system's), and nothing else.

    It never waits, as it would for a pipe, and never reads more than the bound.

    Raises:
      NotOwnError: the file is another user's, or others may write it.
      BrokenFileError: it is no regular file, or is too large.
      OSError: it cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise BrokenFileError(errno.EINVAL, "no regular file", os.fspath(path))
        check_owner(path, status)
        if status.st_size > max_bytes:
            raise BrokenFileError(errno.EFBIG, "too large", os.fspath(path))
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(max_bytes)
    finally:
        os.close(handle)


def check_owner(path: str | os.PathLike[str], status: os.stat_result | None = None) -> None:
    """Checks that nobody else can write a file or folder.

    Raises:
      NotOwnError: it is another user's, or others may write it.
      OSError: its owner cannot be found out, as where it does not exist.
    """
    if not hasattr(os, "geteuid"):
        return
    status = status or os.stat(path)
    if status.st_uid not in (os.geteuid(), 0):
        what = f"it is user {status.st_uid}'s, and this is user {os.geteuid()}"
    elif status.st_mode & 0o022:
        what = f"others may write it; chmod go-w {os.fspath(path)} changes that"
    else:
        return
    raise NotOwnError(errno.EPERM, what, os.fspath(path))


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
