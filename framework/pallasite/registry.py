"""The rule tables: everything that the loaded plugins contribute, checked once, looked up fast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pallasite.conflicts import (
    in_order,
    merge_lifecycles,
    merge_names,
    merge_spaces,
    merge_targets,
    one_for_each,
    with_plugin,
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
    Semantics,
    Stage,
    Translation,
)
from pallasite.jaxpr_table import JaxprPrimitive, JaxprTable
from pallasite.known_plugins import absent_plugins, remedy
from pallasite.lifecycle import KernelLifecycle
from pallasite.order_tables import BarrierTables, MemoryTables
from pallasite.rule_selection import NO_PARAMS, RuleTable
from pallasite.targets import Target
from pallasite.view_rules import ViewRule

if TYPE_CHECKING:
    from jax.extend.core import Primitive

    from pallasite.language.memory_space import MemorySpace


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
      lowering, resources, layouts, inference: the rules of primitives of each kind.
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
        self._views: dict[type, ViewRule] = one_for_each(
            contributions, "views", "views made by", "transform"
        )
        self._views_found: dict[type, ViewRule | None] = {}
        known = self.targets.values()
        self.lowering: RuleTable[LoweringRule] = RuleTable(
            "lowering rules", with_plugin(contributions, "lowering_rules"), known
        )
        self.resources: RuleTable[ResourceRule] = RuleTable(
            "resource rules", with_plugin(contributions, "resource_rules"), known
        )
        self.layouts: RuleTable[LayoutRule] = RuleTable(
            "layout rules", with_plugin(contributions, "layout_rules"), known
        )
        self.inference: RuleTable[InferenceRule] = RuleTable(
            "inference rules", with_plugin(contributions, "inference_rules"), known
        )
        jaxpr_primitives: dict[Primitive, JaxprPrimitive] = one_for_each(
            contributions, "jaxpr_primitives", "jaxprs of primitive", "primitive"
        )
        self.jaxprs = JaxprTable(jaxpr_primitives.values())
        self.barriers = BarrierTables(contributions, self.targets.values(), self._present)
        self.memory = MemoryTables(contributions, self.targets.values())
        self._passes: dict[str, Pass] = one_for_each(contributions, "passes", "passes named")
        self._lifecycles: tuple[KernelLifecycle, ...] = merge_lifecycles(contributions)
        self.executors: dict[str, Executor] = one_for_each(
            contributions, "executors", "executors named"
        )
        self.translations: dict[str, Translation] = one_for_each(
            contributions, "translations", "translations of operation", "operation"
        )
        self._layout_proposals: dict[str, LayoutProposal] = one_for_each(
            contributions, "layout_proposals", "layout proposals named"
        )

    def lowering_rule(
        self,
        primitive: Primitive,
        semantics: Semantics,
        target: Target,
        avals: Sequence[Any] = (),
        params: Mapping[str, Any] = NO_PARAMS,
    ) -> LoweringRule:
        """The most specific lowering rule for an equation; see :meth:`RuleTable.find`.

        Raises:
          MissingRuleError: there is none; the message says which rules there are, and which plugin
            would provide one.
        """
        rule = self.lowering.find(primitive, semantics, target, avals, params)
        if rule is None:
            raise self._missing(primitive, semantics, target, avals, params)
        return rule

    def view_rule(self, transform: type) -> ViewRule | None:
        """What a class of transforms of references means, or None if there is none."""
        if transform not in self._views_found:
            rules = (self._views.get(base) for base in transform.__mro__)
            self._views_found[transform] = next((rule for rule in rules if rule), None)
        return self._views_found[transform]

    def views(self) -> tuple[ViewRule, ...]:
        """What all transforms of references mean, for listings."""
        return tuple(self._views.values())

    def layout_rule(
        self,
        primitive: Primitive,
        target: Target,
        avals: Sequence[Any] = (),
        params: Mapping[str, Any] = NO_PARAMS,
    ) -> LayoutRule | None:
        """The most specific rule that finds hints for an equation's layouts in lane semantics, or
        None. For the arguments see :meth:`lowering_rule`."""
        return self.layouts.find(primitive, Semantics.LANE, target, avals, params)

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
        rules = self.lowering.rules(primitive)
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
