"""Which code compiles kernels: hashes of distributions' files, for keys of caches.

A version says too little: a distribution is built again under the same one, and a checkout is
edited. So the content of all files counts. It is read only when a file has changed: what was hashed
before is kept in the cache folder, under the state (size, times, inode) of all the files.

What counts is the code that this process has loaded, which is that of the files unless they have
been edited since. :meth:`CodeIdentity.hashes` finds out whether they were edited before it was
called, :meth:`CodeIdentity.unchanged` whether afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from pallasite.plugin import StoreNamespace, config
from pallasite.plugin.runtime import SealedStore
from pallasite_std.caching import modules

CODE = StoreNamespace(
    name="code",
    noun="hash of code",
    nouns="hashes of code",
    folder="code",
    suffix=".hash",
    max_bytes=2**20,
)

_GRANULARITY = 20_000_000
"""Nanoseconds by which the times of files may be behind the clock."""

_SETTLED = 2_000_000_000
"""Nanoseconds after which a file that is written once more has other times in any file system."""

_State = tuple[tuple[str, int, int, int, int], ...]
"""Of each file: where it is, size, times of modification and change (ns), and inode."""


class EditedError(Exception):
    """Files of a distribution were edited after this process may have loaded them; says which."""


class CodeIdentity:
    """The hashes that one process has found, so that each is found out once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hashes: dict[str, str] = {}
        self._answers: dict[tuple[tuple[str, ...], ...], dict[str, str] | EditedError] = {}
        self._states: dict[tuple[str, ...], _State] = {}
        self._confirmed: _Confirmed | None = None

    def hashes(self, distributions: Mapping[str, Iterable[str]], since: int) -> dict[str, str]:
        """The hash of each distribution's code, and of those that it requires, by name.

        A distribution that is asked for counts by its files, since people edit plugins where they
        are installed; one that it requires counts by the record of its installer, if it has one.

        Args:
          distributions: packages that belong to each. A name may be that of none, for packages that
            have no distribution.
          since: when this process may first have loaded some of it, in nanoseconds of the epoch.

        Raises:
          EditedError: a file was edited after this process may have loaded it.
          OSError: a file cannot be read.
        """
        asked = tuple((one, *sorted(packages)) for one, packages in sorted(distributions.items()))
        with self._lock:
            if asked not in self._answers:
                try:
                    self._answers[asked] = self._look(distributions, since)
                except EditedError as error:  # That will not change any more.
                    self._answers[asked] = error
            answer = self._answers[asked]
        if isinstance(answer, EditedError):
            raise EditedError(*answer.args)
        return answer

    def unchanged(self) -> bool:
        """Whether all files that this process may have loaded since they were hashed, or may read
        at any time, are as they were then.

        That is asked for each kernel. While no module is imported, edits of Python's files change
        nothing in this process; folders and other files are looked at each time.
        """
        with self._lock:
            states, confirmed = dict(self._states), self._confirmed
        if confirmed is not None and confirmed.holds(states):
            return True
        loaded = list(sys.modules)
        seen = _Confirmed(states, loaded)
        if not all(_state(roots) == state for roots, state in states.items()):
            return False
        with self._lock:
            self._confirmed = seen
        return True

    def _look(self, distributions: Mapping[str, Iterable[str]], since: int) -> dict[str, str]:
        roots: dict[str, tuple[str, ...]] = {}
        states: dict[tuple[str, ...], _State] = {}
        required: set[str] = set()
        for one, packages in distributions.items():
            found = modules.find_distribution(one)
            roots[one] = modules.roots(modules.top_level_names(found) | frozenset(packages))
            required |= modules.requirements(found)
        required -= roots.keys()
        for one in required - self._hashes.keys():
            found = modules.find_distribution(one)
            recorded = None if found is None else modules.recorded_hash(found)
            if found is None or recorded is not None:
                self._hashes[one] = recorded or "not installed"
            else:
                roots[one] = modules.roots(modules.top_level_names(found))
        for where in roots.values():
            if where not in states:
                states[where] = _state(where)
                _check_loaded(states[where], since)
        self._find({one: where for one, where in roots.items() if one not in self._hashes}, states)
        return {one: self._hashes[one] for one in sorted({*roots, *required})}

    def _find(
        self,
        wanted: Mapping[str, tuple[str, ...]],
        states: Mapping[tuple[str, ...], _State],
    ) -> None:
        if not wanted:
            return
        text = json.dumps([[one, *states[roots]] for one, roots in sorted(wanted.items())])
        key = hashlib.sha256(text.encode()).hexdigest()
        store = SealedStore(config.get("cache_dir"), CODE) if config.get("cache") else None
        kept = store.get(key) if store is not None else None
        if kept is not None:
            found = kept.decode().split()
        else:
            found = [_hash(roots, states[roots]) for _, roots in sorted(wanted.items())]
            newest = max((max(one[2:4]) for state in states.values() for one in state), default=0)
            if store is not None and newest < time.time_ns() - _SETTLED:
                store.put(key, " ".join(found).encode())
        self._hashes.update(zip(sorted(wanted), found, strict=True))
        self._states.update(states)


class _Confirmed:
    """That all files were as they were hashed, with these modules loaded.

    Made before the files are looked at, so that nothing that happens meanwhile is missed.
    """

    def __init__(self, states: Mapping[tuple[str, ...], _State], loaded: list[str]):
        self._states = states
        self._loaded = loaded
        files = [path for state in states.values() for path, *_ in state]
        # Most files of packages, but not all, are Python's. A folder's times change with its names.
        folders = {os.path.dirname(path) for path in files}
        others = [path for path in files if not path.endswith(".py")]
        self._watched = [(path, _times(path)) for path in (*sorted(folders), *others)]

    def holds(self, states: Mapping[tuple[str, ...], _State]) -> bool:
        """Whether there are no other modules, folders and files that are not Python's."""
        return (
            states == self._states
            and list(sys.modules) == self._loaded
            and all(_times(path) == times for path, times in self._watched)
        )


def _times(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _state(roots: tuple[str, ...]) -> _State:
    return tuple(sorted(_files(roots)))


def _files(roots: tuple[str, ...]) -> Iterator[tuple[str, int, int, int, int]]:
    """The state of each file of some modules; of packages, of all files but Python's own caches."""
    folders = []
    for root in roots:
        if os.path.isdir(root):
            folders.append(root)
        elif os.path.exists(root):
            yield _entry(root, os.stat(root))
    linked = set()
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    target = os.path.realpath(entry.path) if entry.is_symlink() else ""
                    if entry.name != "__pycache__" and target not in linked:
                        linked.add(target or entry.path)  # Links may lead in a circle.
                        folders.append(entry.path)
                elif entry.is_file():
                    yield _entry(entry.path, entry.stat())


def _entry(path: str, status: os.stat_result) -> tuple[str, int, int, int, int]:
    return (path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _hash(roots: tuple[str, ...], state: _State) -> str:
    """SHA-256 over names and contents of files; where their folder is does not count."""
    digest = hashlib.sha256()
    parents = sorted({os.path.dirname(root) + os.sep for root in roots}, key=len, reverse=True)
    lines = []
    for path, *_ in state:
        name = next(path.removeprefix(one) for one in parents if path.startswith(one))
        with open(path, "rb") as file:
            lines.append(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n")
    for line in sorted(lines):
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _check_loaded(state: _State, since: int) -> None:
    """Refuses files that are newer than what this process may have loaded of them."""
    recent = [path for path, _, *times, _ in state if max(times) > since - _GRANULARITY]
    if not recent:
        return
    loaded = {os.path.abspath(path) for path in _loaded_files()}
    edited = [path for path in recent if path in loaded or not path.endswith(".py")]
    if edited:
        raise EditedError(edited[0])


def _loaded_files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            yield path


IDENTITY = CodeIdentity()
"""That of this process."""
