"""The plugin manager: finds plugins, loads them when first needed, and builds the registry.

Plugins are found through the entry-point group ``pallasite.plugins``; their names are known without
importing them. The core's own targets, rules and passes come in through the same hooks, as the
plugin ``pallasite``.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pallasite
from pallasite import config, forks, garbage, hookspecs
from pallasite.conflicts import CORE as CORE
from pallasite.conflicts import (
    merge_lifecycles,
    merge_names,
    merge_spaces,
    merge_targets,
    one_for_each,
    tie,
    unique,
    winner,
    with_plugin,
)
from pallasite.errors import MissingNameError, PallasiteError, PluginError
from pallasite.extensions import (
    Contribution,
    Diagnosis,
    InstructionRule,
    NamedLayout,
    Operation,
    StoreNamespace,
)
from pallasite.known_plugins import absent_plugins, is_own, known_plugins, remedy
from pallasite.plugin_api import check_plugin_api, needed_by, stated_in_source
from pallasite.plugin_checks import FIELDS, checked, implementations
from pallasite.plugin_values import PARTS, GuardedPart, guarded, note_code
from pallasite.registry import Registry
from pallasite.targets import Target

if TYPE_CHECKING:
    from pallasite.language.memory_space import MemorySpace
    from pallasite.lifecycle import KernelLifecycle

STANDARD = "standard"
"""The name of the standard library's plugin."""

IN_PROCESS = "in process"
"""What stands for the distribution of a plugin that the program registered itself."""

BUILTIN_MODULES: Mapping[str, str] = {
    "pallasite_executors": "pallasite.runtime.builtin",
    "pallasite_memory_spaces": "pallasite.language.builtin_spaces",
    "pallasite_names": "pallasite.language.builtin_spaces",
    "pallasite_passes": "pallasite.passes.builtin",
    "pallasite_stores": "pallasite.runtime.builtin",
}
"""The core's hook implementations: the module that holds each, imported when it is called."""


INSTRUCTIONS = "pallasite_instructions"
"""The hook that is called only when a kernel is interpreted, since it imports much."""

NOT_OF_THE_REGISTRY = (
    INSTRUCTIONS,
    "pallasite_stores",
    "pallasite_diagnoses",
    "pallasite_exports",
    "pallasite_options",
    "pallasite_front_ends",
    "pallasite_implementations",
)
"""The hooks that no kernel needs to be compiled, which are called on their own."""


_NOBODY_HAS = {
    "exports": "module 'pallasite' has no attribute",
    "front_ends": "no plugin has the front end",
    "implementations": "no plugin has the implementation",
}
"""By field of a contribution, what is said of a name that is missing there."""


class PluginWarning(UserWarning):
    """A plugin that is installed but cannot be used."""


@dataclasses.dataclass(frozen=True)
class PluginInfo:
    """What is known of one plugin.

    Attributes:
      name: its entry-point name.
      distribution: the installed distribution and version, or ``"in process"``.
      state: ``"found"`` (not imported yet), ``"loaded"``, ``"disabled"`` or ``"failed"``.
      error: for a failed one, what Pallasite says against it, or else the end of its traceback.
      reason: the error in one line, with the hook that raised it.
    """

    name: str
    distribution: str
    state: str
    error: str = ""
    reason: str = ""

    @property
    def in_process(self) -> bool:
        """Whether the program registered it itself."""
        return self.distribution == IN_PROCESS


@dataclasses.dataclass(frozen=True)
class _Found:
    """A plugin that can be loaded; ``load`` imports it. ``module`` is that of an installed one."""

    name: str
    distribution: str
    load: Callable[[], Any]
    module: str = ""

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution})"

    @property
    def package(self) -> str:
        """The top-level package of an installed plugin."""
        return self.module.partition(".")[0]

    @property
    def owner(self) -> str:
        """The name of the distribution; that of the package if there is none."""
        return self.distribution.partition(" ")[0].strip("?") or self.package


def _core_plugin(modules: Mapping[str, str]) -> dict[str, Callable[[], Any]]:
    def call(hook: str) -> Any:
        return getattr(importlib.import_module(modules[hook]), hook)()

    return {hook: functools.partial(call, hook) for hook in modules}


def _entry_points() -> Iterable[importlib.metadata.EntryPoint]:
    return importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)


class PluginManager:
    """Finds, loads and checks plugins. One serves the process; tests make their own.

    Args:
      builtins: for each hook, the module with the core's own implementation.
      entry_points: gives the installed entry points.
    """

    def __init__(
        self,
        builtins: Mapping[str, str] = BUILTIN_MODULES,
        entry_points: Callable[[], Iterable[importlib.metadata.EntryPoint]] = _entry_points,
    ):
        self._core = _core_plugin(builtins)
        self._entry_points = entry_points
        self._installed: dict[str, _Found] | None = None
        self._registered: dict[str, _Found] = {}
        self._changes = 0
        self._objects: dict[str, Any] = {}
        self._errors: dict[str, tuple[str, str]] = {}
        self._contributions: dict[tuple[str, str], Any] = {}
        self._built: tuple[frozenset[str], Registry] | None = None
        self._merged: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self._unknown: set[str] = set()
        self._lock = threading.RLock()

    def register(self, plugin: Any, name: str | None = None) -> str:
        """Adds a plugin object (module, class instance) to this process and returns its name.

        Raises:
          PluginError: a plugin of that name is there already, or a hook of it is wrong.
        """
        if name is None:
            name = str(getattr(plugin, "__name__", type(plugin).__name__))
        with self._lock:
            if name == CORE or name in self._registered or name in self._find():
                raise PluginError(f"a plugin named {name!r} is already there", hint="name=...")
            check_plugin_api(name, IN_PROCESS, needed_by(plugin))
            implementations(plugin, name)
            self._registered[name] = _Found(name, IN_PROCESS, lambda: plugin)
            self._changed()
        return name

    def unregister(self, name: str) -> None:
        """Removes a plugin that :meth:`register` added.

        Raises:
          PluginError: there is none of that name.
        """
        with self._lock:
            if self._registered.pop(name, None) is None:
                raise PluginError(
                    f"no plugin named {name!r} was registered in this process",
                    expected="one of " + (", ".join(self._registered) or "(none)"),
                )
            self._objects.pop(name, None)
            self._errors.pop(name, None)
            for key in [key for key in self._contributions if key[0] == name]:
                del self._contributions[key]
            self._changed()

    def refresh(self) -> None:
        """Asks all plugins anew, also those that failed and those that were installed meanwhile.

        What was compiled before is compiled again when it is next called. It is for the time after
        code of a plugin was changed in a running process, by a patch or ``importlib.reload``.
        """
        with self._lock:
            self._installed = None
            self._objects.clear()
            self._errors.clear()
            self._contributions.clear()
            self._changed()

    def _changed(self) -> None:
        self._changes += 1
        self._built = None
        config.changed()

    def plugins(self) -> tuple[PluginInfo, ...]:
        """All plugins that are installed or registered, without importing any."""
        with self._lock:
            disabled = config.get("disabled_plugins")
            found = [*self._find().values(), *self._registered.values()]
            return tuple(
                PluginInfo(
                    one.name,
                    one.distribution,
                    self._state(one.name, disabled),
                    *self._errors.get(one.name, ("", "")),
                )
                for one in found
            )

    def registered(self) -> dict[str, Any]:
        """The plugin objects that :meth:`register` added to this process, by name."""
        with self._lock:
            return {name: one.load() for name, one in self._registered.items()}

    def packages(self) -> frozenset[str]:
        """Names of the top-level packages of the installed plugins that are enabled.

        Their versions and sources are part of every key of the cache.
        """
        return frozenset(one.package for one in self.installed())

    def installed(self) -> tuple[_Found, ...]:
        """The installed plugins that are enabled."""
        with self._lock:
            disabled = config.get("disabled_plugins")
            return tuple(one for one in self._find().values() if one.name not in disabled)

    def remedy(self, kind: str, name: str) -> str | None:
        """What to do about something that is missing: what is known to provide it, or which
        installed plugins are of no use and might; None if nothing is known.

        Args:
          kind: ``"targets"``, ``"names"``, ``"primitives"``, ``"executors"`` and so on.
          name: what is missing.
        """
        present = self.absences()
        return remedy(kind, name, present) or absent_plugins(present)

    def absences(self) -> dict[str, str]:
        """By name of installed plugin, why it is of no use, or an empty string."""
        reasons = {}
        for one in self.plugins():
            failed = f"failed to load: {one.reason}" if one.reason else "failed to load"
            reasons[one.name] = {"disabled": "disabled", "failed": failed}.get(one.state, "")
        return reasons

    def targets(self) -> dict[str, Target]:
        """Targets by name, without loading any rules."""
        return merge_targets(self._contribute(("pallasite_targets",)))

    def paths(self, field: str) -> dict[str, str]:
        """What plugins give by name, each with its ``"module:attribute"``.

        Args:
          field: ``"names"`` (of ``pallasite.gpu``), ``"exports"`` (names of ``pallasite``),
            ``"front_ends"`` or ``"implementations"``, as the hooks are called.

        Raises:
          PluginError: two plugins have one name.
        """
        more = ("pallasite_memory_spaces",) if field == "names" else ()
        return self._merge(f"pallasite_{field}", lambda found: merge_names(found, field), *more)

    def layouts(self) -> dict[str, NamedLayout]:
        """Register layouts by name, without loading any rules.

        Raises:
          PluginError: two plugins have a layout of one name.
        """
        return self._merge(
            "pallasite_layouts",
            lambda found: one_for_each(found, "layouts", "register layouts named"),
        )

    def operation_names(self) -> frozenset[str]:
        """Names of the operations that plugins contribute."""
        return frozenset(one.name for one in self.all_operations())

    def operations(self, name: str, target: Target) -> tuple[Operation, ...]:
        """The implementations of an operation for a target, most specific first.

        Raises:
          PluginError: two equally specific ones, of which none overrides the other.
        """
        groups: dict[tuple[int, int], list[Operation]] = {}
        for one in self.all_operations():
            if one.name == name and one.target.matches(target):
                groups.setdefault(one.target.specificity, []).append(one)
        chosen = []
        for specificity in sorted(groups, reverse=True):
            first = winner(groups[specificity])
            if first is None:
                raise tie(f"implementations of operation {name!r}", groups[specificity], target)
            chosen += [first, *(one for one in groups[specificity] if one is not first)]
        return tuple(chosen)

    def portable_operation(self, name: str) -> Operation | None:
        """The implementation of an operation that asks least of a target."""
        found = [one for one in self.all_operations() if one.name == name]
        return min(found, key=lambda one: one.target.specificity, default=None)

    def all_operations(self) -> tuple[Operation, ...]:
        """The implementations of operations that plugins contribute."""
        return self._merge(
            "pallasite_operations",
            lambda contributions: tuple(with_plugin(contributions, "operations")),
        )

    def memory_spaces(self) -> dict[str, MemorySpace]:
        """Memory spaces by name: the core's own, then those of plugins.

        Raises:
          PluginError: two plugins have spaces of one name.
        """
        return self._merge("pallasite_memory_spaces", merge_spaces)

    def lifecycles(self) -> tuple[KernelLifecycle, ...]:
        """The lifecycles of kernels in their order, without loading any rules.

        Raises:
          PluginError: two plugins have one of the same name, or they cannot be ordered.
        """
        return self._merge("pallasite_lifecycles", merge_lifecycles)

    def _merge[Merged](
        self, hook: str, merge: Callable[[list[Contribution]], Merged], *more: str
    ) -> Merged:
        """What all plugins return from hooks, merged once for as long as they stay the same."""
        with self._lock:
            found = self._merged.get(hook)
            if found is None or found[0] != self.generation():
                merged = merge(self._contribute((hook, *more)))
                # A plugin may have failed just now, which makes another generation.
                found = self._merged[hook] = (self.generation(), merged)
            result: Merged = found[1]
            return result

    def generation(self) -> tuple[Any, ...]:
        """What plugins are in use; equal as long as they stay the same."""
        return (tuple(config.get("disabled_plugins")), self._changes, tuple(self._errors))

    def name(self, name: str) -> Any:
        """What a plugin adds to ``pallasite.gpu`` under a name.

        Raises:
          MissingNameError: no plugin has it.
          PluginError: what the plugin says of it is wrong.
        """
        path = self.paths("names").get(name)
        if path is None:
            hint = self.remedy("names", name)
            raise MissingNameError(f"no plugin has the name {name!r}", hint=hint)
        return self._resolve("pallasite_names", name, path)

    def registry(self) -> Registry:
        """All rules, targets, passes and executors of the enabled plugins.

        The same object is returned until a plugin is registered, removed, disabled or enabled.

        Raises:
          PluginError: two plugins contradict each other.
        """
        disabled = frozenset(config.get("disabled_plugins"))
        with self._lock:
            if self._built is None or self._built[0] != disabled:
                hooks = tuple(hook for hook in FIELDS if hook not in NOT_OF_THE_REGISTRY)
                contributions = self._contribute(hooks)
                self._built = (disabled, Registry(contributions, self.absences()))
            return self._built[1]

    def instructions(self) -> dict[str, InstructionRule]:
        """What PTX instructions do, by the beginning of their names.

        Raises:
          PluginError: two plugins contradict each other.
        """
        return self._merge(
            INSTRUCTIONS,
            lambda found: one_for_each(found, "instructions", "rules of PTX instruction"),
        )

    def stores(self) -> dict[str, StoreNamespace]:
        """The parts of the cache folder by name, without loading any rules.

        Raises:
          PluginError: two plugins have one of the same name, or in the same folder.
        """
        found = list(with_plugin(self._contribute(("pallasite_stores",)), "stores"))
        unique("parts of the cache in folder", found, lambda one: (one.folder, one.suffix))
        return unique("parts of the cache named", found, lambda one: one.name)

    def diagnoses(self) -> list[Diagnosis]:
        """What plugins say of the machine, for ``pallasite doctor``."""
        return list(with_plugin(self._contribute(("pallasite_diagnoses",)), "diagnoses"))

    def options(self) -> dict[str, type]:
        """Plugins' compiler parameters, by name of plugin: a dataclass each."""
        return self._merge(
            "pallasite_options",
            lambda contributions: {
                one.plugin: declared for one in contributions for declared in one.options
            },
        )

    def implementation(self, name: str) -> Any:
        """The implementation of a part that the core leaves to plugins; see :meth:`named`."""
        return self.named("implementations", name)

    def named(self, field: str, name: str) -> Any:
        """What a plugin gives by name.

        Args:
          field: ``"exports"``, ``"front_ends"`` or ``"implementations"``; see :meth:`paths`.
          name: such as ``"pallas_call"``, of a front end, or ``"memory_access"``.

        Raises:
          MissingNameError: no plugin has it.
          PluginError: two plugins do, or what one says of it is wrong.
        """
        path = self.paths(field).get(name)
        if path is None:
            message = f"{_NOBODY_HAS[field]} {name!r}"
            raise MissingNameError(message, hint=absent_plugins(self.absences()))
        owner = self._owner(f"pallasite_{field}", name, path)
        found = self._resolve(f"pallasite_{field}", name, path)
        if owner is None or is_own(owner.name):
            return found
        note_code(what := f"pallasite_{field} of plugin {owner}: {name!r}")
        return GuardedPart(found, what, name) if name in PARTS else found

    def _owner(self, hook: str, name: str, path: str) -> _Found | None:
        """The plugin that gives a name its ``"module:attribute"``."""
        for one in (*self._find().values(), *self._registered.values()):
            given = self._contributions.get((one.name, hook), {}).get(name)
            if path in (given, getattr(given, "path", None)):
                return one
        return None

    def _resolve(self, hook: str, name: str, path: str) -> Any:
        """What a plugin's ``"module:attribute"`` leads to; its errors name the plugin."""
        module, _, attribute = path.partition(":")
        try:
            with forks.unforked():
                return getattr(importlib.import_module(module), attribute)
        except PallasiteError:
            raise
        except (Exception, SystemExit) as error:
            owner = self._owner(hook, name, path)
            raise PluginError(
                f"{hook} of plugin {owner}: {name!r} leads to {path}, which cannot be imported:"
                f" {type(error).__name__}: {error}"
            ) from error

    def label(self, name: str) -> str:
        """A plugin's name and distribution, for messages."""
        found = {**self._find(), **self._registered}.get(name)
        return repr(name) if found is None else str(found)

    def culprit(self, error: BaseException) -> str | None:
        """The plugin, with its distribution, whose code raised an exception; None for our own."""
        packages = {one.package: one for one in self.installed() if one.name != STANDARD}
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            found = packages.get(str(frame.f_globals.get("__name__")).partition(".")[0])
            if found is not None:
                return str(found)
        return None

    def _find(self) -> dict[str, _Found]:
        """Entry points by name, sorted; a second one of a name is reported and not used."""
        if self._installed is None:
            found: dict[str, _Found] = {}
            for point in sorted(self._entry_points(), key=lambda point: point.name):
                distribution = getattr(point, "dist", None)
                label = f"{distribution.name} {distribution.version}" if distribution else "?"
                taken = CORE if point.name == CORE else None
                if point.name in found:
                    taken = found[point.name].distribution
                if taken is None:
                    found[point.name] = _Found(point.name, label, point.load, point.module)
                else:
                    warnings.warn(
                        f"plugin {point.name!r} ({label}) is not used, since {taken} has a plugin"
                        " of that name: uninstall one of the two",
                        PluginWarning,
                        stacklevel=2,
                    )
            self._installed = found
        return self._installed

    def _check_disabled(self) -> None:
        """Warns of names in the option ``disabled_plugins`` that no plugin has."""
        names, source = config.source("disabled_plugins")
        present = {*self._find(), *self._registered, *(one.name for one in known_plugins())}
        for name in frozenset(names) - present - self._unknown:
            self._unknown.add(name)
            close = difflib.get_close_matches(name, present, n=1)
            origin = "disabled_plugins" if source in ("context", "update") else source
            warnings.warn(
                f"{origin} names {name!r}, and there is no such plugin"
                + (f"; did you mean {close[0]!r}?" if close else ""),
                PluginWarning,
                stacklevel=2,
            )

    def _state(self, name: str, disabled: Iterable[str]) -> str:
        if name in disabled:
            return "disabled"
        if name in self._errors:
            return "failed"
        return "loaded" if name in self._objects else "found"

    def _contribute(self, hooks: tuple[str, ...]) -> list[Contribution]:
        """What each enabled plugin returns from some hooks; a plugin that fails gives nothing."""
        with forks.unforked(), garbage.uncollected(), self._lock:
            self._check_disabled()
            disabled = config.get("disabled_plugins")
            core = _Found(CORE, pallasite.__version__, lambda: None)
            contributions = [self._collect(core, hooks, self._core)]
            for one in [*self._find().values(), *self._registered.values()]:
                if one.name in disabled or one.name in self._errors:
                    continue
                try:
                    contributions.append(self._collect(one, hooks, self._load(one)))
                except (Exception, SystemExit) as error:  # A plugin may not end the program.
                    self._fail(one, error)
            return contributions

    def _load(self, found: _Found) -> dict[str, Callable[[], Any]]:
        """A plugin's hook implementations by name."""
        if found.name not in self._objects:
            try:
                plugin = found.load()
            except ImportError:
                # It may ask for what a later version has; then that is what is wrong.
                if found.module:
                    needed = stated_in_source(found.module)
                    check_plugin_api(found.name, found.distribution, needed)
                raise
            except KeyboardInterrupt as error:
                error.add_note(f"while plugin {found} was imported")
                raise
            check_plugin_api(found.name, found.distribution, needed_by(plugin))
            self._objects[found.name] = implementations(plugin, found.name)
        loaded: dict[str, Callable[[], Any]] = self._objects[found.name]
        return loaded

    def _collect(
        self, found: _Found, hooks: tuple[str, ...], loaded: Mapping[str, Callable[[], Any]]
    ) -> Contribution:
        values: dict[str, Any] = {}
        for hook in hooks:
            if hook in loaded:
                if (found.name, hook) not in self._contributions:
                    self._contributions[found.name, hook] = self._ask(found, hook, loaded[hook])
                values[FIELDS[hook]] = self._contributions[found.name, hook]
        return Contribution(found.name, **values)

    def _ask(self, found: _Found, hook: str, implementation: Callable[[], Any]) -> Any:
        """What a hook returns, checked; functions in it are guarded unless they are our own."""
        try:
            value = checked(str(found), hook, implementation())
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if not isinstance(error, PluginError):
                error.add_note(f"in {hook} of plugin {found}")
            raise
        if found.name in (CORE, STANDARD) or not isinstance(value, tuple):
            return value
        return tuple(guarded(one, str(found), hook, is_own(found.name)) for one in value)

    def _fail(self, found: _Found, error: BaseException) -> None:
        kind = type(error).__name__
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        line = str(error).strip().partition("\n")[0]
        if isinstance(error, PluginError):
            self._errors[found.name] = str(error), line
        else:
            text = "".join(traceback.format_exception(error, limit=-3)).strip()
            self._errors[found.name] = text, (f"{kind}: {line}" if line else kind) + notes
        self._built = None
        warnings.warn(
            f"plugin {found} is not used, since it failed to load: {kind}: {error}{notes}",
            PluginWarning,
            stacklevel=2,
        )


_manager = PluginManager()


def manager() -> PluginManager:
    """The plugin manager of this process."""
    return _manager


def register(plugin: Any, name: str | None = None) -> str:
    """Adds a plugin object to this process; see :meth:`PluginManager.register`."""
    return _manager.register(plugin, name)


def unregister(name: str) -> None:
    """Removes a plugin that :func:`register` added."""
    _manager.unregister(name)


def refresh() -> None:
    """Asks all plugins anew; see :meth:`PluginManager.refresh`."""
    _manager.refresh()


def plugins() -> tuple[PluginInfo, ...]:
    """All plugins that are installed or registered, without importing any."""
    return _manager.plugins()


def registry() -> Registry:
    """The current registry; it is built anew when plugins were added, removed or switched."""
    return _held.get() or _manager.registry()


def implementation(name: str) -> Any:
    """The implementation of a name, which is looked up once for the current registry."""
    return _implementation(registry(), name)


@functools.lru_cache(maxsize=16)
def _implementation(registry: Registry, name: str) -> Any:
    del registry  # Other plugins make another one.
    return _manager.implementation(name)


_held: contextvars.ContextVar[Registry | None] = contextvars.ContextVar(
    "pallasite_registry", default=None
)


def one_registry() -> contextlib.AbstractContextManager[None]:
    """Within a ``with`` block, :func:`registry` always returns the registry of its beginning: work
    on one kernel asks for it thousands of times, and goes by one state of the plugins."""
    return config.bound(_held, registry())
