"""Which plugin contributes what, found out through the public interface of the plugin manager."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pallasite import config
from pallasite.plugins import CORE, PluginWarning, manager

if TYPE_CHECKING:
    from pallasite.registry import Registry

NOT_INSTALLED = "not installed"


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
    primitives = set()
    for rule in registry.lowering_rules():
        found[rule.plugin]["lowering rules"] += 1
        primitives.add(rule.primitive)
    for primitive in primitives:
        resource, layout = registry.resource_rule(primitive), registry.layout_rule(primitive)
        if resource is not None:
            found[resource.plugin]["resource rules"] += 1
        if layout is not None:
            found[layout.plugin]["layout rules"] += 1
    for entry in registry.jaxprs:
        found[entry.plugin]["primitives with jaxprs"] += 1
    for instruction in manager().instructions().values():
        found[instruction.plugin]["PTX instructions"] += 1
    return {plugin: dict(counter) for plugin, counter in found.items()}


class quiet(warnings.catch_warnings):  # noqa: N801  (used like a function)
    """Leaves out the warnings of plugins that fail to load, where a table shows them."""

    def __enter__(self) -> None:
        """Switches the warnings off."""
        super().__enter__()
        warnings.simplefilter("ignore", PluginWarning)
