"""Configuration: typed options, each settable by the program and by an environment variable.

An option's value is the first that is set: a surrounding ``with config.scoped(...)``, its
environment variable (so that the command line wins over the program), :func:`update`, its default.
Plugins add options of their own when they are imported, with :func:`declare`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pallasite.errors import ConfigError

PREFIX = "PALLASITE_"
"""How the names of all environment variables of options begin."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
      name: as the program names it.
      variable: its environment variable, ``PALLASITE_...``.
      default: gives its value where it is not set.
      parse: turns what a user gives into its value, or raises ``ValueError``.
      accepts: what that may be, for messages.
      description: one line for ``pallasite doctor``.
      affects_code: whether compiled kernels depend on it.
    """

    name: str
    variable: str
    default: Callable[[], Any]
    parse: Callable[[Any], Any]
    accepts: str
    description: str
    affects_code: bool = True


def boolean(value: Any) -> bool:
    """Reads ``on`` or ``off`` (also 1, 0, true, false), for :attr:`Option.parse`."""
    words = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}
    if isinstance(value, bool):
        return value
    try:
        return words[str(value).strip().lower()]
    except KeyError:
        raise ValueError from None


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, (tuple, list, set, frozenset)):
        raise ValueError
    if not all(isinstance(name, str) for name in value):
        raise ValueError
    return tuple(sorted({name.strip() for name in value} - {""}))


def _checks(value: Any) -> bool | tuple[str, ...]:
    """``on``, ``off``, or names of checks."""
    try:
        return boolean(value)
    except ValueError:
        return _names(value) or False


def _optional_name(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError
    return value.strip() or None


def _path(value: Any) -> pathlib.Path:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError
    return pathlib.Path(value).expanduser()


def _optional_path(value: Any) -> pathlib.Path | None:
    return None if value is None or value == "" else _path(value)


def _assembler(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not (value in ("auto", "off") or os.sep in value):
        raise ValueError
    return value


def _autotune(value: Any) -> str:
    """``off``, ``cached`` or ``on``; the words for a boolean as well."""
    if isinstance(value, str) and value.strip().lower() == "cached":
        return "cached"
    return "on" if boolean(value) else "off"


def _pipeline(value: Any) -> str:
    if value not in ("auto", "short", "O1", "O2", "O3"):
        raise ValueError
    return str(value)


def _default_cache_dir() -> pathlib.Path:
    if sys.platform == "darwin":
        return pathlib.Path("~/Library/Caches/pallasite").expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(base).expanduser() / "pallasite"


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "target",
            "PALLASITE_TARGET",
            lambda: None,
            _optional_name,
            "the name of a target such as 'sm_90a', or None for the local GPU",
            "what kernels are compiled for",
        ),
        Option(
            "disabled_plugins",
            "PALLASITE_DISABLE_PLUGINS",
            tuple,
            _names,
            "names of plugins, as a sequence or separated by commas",
            "plugins that are not loaded",
        ),
        Option(
            "disabled_passes",
            "PALLASITE_DISABLE_PASSES",
            tuple,
            _names,
            "names of passes, as a sequence or separated by commas",
            "passes that do not run",
        ),
        Option(
            "dump",
            "PALLASITE_DUMP",
            lambda: None,
            _optional_path,
            "a directory, or None",
            "where each stage of each kernel is written",
        ),
        Option(
            "cache",
            "PALLASITE_CACHE",
            lambda: True,
            boolean,
            "on or off (also 1, 0, true, false)",
            "whether compiled kernels are kept on disk",
        ),
        Option(
            "cache_dir",
            "PALLASITE_CACHE_DIR",
            _default_cache_dir,
            _path,
            "a directory",
            "where compiled kernels are kept",
        ),
        Option(
            "ptxas",
            "PALLASITE_PTXAS",
            lambda: "auto",
            _assembler,
            "'auto' (the installed wheel or PATH), 'off', or a path to the program",
            "the assembler that turns PTX into machine code and counts registers",
        ),
        Option(
            "llvm_pipeline",
            "PALLASITE_LLVM_PIPELINE",
            lambda: "auto",
            _pipeline,
            "short, O1, O2, O3, or auto (short, or O1 for a kernel that needs more)",
            "the pipeline of LLVM's passes that optimizes kernels",
        ),
        Option(
            "executor",
            "PALLASITE_EXECUTOR",
            lambda: None,
            _optional_name,
            "the name of an executor such as 'simulator', or None",
            "what runs kernels, instead of the executor of the highest priority",
            affects_code=False,
        ),
        Option(
            "sanitize",
            "PALLASITE_SANITIZE",
            lambda: ("fast",),
            _checks,
            "on, fast, off, or names of checks, as a sequence or separated by commas",
            "what executors that can do so check in kernels that they run",
            affects_code=False,
        ),
        Option(
            "autotune",
            "PALLASITE_AUTOTUNE",
            lambda: "off",
            _autotune,
            "off (the operations' own choice), cached (what was measured before, if anything) or on"
            " (measure what was not)",
            "whether operations use configurations that were measured to be the fastest",
            affects_code=False,
        ),
    )
}

OPTIONS_OF_CACHES = frozenset({"cache", "cache_dir", "dump", "target", "ptxas"})
"""Options that change no kernel's code, or that keys of caches have on their own."""

_updated: dict[str, Any] = {}
_listeners: list[Callable[[], None]] = []
DECLARERS: list[Callable[[], object]] = []
"""Functions that are called, once, before an option that nobody has declared is refused."""
_trace_context: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
_scoped: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar(
    "pallasite_config",
    default=types.MappingProxyType({}),
)


def declare(option: Option) -> None:
    """Adds an option of a plugin; to add it again changes nothing.

    Raises:
      ConfigError: another option has its name or its environment variable, or the variable's name
        does not begin as all do, so that the cache would not know of it before it is declared.
    """
    if not option.variable.startswith(PREFIX):
        raise ConfigError(
            f"option {option.name!r} has an environment variable with a strange name",
            got=repr(option.variable),
            expected=f"a name that begins with {PREFIX}",
        )
    for one in OPTIONS.values():
        if one.name == option.name and one.variable == option.variable:
            return
        if one.name == option.name or one.variable == option.variable:
            raise ConfigError(
                f"option {option.name!r} ({option.variable}) clashes with another one",
                got=f"{one.name!r} ({one.variable})",
            )
    OPTIONS[option.name] = option


def get(name: str) -> Any:
    """The present value of an option.

    Raises:
      ConfigError: there is no such option, or its environment variable has a value it rejects.
    """
    return source(name)[0]


def source(name: str) -> tuple[Any, str]:
    """The value of an option, and where it comes from: ``"context"``, a variable's name,
    ``"update"`` or ``"default"``."""
    option = _option(name)
    scoped_values = _scoped.get()
    if name in scoped_values:
        return scoped_values[name], "context"
    text = os.environ.get(option.variable, "")
    if text:
        return _parse(option, text, f"environment variable {option.variable}"), option.variable
    if name in _updated:
        return _updated[name], "update"
    return option.default(), "default"


def on_change(listener: Callable[[], None]) -> None:
    """Calls a function whenever something has changed for the whole process on which the code of
    kernels depends: an option, or the plugins."""
    _listeners.append(listener)


def set_trace_context(make: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> None:
    """Sets what makes a context, for each value, in which JAX's caches have entries of their own;
    :func:`scoped` enters one, so that what was traced with other options is not used there."""
    global _trace_context
    _trace_context = make


def changed() -> None:
    """Calls those who asked for it by :func:`on_change`."""
    for listener in _listeners:
        listener()


def scoped_options() -> Mapping[str, Any]:
    """What the surrounding ``with scoped(...)`` set, for work that another thread takes over."""
    return dict(_scoped.get())


def update(name: str, value: Any) -> None:
    """Sets an option for the whole process; its environment variable, if set, still wins.

    Raises:
      ConfigError: there is no such option, or it does not accept the value.
    """
    option, before = _option(name), _updated.get(name)
    _updated[name] = _parse(option, value, f"option {name!r}")
    if _updated[name] != before and _is_of_code(option):
        changed()


def reset(name: str | None = None) -> None:
    """Forgets what :func:`update` set, for one option or for all."""
    names = list(_updated) if name is None else [_option(name).name]
    was_set = [one for one in names if _updated.pop(one, None) is not None]
    if any(_is_of_code(OPTIONS[one]) for one in was_set):
        changed()


@contextlib.contextmanager
def scoped(**values: Any) -> Iterator[None]:
    """Sets options within a ``with`` block, for the present thread or task only."""
    parsed = {
        name: _parse(_option(name), value, f"option {name!r}") for name, value in values.items()
    }
    values = {**_scoped.get(), **parsed}
    of_code = tuple((name, values[name]) for name in sorted(values) if _is_of_code(OPTIONS[name]))
    traced = _trace_context(of_code) if of_code else contextlib.nullcontext()
    with bound(_scoped, values), traced:
        yield


@contextlib.contextmanager
def bound[Value](variable: contextvars.ContextVar[Value], value: Value) -> Iterator[None]:
    """A context variable has a value within a ``with`` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _is_of_code(option: Option) -> bool:
    """Whether what was traced with another value is out of date: operations also choose their
    implementation by the target, which the keys of compiled kernels have on their own."""
    return option.affects_code and option.name not in OPTIONS_OF_CACHES - {"target"}


def _option(name: str) -> Option:
    while name not in OPTIONS and DECLARERS:
        DECLARERS.pop()()
    try:
        return OPTIONS[name]
    except KeyError:
        raise ConfigError(
            f"there is no configuration option {name!r}", expected="one of " + ", ".join(OPTIONS)
        ) from None


def _parse(option: Option, value: Any, what: str) -> Any:
    try:
        return option.parse(value)
    except ValueError:
        raise ConfigError(
            f"{what} does not accept this value", got=repr(value), expected=option.accepts
        ) from None
