"""Variables of a kernel's jaxprs that hold arrays of one shape and, it is known, one layout."""

from __future__ import annotations

from typing import Any

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import Region


class LinkedVariables:
    """Groups of variables (a disjoint-set forest)."""

    def __init__(self) -> None:
        self._parents: dict[Any, Any] = {}

    def __contains__(self, variable: Any) -> bool:
        return variable in self._parents

    def group(self, variable: Any) -> Any:
        """What stands for the group of a variable; a new one begins with a group of its own."""
        parents = self._parents
        while parents.setdefault(variable, variable) is not variable:
            parents[variable] = parents[parents[variable]]
            variable = parents[variable]
        return variable

    def link(self, one: Any, other: Any) -> None:
        """Joins the groups of two atoms, if both are variables that hold arrays of one shape."""
        if any(isinstance(atom, _jax.Literal) for atom in (one, other)):
            return
        if not all(isinstance(atom.aval, _jax.ShapedArray) for atom in (one, other)):
            return
        if one.aval.shape == other.aval.shape != ():
            self._parents[self.group(one)] = self.group(other)

    def join(self, one: Any, other: Any) -> None:
        """Joins the groups of two variables, whatever their shapes."""
        self._parents[self.group(one)] = self.group(other)

    def link_region(self, equation: Any, region: Region) -> None:
        """Joins what goes into a region of an equation, and what comes out of it, with what it is
        inside."""
        for operand, variable in zip(region.operands, region.inputs, strict=True):
            if operand is not None:
                self.link(equation.invars[operand], variable)
        for result, atom in zip(region.results, region.jaxpr.outvars, strict=True):
            if result is not None:
                self.link(equation.outvars[result], atom)

    def link_carried(self, equation: Any, region: Region) -> None:
        """Joins what a loop begins with, or a state, with what it ends with."""
        for output, operand in region.carried_operands():
            result = region.results[output]
            if result is not None:
                self.link(equation.invars[operand], equation.outvars[result])
        for position, result in region.states:
            initial = region.operands[position]
            if initial is not None:
                self.link(equation.invars[initial], equation.outvars[result])
