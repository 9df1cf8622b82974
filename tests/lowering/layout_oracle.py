"""The exact minimum of what the factors of a small layout problem cost, as an integer program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import optimize, sparse

from pallasite.layouts.construct import default_strided
from pallasite.layouts.registers import Layout
from pallasite.lowering.inference.costs import is_impossible
from pallasite.lowering.inference.problem import Factor, Problem
from pallasite.lowering.inference.solver import Solver

MOST_LAYOUTS = 12
"""Of one group of arrays."""


class Oracle:
    """All assignments of a problem, and what they cost.

    The groups of arrays may have any layout that a factor proposes when its other arrays have
    theirs, again and again, the default one, and the one that the solver has chosen.

    Attributes:
      groups: the representatives of arrays that are no splats.
      layouts: for each of them, those that it may have.
      sizes: how many layouts each group, and then each allocation, may have.
    """

    def __init__(self, problem: Problem, solver: Solver):
        self._problem = problem
        self._solver = solver
        self.groups = sorted(solver.labels)
        self.layouts: dict[int, list[Layout]] = {}
        for group in self.groups:
            variable = problem.variables[group]
            default = default_strided(variable.shape, variable.bits)
            self.layouts[group] = list(dict.fromkeys([solver.labels[group], default]))
        self._close()
        self.sizes = [len(self.layouts[group]) for group in self.groups]
        self.sizes += [len(choice.candidates) for choice in problem.choices]
        self.tables = [self._table(factor) for factor in solver.factors]

    def _close(self) -> None:
        """Proposals of all factors, until there is no new one (or there are enough)."""
        changed = True
        seen: set[tuple[Any, ...]] = set()
        while changed:
            changed = False
            for factor in self._solver.factors:
                groups = [self._problem.group(v) for v in factor.variables]
                candidates = [self._problem.choices[c].candidates for c in factor.choices]
                for position, group in enumerate(groups):
                    known = [[None, *self.layouts[other]] for other in groups]
                    known[position] = [None]
                    for layouts in itertools.product(*known):
                        for memory in itertools.product(*candidates):
                            question = (id(factor), position, layouts, memory)
                            if question in seen:
                                continue
                            seen.add(question)
                            for layout in factor.proposals(position, layouts, memory):
                                found = self.layouts[group]
                                if layout not in found and len(found) < MOST_LAYOUTS:
                                    found.append(layout)
                                    changed = True

    def _table(self, factor: Factor) -> tuple[tuple[int, ...], np.ndarray]:
        """What a factor decides on, and its weighed costs by their layouts; infinite if it cannot
        be satisfied."""
        groups = [self.groups.index(self._problem.group(v)) for v in factor.variables]
        scope = tuple(dict.fromkeys(groups))
        scope += tuple(len(self.groups) + choice for choice in factor.choices)
        costs = np.empty([self.sizes[number] for number in scope])
        for place in np.ndindex(costs.shape):
            chosen = dict(zip(scope, place, strict=True))
            layouts = [self.layouts[self.groups[g]][chosen[g]] for g in groups]
            memory = [
                self._problem.choices[c].candidates[chosen[len(self.groups) + c]]
                for c in factor.choices
            ]
            cost = factor.cost(layouts, memory)
            costs[place] = math.inf if is_impossible(cost) else factor.weight * cost
        return scope, costs

    def cost(self, assignment: Sequence[int]) -> float:
        """Of all factors; infinite if one of them cannot be satisfied."""
        return float(
            sum(costs[tuple(assignment[n] for n in scope)] for scope, costs in self.tables)
        )

    def solution(self) -> list[int]:
        """The assignment that the solver has found."""
        chosen = [self.layouts[group].index(self._solver.labels[group]) for group in self.groups]
        for choice, layout in zip(self._problem.choices, self._solver.memory, strict=True):
            chosen.append(choice.candidates.index(layout))
        return chosen

    def by_enumeration(self) -> float:
        """The least cost of all assignments, one after the other; infinite if none is possible."""
        return min(self.cost(one) for one in itertools.product(*map(range, self.sizes)))

    def optimum(self) -> float:
        """The least cost, by integer programming; infinite if no assignment is possible.

        A binary variable says for each group or allocation whether it has a layout, and a variable
        from 0 to 1 for each factor whether it has several of them; those of a factor add up to the
        former.
        """
        starts = [0, *itertools.accumulate(self.sizes)]
        costs = [0.0] * starts[-1]
        rows: list[tuple[dict[int, float], float]] = []
        for number, size in enumerate(self.sizes):
            rows.append((dict.fromkeys(range(starts[number], starts[number] + size), 1.0), 1.0))
        for scope, table in self.tables:
            sums: dict[int, dict[int, float]] = {
                starts[number] + place: {starts[number] + place: -1.0}
                for number in scope
                for place in range(self.sizes[number])
            }
            for place in np.argwhere(np.isfinite(table)):
                for number, layout in zip(scope, place, strict=True):
                    sums[starts[number] + layout][len(costs)] = 1.0
                costs.append(float(table[tuple(place)]))
            rows += [(row, 0.0) for row in sums.values()]
        entries = [(i, j, a) for i, (row, _) in enumerate(rows) for j, a in row.items()]
        line, column, values = zip(*entries, strict=True)
        matrix = sparse.csr_array((values, (line, column)), shape=(len(rows), len(costs)))
        right = [side for _, side in rows]
        integral = np.zeros(len(costs))
        integral[: starts[-1]] = 1
        result = optimize.milp(
            costs,
            integrality=integral,
            bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(matrix, right, right),
            options={"mip_rel_gap": 0.0},
        )
        if result.status == 2:
            return math.inf
        assert result.status == 0, result.message
        chosen = np.round(result.x[: starts[-1]]).astype(int)
        return self.cost(
            [int(np.argmax(chosen[a : a + n])) for a, n in zip(starts, self.sizes, strict=False)]
        )
