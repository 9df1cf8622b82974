"""Layouts under lane semantics: hints from later uses, or what is known of what they meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pallasite.plugin import check_layouts, is_own
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.layouts import RegisterLayout, transforms
from pallasite.plugin.lowering import (
    LayoutContext,
    LayoutStrategy,
    RegisterArray,
    errors_at_equation,
)
from pallasite_std.lane_layouts.access_widths import AccessWidths
from pallasite_std.lane_layouts.known_layouts import KnownLayouts

if TYPE_CHECKING:
    from pallasite.plugin import Registry, Target
    from pallasite.plugin.inference import Path
    from pallasite.plugin.layouts import Layout
    from pallasite.plugin.lowering import RuleContext, Value


class LaneStrategy(LayoutStrategy):
    """Arrays keep the layouts that rules give them; those that make arrays get hints."""

    def __init__(self, registry: Registry, target: Target):
        self._registry = registry
        self._target = target
        self._access_widths = AccessWidths(registry, target)
        self._known_layouts = KnownLayouts(registry, target)
        self._hints: dict[Any, Layout] = {}
        self._entered: dict[int, Any] = {}
        self._equations: dict[int, Any] = {}

    def enter(self, jaxpr: Any) -> None:
        """Finds hints for the variables of a jaxpr, unless it was entered before."""
        if id(jaxpr) in self._entered:
            return
        self._entered[id(jaxpr)] = jaxpr  # Kept, so that no other object gets its id.
        self._find_hints(jaxpr)
        self._access_widths.add(jaxpr)
        self._known_layouts.add(jaxpr)

    def wanted(self, equation: Any, path: Path) -> tuple[Layout | None, int | None]:
        """The layout requested by later uses, or else that of what the result is combined with."""
        if not equation.outvars:
            return None, None
        variable = equation.outvars[0]
        hint = self._hints.get(variable)
        if hint is None:
            hint = self._known_layouts.layout(variable)
        self._equations[id(equation)] = equation
        odd = _is_odd(variable.aval)
        types = [one.aval for one in equation.invars]
        if hint is None and (odd or any(map(_is_odd, types))) and all(map(_is_array, types)):
            # Loads choose layouts that suit memory. Default layouts of odd shapes, and of parts of
            # them, differ, by rank and by what they are broadcast from, more than conversions
            # should have to mend.
            hint = self._known_layouts.emitted(variable)
        if hint is None and equation.primitive is _jax.get_p:
            hint = self._stretchable(variable)
        if hint is None and odd:
            hint = self._access_widths.row(equation)
        return hint, self._access_widths.limit(variable)

    def _stretchable(self, variable: Any) -> Layout | None:
        """The layout in which a load of an odd shape with extents of 1 stretches to that of what it
        is combined with."""
        wide = self._access_widths.wider(variable)
        if wide is None or not _is_odd(wide.aval):
            return None
        layout = self._known_layouts.emitted(wide)
        shape, own = wide.aval.shape, variable.aval.shape
        if not isinstance(layout, RegisterLayout) or layout.flat or len(own) != len(shape):
            return None
        dims = [d for d, extent in enumerate(shape) if own[d] != extent]
        return transforms.expand_dims(transforms.reduce(layout, dims), dims).layout

    def before(self, ctx: RuleContext, operands: Sequence[Value]) -> Sequence[Value]:
        """The operands as they are."""
        return operands

    def after(self, ctx: RuleContext, results: Sequence[Value]) -> Sequence[Value]:
        """The results as they are."""
        equation = self._equations.get(ctx.path[-1])
        for variable, value in zip(
            () if equation is None else equation.outvars, results, strict=False
        ):
            if isinstance(value, RegisterArray) and not value.is_splat:
                self._known_layouts.emit(variable, value.layout)
        return results

    def outputs(self, ctx: RuleContext, jaxpr: Any, values: Sequence[Value]) -> Sequence[Value]:
        """The results as they are."""
        return values

    def is_release(self, path: Path) -> bool:
        """Not known."""
        return False

    @property
    def places_barriers(self) -> bool:
        """No: rules emit them."""
        return False

    def _find_hints(self, jaxpr: Any) -> None:
        """Which register layout the uses of each variable ask for, from a walk back over the jaxpr.

        A primitive's layout rule says what its operands should be laid out like, given the layout
        that is wanted of its results; the earliest use in program order decides.
        """
        hints = self._hints
        for equation in reversed(jaxpr.eqns):
            with errors_at_equation(equation):
                avals = [atom.aval for atom in equation.invars]
                rule = self._registry.layout_rule(
                    equation.primitive, self._target, avals, equation.params
                )
                if rule is None:
                    self._find_hints_inside(equation)
                    continue
                context = LayoutContext(
                    self._registry,
                    self._target,
                    equation.primitive,
                    avals,
                    [variable.aval for variable in equation.outvars],
                    (rule,),
                )
                wanted = [hints.get(variable) for variable in equation.outvars]
                proposals = rule.function(context, wanted, **equation.params)
                if not is_own(rule.plugin):
                    check_layouts(rule, rule.function, proposals, avals)
            for atom, proposal in zip(equation.invars, proposals, strict=True):
                if proposal is not None and not isinstance(atom, _jax.Literal):
                    hints[atom] = proposal

    def _find_hints_inside(self, equation: Any) -> None:
        """What the uses of an operand inside a function that is called ask for, if its shape is
        odd: layouts of others are known to suit most uses."""
        for region in self._registry.jaxprs.regions(equation):
            if not region.is_plain_call:
                continue
            self.enter(region.jaxpr)
            for operand, variable in zip(region.operands, region.inputs, strict=True):
                hint = self._hints.get(variable)
                if hint is None or operand is None or not _is_odd(variable.aval):
                    continue
                atom = equation.invars[operand]
                if not isinstance(atom, _jax.Literal):
                    self._hints[atom] = hint


def _is_odd(aval: Any) -> bool:
    return any(extent & (extent - 1) for extent in getattr(aval, "shape", ()))


def _is_array(aval: Any) -> bool:
    return isinstance(aval, _jax.ShapedArray)
