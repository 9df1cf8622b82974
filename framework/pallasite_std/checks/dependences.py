"""On which blocks data depends: a second walk, where two blocks write the same elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pallasite.plugin import jax_internals as _jax
from pallasite_std.checks import values as v
from pallasite_std.checks.accesses import Accesses, views_of
from pallasite_std.checks.scalars import Memory, Test
from pallasite_std.primitives import copies


class Data(frozenset[v.Symbol]):
    """An array or a number that depends on symbols."""

    __slots__ = ()


class Dependences(Accesses):
    """Follows from which windows of the operands data comes.

    Attributes:
      contents: for each reference, what the data in it depends on.
      written: for each equation that stores, by its identity, what it stores depends on.
    """

    skips = False

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.contents: dict[Any, frozenset[v.Symbol]] = {}
        self.written: dict[int, frozenset[v.Symbol]] = {}

    def join(self, values: Sequence[Any], variable: Any) -> Any:
        if any(isinstance(value, Data) for value in values):
            return Data().union(*(self.symbols(value) for value in values))
        return super().join(values, variable)

    def primitive(self, equation: Any, operands: list[Any]) -> Sequence[Any] | None:
        plain = [None if isinstance(one, Data) else one for one in operands]
        found = super().primitive(equation, plain)
        if found is not None and found[0] is not None:
            return found
        read: frozenset[v.Symbol] = frozenset()
        if any(type(one) is Memory for one in operands):
            read = self.memory(equation, operands)
        elif not equation.outvars:
            return found
        values = Data(read.union(*map(self.symbols, operands)))
        return [values] * len(equation.outvars)

    def memory(self, equation: Any, operands: list[Any]) -> frozenset[v.Symbol]:
        """What is read; what is stored is noted."""
        views = list(views_of(equation, operands))
        read: frozenset[v.Symbol] = frozenset()
        for memory, transforms in views:
            read |= self.contents.get(memory.variable, frozenset())
            if memory.number is not None:
                for one in transforms:
                    for index in getattr(one, "indices", ()):
                        start = index.start if isinstance(index, _jax.Slice) else index
                        read |= self.symbols(start)
        primitive = equation.primitive
        if primitive is _jax.swap_p:
            read = self.symbols(operands[1])
            self._store(equation, views[0][0], read)
        elif primitive is copies.copy_gmem_to_smem_p:
            self._store(equation, views[1][0], read)
        elif primitive is copies.copy_smem_to_gmem_p:
            self._store(equation, views[1][0], self.contents.get(views[0][0].variable, frozenset()))
        return read

    def _store(self, equation: Any, memory: Memory, data: frozenset[v.Symbol]) -> None:
        variable = memory.variable
        self.contents[variable] = self.contents.get(variable, frozenset()) | data
        self.written[id(equation)] = self.written.get(id(equation), frozenset()) | data

    def symbols(self, value: Any) -> frozenset[v.Symbol]:
        """What a value depends on."""
        if isinstance(value, Data):
            return frozenset(value)
        if isinstance(value, Test):
            return frozenset((value.symbol,))
        if isinstance(value, v.Form):
            expanded = self.places.splits.expand(value)
            if isinstance(expanded, v.Form):
                return frozenset(one for one, _ in expanded.terms)
        return frozenset()
