"""Which plugin contributes what, found out through the public interface of the plugin manager."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pallasite import config
from pallasite.plugins import CORE, PluginWarning, manager

if TYPE_CHECKING:
    from pallasite.extensions import Rule
    from pallasite.registry import Registry


def providers(names: Callable[[], Iterable[str]]) -> dict[str, str]:
    """The plugin that provides each name: the one without which it is gone, else the core.

    Args:
      names: gives the names that the enabled plugins provide.
    """
    with quiet():
        found = dict.fromkeys(names(), CORE)
        disabled = config.get("disabled_plugins")
        for plugin in manager().plugins():
            if plugin.state == "disabled":
                continue
            with config.scoped(disabled_plugins=(*disabled, plugin.name)):
                found.update(dict.fromkeys(found.keys() - set(names()), plugin.name))
    return found


def counts(registry: Registry) -> dict[str, dict[str, int]]:
    """By plugin, how many rules of each kind it contributes.

    Raises:
      PluginError: two plugins contradict each other on a PTX instruction.
    """
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    kinds: dict[str, tuple[Rule, ...]] = {
        "lowering rules": registry.lowering.rules(),
        "resource rules": registry.resources.rules(),
        "layout rules": registry.layouts.rules(),
        "inference rules": registry.inference.rules(),
    }
    for kind, rules in kinds.items():
        for rule in rules:
            found[rule.plugin][kind] += 1
    for view in registry.views():
        found[view.plugin]["views"] += 1
    for entry in registry.jaxprs:
        found[entry.plugin]["primitives with jaxprs"] += 1
    for kind, entries in (
        ("barrier kinds", registry.barriers.kinds.values()),
        ("barrier orders", registry.barriers.orders()),
        ("barrier uses", registry.barriers.all_uses()),
        ("memory events", registry.memory.declared()),
        ("proxy fences", registry.memory.all_fences()),
        ("translations", registry.translations.values()),
    ):
        for one in entries:
            found[one.plugin][kind] += 1
    for instruction in manager().instructions().values():
        found[instruction.plugin]["PTX instructions"] += 1
    return {plugin: dict(counter) for plugin, counter in found.items()}


class quiet(warnings.catch_warnings):  # noqa: N801  (used like a function)
    """Leaves out the warnings of plugins that fail to load, where a table shows them."""

    def __enter__(self) -> None:
        """Switches the warnings off."""
        super().__enter__()
        warnings.simplefilter("ignore", PluginWarning)
