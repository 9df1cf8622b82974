"""Costs of factors as the solver needs them: whole numbers, remembered by the layouts they are of.

Costs are counted in millionths, so that a sum does not depend on the order of its terms, and can be
kept up to date by what is added to it and taken away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pallasite.layouts.memory import MemoryLayout
from pallasite.layouts.registers import Layout
from pallasite.lowering.inference.problem import Factor, Relation

UNIT = 1e6
"""How many of the numbers here are one of the costs of :class:`Factor`."""

Key = tuple[int, ...]


class KnownFactor:
    """A factor with what the solver remembers of it; layouts are compared by identity.

    Attributes:
      factor: that one.
      number: its place in the order of the program.
      groups: those of its variables, which no longer change.
      choices: allocations whose layouts matter.
      is_relation: whether layouts of one variable follow from those of the other.
    """

    __slots__ = ("_costs", "_suits", "choices", "factor", "groups", "is_relation", "number")

    def __init__(self, factor: Factor, number: int, groups: tuple[int, ...]):
        self.factor = factor
        self.number = number
        self.groups = groups
        self.choices = factor.choices
        self.is_relation = isinstance(factor, Relation)
        self._costs: dict[Key, int] = {}
        self._suits: dict[Key, bool] = {}

    def cost(
        self,
        changes: Mapping[int, Layout],
        labels: Mapping[int, Layout],
        memory: Sequence[MemoryLayout],
    ) -> int:
        """What it costs by its weight.

        Args:
          changes: layouts of groups that replace those of ``labels``.
          labels: layouts of all groups.
          memory: of its choices.
        """
        layouts = [changes.get(group) or labels[group] for group in self.groups]
        key = (*map(id, layouts), *map(id, memory))
        cost = self._costs.get(key)
        if cost is None:
            found = self.factor.weight * self.factor.cost(layouts, memory)
            cost = self._costs[key] = round(found * UNIT)
        return cost

    def suits(self, operand: Layout, result: Layout) -> bool:
        """Of a relation: whether nothing has to be converted between two layouts."""
        key = (id(operand), id(result))
        suits = self._suits.get(key)
        if suits is None:
            assert isinstance(self.factor, Relation)
            suits = self._suits[key] = self.factor.suits(operand, result)
        return suits
