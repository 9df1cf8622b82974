"""Which rule of a primitive is called, and which comes after it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pallasite.conflicts import check_no_tie, tie, winner
from pallasite.errors import MissingRuleError
from pallasite.rules import Rule
from pallasite.semantics import Semantics
from pallasite.targets import Target

if TYPE_CHECKING:
    from jax.extend.core import Primitive

NO_PARAMS: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class _Candidates[Kind: Rule]:
    """The rules of a primitive for one semantics and target.

    Attributes:
      target: kept live, so that its id cannot become that of another one.
      groups: equally specific rules, the most specific first.
      first: the rule that is called whatever the operands are, if ``by_operands`` is false.
      by_operands: whether that depends on the operands.
    """

    target: Target
    groups: tuple[tuple[Kind, ...], ...]
    first: Kind | None
    by_operands: bool


class RuleTable[Kind: Rule]:
    """All rules of one kind, such as all lowering rules.

    A rule is more specific than another if its semantics comes earlier in the chain of fallbacks;
    within one semantics, if it alone has a predicate of operands; then if its target predicate is
    more specific. Among equals one has to override the others.

    Args:
      kind: what the rules are called in messages, such as ``"lowering rules"``.
      rules: of all plugins.
      targets: the known targets; ties on them are errors at once.

    Raises:
      PluginError: two plugins have rules of which neither goes before the other.
    """

    def __init__(self, kind: str, rules: Iterable[Kind], targets: Iterable[Target]):
        self._kind = kind
        self._rules: dict[Primitive, list[Kind]] = {}
        for rule in rules:
            self._rules.setdefault(rule.primitive, []).append(rule)
        self._found: dict[tuple[Primitive, Semantics, int], _Candidates[Kind]] = {}
        known = tuple(targets)
        for primitive, of_primitive in self._rules.items():
            if len(of_primitive) > 1:
                self._check(primitive, of_primitive, known)

    def __contains__(self, primitive: Primitive) -> bool:
        """Whether there are rules of a primitive."""
        return primitive in self._rules

    def rules(self, primitive: Primitive | None = None) -> tuple[Kind, ...]:
        """All rules, or all those of one primitive."""
        if primitive is not None:
            return tuple(self._rules.get(primitive, ()))
        return tuple(rule for rules in self._rules.values() for rule in rules)

    def find(
        self,
        primitive: Primitive,
        semantics: Semantics,
        target: Target,
        avals: Sequence[Any] = (),
        params: Mapping[str, Any] = NO_PARAMS,
        after: Sequence[Kind] = (),
    ) -> Kind | None:
        """The most specific rule for an equation, or None.

        Args:
          primitive: of the equation.
          semantics: what one user thread is; rules for those that it falls back to match, too.
          target: what is compiled for.
          avals: abstract values of the operands, for rules with a predicate of them.
          params: parameters of the equation, for the same.
          after: rules that have been called already, of which each has called the next.

        Raises:
          PluginError: several are equally specific, which only their predicates of operands, or a
            target that no plugin contributes, bring to light.
        """
        candidates = self._found.get((primitive, semantics, id(target)))
        if candidates is None:
            candidates = self._collect(primitive, semantics, target)
            self._found[primitive, semantics, id(target)] = candidates
        if not after and not candidates.by_operands:
            return candidates.first
        for group in candidates.groups:
            matching = [
                rule
                for rule in group
                if rule not in after
                and (rule.operands is None or rule.operands.matches(avals, params))
            ]
            if matching:
                return self._best(primitive, matching, target)
        return None

    def next(
        self,
        called: Sequence[Kind],
        semantics: Semantics,
        target: Target,
        avals: Sequence[Any],
        params: Mapping[str, Any],
    ) -> Kind:
        """The rule that the last of some rules calls, of which each has called the next.

        Raises:
          MissingRuleError: there is none.
        """
        rule = called[-1]
        found = self.find(rule.primitive, semantics, target, avals, params, called)
        if found is not None:
            return found
        raise MissingRuleError(
            f"the {self._kind[:-1]} of plugin {rule.plugin!r} for primitive"
            f" {str(rule.primitive)!r} calls the next one, and there is none on target"
            f" {target.name!r}",
            expected="a rule that is less specific, or one that this one overrides",
            hint="register this rule for fewer cases (operands=, requires=, targets=), or let it do"
            " without another",
        )

    def _best(self, primitive: Primitive, rules: Sequence[Kind], target: Target) -> Kind:
        chosen = rules[0] if len(rules) == 1 else winner(rules)
        if chosen is None:
            raise tie(self._subject(primitive, rules), rules, target)
        return chosen

    def _collect(
        self, primitive: Primitive, semantics: Semantics, target: Target
    ) -> _Candidates[Kind]:
        rules = [rule for rule in self._rules.get(primitive, ()) if rule.target.matches(target)]
        groups: list[tuple[Kind, ...]] = []
        for one in (*semantics.chain, None):
            by_specificity: dict[tuple[int, ...], list[Kind]] = {}
            for rule in rules:
                if rule.semantics == one:
                    by_specificity.setdefault(rule.specificity, []).append(rule)
            groups += [tuple(by_specificity[key]) for key in sorted(by_specificity, reverse=True)]
        by_operands = any(rule.operands is not None for group in groups for rule in group)
        first = None
        if groups and not by_operands:
            first = self._best(primitive, groups[0], target)
        return _Candidates(target, tuple(groups), first, by_operands)

    def _check(
        self, primitive: Primitive, rules: Sequence[Kind], targets: Sequence[Target]
    ) -> None:
        """Refuses ties that do not depend on an equation's operands."""
        for group in _grouped(rules):
            for target in targets:
                check_no_tie(self._subject(primitive, group), group, target)

    def _subject(self, primitive: Primitive, rules: Sequence[Kind]) -> str:
        semantics, predicates = rules[0].semantics, {rule.operands for rule in rules}
        kind = self._kind if semantics is None else f"{semantics.name} {self._kind}"
        known = [predicate.description for predicate in predicates if predicate is not None]
        operands = f" for {' and for '.join(sorted(known))}" if known else ""
        return f"equally specific {kind} of primitive {str(primitive)!r}{operands}"


def _grouped[Kind: Rule](rules: Sequence[Kind]) -> Iterator[list[Kind]]:
    """Rules that are equally specific and for the same operands, where there are several."""
    groups: dict[Any, list[Kind]] = {}
    for rule in rules:
        groups.setdefault((rule.semantics, rule.specificity, rule.operands), []).append(rule)
    return (group for group in groups.values() if len(group) > 1)
