"""Whether code of plugins was changed in this process after it was imported: patched, reloaded.

Kernels that such code compiles are not those that the files say, so they must not be kept on disk,
nor taken for those compiled before. What is watched are functions, classes with their functions,
and constants (names in capitals) of the loaded modules of some packages.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from pallasite_std.caching.object_fields import (
    HAS_VERSIONS,
    Fields,
    Words,
    codes_of,
    version_of,
)

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_CODE_OF = operator.attrgetter("__code__")
_CODE = {types.FunctionType, staticmethod, classmethod, property, type(functools.cache(len))}


class LoadedCode:
    """What the modules of plugins had when they were first seen, and what has changed since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[str, tuple[Any, list[_Scope]]] = {}
        self._foreign: dict[str, tuple[Any, ...]] = {}
        self._states: dict[frozenset[int], tuple[int, tuple[Any, ...]]] = {}
        self._unchanged: _Snapshot | None = None

    def forget(self) -> None:
        """Takes what is loaded now for what was imported."""
        with self._lock:
            for name, (module, scopes) in list(self._watched.items()):
                if sys.modules.get(name) is not module or not all(map(_Scope.intact, scopes)):
                    del self._watched[name]
                    self._foreign.pop(name, None)
                    self._unchanged = None

    def generation(self, packages: Set[str]) -> int:
        """A number of the present state of the code of packages: 0 if it is what was imported, and
        another one for each other state."""
        changed: list[Any] = []
        with self._lock:
            known = list(sys.modules)
            if self._unchanged is not None and self._unchanged.holds(packages):
                if self._unchanged.loaded == known:
                    return 0
                if self._is_extended(self._unchanged, known, packages):
                    return 0
            self._unchanged, partial = None, False
            for name, module in list(sys.modules.items()):
                if _package(name) not in packages or module is None:
                    continue
                if name not in self._watched:
                    if getattr(module.__spec__, "_initializing", False):
                        partial = True
                        continue  # Another thread is importing it.
                    self._watch(name, module, packages)
                first, scopes = self._watched[name]
                if module is not first:
                    changed.append(module)
                    continue
                changed += self._foreign.get(name, ())
                for scope in scopes:
                    changed += scope.changes()
            if not changed:
                if not partial:
                    watched = {
                        name: self._watched[name]
                        for name in known
                        if _package(name) in packages and name in self._watched
                        if sys.modules.get(name) is not None
                    }
                    self._unchanged = _Snapshot(packages, known, watched)
                return 0
            key = frozenset(map(id, changed))
            number, _ = self._states.setdefault(key, (len(self._states) + 1, tuple(changed)))
            return number

    def _is_extended(self, snapshot: _Snapshot, known: list[str], packages: Set[str]) -> bool:
        """Whether all modules that were imported since a snapshot could be added to it."""
        added = dict[str, tuple[Any, list[_Scope]]]()
        for name in known:
            if name in snapshot.names or _package(name) not in packages:
                continue
            module = sys.modules.get(name)
            if module is None:
                continue
            if name not in self._watched:
                if getattr(module.__spec__, "_initializing", False):
                    return False
                self._watch(name, module, packages)
            first, scopes = self._watched[name]
            if module is not first or name in self._foreign:
                return False
            if any(True for scope in scopes for _ in scope.changes()):
                return False
            added[name] = first, scopes
        snapshot.add(added)
        snapshot.loaded = known
        return True

    def _watch(self, name: str, module: Any, packages: Set[str]) -> None:
        """Notes what there is; what somebody has put there from outside is a change already."""
        names = vars(module)
        scopes = [_Scope(names)]
        for value in list(names.values()):
            if isinstance(value, type) and value.__module__ == name:
                scopes.append(_Scope(value.__dict__))
        foreign = [one for scope in scopes for one in scope.values if _is_foreign(one, packages)]
        if foreign:
            self._foreign[name] = tuple(foreign)
        self._watched[name] = (module, scopes)


class _Scope:
    """The code in a module or a class, by name."""

    def __init__(self, scope: Mapping[str, Any]):
        code = [(name, value) for name, value in list(scope.items()) if _is_code(name, value)]
        self.scope = scope
        self.version = version_of(scope) if HAS_VERSIONS else None
        self._intact: int | None = None
        self.size = len(scope)
        self.names = [name for name, _ in code]
        self.values = [value for _, value in code]
        self.functions = [value for value in self.values if type(value) is types.FunctionType]
        self.codes = list(map(_CODE_OF, self.functions))

    def intact(self) -> bool:
        """Whether it is as it was, with nothing added."""
        version = None if self.version is None else self.version.value
        if version is not None and version == self._intact:
            return list(map(_CODE_OF, self.functions)) == self.codes
        same = len(self.scope) == self.size and not any(True for _ in self.changes())
        self._intact = version if same else None
        return same

    def changes(self) -> Iterator[Any]:
        """What is in the place of what there was, and functions with other code than theirs."""
        for name, then in zip(self.names, self.values, strict=True):
            now = self.scope.get(name)
            if now is not then:
                yield name
                yield now
        for function, code in zip(self.functions, self.codes, strict=True):
            if function.__code__ is not code:
                yield function.__code__


class _Snapshot:
    """All modules of some packages in a state without changes, where ``loaded`` were loaded.

    Whether that is still so is asked for each kernel, of thousands of names: these are looked up
    only where a module or class has changed at all, if that can be found out.
    """

    def __init__(
        self, packages: Set[str], loaded: list[str], watched: Mapping[str, tuple[Any, list[_Scope]]]
    ):
        self._packages = packages
        self.loaded = loaded
        self.names: set[str] = set()
        self._scopes: list[tuple[Mapping[str, Any], Callable[[Any], Any], tuple[Any, ...]]] = []
        self._versions: list[Any] = []
        self._version_fields = Fields([])
        self._seen: Words | None = None
        self._functions: list[Any] = []
        self._codes: list[Any] = []
        self._code_fields: Fields | None = None
        self._known_codes: Words = np.zeros(0, np.uint64)
        self.add(watched)

    def add(self, watched: Mapping[str, tuple[Any, list[_Scope]]]) -> None:
        """Adds modules, which are as they were when they were first seen."""
        if not watched:
            return
        self.names.update(watched)
        scopes = [one for _, found in watched.values() for one in found]
        # The modules themselves, then what each module and class has.
        modules = [module for module, _ in watched.values()]
        named: list[tuple[Mapping[str, Any], Sequence[str], Sequence[Any]]]
        named = [(sys.modules, list(watched), modules)]
        named += [(one.scope, one.names, one.values) for one in scopes if one.names]
        self._scopes += [(scope, _getter(names), tuple(values)) for scope, names, values in named]
        codes = dict(zip(self._functions, self._codes, strict=True))
        for one in scopes:
            codes |= zip(one.functions, one.codes, strict=True)
        self._functions, self._codes = list(codes), list(codes.values())
        self._code_fields = codes_of(self._functions)
        self._known_codes = np.array(list(map(id, self._codes)), np.uint64)
        if HAS_VERSIONS:
            self._versions.append(version_of(sys.modules))
            self._versions += [one.version for one in scopes if one.names]
            self._version_fields = Fields(list(map(ctypes.addressof, self._versions)))
        self._seen = None

    def holds(self, packages: Set[str]) -> bool:
        """Whether nothing of these modules was changed since."""
        if packages != self._packages:
            return False
        changed, seen = self._scopes, None
        if self._versions:
            seen = self._version_fields.read()
            if self._seen is not None:
                changed = [self._scopes[place] for place in np.flatnonzero(seen != self._seen)]
        try:
            for scope, get, values in changed:
                # Equal constants may be of several types.
                if not all(map(operator.is_, get(scope), values)):
                    return False
        except KeyError:
            return False
        self._seen = seen
        if self._code_fields is not None:
            return np.array_equal(self._code_fields.read(), self._known_codes)
        return list(map(_CODE_OF, self._functions)) == self._codes


def _getter(names: Sequence[str]) -> Callable[[Any], Any]:
    """What finds the values of some names in a mapping, as a tuple."""
    if len(names) == 1:
        (name,) = names
        return lambda scope: (scope[name],)
    return operator.itemgetter(*names)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_code(name: str, value: Any) -> bool:
    return type(value) in _CODE or isinstance(value, type) or name.isupper()


def _is_foreign(value: Any, packages: Set[str]) -> bool:
    """Whether a function is from the program rather than from a package or a library."""
    if type(value) is not types.FunctionType:
        return False
    top = str(value.__globals__.get("__name__", "")).partition(".")[0]
    if top in packages or top in sys.stdlib_module_names:
        return top == "__main__"
    file = str(value.__globals__.get("__file__", ""))
    return not file.startswith(_LIBRARIES) and top != "pallasite"


LOADED = LoadedCode()
"""That of this process."""
