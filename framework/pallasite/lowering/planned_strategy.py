"""Layouts under warpgroup semantics: those of the plan that inference has made for the kernel."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from pallasite.lowering.arrays import RegisterArray
from pallasite.lowering.memory_access import relayout
from pallasite.lowering.strategy import LayoutStrategy

if TYPE_CHECKING:
    from pallasite.layouts.registers import Layout
    from pallasite.lowering.context import RuleContext, Value
    from pallasite.lowering.inference.plan import LayoutPlan, Path


class PlannedStrategy(LayoutStrategy):
    """Follows a plan: converts arrays where it says so, and adds its barriers and fences."""

    def __init__(self, plan: LayoutPlan):
        self.plan: LayoutPlan = plan

    def enter(self, jaxpr: Any) -> None:
        """Nothing: the plan is for the whole kernel."""

    def wanted(self, equation: Any, path: Path) -> tuple[Layout | None, int | None]:
        """The layout that inference has chosen, if there is a choice."""
        planned = self.plan.equations.get((path, id(equation)))
        return (None if planned is None else planned.hint), None

    def before(self, ctx: RuleContext, operands: Sequence[Value]) -> Sequence[Value]:
        """Converts operands, then emits the barrier and the fences that come first."""
        plan, key = self.plan, (ctx.path[:-1], ctx.path[-1])
        planned = plan.equations.get(key)
        if planned is not None:
            operands = _converted(ctx, operands, planned.operands, planned.materialized)
        if key in plan.barriers:
            ctx.synchronize()
        for primitive, params in plan.before.get(key, ()):
            ctx.insert(primitive, **params)
        return operands

    def after(self, ctx: RuleContext, results: Sequence[Value]) -> Sequence[Value]:
        """Converts results."""
        planned = self.plan.equations.get((ctx.path[:-1], ctx.path[-1]))
        return results if planned is None else _converted(ctx, results, planned.results)

    def outputs(self, ctx: RuleContext, jaxpr: Any, values: Sequence[Value]) -> Sequence[Value]:
        """Converts the results of a jaxpr."""
        layouts = self.plan.outputs.get((ctx.path, id(jaxpr)))
        return values if layouts is None else _converted(ctx, values, layouts)

    def is_release(self, path: Path) -> bool:
        """Whether the plan says so."""
        return (path[:-1], path[-1]) in self.plan.releases

    @property
    def places_barriers(self) -> bool:
        """Yes: they are in the plan."""
        return True


def _converted(
    ctx: RuleContext,
    values: Sequence[Value],
    layouts: Sequence[Layout | None],
    materialized: Collection[int] = (),
) -> list[Value]:
    """Arrays in the layouts that inference has chosen; splats only where they must not stay so."""
    converted = list(values)
    for position, layout in enumerate(layouts[: len(converted)]):
        value = converted[position]
        if layout is None or not isinstance(value, RegisterArray) or value.layout == layout:
            continue
        if not value.is_splat or position in materialized:
            converted[position] = relayout(ctx, value, layout)
    return converted
