"""Compiler parameters of plugins: how a plugin declares them, and what a kernel gives.

A plugin declares its parameters as a frozen dataclass whose fields all have defaults, made with
:func:`option`; its hook ``pallasite_options`` returns the class. A kernel gives values for some of
them with ``CompilerParams(plugin_options={"plugin": {"option": value}})``.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pallasite.errors import InvalidTypeError, InvalidValueError, PallasiteError, PluginError

_PLAIN = (bool, int, float, str)
"""Types of defaults that say of what type an option's values are."""


def option[Value](default: Value, description: str, *, keyword: bool = False) -> Value:
    """A field of a dataclass of options.

    Args:
      default: its value where a kernel gives none; hashable. Where it is a bool, an int, a float or
        a str, values are of that type too (an int will do for a float).
      description: one line, for error messages and ``pallasite plugins``.
      keyword: whether ``CompilerParams`` also takes it as a keyword of its own, and has it as an
        attribute.
    """
    metadata = {"description": description, "keyword": keyword}
    return dataclasses.field(default=default, metadata=metadata)


def keyword_owners(declared: Mapping[str, type]) -> dict[str, str]:
    """The plugin of each option that is a keyword of ``CompilerParams``; the first one has it."""
    return {
        field.name: plugin
        for plugin, options in reversed(list(declared.items()))
        for field in dataclasses.fields(cast(Any, options))
        if field.metadata.get("keyword")
    }


@dataclasses.dataclass(frozen=True)
class GivenOptions(Mapping[str, Mapping[str, Any]]):
    """What a kernel gives: by plugin, values by name of option. Immutable and hashable."""

    entries: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    def __getitem__(self, plugin: str) -> Mapping[str, Any]:
        return types.MappingProxyType(dict(dict(self.entries)[plugin]))

    def __iter__(self) -> Iterator[str]:
        return (plugin for plugin, _ in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return repr({plugin: dict(values) for plugin, values in self.entries})


def given_options(value: Any) -> GivenOptions:
    """What a user gives, frozen; whether the plugins have such options is not checked.

    Args:
      value: a mapping from names of plugins to mappings from names of options to values, or to
        instances of a plugin's dataclass of options.

    Raises:
      InvalidTypeError: it is something else, or a value is not hashable.
    """
    if isinstance(value, GivenOptions):
        return value
    if not isinstance(value, Mapping):
        raise InvalidTypeError(
            "plugin_options is not a mapping", got=repr(value), expected='{"plugin": {"option": 1}}'
        )
    return GivenOptions(
        tuple((plugin, _values(plugin, value[plugin])) for plugin in sorted(value, key=str))
    )


def _values(plugin: Any, values: Any) -> tuple[tuple[str, Any], ...]:
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        fields = dataclasses.fields(values)
        found = {field.name: getattr(values, field.name) for field in fields}
        values = {f.name: found[f.name] for f in fields if found[f.name] != f.default}
    if not isinstance(plugin, str) or not isinstance(values, Mapping):
        raise InvalidTypeError(
            "plugin_options is a mapping of something else",
            got=f"{plugin!r}: {values!r}",
            expected='names of plugins with their options, {"plugin": {"option": 1}}',
        )
    for name, value in values.items():
        try:
            hash(value)
        except TypeError as error:
            raise InvalidTypeError(
                f"option {name!r} of plugin {plugin!r} is not hashable",
                got=f"{value!r} of type {type(value).__name__}",
                expected="a value that never changes, such as a tuple instead of a list",
            ) from error
    return tuple((str(name), values[name]) for name in sorted(values, key=str))


def check_declaration(plugin: str, declared: Any) -> type:
    """Checks what the hook ``pallasite_options`` of a plugin returned.

    Raises:
      PluginError: it is not a frozen dataclass whose fields all have hashable defaults.
    """

    def wrong(why: str) -> PluginError:
        return PluginError(
            f"pallasite_options of plugin {plugin} returned the wrong thing: {why}",
            got=repr(declared),
            expected="a class: a frozen dataclass whose fields are made with option(default, text)",
        )

    if not isinstance(declared, type) or not dataclasses.is_dataclass(declared):
        raise wrong("no dataclass")
    if not cast(Any, declared).__dataclass_params__.frozen:
        raise wrong("the dataclass is not frozen")
    for field in dataclasses.fields(declared):
        if field.default is dataclasses.MISSING or not field.init:
            raise wrong(f"its field {field.name!r} has no default")
    try:
        hash(declared())
    except Exception as error:
        raise wrong(f"its defaults do not work: {type(error).__name__}: {error}") from error
    return declared


def describe(declared: type) -> list[tuple[str, Any, str]]:
    """Name, default and description of each option of a plugin."""
    return [
        (field.name, field.default, str(field.metadata.get("description", "")))
        for field in dataclasses.fields(cast(Any, declared))
    ]


def resolve(plugin: str, declared: type, given: GivenOptions) -> Any:
    """The options of a plugin for a kernel: an instance of its dataclass.

    Raises:
      InvalidValueError, InvalidTypeError: the plugin has no such option, or does not accept it.
    """
    values = dict(given.get(plugin, {}))
    defaults = {name: default for name, default, _ in describe(declared)}
    for name, value in values.items():
        if name not in defaults:
            close = difflib.get_close_matches(name, defaults, n=1)
            raise InvalidValueError(
                f"plugin {plugin!r} has no option {name!r}",
                expected=_listed(declared),
                hint=f"did you mean {close[0]}?" if close else None,
            )
        kind = type(defaults[name])
        fits = type(value) is kind or (kind is float and type(value) is int)
        if kind in _PLAIN and not fits:
            raise InvalidTypeError(
                f"option {name!r} of plugin {plugin!r} is of another type",
                got=f"{value!r} of type {type(value).__name__}",
                expected=f"{kind.__name__}, such as {defaults[name]!r}, its default",
            )
    try:
        return declared(**values)
    except PallasiteError:
        raise
    except (ValueError, TypeError) as error:
        raise InvalidValueError(
            f"plugin {plugin!r} does not accept its options: {error}",
            got=", ".join(f"{name}={value!r}" for name, value in values.items()),
            expected=_listed(declared),
        ) from error


def _listed(declared: type) -> str:
    """The options of a plugin, for messages."""
    parts = [
        f"{name} (default {default!r}{': ' + text if text else ''})"
        for name, default, text in describe(declared)
    ]
    return "one of " + "; ".join(parts) if parts else "no options: it has none"
