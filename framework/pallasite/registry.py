"""The rule tables: everything that the loaded plugins contribute, checked once, looked up fast."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pallasite.conflicts import (
    in_order,
    merge_lifecycles,
    merge_names,
    merge_spaces,
    merge_targets,
    unique,
)
from pallasite.errors import MissingRuleError
from pallasite.executor_choice import ExecutorChoice, choose_executor
from pallasite.extensions import (
    STAGES,
    Contribution,
    Executor,
    InferenceRule,
    LayoutProposal,
    LayoutRule,
    LoweringRule,
    Pass,
    ResourceRule,
    RuleSet,
    Semantics,
    Stage,
    Translation,
)
from pallasite.jaxpr_table import JaxprPrimitive, JaxprTable
from pallasite.known_plugins import absent_plugins, remedy
from pallasite.lifecycle import KernelLifecycle
from pallasite.order_tables import BarrierTables, MemoryTables
from pallasite.rule_selection import RuleTable
from pallasite.rules import OperandPredicate, Rule
from pallasite.targets import Target, TargetPredicate
from pallasite.view_rules import ViewRule

if TYPE_CHECKING:
    from jax.extend.core import Primitive

    from pallasite.language.memory_space import MemorySpace

__all__ = [
    "STAGES",
    "Contribution",
    "Executor",
    "InferenceRule",
    "LayoutRule",
    "LoweringRule",
    "OperandPredicate",
    "Pass",
    "Registry",
    "ResourceRule",
    "Rule",
    "RuleSet",
    "Semantics",
    "Stage",
    "TargetPredicate",
]

_NO_PARAMS: Mapping[str, Any] = types.MappingProxyType({})


class Registry:
    """All contributions of the plugins that are loaded.

    Building one checks that plugins agree: two equally specific rules for the same operands that
    can both match a known target, or two things of the same name, raise :class:`PluginError` naming
    both plugins, unless one says that it overrides the other.

    Attributes:
      targets: targets by name.
      names: ``"module:attribute"`` by the name under ``pallasite.gpu``.
      memory_spaces: memory spaces by name.
      owners_of_spaces: the plugin that each of them is of, by name.
      executors: executors by name.
      jaxprs: the primitives that carry jaxprs.
      barriers: kinds of barriers, and what primitives do to them.
      memory: what primitives do to memory, and fences.
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
        self.memory_spaces: dict[str, MemorySpace] = merge_spaces(contributions)
        self.owners_of_spaces = {
            space.name: one.plugin for one in contributions for space in one.memory_spaces
        }
        self._views: dict[type, ViewRule] = unique(
            "views made by",
            _with_plugin(contributions, "views"),
            lambda rule: rule.transform,
        )
        self._views_found: dict[type, ViewRule | None] = {}
        known = self.targets.values()
        self._lowering: RuleTable[LoweringRule] = RuleTable(
            "lowering rules", _with_plugin(contributions, "lowering_rules"), known
        )
        self._resources: RuleTable[ResourceRule] = RuleTable(
            "resource rules", _with_plugin(contributions, "resource_rules"), known
        )
        self._layouts: RuleTable[LayoutRule] = RuleTable(
            "layout rules", _with_plugin(contributions, "layout_rules"), known
        )
        self._inference: RuleTable[InferenceRule] = RuleTable(
            "inference rules", _with_plugin(contributions, "inference_rules"), known
        )
        jaxpr_primitives: dict[Primitive, JaxprPrimitive] = _by_primitive(
            contributions, "jaxpr_primitives", "descriptions of the jaxprs"
        )
        self.jaxprs = JaxprTable(jaxpr_primitives.values())
        self.barriers = BarrierTables(contributions, self.targets.values(), self._present)
        self.memory = MemoryTables(contributions, self.targets.values())
        self._passes: dict[str, Pass] = unique(
            "passes named", _with_plugin(contributions, "passes"), lambda entry: entry.name
        )
        self._lifecycles: tuple[KernelLifecycle, ...] = merge_lifecycles(contributions)
        self.executors: dict[str, Executor] = unique(
            "executors named", _with_plugin(contributions, "executors"), lambda entry: entry.name
        )
        self.translations: dict[str, Translation] = unique(
            "translations of operation",
            _with_plugin(contributions, "translations"),
            lambda entry: entry.operation,
        )
        self._layout_proposals: dict[str, LayoutProposal] = unique(
            "layout proposals named",
            _with_plugin(contributions, "layout_proposals"),
            lambda entry: entry.name,
        )

    def lowering_rule(
        self,
        primitive: Primitive,
        semantics: Semantics,
        target: Target,
        avals: Sequence[Any] = (),
        params: Mapping[str, Any] = _NO_PARAMS,
        *,
        after: Sequence[LoweringRule] = (),
    ) -> LoweringRule:
        """The most specific lowering rule for an equation.

        Args:
          primitive: of the equation.
          semantics: what one user thread is; rules for those that it falls back to match, too.
          target: what is compiled for.
          avals: abstract values of the operands, for rules with a predicate of them.
          params: parameters of the equation, for the same.
          after: rules that have been called already, of which each has called the next.

        Raises:
          MissingRuleError: there is none; the message says which rules there are, and which plugin
            would provide one.
        """
        rule = self._lowering.find(primitive, semantics, target, avals, params, after)
        if rule is None:
            if after:
                raise no_next_rule("lowering rule", after, target)
            raise self._missing(primitive, semantics, target, avals, params)
        return rule

    def find_lowering_rule(
        self,
        primitive: Primitive,
        semantics: Semantics,
        target: Target,
        avals: Sequence[Any] = (),
        params: Mapping[str, Any] = _NO_PARAMS,
    ) -> LoweringRule | None:
        """What :meth:`lowering_rule` returns, or None where it raises."""
        return self._lowering.find(primitive, semantics, target, avals, params)

    def view_rule(self, transform: type) -> ViewRule | None:
        """What a class of transforms of references means, or None if there is none."""
        if transform not in self._views_found:
            rules = (self._views.get(base) for base in transform.__mro__)
            self._views_found[transform] = next((rule for rule in rules if rule), None)
        return self._views_found[transform]

    def views(self) -> tuple[ViewRule, ...]:
        """What all transforms of references mean, for listings."""
        return tuple(self._views.values())

    def has_lowering_rule(
        self,
        primitive: Primitive,
        semantics: Semantics,
        target: Target,
        avals: Sequence[Any] = (),
        params: Mapping[str, Any] = _NO_PARAMS,
    ) -> bool:
        """Whether :meth:`lowering_rule` would find one."""
        return self.find_lowering_rule(primitive, semantics, target, avals, params) is not None

    def lowering_rules(self, primitive: Primitive | None = None) -> tuple[LoweringRule, ...]:
        """All lowering rules, or all those of one primitive, for listings and messages."""
        return self._lowering.rules(primitive)

    def resource_rules(self, primitive: Primitive | None = None) -> tuple[ResourceRule, ...]:
        """All resource rules, or all those of one primitive."""
        return self._resources.rules(primitive)

    def has_resource_rules(self, primitive: Primitive) -> bool:
        """Whether there is a resource rule of a primitive at all, for any operands and target."""
        return primitive in self._resources

    def layout_rules(self, primitive: Primitive | None = None) -> tuple[LayoutRule, ...]:
        """All layout rules, or all those of one primitive."""
        return self._layouts.rules(primitive)

    def inference_rules(self, primitive: Primitive | None = None) -> tuple[InferenceRule, ...]:
        """All rules of layout inference, or all those of one primitive."""
        return self._inference.rules(primitive)

    def resource_rule(
        self,
        primitive: Primitive,
        semantics: Semantics,
        target: Target,
        avals: Sequence[Any] = (),
        params: Mapping[str, Any] = _NO_PARAMS,
        *,
        after: Sequence[ResourceRule] = (),
    ) -> ResourceRule | None:
        """The most specific resource rule for an equation, or None: it needs nothing by itself.

        For the arguments see :meth:`lowering_rule`.
        """
        return self._resources.find(primitive, semantics, target, avals, params, after)

    def layout_rule(
        self,
        primitive: Primitive,
        target: Target,
        avals: Sequence[Any] = (),
        params: Mapping[str, Any] = _NO_PARAMS,
        *,
        after: Sequence[LayoutRule] = (),
    ) -> LayoutRule | None:
        """The most specific rule that finds hints for an equation's layouts in lane semantics, or
        None. For the arguments see :meth:`lowering_rule`."""
        return self._layouts.find(primitive, Semantics.LANE, target, avals, params, after)

    def inference_rule(
        self,
        primitive: Primitive,
        semantics: Semantics,
        target: Target,
        avals: Sequence[Any] = (),
        params: Mapping[str, Any] = _NO_PARAMS,
        *,
        after: Sequence[InferenceRule] = (),
    ) -> InferenceRule | None:
        """The most specific rule of layout inference for an equation, or None: it asks for nothing.

        For the arguments see :meth:`lowering_rule`.
        """
        return self._inference.find(primitive, semantics, target, avals, params, after)

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
                f"{one} passes", [entry for entry in self._passes.values() if entry.stage == one]
            )
        return tuple(entry for entry in ordered if target is None or entry.target.matches(target))

    def layout_proposals(self, target: Target | None = None) -> tuple[LayoutProposal, ...]:
        """The layout proposals in the order in which they are tried; with ``target``, only those
        that are for it."""
        found = [
            one
            for one in self._layout_proposals.values()
            if target is None or one.target.matches(target)
        ]
        return tuple(sorted(found, key=lambda one: one.order))

    def lifecycles(self, *, target: Target | None = None) -> tuple[KernelLifecycle, ...]:
        """The lifecycles of kernels in their order; with ``target``, only those that are for it."""
        return tuple(
            one for one in self._lifecycles if target is None or one.target.matches(target)
        )

    def executor_for(self, platform: str) -> Executor | None:
        """The executor that runs kernels on a JAX platform, or None."""
        return self.executor_choice(platform).chosen

    def executor_choice(self, platform: str) -> ExecutorChoice:
        """Which executor runs kernels on a JAX platform, and why; see :class:`ExecutorChoice`."""
        return choose_executor(self.executors.values(), platform)

    def _missing(
        self,
        primitive: Primitive,
        semantics: Semantics,
        target: Target,
        avals: Sequence[Any],
        params: Mapping[str, Any],
    ) -> MissingRuleError:
        rules = self.lowering_rules(primitive)
        name = str(primitive)
        fitting = [
            rule for rule in rules if rule.operands is None or rule.operands.matches(avals, params)
        ]
        here = [rule for rule in fitting if rule.semantics in semantics.chain]
        suitable = sorted({name for rule in here for name in self._targets_of(rule)})
        others = sorted(
            {
                rule.semantics.name
                for rule in fitting
                if rule.semantics is not None and rule.target.matches(target)
            }
        )
        hint = got = None
        known = None if rules else remedy("primitives", name, self._present)
        if suitable:
            hint = f"compile for {' or '.join(suitable)}"
        elif others:
            hint = f"use it under {' or '.join(others)} semantics"
        absent = None if known else absent_plugins(self._present)
        hint = "; ".join(part for part in (hint, known, absent) if part) or None
        if len(fitting) < len(rules):
            got = "operands " + (", ".join(str(aval) for aval in avals) or "(none)")
        installed = "; ".join(rule.describe() for rule in rules)
        return MissingRuleError(
            f"no lowering rule for primitive {name!r} under {semantics.name} semantics"
            f" on target {target.name!r}",
            got=got,
            expected=f"a case that has a rule: {installed}"
            if installed
            else "a primitive that a plugin lowers; no plugin loaded has any rule for this one",
            hint=hint,
        )

    def _targets_of(self, rule: LoweringRule) -> list[str]:
        return [name for name, target in self.targets.items() if rule.target.matches(target)]


def no_next_rule(kind: str, called: Sequence[Rule], target: Target) -> MissingRuleError:
    """The error for a rule that calls the next one, where it is the last.

    Args:
      kind: of rule, such as ``"lowering rule"``.
      called: the rules that have been called, of which the last called the next.
      target: what is compiled for.
    """
    rule = called[-1]
    return MissingRuleError(
        f"the {kind} of plugin {rule.plugin!r} for primitive {str(rule.primitive)!r} calls the next"
        f" one, and there is none on target {target.name!r}",
        expected="a rule that is less specific, or one that this one overrides",
        hint="register this rule for fewer cases (operands=, requires=, targets=), or let it do"
        " without another",
    )


def _with_plugin(contributions: Iterable[Contribution], field: str) -> Iterator[Any]:
    """What all plugins contribute of one kind, each with the name of its plugin."""
    for one in contributions:
        for entry in getattr(one, field):
            yield dataclasses.replace(entry, plugin=one.plugin)


def _by_primitive(
    contributions: Iterable[Contribution], field: str, what: str
) -> dict[Primitive, Any]:
    """Records of which a primitive has one."""
    entries = _with_plugin(contributions, field)
    return unique(f"{what} of primitive", entries, lambda entry: entry.primitive)
