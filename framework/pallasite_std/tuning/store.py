"""What was measured, on disk: one JSON file for each operation, shared by processes.

A file is replaced as a whole, by renaming, so a reader sees one state or the next. Writers take a
lock, so that none loses what another one has added meanwhile. A damaged file gives one warning and
counts as empty; the next entry replaces it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
import tempfile
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from pallasite.plugin.runtime import CacheWarning
from pallasite_std.tuning.encoding import Json, digest

try:
    import fcntl
except ImportError:  # Not a POSIX system; two writers at once may lose an entry.
    fcntl = None  # type: ignore[assignment]

FOLDER = "tuning"
"""The folder of these files in that of the compiler's cache."""
FORMAT = 1
MAX_ENTRIES = 1000
"""For each operation; beyond it the entries that were written first are dropped."""
_SUFFIX = ".json"
_TEMPORARY = ".tmp-"
_LOCK = ".lock"

Entry = dict[str, Any]
"""``key`` (what it is for), ``best`` (the encoded configuration), and what was measured."""


class TuningStore:
    """The entries in one folder.

    Args:
      directory: that of the compiler's cache, in which the folder is.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory / FOLDER
        self._guard = threading.Lock()
        self._read: dict[pathlib.Path, tuple[Any, dict[str, Entry]]] = {}
        self._warned: set[str] = set()

    def get(self, name: str, key: Json) -> Entry | None:
        """The entry of an operation under a key, or None."""
        return self.entries(self.path(name)).get(digest(key))

    def put(self, name: str, key: Json, entry: Entry, *, replace: bool = False) -> Entry:
        """Writes an entry; a folder that cannot be written to gives one warning.

        Returns:
          The entry that holds: that of another process, if it was faster and ``replace`` is false.
        """
        path = self.path(name)
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                entries = dict(self.entries(path))
                known = entries.pop(digest(key), None)
                if known is not None and not replace:
                    return known
                entries[digest(key)] = {"key": key, **entry}
                while len(entries) > MAX_ENTRIES:
                    del entries[next(iter(entries))]
                content = {"format": FORMAT, "entries": entries}
                self._replace(path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            self._warn("write", f"cannot write what was tuned to {self.directory}: {error}")
        return entry

    def entries(self, path: pathlib.Path) -> dict[str, Entry]:
        """All entries of a file; none if it does not exist or is damaged."""
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                state = (status.st_ino, status.st_mtime_ns, status.st_size)
                with self._guard:
                    known = self._read.get(path)
                if known is not None and known[0] == state:
                    return known[1]
                content = file.read()
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._warn("read", f"cannot read what was tuned from {path}: {error}")
            return {}
        entries = _parse(content)
        if entries is None:
            self._warn(str(path), f"a damaged file of tuned configurations is ignored: {path}")
            return {}
        with self._guard:
            self._read[path] = (state, entries)
        return entries

    def files(self) -> list[pathlib.Path]:
        """The files of all operations."""
        return sorted(self.directory.glob(f"*{_SUFFIX}"))

    def all_entries(self) -> list[Entry]:
        """The entries of all operations."""
        return [entry for path in self.files() for entry in self.entries(path).values()]

    def clear(self) -> None:
        """Removes all files."""
        for path in [*self.files(), *self.directory.glob(f"{_TEMPORARY}*")]:
            with contextlib.suppress(OSError):
                path.unlink()

    def path(self, name: str) -> pathlib.Path:
        """The file of an operation: its name, if that is a plain one."""
        plain = re.sub(r"[^\w.-]", "_", name.lower(), flags=re.ASCII)[:100]
        if plain != name or plain.startswith("."):
            plain = f"{plain.lstrip('.')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return self.directory / f"{plain}{_SUFFIX}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps other writers out; a file system that has no locks does without."""
        with (self.directory / _LOCK).open("ab") as file:
            if fcntl is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _replace(self, path: pathlib.Path, content: str) -> None:
        handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=self.directory)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(content)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _warn(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(message, CacheWarning, stacklevel=3)


def _parse(content: bytes) -> dict[str, Entry] | None:
    """The entries in a file's content; None if it is damaged, or of another version."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return None
    entries = data.get("entries")
    if not isinstance(entries, dict) or not all(_is_entry(one) for one in entries.values()):
        return None
    return entries


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and "best" in entry and isinstance(entry.get("key"), dict)
