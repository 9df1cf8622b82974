"""The resource estimator: what a kernel reserves on chip, found before anything is lowered.

It walks the jaxpr bottom up with rules registered like any other. Allocations that are live at
once add up; alternatives and sequential allocations share (the largest counts). What the target
has of each resource is checked at the end.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from pallasite import _jax
from pallasite.errors import (
    PluginError,
    ResourceError,
    SourceLocation,
    UnsupportedError,
)
from pallasite.extensions import ResourceRule, Semantics
from pallasite.jaxpr_table import Region, inputs_of
from pallasite.jaxpr_visitor import Visitor
from pallasite.launch import Allocation
from pallasite.lowering.equations import errors_at_equation as errors_at_equation
from pallasite.lowering.geometry import Geometry
from pallasite.registry import Registry
from pallasite.resource import Count, Resource
from pallasite.targets import Target


@dataclasses.dataclass(frozen=True)
class Resources:
    """What (part of) a kernel reserves, and who asks for it where the peak is.

    Attributes:
      peaks: how much of each resource is reserved at once, at most. What one allocation counts is
        what it takes, aligned.
      kept: what is never given back, by resource and by a key: the same key counts once (a scope
        that is entered again), other keys add up even where they are alternatives.
      allocations: the requests behind ``peaks``, with their source lines.
    """

    peaks: Mapping[Resource, Count] = dataclasses.field(default_factory=dict)
    kept: Mapping[tuple[Resource, Hashable], Count] = dataclasses.field(default_factory=dict)
    allocations: tuple[Allocation, ...] = ()

    def __add__(self, other: Resources) -> Resources:
        """Both are live at the same time."""
        if other is _NOTHING:
            return self
        if self is _NOTHING:
            return other
        return Resources(
            peaks=_merged(self.peaks, other.peaks, operator.add),
            kept=_merged(self.kept, other.kept, operator.add),
            allocations=self.allocations + other.allocations,
        )

    def __or__(self, other: Resources) -> Resources:
        """One after the other, or one instead of the other."""
        if other is _NOTHING:
            return self
        if self is _NOTHING:
            return other
        smaller = {one.name for one in other.peaks if other.peaks[one] > self.peaks.get(one, 0)}
        return Resources(
            peaks=_merged(self.peaks, other.peaks, max),
            kept=_merged(self.kept, other.kept, max),
            allocations=(
                *(row for row in self.allocations if row.resource not in smaller),
                *(row for row in other.allocations if row.resource in smaller),
            ),
        )

    def amount(self, resource: Resource) -> int:
        """How much of a resource the kernel needs in all."""
        kept = sum(amount for (one, _), amount in self.kept.items() if one == resource)
        return self.peaks.get(resource, 0) + kept

    def amounts(self) -> dict[Resource, int]:
        """How much of every resource the kernel needs."""
        named = dict.fromkeys((*self.peaks, *(resource for resource, _ in self.kept)))
        return {resource: self.amount(resource) for resource in named}


def _merged[Key](
    one: Mapping[Key, int], other: Mapping[Key, int], combine: Callable[[int, int], int]
) -> dict[Key, int]:
    found = dict(one)
    for key, amount in other.items():
        found[key] = combine(found[key], amount) if key in found else amount
    return found


_NOTHING = Resources()


def nothing() -> Resources:
    """Resources of something that reserves nothing."""
    return _NOTHING


def reserve(
    resource: Resource,
    amount: int,
    what: str,
    location: SourceLocation | None,
    *,
    size: int | None = None,
) -> Resources:
    """Resources of one allocation that lasts for a scope.

    Args:
      resource: what it takes.
      amount: how much, aligned as it will be.
      what: the allocation, for tables: its dtype and shape, say.
      location: the user's line.
      size: how much was asked for, if that is less.
    """
    asked = amount if size is None else size
    row = Allocation(resource.name, what, asked, 0, location, resource.name, resource.unit)
    return Resources({resource: amount}, allocations=(row,))


def check_limits(kernel: str, resources: Resources, target: Target, registry: Registry) -> None:
    """Raises ResourceError if a kernel reserves more than the target has; it lists who asked."""
    amounts = resources.amounts()
    for limit in dict.fromkeys(one.limit_name for one in amounts if one.limited):
        pool = [one for one in amounts if one.limit_name == limit]
        total = sum(one.in_pool(amounts[one]) for one in pool)
        if total > target.limit(limit):
            own = next((one for one in pool if not one.pool), pool[0])
            names = {one.name for one in pool}
            rows = [row for row in resources.allocations if row.resource in names]
            raise resource_error(kernel, own, total, target, rows, registry)


def resource_error(
    kernel: str,
    resource: Resource,
    total: int,
    target: Target,
    allocations: Sequence[Allocation],
    registry: Registry | None = None,
) -> ResourceError:
    """The error for a kernel that exceeds what the target has of a resource.

    Its table has the allocations, the largest first, each with its source line.
    """
    limit = target.limit(resource.limit_name)
    rows = sorted(allocations, key=lambda allocation: -allocation.amount)
    table = "".join(
        f"\n    {row.amount:>9,} {row.unit}  {row.what:<34} {row.location or ''}".rstrip()
        for row in rows
    )
    hint = resource.hint
    if limit == 0 and registry is not None:
        others = sorted(
            one.name for one in registry.targets.values() if one.limit(resource.limit_name)
        )
        hint = f"compile for {' or '.join(others)}" if others else hint
    return ResourceError(
        f"kernel {kernel} exceeds available {resource.label}:"
        f" {resource.symbol or resource.name}={total}{table}",
        expected=f"at most {limit} {resource.unit} per block on {target.name}"
        if limit
        else f"a target that has {resource.label}; {target.name} has none",
        hint=hint,
        location=rows[0].location if rows else None,
    )


@dataclasses.dataclass(frozen=True)
class EstimatorContext:
    """What a resource rule gets to work with.

    Attributes:
      registry: where rules come from.
      target: what is compiled for.
      geometry: grid, cluster and threads.
      params: the kernel's ``CompilerParams``.
      location: the source line of the equation, or else of the kernel.
      semantics: what one user thread is in the kernel.
      rules: the equation's rules that are being called, each by the one before it.
      owners: by name, the resources that the kernel needed so far, and whose they are.
    """

    registry: Registry
    target: Target
    geometry: Geometry
    params: Any
    location: SourceLocation | None = None
    semantics: Semantics = Semantics.LANE
    rules: tuple[ResourceRule, ...] = ()
    owners: dict[str, tuple[Resource, str]] = dataclasses.field(default_factory=dict)

    def owned(self, resources: Resources, plugin: str) -> Resources:
        """``resources``, which a plugin says are needed, once it is checked that every record of a
        resource is the only one of its name.

        Raises:
          PluginError: another plugin has another resource of the same name.
        """
        for resource, amount in resources.amounts().items():
            if amount < 0:
                raise PluginError(f"plugin {plugin!r} reserves {amount} of {resource.name}")
            known, owner = self.owners.setdefault(resource.name, (resource, plugin))
            if known != resource:
                raise PluginError(
                    f"plugins {owner!r} and {plugin!r} have different resources that are both named"
                    f" {resource.name!r}",
                    got=f"{known} of {owner!r}, {resource} of {plugin!r}",
                    expected="one record for each name",
                    hint="give one of them another name, or let one plugin use the other's record",
                )
        return resources

    def next_rule(self, *avals: Any, **params: Any) -> Resources:
        """Calls the rule that would be called if this one were not there, and returns its result.

        Raises:
          MissingRuleError: there is none.
        """
        table = self.registry.resources
        rule = table.next(self.rules, self.semantics, self.target, avals, params)
        context = dataclasses.replace(self, rules=(*self.rules, rule))
        needed: Resources = rule.function(context, *avals, **params)
        return needed

    def reserve(
        self, resource: Resource, amount: int, what: str, *, size: int | None = None
    ) -> Resources:
        """Resources of one allocation of the equation; see :func:`reserve`."""
        return reserve(resource, amount, what, self.location, size=size)

    def nothing(self) -> Resources:
        """Resources of something that reserves nothing."""
        return _NOTHING

    def estimate(self, jaxpr: Any) -> Resources:
        """Resources of a nested jaxpr: its equations follow one another.

        Raises:
          UnsupportedError: no plugin says what the jaxprs of a primitive are to it, or what a
            scope of its own allocates.
        """
        estimate = _Estimate(self)
        estimate.run(jaxpr, [variable.aval for variable in inputs_of(jaxpr)])
        return estimate.total


class _Estimate(Visitor[Any]):
    """What equations that follow one another reserve; values are abstract values.

    Regions of equations without a resource rule follow one another or are alternatives: either way,
    the largest counts.
    """

    def __init__(self, ctx: EstimatorContext):
        super().__init__(ctx.registry.jaxprs)
        self.ctx = ctx
        self.total = _NOTHING

    def unknown(self, variable: Any) -> Any:
        return variable.aval

    def literal(self, atom: Any) -> Any:
        return atom.aval

    def equation(self, equation: Any, operands: list[Any]) -> Sequence[Any] | None:
        ctx, rule = self.ctx, None
        if equation.primitive in ctx.registry.resources:
            with errors_at_equation(equation):
                rule = ctx.registry.resources.find(
                    equation.primitive, ctx.semantics, ctx.target, operands, equation.params
                )
        if equation.primitive not in self.table:
            check_no_jaxprs(equation)
        elif rule is None:
            return super().equation(equation, operands)
        if rule is not None:
            location = _jax.user_location(equation.source_info) or ctx.location
            ctx = dataclasses.replace(ctx, location=location, rules=(rule,))
            with errors_at_equation(equation):
                found = rule.function(ctx, *operands, **equation.params)
                self.total |= ctx.owned(found, rule.plugin)
        return None

    def region(self, equation: Any, region: Region, inputs: Sequence[Any]) -> list[Any]:
        outer = self.ctx
        if region.per_warp:
            self.ctx = dataclasses.replace(outer, semantics=Semantics.WARP)
        outputs = super().region(equation, region, inputs)
        self.ctx = outer
        return outputs

    def allocation(self, equation: Any, region: Region, position: int) -> Any:
        raise UnsupportedError(
            f"primitive {equation.primitive.name} allocates memory for a jaxpr that it holds, but"
            " no plugin has a resource rule for it",
            hint="not the kernel, but the plugin that provides the primitive lacks something: a"
            " rule of RuleSet.resources (ctx.estimate(jaxpr) is what the jaxpr needs besides)",
            location=_jax.user_location(equation.source_info),
        )


def check_no_jaxprs(equation: Any) -> None:
    """Refuses an equation that holds jaxprs, when its primitive is not in the table of those.

    Raises:
      UnsupportedError: at the user's line.
    """
    for _ in _jax.jaxprs_in_params(equation.params):
        raise UnsupportedError(
            f"primitive {equation.primitive.name} holds a jaxpr, but no plugin says what it does"
            " with it",
            expected="a primitive that a plugin describes with a JaxprPrimitive",
            hint="return one from the plugin's hook pallasite_jaxpr_primitives, for example"
            " JaxprPrimitive(primitive=..., regions=lambda equation:"
            ' [call(equation.params["jaxpr"])])',
            location=_jax.user_location(equation.source_info),
        )
