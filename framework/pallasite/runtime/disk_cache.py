"""A folder of byte strings by key, shared by processes.

Each entry is one file that holds a header, the SHA-256 of the content, and the content. It is
written under a temporary name and renamed, so a reader sees all of it or nothing; a file that is
damaged all the same is removed and counts as absent. When the folder outgrows its bound, the
entries that were not used for the longest time go first. There are no locks: two processes that
write one key write the same content.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import tempfile
import time
import warnings

DEFAULT_MAX_BYTES = 2**30
_HEADER = b"pallasite cache 1\n"
_DIGEST_BYTES = 32
_SUFFIX = ".kernel"
_TEMPORARY = ".tmp-"
_STALE_SECONDS = 3600
_KEEP = 0.8
"""What part of the bound is left after an eviction."""


class CacheWarning(UserWarning):
    """The disk cache cannot be used, or an entry of it was damaged; kernels are compiled anew."""


class DiskCache:
    """The cache in one folder.

    Args:
      directory: where; it is created, for the present user only, by the first write.
      max_bytes: the bound on the size of all entries together.
    """

    def __init__(self, directory: pathlib.Path, max_bytes: int = DEFAULT_MAX_BYTES):
        self.directory = directory
        self.max_bytes = max_bytes
        self._size: int | None = None
        self._warned: set[str] = set()

    def get(self, key: str) -> bytes | None:
        """The content of an entry, or None."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", f"cannot read the kernel cache in {self.directory}: {error}")
            return None
        start = len(_HEADER) + _DIGEST_BYTES
        content = data[start:]
        if data[:start] != _HEADER + hashlib.sha256(content).digest():
            self.discard(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    def put(self, key: str, content: bytes) -> None:
        """Writes an entry; a folder that cannot be written to gives one warning."""
        data = _HEADER + hashlib.sha256(content).digest() + content
        path = self._path(key)
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            self._grow(len(data))
        except OSError as error:
            self._warn("write", f"cannot write the kernel cache in {self.directory}: {error}")

    def discard(self, key: str) -> None:
        """Removes an entry that turned out to be damaged, with one warning."""
        path = self._path(key)
        self._warn("damaged", f"a damaged entry of the kernel cache was removed: {path}")
        with contextlib.suppress(OSError):
            path.unlink()

    def clear(self) -> None:
        """Removes all entries."""
        self._evict(0)
        self._size = None

    def entries(self) -> list[pathlib.Path]:
        """The files of all entries."""
        return list(self.directory.glob(f"??/*{_SUFFIX}"))

    def _path(self, key: str) -> pathlib.Path:
        return self.directory / key[:2] / f"{key}{_SUFFIX}"

    def _grow(self, size: int) -> None:
        if self._size is not None:
            self._size += size
        if self._size is None or self._size > self.max_bytes:
            self._size = self._evict(self.max_bytes)

    def _evict(self, max_bytes: int) -> int:
        """Removes the entries used longest ago if all are larger than ``max_bytes``; returns the
        size of what is left."""
        files = []
        for path in self.entries():
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in files)
        if total > max_bytes:
            for _, size, path in sorted(files):
                if total <= _KEEP * max_bytes:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= size
        for path in self.directory.glob(f"??/{_TEMPORARY}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
        return total

    def _warn(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(message, CacheWarning, stacklevel=3)
