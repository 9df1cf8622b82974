"""Variables of a kernel's jaxprs that hold arrays of one shape and, it is known, one layout."""

from __future__ import annotations

from typing import Any

from pallasite import _jax


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
