"""Small plugins, rules and targets for the tests of the extension surface."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from jax.extend.core import Primitive

from pallasite.extensions import Contribution, RuleSet, Semantics
from pallasite.plugins import PluginManager
from pallasite.targets import Target

LANE, WARP, WARPGROUP = Semantics.LANE, Semantics.WARP, Semantics.WARPGROUP

OLD = Target(name="old", ptx_version=80, compute_capability=(8, 0), features=frozenset({"copy"}))
NEW = Target(
    name="new",
    ptx_version=86,
    compute_capability=(9, 0),
    features=frozenset({"copy", "tma", "mma"}),
)


def rule(primitive: Primitive, *semantics: Semantics, **options: Any) -> RuleSet:
    """A rule set of one lowering rule."""
    rules = RuleSet()
    rules.lowering(primitive, *(semantics or (LANE,)), **options)(lambda ctx: None)
    return rules


def contribution(plugin: str, *rule_sets: RuleSet, **fields: Any) -> Contribution:
    """A contribution of the rules of several sets; the core's has the targets."""
    rules = RuleSet()
    rules.extend(*rule_sets)
    if plugin == "pallasite":
        fields.setdefault("targets", (OLD, NEW))
    return Contribution(
        plugin,
        lowering_rules=tuple(rules.lowering_rules),
        resource_rules=tuple(rules.resource_rules),
        layout_rules=tuple(rules.layout_rules),
        **fields,
    )


@dataclasses.dataclass
class FakeEntryPoint:
    """An entry point without an installed distribution."""

    name: str
    load: Callable[[], Any]
    module: str = "fake_plugin"
    dist: Any = None


def manager(*points: FakeEntryPoint) -> PluginManager:
    """A plugin manager with no built-in rules and the entry points given."""
    return PluginManager({"pallasite_targets": "pallasite_std.plugin"}, entry_points=lambda: points)


def lines(error: Any) -> list[str]:
    """The lines of an error's text."""
    return str(error.value).splitlines()


def dedent(text: str) -> str:
    return textwrap.dedent(text).strip()


def names(rules: Iterable[Any]) -> list[str]:
    return [one.name for one in rules]
