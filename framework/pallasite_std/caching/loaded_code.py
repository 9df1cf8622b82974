"""Whether code of plugins was changed in this process after it was imported: patched, reloaded.

Kernels that such code compiles are not those that the files say, so they must not be kept on disk,
nor taken for those compiled before. What is watched are functions, classes with their functions,
and constants (names in capitals) of the loaded modules of some packages.
"""

from __future__ import annotations

import functools
import operator
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_CODE_OF = operator.attrgetter("__code__")
_CODE = {types.FunctionType, staticmethod, classmethod, property, type(functools.cache(len))}
_BY_IDENTITY = _CODE | {type, types.ModuleType}
"""Types of values that are equal only if they are identical."""


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
        self.size = len(scope)
        self.names = [name for name, _ in code]
        self.values = [value for _, value in code]
        self.functions = [value for value in self.values if type(value) is types.FunctionType]
        self.codes = list(map(_CODE_OF, self.functions))

    def intact(self) -> bool:
        """Whether it is as it was, with nothing added."""
        return len(self.scope) == self.size and not any(True for _ in self.changes())

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

    Whether that is still so is asked for each kernel, of thousands of names: what is compared is
    therefore kept in flat lists.
    """

    def __init__(
        self, packages: Set[str], loaded: list[str], watched: Mapping[str, tuple[Any, list[_Scope]]]
    ):
        self._scopes: list[tuple[Callable[[Any], Any], Mapping[str, Any]]] = []
        self._values: list[Any] = []
        self._functions: list[Any] = []
        self._codes: list[Any] = []
        self._places: list[int] = []
        self._constants: Callable[[Any], tuple[Any, ...]] = lambda values: ()
        self._constant_values: tuple[Any, ...] = ()
        self.names: set[str] = set()
        self._packages = packages
        self.loaded = loaded
        self.add(watched)

    def add(self, watched: Mapping[str, tuple[Any, list[_Scope]]]) -> None:
        """Adds modules, which are as they were when they were first seen."""
        if not watched:
            return
        self.names.update(watched)
        scopes = [one for _, found in watched.values() for one in found]
        # The modules themselves, then what each module and class has.
        self._scopes += [
            (_getter(names), scope)
            for names, scope in [(list(watched), sys.modules)]
            + [(one.names, one.scope) for one in scopes]
            if names
        ]
        count = len(self._values)
        self._values += [module for module, _ in watched.values()]
        for one in scopes:
            self._values += one.values
            self._functions += one.functions
            self._codes += one.codes
        # Equal constants may be of several types, so these are compared by identity.
        added = enumerate(self._values[count:], count)
        self._places += [place for place, one in added if type(one) not in _BY_IDENTITY]
        if self._places:
            self._constants = _getter(self._places)
        self._constant_values = self._constants(self._values)

    def holds(self, packages: Set[str]) -> bool:
        """Whether nothing of these modules was changed since."""
        if packages != self._packages:
            return False
        found: list[Any] = []
        try:
            for get, scope in self._scopes:
                found += get(scope)
            # What is identical is equal, which a comparison of lists finds out first.
            return (
                all(map(operator.is_, self._constants(found), self._constant_values))
                and found == self._values
                and list(map(_CODE_OF, self._functions)) == self._codes
            )
        except KeyError:
            return False


def _getter(names: Sequence[Any]) -> Callable[[Any], Any]:
    """What finds the values of some names in a mapping, or places in a list, as a tuple."""
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
