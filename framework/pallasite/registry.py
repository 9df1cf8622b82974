"""The rule tables: everything that the loaded plugins contribute, checked once, looked up fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pallasite.conflicts import check_no_tie, in_order, merge_names, merge_targets, unique, winner
from pallasite.errors import MissingRuleError
from pallasite.extensions import (
    STAGES,
    Contribution,
    Executor,
    InferenceRule,
    LayoutRule,
    LoweringRule,
    Pass,
    ResourceRule,
    RuleSet,
    Semantics,
    Stage,
)
from pallasite.jaxpr_table import JaxprPrimitive, JaxprTable
from pallasite.known_plugins import remedy
from pallasite.targets import Target, TargetPredicate

if TYPE_CHECKING:
    from jax.extend.core import Primitive

__all__ = [
    "STAGES",
    "Contribution",
    "Executor",
    "InferenceRule",
    "LayoutRule",
    "LoweringRule",
    "Pass",
    "Registry",
    "ResourceRule",
    "RuleSet",
    "Semantics",
    "Stage",
    "TargetPredicate",
]


class Registry:
    """All contributions of the plugins that are loaded.

    Building one checks that plugins agree: two equally specific lowering rules that can both match
    a known target, or two things of the same name, raise :class:`PluginError` naming both plugins,
    unless one says that it overrides the other.

    Attributes:
      targets: targets by name.
      names: ``"module:attribute"`` by the name under ``pallasite.gpu``.
      executors: executors by name.
      jaxprs: the primitives that carry jaxprs.
      plugins: names of the plugins, in the order of loading.
    """

    def __init__(
        self, contributions: Iterable[Contribution], absences: Mapping[str, str] | None = None
    ):
        """Merges and checks contributions.

        Args:
          contributions: what each plugin contributes; the core's first.
          absences: by name of installed plugin, why it is of no use (see ``remedy``).
        """
        contributions = tuple(contributions)
        self._present = {one.plugin: "" for one in contributions} | dict(absences or {})
        self.plugins = tuple(one.plugin for one in contributions)
        self.targets: dict[str, Target] = merge_targets(contributions)
        self.names: dict[str, str] = merge_names(contributions)
        self._lowering: dict[tuple[Primitive, Semantics], list[LoweringRule]] = {}
        for rule in _with_plugin(contributions, "lowering_rules"):
            self._lowering.setdefault((rule.primitive, rule.semantics), []).append(rule)
        self._resources: dict[Primitive, ResourceRule] = _by_primitive(
            contributions, "resource_rules", "resource rules"
        )
        self._layouts: dict[Primitive, LayoutRule] = _by_primitive(
            contributions, "layout_rules", "layout rules"
        )
        self._inference: dict[Primitive, InferenceRule] = _by_primitive(
            contributions, "inference_rules", "inference rules"
        )
        jaxpr_primitives: dict[Primitive, JaxprPrimitive] = _by_primitive(
            contributions, "jaxpr_primitives", "descriptions of the jaxprs"
        )
        self.jaxprs = JaxprTable(jaxpr_primitives.values())
        self._passes: dict[str, Pass] = unique(
            "passes named", _with_plugin(contributions, "passes"), lambda entry: entry.name
        )
        self.executors: dict[str, Executor] = unique(
            "executors named", _with_plugin(contributions, "executors"), lambda entry: entry.name
        )
        # The target is part of the value, so that its id cannot be used again by another one.
        self._found: dict[tuple[Primitive, Semantics, int], tuple[Target, LoweringRule]] = {}
        self._check_lowering_rules()

    def lowering_rule(
        self, primitive: Primitive, semantics: Semantics, target: Target
    ) -> LoweringRule:
        """The most specific lowering rule for a primitive under a semantics on a target.

        Raises:
          MissingRuleError: there is none; the message says which rules there are, and which plugin
            would provide one.
        """
        key = (primitive, semantics, id(target))
        found = self._found.get(key)
        if found is None:
            rule = _select(self._lowering.get((primitive, semantics), ()), target)
            if rule is None:
                raise self._missing(primitive, semantics, target)
            found = self._found[key] = (target, rule)
        return found[1]

    def has_lowering_rule(self, primitive: Primitive, semantics: Semantics, target: Target) -> bool:
        """Whether :meth:`lowering_rule` would find one."""
        rules = self._lowering.get((primitive, semantics), ())
        return any(rule.target.matches(target) for rule in rules)

    def lowering_rules(self, primitive: Primitive | None = None) -> tuple[LoweringRule, ...]:
        """All lowering rules, or all those of one primitive, for listings and messages."""
        return tuple(
            rule
            for (key, _), rules in self._lowering.items()
            for rule in rules
            if primitive is None or key is primitive
        )

    def resource_rule(self, primitive: Primitive) -> ResourceRule | None:
        """The resource-estimator rule of a primitive, or None: it needs nothing by itself."""
        return self._resources.get(primitive)

    def layout_rule(self, primitive: Primitive) -> LayoutRule | None:
        """The rule that finds hints for a primitive's layouts in lane semantics, or None."""
        return self._layouts.get(primitive)

    def inference_rule(self, primitive: Primitive) -> InferenceRule | None:
        """The rule of layout inference for a primitive, or None: it asks for nothing."""
        return self._inference.get(primitive)

    def passes(
        self, stage: Stage | None = None, *, target: Target | None = None
    ) -> tuple[Pass, ...]:
        """The passes of a stage (or of all), in the order in which they run.

        Passes that nothing orders keep the order of registration. With ``target``, only those that
        are for it. Passes that are switched off by configuration are included.
        """
        stages = STAGES if stage is None else (stage,)
        ordered: list[Pass] = []
        for one in stages:
            ordered += in_order(
                one, [entry for entry in self._passes.values() if entry.stage == one]
            )
        return tuple(entry for entry in ordered if target is None or entry.target.matches(target))

    def executor_for(self, platform: str) -> Executor | None:
        """The available executor of the highest priority for a JAX platform, or None."""
        candidates = [
            entry
            for entry in self.executors.values()
            if platform in entry.platforms and (entry.available is None or entry.available())
        ]
        return max(candidates, key=lambda entry: entry.priority, default=None)

    def _check_lowering_rules(self) -> None:
        for (primitive, semantics), rules in self._lowering.items():
            if len(rules) > 1:
                subject = f"{semantics.name} lowering rules of primitive {str(primitive)!r}"
                for target in self.targets.values():
                    check_no_tie(subject, rules, target)

    def _missing(
        self, primitive: Primitive, semantics: Semantics, target: Target
    ) -> MissingRuleError:
        rules = self.lowering_rules(primitive)
        name = str(primitive)
        suitable = sorted({t for rule in rules for t in self._targets_of(rule, semantics)})
        others = sorted({rule.semantics.name for rule in rules if rule.target.matches(target)})
        hint = None
        if suitable:
            hint = f"compile for {' or '.join(suitable)}"
        elif others:
            hint = f"use it under {' or '.join(others)} semantics"
        elif not rules:
            hint = remedy("primitives", name, self._present)
        installed = "; ".join(
            f"{rule.semantics.name} on {_describe(rule.target)} (plugin {rule.plugin!r})"
            for rule in rules
        )
        return MissingRuleError(
            f"no lowering rule for primitive {name!r} under {semantics.name} semantics"
            f" on target {target.name!r}",
            expected=f"a case that has a rule: {installed}"
            if installed
            else "a primitive that a plugin lowers; no plugin loaded has any rule for this one",
            hint=hint,
        )

    def _targets_of(self, rule: LoweringRule, semantics: Semantics) -> list[str]:
        if rule.semantics is not semantics:
            return []
        return [name for name, target in self.targets.items() if rule.target.matches(target)]


def _with_plugin(contributions: Iterable[Contribution], field: str) -> Iterator[Any]:
    """What all plugins contribute of one kind, each with the name of its plugin."""
    for one in contributions:
        for entry in getattr(one, field):
            yield dataclasses.replace(entry, plugin=one.plugin)


def _by_primitive(
    contributions: Iterable[Contribution], field: str, what: str
) -> dict[Primitive, Any]:
    """Rules of which a primitive has one."""
    rules = _with_plugin(contributions, field)
    return unique(f"{what} of primitive", rules, lambda rule: rule.primitive)


def _select(rules: Sequence[LoweringRule], target: Target) -> LoweringRule | None:
    matching = [rule for rule in rules if rule.target.matches(target)]
    if not matching:
        return None
    best = max(rule.target.specificity for rule in matching)
    tied = [rule for rule in matching if rule.target.specificity == best]
    if len(tied) == 1:
        return tied[0]
    chosen = winner(tied)
    if chosen is None:  # Possible only for a target that no plugin contributed.
        check_no_tie(f"lowering rules of primitive {str(tied[0].primitive)!r}", tied, target)
    return chosen


def _describe(predicate: TargetPredicate) -> str:
    return str(predicate) if predicate.names or not predicate.features else f"targets {predicate}"
