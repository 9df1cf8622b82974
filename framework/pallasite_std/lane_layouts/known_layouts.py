"""Register layouts that arrays have because of where they come from, found before code is emitted.

Some primitives give their results a layout of their own: a cast, or a read of an accumulator.
Arrays that are combined with them element-wise have to have the same layout, so loads that feed
into these operations should produce it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pallasite.plugin import PallasiteError, Registry, Target
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.layouts import Layout
from pallasite_std.lane_layouts.linked_variables import LinkedVariables


@dataclasses.dataclass(frozen=True)
class _Source:
    """An equation whose rule says which layouts its results have."""

    equation: Any
    result_layouts: Callable[..., Sequence[Layout | None]]


class KnownLayouts:
    """For each variable of a kernel, the layout that it is known to have.

    A layout rule's function says so with the attribute ``result_layouts``: a function of the
    operands' abstract values, their known layouts (or None) and the equation's parameters that
    returns the layout of each result, or None. Rules with ``same_layout`` link what they
    combine, and regions of equations link operands and results to what these are inside.
    """

    def __init__(self, registry: Registry, target: Target):
        self._registry = registry
        self._target = target
        self._variables = LinkedVariables()
        self._sources: list[_Source] = []
        self._seen: dict[int, Any] = {}
        self._found: dict[Any, Layout] | None = None
        self._emitted: list[tuple[Any, Layout]] = []
        self._settled: dict[Any, Layout] | None = None

    def add(self, jaxpr: Any) -> None:
        """Takes account of a jaxpr and of those that it calls, unless it has already."""
        if id(jaxpr) in self._seen:
            return
        self._seen[id(jaxpr)] = jaxpr  # Kept, so that no other object gets its id.
        self._found = self._settled = None
        for equation in jaxpr.eqns:
            self._add_equation(equation)

    def layout(self, variable: Any) -> Layout | None:
        """The known layout of a variable."""
        if self._found is None:
            self._found = self._find_all()
        if isinstance(variable, _jax.Literal) or variable not in self._variables:
            return None
        return self._found.get(self._variables.group(variable))

    def emit(self, variable: Any, layout: Layout) -> None:
        """Takes account of the layout that a variable has got."""
        if variable in self._variables:
            self._emitted.append((variable, layout))
            if self._settled is not None:
                self._settled.setdefault(self._variables.group(variable), layout)

    def emitted(self, variable: Any) -> Layout | None:
        """The layout of the first variable emitted of those that a variable is combined with."""
        if self._settled is None:
            self._settled = {}
            for one, layout in self._emitted:
                self._settled.setdefault(self._variables.group(one), layout)
        if variable not in self._variables:
            return None
        return self._settled.get(self._variables.group(variable))

    def _find_all(self) -> dict[Any, Layout]:
        """Layouts by what links variables; the first source in the program counts."""
        found: dict[Any, Layout] = {}
        for source in self._sources:
            equation = source.equation
            layouts = [
                None if isinstance(atom, _jax.Literal) else found.get(self._variables.group(atom))
                for atom in equation.invars
            ]
            avals = [atom.aval for atom in equation.invars]
            try:
                results = source.result_layouts(avals, layouts, **equation.params)
            except PallasiteError:
                continue  # The equation's own rule reports what is wrong.
            for variable, layout in zip(equation.outvars, results, strict=True):
                if layout is not None:
                    found.setdefault(self._variables.group(variable), layout)
        return found

    def _add_equation(self, equation: Any) -> None:
        rule = self._registry.layout_rule(
            equation.primitive,
            self._target,
            [atom.aval for atom in equation.invars],
            equation.params,
        )
        if rule is not None and equation.outvars:
            function = getattr(rule.function, "result_layouts", None)
            if function is not None:
                for variable in equation.outvars:
                    self._variables.group(variable)
                self._sources.append(_Source(equation, function))
            if getattr(rule.function, "same_layout", False) and len(equation.outvars) == 1:
                for atom in equation.invars:
                    self._variables.link(atom, equation.outvars[0])
        for region in self._registry.jaxprs.regions(equation):
            self.add(region.jaxpr)
            self._variables.link_region(equation, region)
