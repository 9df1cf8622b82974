"""The cache folder: entries on disk, shared by processes, in namespaces (``stores.py``).

Every file is written as a whole, so a reader sees one state or the next; what is damaged all the
same, or of another version, gives one warning and counts as absent. Folders and files that others
can write are not used, since what is in them will be run. Sealed entries need no locks:
two processes that write one key write the same content. Whoever adds to a document takes a lock, so
that nothing is lost that another process has added meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from pallasite import files
from pallasite.stores import StoreNamespace

try:
    import fcntl
except ImportError:  # Not a POSIX system; two writers at once may lose an entry.
    fcntl = None  # type: ignore[assignment]

_DIGEST_BYTES = 32
_LOCK = ".lock"
_PRIVATE_FILE, _PRIVATE_FOLDER = 0o600, 0o700
_STALE_SECONDS = 3600
_LOCK_SECONDS = 5.0
_MAX_FILE_BYTES = 2**28
_FOLDERS, _ENOUGH = 256, 64
_KEEP = 0.8
"""What part of the bound is left after an eviction."""


class CacheWarning(UserWarning):
    """The cache folder cannot be used, or something in it is damaged; it is found out anew."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What a namespace holds: files, their bytes, entries, and when one was last used longest ago
    (seconds of the epoch; None if there is none)."""

    files: int
    bytes: int
    entries: int
    oldest_use: float | None


class Store:
    """What both kinds of namespace have in common.

    Args:
      cache_dir: the cache folder; it is made, for the present user only, by the first write.
      namespace: the part of it.
    """

    def __init__(self, cache_dir: pathlib.Path, namespace: StoreNamespace):
        self.namespace = namespace
        self._cache_dir = pathlib.Path(cache_dir)
        self.directory = self._cache_dir / namespace.folder
        self._warned: set[str] = set()

    @property
    def nouns(self) -> str:
        """What is kept here, in the plural."""
        return self.namespace.nouns or f"{self.namespace.noun}s"

    def files(self) -> list[pathlib.Path]:
        """The files of all entries."""
        raise NotImplementedError

    def temporary_files(self) -> list[pathlib.Path]:
        """Files that are being written, or were when a process was killed."""
        raise NotImplementedError

    def count(self) -> int:
        """How many entries there are."""
        return len(self.files())

    def usage(self) -> Usage:
        """How many files and entries there are, and how large they are."""
        statuses = [status for _, status in self._statuses()]
        return Usage(
            files=len(statuses),
            bytes=sum(status.st_size for status in statuses),
            entries=self.count(),
            oldest_use=min((status.st_mtime for status in statuses), default=None),
        )

    def clear(self) -> None:
        """Removes all files."""
        for path in [*self.files(), *self.temporary_files()]:
            files.remove(path)

    def _make_folder(self, path: pathlib.Path) -> None:
        """Makes the folder of a file, and those that it is in.

        Raises:
          OSError: they cannot be made, or are not the user's own.
        """
        for one in (self._cache_dir, self.directory, path) if not path.is_dir() else ():
            files.make_folder(one, mode=_PRIVATE_FOLDER)
        self._check_folders()

    def _check_folders(self) -> None:
        """Refuses folders in which others can put files: these would be taken for our own."""
        for folder in {self._cache_dir, self.directory}:
            files.check_owner(folder)

    def _read_file(self, path: pathlib.Path) -> bytes:
        """The content of a file.

        Raises:
          OSError: it cannot be read, or somebody else could have written it.
        """
        self._check_folders()
        return files.read(path, max_bytes=_MAX_FILE_BYTES)

    def _found(self) -> Iterable[Any]:
        """The files of all entries, in the form that is found first."""
        return self.files()

    def _statuses(self) -> list[tuple[Any, os.stat_result]]:
        found = []
        for path in self._found():
            with contextlib.suppress(OSError):  # Another process may have removed it.
                found.append((path, path.stat()))
        return found

    def _remove_stale(self) -> None:
        """Removes what processes left that were killed while they wrote."""
        for path in self.temporary_files():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    files.remove(path)

    def _warn(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(message, CacheWarning, stacklevel=4)

    def _cannot(self, what: str, error: OSError) -> None:
        self._warn(what, f"cannot {what} {self.nouns} in {self.directory}: {error}")


class SealedStore(Store):
    """Byte strings under keys; one file each, which is checked when it is read.

    Args:
      cache_dir, namespace: as for :class:`Store`.
      max_bytes: another bound than that of the namespace.
    """

    def __init__(
        self, cache_dir: pathlib.Path, namespace: StoreNamespace, max_bytes: int | None = None
    ):
        super().__init__(cache_dir, namespace)
        self.max_bytes = namespace.max_bytes if max_bytes is None else max_bytes
        self._header = f"pallasite {namespace.name} {namespace.version}\n".encode()
        self._size: int | None = None

    def get(self, key: str) -> bytes | None:
        """The content of an entry, or None."""
        path = self.path(key)
        try:
            data = self._read_file(path)
        except FileNotFoundError:
            return None
        except files.BrokenFileError:
            self.discard(key)
            return None
        except OSError as error:
            self._cannot("read", error)
            return None
        start = len(self._header) + _DIGEST_BYTES
        content = data[start:]
        if data[:start] != self._header + self._digest(key, content):
            self.discard(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return content

    def put(self, key: str, content: bytes) -> None:
        """Writes an entry; a folder that cannot be written to gives one warning."""
        data = self._header + self._digest(key, content) + content
        path = self.path(key)
        try:
            self._make_folder(path.parent)
            files.write(path, data, mode=_PRIVATE_FILE)
            self._grow(path.parent, len(data))
        except OSError as error:
            self._cannot("write", error)

    def _digest(self, key: str, content: bytes) -> bytes:
        """SHA-256 of an entry and its key, so that a file under another name is none."""
        return hashlib.sha256(key.encode() + b"\0" + content).digest()

    def discard(self, key: str) -> None:
        """Removes an entry that turned out to be damaged, with one warning."""
        path = self.path(key)
        self._warn("damaged", f"a damaged file of {self.nouns} was removed: {path}")
        if not files.remove(path):
            with contextlib.suppress(OSError):  # It may be an empty folder.
                path.rmdir()

    def path(self, key: str) -> pathlib.Path:
        """The file of an entry."""
        return self.directory / key[:2] / f"{key}{self.namespace.suffix}"

    def files(self) -> list[pathlib.Path]:
        """The files of all entries."""
        return list(map(pathlib.Path, self._found()))

    def _found(self) -> Iterator[os.DirEntry[str]]:
        for folder in self.directory.glob("??"):
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                yield from [one for one in entries if one.name.endswith(self.namespace.suffix)]

    def temporary_files(self) -> list[pathlib.Path]:
        """Files that are being written, or were when a process was killed."""
        return list(self.directory.glob(f"??/{files.TEMPORARY}*"))

    def clear(self) -> None:
        """Removes all entries, and what killed processes left; not what is being written."""
        self._evict(0)
        self._size = None

    def _grow(self, folder: pathlib.Path, size: int) -> None:
        self._size = self._estimate(folder) if self._size is None else self._size + size
        if self._size is None or (self.max_bytes is not None and self._size > self.max_bytes):
            self._size = self._evict(self.max_bytes)

    def _estimate(self, folder: pathlib.Path) -> int | None:
        """The size of all entries by those of one folder, as keys are hashes; None of too few."""
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            sizes = [one.stat().st_size for one in entries]
            return _FOLDERS * sum(sizes) if len(sizes) >= _ENOUGH else None
        return None

    def _evict(self, max_bytes: int | None) -> int:
        """Removes the entries used longest ago if all are larger than ``max_bytes``; returns the
        size of what is left."""
        found = [(one.st_mtime_ns, one.st_size, path.name) for path, one in self._statuses()]
        total = sum(size for _, size, _ in found)
        if max_bytes is not None and total > max_bytes:
            for _, size, name in sorted(found):
                if total <= _KEEP * max_bytes:
                    break
                files.remove(self.directory / name[:2] / name)
                total -= size
        self._remove_stale()
        return total


class DocumentStore(Store):
    """JSON objects with several entries, under names; people can read the files.

    An entry is a JSON object that is found by another one, its key, which it holds as ``"key"``.
    """

    def __init__(self, cache_dir: pathlib.Path, namespace: StoreNamespace):
        super().__init__(cache_dir, namespace)
        self._guard = threading.Lock()
        self._read: dict[pathlib.Path, tuple[Any, dict[str, Any]]] = {}

    def get(self, name: str, key: Any) -> dict[str, Any] | None:
        """The entry of a document under a key, or None."""
        entry: dict[str, Any] | None = self.entries(self.path(name)).get(key_digest(key))
        return entry

    def put(
        self, name: str, key: Any, entry: dict[str, Any], *, replace: bool = False
    ) -> dict[str, Any]:
        """Writes an entry; a folder that cannot be written to gives one warning.

        Returns:
          The entry that holds: that of another process, if it was faster and ``replace`` is false.
        """
        path = self.path(name)
        digest = key_digest(key)
        try:
            self._make_folder(self.directory)
            with self._locked():
                entries = dict(self.entries(path))
                known: dict[str, Any] | None = entries.pop(digest, None)
                if known is not None and not replace:
                    return known
                entries[digest] = {"key": key, **entry}
                bound = self.namespace.max_entries or len(entries)
                while len(entries) > bound:
                    del entries[next(iter(entries))]
                files.write(path, _document(entries, self.namespace), mode=_PRIVATE_FILE)
                self._remove_stale()
        except OSError as error:
            self._cannot("write", error)
        return entry

    def entries(self, path: pathlib.Path) -> dict[str, Any]:
        """All entries of a file; none if it does not exist or is damaged."""
        entries = None
        try:
            status = os.stat(path)
            state = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)
            with self._guard:
                known = self._read.get(path)
            if known is not None and known[0] == state:
                return known[1]
            entries = _entries(self._read_file(path), self.namespace)
        except FileNotFoundError:
            return {}
        except files.BrokenFileError:
            pass
        except OSError as error:
            self._cannot("read", error)
            return {}
        if entries is None:
            self._warn(str(path), f"a damaged file of {self.nouns} is ignored: {path}")
            return {}
        with self._guard:
            self._read[path] = (state, entries)
        return entries

    def files(self) -> list[pathlib.Path]:
        """The files of all documents."""
        return sorted(self.directory.glob(f"*{self.namespace.suffix}"))

    def temporary_files(self) -> list[pathlib.Path]:
        """Files that are being written, or were when a process was killed."""
        return list(self.directory.glob(f"{files.TEMPORARY}*"))

    def all_entries(self) -> list[dict[str, Any]]:
        """The entries of all documents."""
        return [entry for path in self.files() for entry in self.entries(path).values()]

    def count(self) -> int:
        """How many entries there are."""
        return len(self.all_entries())

    def path(self, name: str) -> pathlib.Path:
        """The file of a document: its name, if that is a plain one."""
        plain = re.sub(r"[^\w.-]", "_", name.lower(), flags=re.ASCII)[:100]
        if plain != name or plain.startswith("."):
            plain = f"{plain.lstrip('.')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return self.directory / f"{plain}{self.namespace.suffix}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other writers out; a file system that has no locks does without."""
        with (self.directory / _LOCK).open("ab") as file:
            end = time.monotonic() + _LOCK_SECONDS
            while fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise TimeoutError(
                            errno.ETIMEDOUT, "another process keeps it locked"
                        ) from None
                    time.sleep(0.01)
                    continue
                except OSError:
                    pass
                break
            yield


def key_digest(key: Any) -> str:
    """SHA-256, in hexadecimal, of a JSON value."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def _document(entries: dict[str, Any], namespace: StoreNamespace) -> str:
    content = {
        "format": namespace.version,
        "sha256": _checksum(entries),
        "entries": entries,
    }
    return json.dumps(content, indent=1) + "\n"


def _entries(content: bytes, namespace: StoreNamespace) -> dict[str, Any] | None:
    """The entries in a file's content; None if it is damaged, or of another version.

    A file without a checksum is one that a person has written.
    """
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or data.get("format") != namespace.version:
        return None
    entries = data.get("entries")
    if not isinstance(entries, dict) or not all(
        isinstance(one, dict)
        and isinstance(one.get("key"), dict)
        and (namespace.valid is None or namespace.valid(one))
        for one in entries.values()
    ):
        return None
    return entries if data.get("sha256", _checksum(entries)) == _checksum(entries) else None


def _checksum(entries: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()
