"""Plugins that are known to exist, so that an error can say which one to install.

The table is data for messages only: nothing is looked up in it unless something is missing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownPlugin:
    """One plugin: its entry-point name, how to get it, and what it provides.

    ``install`` is empty for a plugin that is not published yet.
    """

    name: str
    install: str = ""
    targets: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    primitives: tuple[str, ...] = ()
    executors: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    barrier_orders: tuple[str, ...] = ()

    @property
    def absence(self) -> str:
        """What is said of it where it is not installed."""
        return "not installed" if self.install else "not available yet"


@functools.cache
def known_plugins() -> tuple[KnownPlugin, ...]:
    """The plugins of the table ``known_plugins.json``."""
    table = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())
    for one in table:
        one.update({key: tuple(value) for key, value in one.items() if isinstance(value, list)})
    return tuple(KnownPlugin(**one) for one in table)


@functools.cache
def is_own(plugin: str) -> bool:
    """Whether a plugin comes with Pallasite."""
    return plugin in ("pallasite", "standard") or any(one.name == plugin for one in known_plugins())


def provider(kind: str, name: str) -> KnownPlugin | None:
    """The known plugin that provides ``name``, or None.

    Args:
      kind: ``"targets"``, ``"names"``, ``"primitives"``, ``"executors"``, ``"layouts"`` or
        ``"barrier_orders"``.
      name: what is missing.
    """
    for plugin in known_plugins():
        if name in getattr(plugin, kind):
            return plugin
    return None


def remedy(kind: str, name: str, present: Mapping[str, str]) -> str | None:
    """What to do about something missing that a known plugin provides; None if none does.

    Args:
      kind: as for :func:`provider`.
      name: what is missing.
      present: by name of installed plugin, why it is of no use: ``"disabled"``, ``"failed: ..."``,
        or empty for a plugin that is loaded and well.
    """
    plugin = provider(kind, name)
    return None if plugin is None else plugin_remedy(plugin.name, present)


def plugin_remedy(name: str, present: Mapping[str, str]) -> str | None:
    """What to do to get what a plugin provides; None if nothing is known of the plugin.

    Args:
      name: the plugin's.
      present: as for :func:`remedy`.
    """
    known = {one.name: one for one in known_plugins()}.get(name)
    install = known.install if known is not None else ""
    reason = present.get(name)
    if reason is None:
        if known is None:
            return None
        if not install:
            return f"plugin {name!r}, which is to provide it, is not available yet"
        return f"{install} (plugin {name!r} provides it and is not installed)"
    if reason == "disabled":
        return (
            f"enable plugin {name!r}, which provides it:"
            " it is listed in PALLASITE_DISABLE_PLUGINS or config disabled_plugins"
        )
    if reason:
        return f"repair plugin {name!r}, which provides it; it {reason}"
    return f"plugin {name!r} is to provide it; this version, which is installed, does not have it"


def absent_plugins(present: Mapping[str, str]) -> str | None:
    """Which installed plugins are of no use and might have had what is missing; None if none is.

    Args:
      present: as for :func:`remedy`.
    """
    parts = []
    disabled = [repr(name) for name, reason in present.items() if reason == "disabled"]
    if disabled:
        parts.append(
            f"plugins that are disabled may provide it: {', '.join(disabled)}"
            " (PALLASITE_DISABLE_PLUGINS or config disabled_plugins)"
        )
    failed = [
        f"{name!r}, which {reason}"
        for name, reason in present.items()
        if reason not in ("", "disabled")
    ]
    if failed:
        parts.append(f"plugins that are broken may provide it: {'; '.join(failed)}")
    return "; ".join(parts) or None
