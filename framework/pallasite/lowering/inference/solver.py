"""Chooses layouts so that what the factors cost is small.

It starts from what equations need and make, propagates layouts from there over the relations, and
then moves one group or allocation at a time, with those that follow from it, as long as that helps.
The order is that of the program, so the result is the same every time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pallasite.layouts.construct import default_strided
from pallasite.layouts.memory import MemoryLayout
from pallasite.layouts.registers import Layout
from pallasite.lowering.inference.costs import is_impossible
from pallasite.lowering.inference.problem import Copies, Factor, Fixed, Problem, Relation

_MOST_CANDIDATES = 12
"""Layouts that are tried for a group, besides the default one."""

_MOST_ROUNDS = 8
"""Improvement almost always ends after two or three."""

_MOST_FOLLOWERS = 64
"""Groups that change together with one."""


class _Known:
    """What the solver keeps of a factor.

    Attributes:
      factor: kept, so that its id is not that of another one.
      groups: those of its variables, which no longer change.
      costs: what it costs, by the layouts of the variables and then of the choices.
    """

    __slots__ = ("costs", "factor", "groups")

    def __init__(self, factor: Factor, groups: tuple[int, ...]):
        self.factor = factor
        self.groups = groups
        self.costs: dict[tuple[Any, ...], float] = {}


class Solver:
    """Solves one problem.

    Attributes:
      factors: those that matter for the choice: of arrays that are no splats, with what it costs
        to keep copies of them.
      labels: by group, the layout that was chosen.
      memory: by choice, the layout that was chosen.
    """

    def __init__(self, problem: Problem):
        self._problem = problem
        varying = problem.varying()
        self.varying = varying
        self._groups = sorted({problem.group(v) for v, known in enumerate(varying) if known})
        members = set(self._groups)
        # A splat is in every layout already.
        self.factors = [
            factor
            for factor in problem.factors
            if all(problem.group(v) in members for v in factor.variables)
        ]
        self.factors += self._copies()
        self._known = {
            id(factor): _Known(factor, tuple(problem.group(v) for v in factor.variables))
            for factor in self.factors
        }
        self._of_group: dict[int, list[Factor]] = {group: [] for group in self._groups}
        self._of_choice: list[list[Factor]] = [[] for _ in problem.choices]
        for factor in self.factors:
            for group in dict.fromkeys(self._known[id(factor)].groups):
                self._of_group[group].append(factor)
            for choice in factor.choices:
                self._of_choice[choice].append(factor)
        self._pinned = {
            problem.group(factor.variable)
            for factor in self.factors
            if isinstance(factor, Fixed) and factor.pinned
        }
        self.labels: dict[int, Layout] = {}
        self.memory: list[MemoryLayout] = []
        self._candidates: dict[int, list[Layout]] = {}

    def _copies(self) -> list[Factor]:
        """For each group, what all the work on it costs that several threads do."""
        found: dict[int, Copies] = {}
        for number, variable in enumerate(self._problem.variables):
            group = self._problem.group(number)
            if not self.varying[number]:
                continue
            if group in found:
                found[group].weight += variable.weight
                found[group].bits = max(found[group].bits, variable.bits)
            else:
                found[group] = Copies(variable.place, variable.weight, group, variable.bits)
        return list(found.values())

    def solve(self) -> None:
        """Fills in ``labels`` and ``memory``."""
        self.memory = [choice.candidates[0] for choice in self._problem.choices]
        for number in range(len(self.memory)):
            self._choose_memory(number)
        self._start()
        for _ in range(_MOST_ROUNDS):
            # Memory first: arrays should not leave the layouts that they come in because of memory
            # that can lie otherwise.
            changed = [self._choose_memory(number) for number in range(len(self.memory))]
            changed += [self._improve(group) for group in self._groups]
            if not any(changed):
                break

    # Beginning ----------------------------------------------------------------------------------

    def _start(self) -> None:
        for pinned in (True, False):
            for factor in self.factors:
                if isinstance(factor, Fixed) and factor.pinned is pinned:
                    group = self._problem.group(factor.variable)
                    self._propose(group, factor.layout)
                    self.labels.setdefault(group, factor.layout)
        self._spread_labels()
        for group in self._groups:
            if group in self.labels:
                continue
            for factor in self._of_group[group]:
                for layout in self._proposals(factor, group):
                    self._propose(group, layout)
            self._propose_default(group)
            self.labels[group] = self._candidates[group][0]
            self._spread_labels()

    def _spread_labels(self) -> None:
        """Gives layouts to groups that follow from others that have one."""
        changed = True
        while changed:
            changed = False
            for factor in self.factors:
                if not isinstance(factor, Relation):
                    continue
                for group in set(self._known[id(factor)].groups):
                    if group in self.labels:
                        continue
                    for layout in self._proposals(factor, group)[:1]:
                        self._propose(group, layout)
                        self.labels[group] = layout
                        changed = True

    def _propose(self, group: int, layout: Layout) -> None:
        found = self._candidates.setdefault(group, [])
        if layout not in found and len(found) < _MOST_CANDIDATES:
            found.append(layout)

    def _propose_default(self, group: int) -> None:
        """The layout that any load and any conversion can do with is tried in any case."""
        variable = self._problem.variables[group]
        layout = default_strided(variable.shape, variable.bits)
        found = self._candidates.setdefault(group, [])
        if layout not in found:
            found.append(layout)

    def _proposals(self, factor: Factor, group: int) -> list[Layout]:
        groups = self._known[id(factor)].groups
        layouts = [self.labels.get(one) for one in groups]
        memory = [self.memory[choice] for choice in factor.choices]
        return [
            layout
            for position, one in enumerate(groups)
            if one == group
            for layout in factor.proposals(position, layouts, memory)
        ]

    # Improving ----------------------------------------------------------------------------------

    def cost_of(self, factor: Factor, labels: dict[int, Layout] | None = None) -> float:
        """What a factor costs, by its weight; ``labels`` replace some of the chosen ones."""
        known, present = self._known[id(factor)], self.labels
        if labels is None:
            layouts = [present[group] for group in known.groups]
        else:
            layouts = [labels.get(group) or present[group] for group in known.groups]
        memory = [self.memory[choice] for choice in factor.choices]
        key = (*layouts, *memory)
        cost = known.costs.get(key)
        if cost is None:
            cost = known.costs[key] = factor.weight * factor.cost(layouts, memory)
        return cost

    def _improve(self, group: int) -> bool:
        if group in self._pinned:
            return False
        if sum(self.cost_of(factor) for factor in self._concerned(group)) < 1e-6:
            return False
        for factor in self._of_group[group]:
            for layout in self._proposals(factor, group):
                self._propose(group, layout)
        self._propose_default(group)
        best: tuple[float, dict[int, Layout], dict[int, MemoryLayout]] = (-1e-6, {}, {})
        for layout in self._candidates[group]:
            if layout == self.labels[group]:
                continue
            for changes in self._moves(group, layout):
                gain, memory = self._gain(changes)
                if gain < best[0]:
                    best = gain, changes, memory
        self.labels.update(best[1])
        for number, choice in best[2].items():
            self.memory[number] = choice
        return bool(best[1])

    def _concerned(self, group: int) -> list[Factor]:
        """The factors of a group, and those of memory that may lie otherwise if it changes."""
        found = {id(factor): factor for factor in self._of_group[group]}
        for choice in dict.fromkeys(c for f in self._of_group[group] for c in f.choices):
            found |= {id(factor): factor for factor in self._of_choice[choice]}
        return list(found.values())

    def _moves(self, group: int, layout: Layout) -> Iterable[dict[int, Layout]]:
        alone = {group: layout}
        yield alone
        together = self._with_followers(alone)
        if len(together) > 1:
            yield together

    def _with_followers(self, start: dict[int, Layout]) -> dict[int, Layout]:
        """A change with those of the groups whose layouts follow from it."""
        changes = dict(start)
        pending = list(start)
        while pending and len(changes) < _MOST_FOLLOWERS:
            group = pending.pop(0)
            for factor in self._of_group[group]:
                if not isinstance(factor, Relation):
                    continue
                operand, result = self._known[id(factor)].groups
                other, position = (result, 1) if operand == group else (operand, 0)
                if other in changes or other in self._pinned:
                    continue
                ends = [changes.get(end, self.labels[end]) for end in (operand, result)]
                if factor.suits(*ends):
                    continue
                layouts: list[Layout | None] = [None, None]
                layouts[1 - position] = changes[group]
                found = factor.proposals(position, layouts, ())
                if found and found[0] != self.labels[other]:
                    changes[other] = found[0]
                    pending.append(other)
        return changes

    def _gain(self, changes: dict[int, Layout]) -> tuple[float, dict[int, MemoryLayout]]:
        """What a change adds to the costs, and the memory that had better lie otherwise then."""
        touched = {id(f): f for group in changes for f in self._of_group[group]}
        gain = sum(self.cost_of(f, changes) - self.cost_of(f) for f in touched.values())
        memory = {}
        for number in dict.fromkeys(c for f in touched.values() for c in f.choices):
            found, saved = self._best_memory(number, changes)
            if found != self.memory[number]:
                memory[number] = found
                gain -= saved
        return gain, memory

    def _choose_memory(self, number: int) -> bool:
        found, _ = self._best_memory(number)
        changed = found != self.memory[number]
        self.memory[number] = found
        return changed

    def _best_memory(
        self, number: int, labels: dict[int, Layout] | None = None
    ) -> tuple[MemoryLayout, float]:
        """The best layout of an allocation, and what it saves compared with the present one."""
        factors = self._of_choice[number]
        known, chosen = self._known, self.labels
        ready = [f for f in factors if all(group in chosen for group in known[id(f)].groups)]
        before, costs = self.memory[number], []
        for candidate in self._problem.choices[number].candidates:
            self.memory[number] = candidate
            costs.append(sum(self.cost_of(factor, labels) for factor in ready))
        self.memory[number] = before
        candidates = self._problem.choices[number].candidates
        # The first ones are preferred.
        best = min(range(len(costs)), key=lambda i: (round(costs[i], 6), i))
        return candidates[best], costs[candidates.index(before)] - costs[best]

    def impossible(self) -> list[Factor]:
        """Factors that cannot be satisfied by what was chosen."""
        return [
            factor for factor in self.factors if is_impossible(self.cost_of(factor) / factor.weight)
        ]
