"""How many elements one memory access of an array should move, found before code is emitted."""

from __future__ import annotations

from typing import Any

from pallasite.plugin import Registry, Target
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import bit_width
from pallasite_std.lane_layouts.linked_variables import LinkedVariables


class AccessWidths:
    """For each variable of a kernel, how many elements one memory access should move at most.

    Arrays that are combined in element-wise operations need one layout. Where none is asked for,
    loads choose strided layouts whose vectors fit 16 bytes of the widest element type that any load
    or store among them moves. Layout rules say which primitives keep layouts (``same_layout``) and
    which move data between memory and registers (``accesses_memory``: a function from the
    equation's operands and results to the variable that is moved).

    Arrays keep their layout on the way into and out of calls, loops and branches, and from one
    iteration of a loop to the next.
    """

    def __init__(self, registry: Registry, target: Target):
        self._registry = registry
        self._target = target
        self._variables = LinkedVariables()
        self._moved: list[Any] = []
        self._known: dict[int, Any] = {}
        self._widest: dict[Any, int] | None = None

    def add(self, jaxpr: Any) -> None:
        """Takes account of a jaxpr and of those inside it, unless it has already."""
        if id(jaxpr) in self._known:
            return
        self._known[id(jaxpr)] = jaxpr  # Kept, so that no other object gets its id.
        self._widest = None
        for equation in jaxpr.eqns:
            self._add_equation(equation)

    def limit(self, variable: Any) -> int | None:
        """Elements per access of what an equation loads, or None if it loads nothing."""
        if self._widest is None:
            self._widest = {}
            for moved in self._moved:
                root = self._variables.group(moved)
                bits = max(8, bit_width(moved.aval.dtype))
                self._widest[root] = max(self._widest.get(root, 0), bits)
        if variable not in self._variables:
            return None
        widest = self._widest.get(self._variables.group(variable))
        return None if widest is None else 128 // widest

    def _add_equation(self, equation: Any) -> None:
        rule = self._registry.layout_rule(
            equation.primitive,
            self._target,
            [atom.aval for atom in equation.invars],
            equation.params,
        )
        accesses = getattr(rule.function, "accesses_memory", None) if rule is not None else None
        if accesses is not None:
            variable = accesses(equation.invars, equation.outvars)
            if not isinstance(variable, _jax.Literal):
                self._moved.append(variable)
                self._variables.group(variable)
        if rule is not None and getattr(rule.function, "same_layout", False):
            results = equation.outvars
            if len(results) == 1:
                results = results * len(equation.invars)
            for atom, result in zip(equation.invars, results, strict=False):
                self._variables.link(atom, result)
        for region in self._registry.jaxprs.regions(equation):
            self.add(region.jaxpr)
            self._variables.link_region(equation, region)
            self._variables.link_carried(equation, region)
