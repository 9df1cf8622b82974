"""Checks of a plugin when it is loaded: its hooks fit the specifications and what they return."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pluggy

from pallasite import extensions, hookspecs
from pallasite.barrier_kinds import BarrierKind, BarrierOrder, BarrierUse
from pallasite.errors import PluginError
from pallasite.jaxpr_table import JaxprPrimitive
from pallasite.lifecycle import KernelLifecycle
from pallasite.memory_events import MemoryEvents, ProxyFence
from pallasite.plugin_options import check_declaration
from pallasite.plugin_values import entries, wrong_field, wrong_value
from pallasite.targets import Target

FIELDS: Mapping[str, str] = {
    f"pallasite_{field.name}": field.name
    for field in dataclasses.fields(extensions.Contribution)
    if field.name != "plugin"
}
"""For each hook, the field of a :class:`Contribution` that it fills."""

_NAME_HOOKS = (
    "pallasite_names",
    "pallasite_exports",
    "pallasite_front_ends",
    "pallasite_implementations",
)
"""The hooks that return a mapping of names."""

_NAME = "names of one letter or more, without blanks, commas and equals signs"

_RECORDS: Mapping[str, type | str] = {
    "pallasite_targets": Target,
    "pallasite_lowering_rules": extensions.LoweringRule,
    "pallasite_resource_rules": extensions.ResourceRule,
    "pallasite_layout_rules": extensions.LayoutRule,
    "pallasite_inference_rules": extensions.InferenceRule,
    "pallasite_jaxpr_primitives": JaxprPrimitive,
    "pallasite_barrier_kinds": BarrierKind,
    "pallasite_barrier_orders": BarrierOrder,
    "pallasite_barrier_uses": BarrierUse,
    "pallasite_memory_events": MemoryEvents,
    "pallasite_proxy_fences": ProxyFence,
    "pallasite_memory_spaces": "pallasite.language.memory_space:MemorySpace",
    "pallasite_views": extensions.ViewRule,
    "pallasite_passes": extensions.Pass,
    "pallasite_lifecycles": KernelLifecycle,
    "pallasite_executors": extensions.Executor,
    "pallasite_instructions": extensions.InstructionRule,
    "pallasite_stores": extensions.StoreNamespace,
    "pallasite_diagnoses": extensions.Diagnosis,
    "pallasite_layouts": extensions.NamedLayout,
    "pallasite_operations": extensions.Operation,
    "pallasite_translations": extensions.Translation,
    "pallasite_layout_proposals": extensions.LayoutProposal,
}
"""By hook, the class of what it returns, or where that is."""


def implementations(plugin: Any, name: str) -> dict[str, Callable[[], Any]]:
    """A plugin's hook implementations by name of hook.

    Raises:
      PluginError: it has none, or one that no specification knows or whose arguments differ; or the
        plugin's name is none.
    """
    if not is_name(name):
        raise PluginError("a plugin has a wrong name", got=repr(name), expected=_NAME)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    expected = "functions marked with pallasite.hookimpl, named " + ", ".join(FIELDS)
    try:
        manager.register(plugin, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(
            f"plugin {name!r} does not fit the hook specifications: {error}", expected=expected
        ) from error
    callers = {hook: getattr(manager.hook, hook) for hook in FIELDS}
    found = {hook: caller for hook, caller in callers.items() if caller.get_hookimpls()}
    if not found:
        raise PluginError(f"plugin {name!r} implements no hook", expected=expected)
    return {hook: functools.partial(_call, caller) for hook, caller in found.items()}


def checked(plugin: str, hook: str, value: Any) -> Any:
    """What a hook returned, as a tuple of records or a dictionary.

    Args:
      plugin: the plugin's name and distribution, for messages.
      hook: the hook.
      value: what its implementation returned.

    Raises:
      PluginError: it is something else, or a field of a record is none that the record may have.
    """
    what = f"{hook} of plugin {plugin}"
    if hook == "pallasite_options":
        return () if value == () else (check_declaration(plugin, value),)
    if hook in _NAME_HOOKS:
        if isinstance(value, Mapping) and all(
            is_name(name) and _is_path(path) for name, path in value.items()
        ):
            return dict(value)
        expected = 'a mapping of name to "module:attribute", or to a Replacement'
        raise wrong_value(what, value, f"{expected}; {_NAME}")
    record = _record(hook)
    found = entries(value) if isinstance(value, Iterable) else (value,)
    for one in found:
        if not isinstance(one, record):
            raise wrong_value(what, one, f"an iterable of {record.__name__}")
        if wrong_field(one) is not None:
            raise wrong_value(what, one, record.__name__)
        owner = getattr(one, "primitive", one)
        name = getattr(owner, "name", getattr(owner, "operation", "none"))
        if not is_name(name) and not (name and isinstance(one, extensions.Diagnosis)):
            error = wrong_value(what, one, _NAME)
            error.got = f"the name {name!r} in {error.got}"
            raise error
    return found


def is_name(value: Any) -> bool:
    """Whether users can write a name in an option, which lists names separated by commas."""
    return isinstance(value, str) and re.fullmatch(r"[^\s,=]+", value) is not None


def _is_path(value: Any) -> bool:
    if isinstance(value, extensions.Replacement):
        return wrong_field(value) is None and _is_path(value.path)
    return isinstance(value, str) and all(value.partition(":"))


def _record(hook: str) -> type:
    """The class of what a hook returns; one that is costly to import is imported only now."""
    record = _RECORDS[hook]
    if isinstance(record, type):
        return record
    module, _, name = record.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


def _call(caller: pluggy.HookCaller) -> Any:
    # pluggy leaves out an implementation that returned None, which here means "nothing".
    results = caller()
    if results:
        return results[0]
    return {} if caller.name in _NAME_HOOKS else ()
