"""Rules of primitives as plain records, and :class:`RuleSet`, which collects them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from pallasite.errors import InvalidValueError
from pallasite.semantics import Semantics
from pallasite.targets import ANY_TARGET, TargetPredicate

if TYPE_CHECKING:
    from jax.extend.core import Primitive


@dataclasses.dataclass(frozen=True)
class OperandPredicate:
    """Which operands a rule is for.

    Attributes:
      matches: ``matches(avals, params)`` with the abstract values of the operands and the
        parameters of the equation; it must depend on nothing else.
      description: for messages, as in "a rule for <description>".
    """

    matches: Callable[[Sequence[Any], Mapping[str, Any]], bool]
    description: str


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """What all kinds of rules have in common: what a rule is for, and what it does.

    Of the rules that match an equation, the most specific is called: first by semantics, then one
    with a predicate of operands, then by target. It can call the next one (``ctx.next_rule``).

    Attributes:
      primitive: the JAX primitive.
      function: the rule.
      semantics: what one user thread is where the rule applies; None for any.
      target: the targets that it is for.
      operands: the operands that it is for; None for any.
      overrides: names of plugins whose equally specific rules come after this one.
      plugin: who contributed it; the registry fills it in.
    """

    primitive: Primitive
    function: Callable[..., Any]
    semantics: Semantics | None = None
    target: TargetPredicate = ANY_TARGET
    operands: OperandPredicate | None = None
    overrides: tuple[str, ...] = ()
    plugin: str = ""

    @property
    def specificity(self) -> tuple[int, int, int]:
        """Sort key among rules for one semantics: larger is more specific."""
        return (0 if self.operands is None else 1, *self.target.specificity)

    def describe(self) -> str:
        """What the rule is for and whose it is, for messages."""
        predicate = self.target
        plain = predicate.names or not predicate.features
        parts = [f"{self.semantics.name} on "] if self.semantics is not None else ["on "]
        parts.append(str(predicate) if plain else f"targets {predicate}")
        if self.operands is not None:
            parts.append(f" for {self.operands.description}")
        return "".join(parts) + f" (plugin {self.plugin!r})"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LoweringRule(Rule):
    """How to emit one primitive: ``function(ctx, *operands, **params)`` returns its results.

    Attributes:
      layouts: ``"any"`` if the rule takes arrays in whatever layouts inference gives them; no rule
        of layout inference is called then. None if one is, which says what this rule needs.
      result_layouts: for a rule with ``layouts="any"``, ``result_layouts(avals, **params)`` returns
        the layout of each result, or None where only the rule knows it; what it returns is then
        converted to the layout that inference has chosen.
    """

    layouts: Literal["any"] | None = None
    result_layouts: Callable[..., Sequence[Any]] | None = None


class ResourceRule(Rule):
    """What one primitive needs on chip: ``function(ctx, *avals, **params) -> Resources``."""


class LayoutRule(Rule):
    """How layouts of one primitive's operands and results constrain one another."""


class InferenceRule(Rule):
    """What layout inference has to know of one primitive, where a program leaves layouts open."""


type Operands = OperandPredicate | Callable[[Sequence[Any], Mapping[str, Any]], bool] | None
"""What ``operands=`` takes: a predicate, a plain function (described by its name), or nothing."""


class RuleKeywords(TypedDict, total=False):
    """What a rule is for, and whose rules it replaces; see :class:`RuleSet`."""

    requires: Iterable[str]
    targets: Iterable[str]
    operands: Operands
    overrides: Iterable[str]


class RuleSet:
    """Collects a module's rules by decorators, which stack and return the function unchanged.

    The lists ``lowering_rules``, ``resource_rules``, ``layout_rules`` and ``inference_rules`` are
    what the plugin's hook implementations return. All decorators take the same keywords:

    * ``requires``: features that a target must have;
    * ``targets``: names of the only targets that the rule is for; empty means any;
    * ``operands``: an :class:`OperandPredicate`, such as ``any_operand(...)`` of
      ``pallasite.plugin.language`` makes, or a function of the operands' abstract values and the
      parameters; None means any;
    * ``overrides``: names of plugins whose equally specific rules come after this one.
    """

    def __init__(self) -> None:
        self.lowering_rules: list[LoweringRule] = []
        self.resource_rules: list[ResourceRule] = []
        self.layout_rules: list[LayoutRule] = []
        self.inference_rules: list[InferenceRule] = []

    def lowering[Function: Callable[..., Any]](
        self,
        primitive: Primitive,
        *semantics: Semantics,
        layouts: Literal["any"] | None = None,
        result_layouts: Callable[..., Sequence[Any]] | None = None,
        **keywords: Unpack[RuleKeywords],
    ) -> Callable[[Function], Function]:
        """Registers ``function(ctx, *operands, **params)`` as a lowering rule of ``primitive``.

        Args:
          primitive: the JAX primitive.
          *semantics: where the rule applies; at least one.
          layouts, result_layouts: see :class:`LoweringRule`.
          **keywords: see the class.
        """
        if not semantics:
            raise InvalidValueError(
                f"the rule of {primitive} does not say for which semantics it is",
                expected="one or more of Semantics.LANE, Semantics.WARP, Semantics.WARPGROUP",
            )
        if layouts not in (None, "any") or (result_layouts is not None and layouts is None):
            raise InvalidValueError(
                f"the rule of {primitive} is wrong about layouts",
                got=f"layouts={layouts!r}, result_layouts={result_layouts!r}",
                expected='layouts="any", with or without result_layouts, or neither of the two',
                hint="a rule of layout inference (RuleSet.inference) says what a rule needs",
            )
        kind = functools.partial(LoweringRule, layouts=layouts, result_layouts=result_layouts)
        return _collect(self.lowering_rules, kind, primitive, semantics, **keywords)

    def resources[Function: Callable[..., Any]](
        self, primitive: Primitive, *semantics: Semantics, **keywords: Unpack[RuleKeywords]
    ) -> Callable[[Function], Function]:
        """Registers ``function(ctx, *avals, **params)`` as an estimator rule of ``primitive``.

        Args:
          primitive: the JAX primitive.
          *semantics: the semantics of the kernels for which it is; none means all.
          **keywords: see the class.
        """
        return _collect(self.resource_rules, ResourceRule, primitive, semantics, **keywords)

    def layout[Function: Callable[..., Any]](
        self, primitive: Primitive, **keywords: Unpack[RuleKeywords]
    ) -> Callable[[Function], Function]:
        """Registers ``function`` as a rule that finds hints for layouts in lane semantics.

        Args:
          primitive: the JAX primitive.
          **keywords: see the class.
        """
        return _collect(self.layout_rules, LayoutRule, primitive, (), **keywords)

    def inference[Function: Callable[..., Any]](
        self, primitive: Primitive, *semantics: Semantics, **keywords: Unpack[RuleKeywords]
    ) -> Callable[[Function], Function]:
        """Registers ``function(ctx, *operands, **params)`` as a rule of layout inference.

        It gets an ``InferenceContext`` and an abstract value for each operand, tells the context
        what the primitive asks of layouts, and returns abstract values of the results, just as a
        lowering rule returns values.

        Args:
          primitive: the JAX primitive.
          *semantics: where it applies, such as ``Semantics.WARP`` for warp-mapped regions; none
            means everywhere.
          **keywords: see the class.
        """
        return _collect(self.inference_rules, InferenceRule, primitive, semantics, **keywords)

    def extend(self, *others: RuleSet) -> None:
        """Adds all the rules of ``others``, for a plugin whose rules are in several modules."""
        for other in others:
            self.lowering_rules += other.lowering_rules
            self.resource_rules += other.resource_rules
            self.layout_rules += other.layout_rules
            self.inference_rules += other.inference_rules


def _collect[Function: Callable[..., Any]](
    rules: list[Any],
    kind: Callable[..., Rule],
    primitive: Primitive,
    semantics: Sequence[Semantics],
    *,
    requires: Iterable[str] = (),
    targets: Iterable[str] = (),
    operands: Operands = None,
    overrides: Iterable[str] = (),
) -> Callable[[Function], Function]:
    """A decorator that adds a function to a list of rules: for some semantics, or for any."""
    for one in semantics:
        if not isinstance(one, Semantics):
            raise InvalidValueError(
                f"the rule of {primitive} has a wrong semantics",
                got=repr(one),
                expected="Semantics.LANE, Semantics.WARP, Semantics.WARPGROUP, or a Semantics of a"
                " plugin",
            )
    common = {
        "primitive": primitive,
        "target": TargetPredicate(_names("requires", requires), _names("targets", targets)),
        "operands": _operands(primitive, operands),
        "overrides": tuple(sorted(_names("overrides", overrides))),
    }

    def register(function: Function) -> Function:
        rules.extend(
            kind(function=function, semantics=one, **common) for one in semantics or (None,)
        )
        return function

    return register


def _operands(primitive: Primitive, operands: Any) -> OperandPredicate | None:
    if operands is None or isinstance(operands, OperandPredicate):
        return operands
    if not callable(operands) or isinstance(operands, type):
        raise InvalidValueError(
            f"the rule of {primitive} has a wrong predicate of operands",
            got=repr(operands),
            expected="a function of the operands' abstract values and the parameters",
            hint="any_operand(...) makes one from memory spaces and types of abstract values",
        )
    name = getattr(operands, "__name__", "").strip("_")
    return OperandPredicate(operands, f"operands of which {name or 'its predicate'} is true")


def _names(what: str, values: Iterable[str]) -> frozenset[str]:
    """A set of names; a plain string is a common slip and would become its letters."""
    if isinstance(values, str):
        raise InvalidValueError(
            f"{what} takes a tuple of names", got=repr(values), hint=f"{what}=({values!r},)"
        )
    return frozenset(values)
