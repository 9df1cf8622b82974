"""Layout inference of equations for which no inference rule is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pallasite.errors import InvalidValueError
from pallasite.layouts.memory import row_major
from pallasite.lowering.inference.values import AbstractValue, MemoryValue
from pallasite.memory_events import EventKind
from pallasite.plugin_values import check_layouts

if TYPE_CHECKING:
    from pallasite.extensions import LoweringRule
    from pallasite.lowering.inference.context import InferenceContext
    from pallasite.lowering.inference.views import View


def with_any_layouts(
    ctx: InferenceContext, operands: Sequence[AbstractValue], rule: LoweringRule
) -> list[AbstractValue]:
    """What a primitive makes whose lowering rule takes arrays in whatever layouts they have."""
    _use_as_is(ctx, operands)
    results = [ctx.result(aval) for aval in ctx.avals_out]
    if rule.result_layouts is not None:
        layouts = rule.result_layouts(ctx.avals_in, **ctx.equation.params)
        check_layouts(rule, rule.result_layouts, layouts, ctx.avals_out)
        for result, layout in zip(results, layouts, strict=True):
            if layout is not None:
                ctx.makes(result, layout, f"{ctx.equation.primitive.name} makes it so")
    return results


def without_rule(ctx: InferenceContext, operands: Sequence[AbstractValue]) -> list[AbstractValue]:
    """What a primitive makes that has no rule of layout inference, such as one of a plugin."""
    _use_as_is(ctx, operands)
    hints = ctx.walk.kernel.registry.layout_rule(
        ctx.equation.primitive, ctx.walk.kernel.target, ctx.avals_in, ctx.equation.params
    )
    if getattr(getattr(hints, "function", None), "same_layout", False):
        return [ctx.elementwise(*operands, aval=aval) for aval in ctx.avals_out]
    return [ctx.result(aval) for aval in ctx.avals_out]


def _use_as_is(ctx: InferenceContext, operands: Sequence[AbstractValue]) -> None:
    """Memory that is used in an unknown way is row-major, and what is done to it may be anything
    that the plugin does not declare."""
    name = ctx.equation.primitive.name

    def as_is(view: View) -> None:
        if view.layout != row_major(view.root.shape, view.layout.element_bits):
            raise InvalidValueError(f"{name} has no rule of layout inference")

    for operand in operands:
        if isinstance(operand, MemoryValue) and not ctx.declared:
            ctx.event(EventKind.ACCESS, operand)
        ctx.uses(operand, as_is, f"{name} uses it")
