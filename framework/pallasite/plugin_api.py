"""The version of what plugins rely on, and whether it is the one that a plugin needs."""

from __future__ import annotations

import ast
import importlib.util
from typing import Any

from pallasite.errors import PluginError

PLUGIN_API = (2, 0)
"""Major and minor number of the plugin API: ``pallasite.plugin`` and the hooks. Names and hooks are
added under a new minor number, and changed or removed under a new major number only."""

NEEDED = "PALLASITE_PLUGIN_API"
"""The variable by which the module (or object) of a plugin states what it needs. A plugin without
it is taken to need what there is."""


def check_plugin_api(
    name: str, distribution: str, needed: Any, provided: tuple[int, int] = PLUGIN_API
) -> None:
    """Checks that a plugin can work with this version.

    Args:
      name: the plugin's.
      distribution: that which it comes with, and its version.
      needed: what it states.
      provided: what there is.

    Raises:
      PluginError: it states something else than two numbers, or needs another version.
    """
    if (
        not isinstance(needed, tuple)
        or len(needed) != 2
        or not all(type(number) is int and number >= 0 for number in needed)
    ):
        raise PluginError(
            f"plugin {name!r} does not say which plugin API it needs",
            got=f"{NEEDED} = {needed!r}",
            expected=f"a major and a minor number, such as {NEEDED} = {provided}",
        )
    if needed[0] == provided[0] and needed[1] <= provided[1]:
        return
    later = needed > provided
    package = distribution.partition(" ")[0]
    upgrade = "pallasite" if later or package in ("in", "?") else package
    raise PluginError(
        f"plugin {name!r} ({distribution}) needs plugin API {_text(needed)}, and this pallasite"
        f" has {_text(provided)}",
        expected=f"a plugin that needs {provided[0]}.0"
        + (f" to {_text(provided)}" if provided[1] else ""),
        hint=f"pip install --upgrade {upgrade}, if there is a later version"
        if later or upgrade != "pallasite"
        else f"change the plugin for plugin API {_text(provided)}",
    )


def needed_by(plugin: Any) -> Any:
    """What the module or object of a plugin states that it needs."""
    return getattr(plugin, NEEDED, PLUGIN_API)


def stated_in_source(module: str) -> Any:
    """What the source of a module states that cannot be imported."""
    try:
        spec = importlib.util.find_spec(module)
        source = getattr(spec.loader, "get_source", None) if spec is not None else None
        text = source(module) if source is not None else None
        tree = ast.parse(text or "")
    except (ImportError, SyntaxError, ValueError):
        return PLUGIN_API
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(one, ast.Name) and one.id == NEEDED for one in targets):
            try:
                return ast.literal_eval(statement.value)  # type: ignore[attr-defined]
            except ValueError:
                return PLUGIN_API
    return PLUGIN_API


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
