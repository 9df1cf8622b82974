"""Why arrays have the layouts that inference has chosen."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pallasite.plugin.inference import Access, Factor, Fixed, Relation
from pallasite.plugin.lowering import Reason

if TYPE_CHECKING:
    from pallasite.plugin.inference import Problem, Solver

_MOST_STEPS = 3
"""Primitives that are named between an array and what decided its layout."""


class Reasons:
    """Finds for every group of arrays what decided its layout.

    First what needs or makes an array in just this layout decides, then what loads or stores it
    fastest so. From such groups, reasons propagate over changes of shape that need no conversion.
    """

    def __init__(self, problem: Problem, solver: Solver):
        self._problem = problem
        self._solver = solver
        self._found: dict[int, tuple[Reason, ...]] = {}
        self._steps: dict[int, tuple[str, ...]] = {}
        self._links: dict[int, list[tuple[Relation, int]]] = collections.defaultdict(list)
        factors = [f for f in problem.factors if self._is_solved(f)]
        for factor in factors:
            if not isinstance(factor, Relation):
                continue
            ends = problem.group(factor.operand), problem.group(factor.result)
            if factor.suits(*(solver.labels[end] for end in ends)):
                self._links[ends[0]].append((factor, ends[1]))
                self._links[ends[1]].append((factor, ends[0]))
        for pinned in (True, False):
            self._spread(self._fixed(factors, pinned=pinned))
        self._spread(self._accessed(factors))

    def of(self, variable: int) -> tuple[Reason, ...]:
        """The reasons for the layout of a variable, the nearest first."""
        group = self._problem.group(variable)
        return self._found.get(group, (Reason("nothing asks for another"),))

    def _is_solved(self, factor: Factor) -> bool:
        return all(self._problem.group(v) in self._solver.labels for v in factor.variables)

    def _fixed(self, factors: Iterable[Factor], *, pinned: bool) -> Iterable[int]:
        for factor in factors:
            if isinstance(factor, Fixed) and factor.pinned is pinned:
                group = self._problem.group(factor.variable)
                if group not in self._found and self._solver.labels[group] == factor.layout:
                    reason = factor.why or f"{factor.place.primitive} needs it so"
                    self._found[group] = (Reason(reason, factor.place.location),)
                    yield group

    def _accessed(self, factors: Iterable[Factor]) -> Iterable[int]:
        accesses: dict[int, list[Access]] = collections.defaultdict(list)
        for factor in factors:
            if isinstance(factor, Access):
                accesses[self._problem.group(factor.variable)].append(factor)
        for group, own in accesses.items():
            if group in self._found:
                continue
            label = self._solver.labels[group]
            # What runs most often weighs most.
            for access in sorted(own, key=lambda access: -access.weight):
                memory = [self._solver.memory[choice] for choice in access.choices]
                if label in access.proposals(0, [label], memory):
                    what = f"{access.what} of {access.root.name or 'memory'}"
                    reason = Reason(f"{what} is fastest so", access.place.location)
                    break
            else:
                reason = Reason("cheapest for all its uses together")
            self._found[group] = (reason,)
            yield group

    def _spread(self, start: Iterable[int]) -> None:
        pending = collections.deque(start)
        while pending:
            group = pending.popleft()
            for relation, other in self._links[group]:
                if other in self._found:
                    continue
                steps = (relation.place.primitive, *self._steps.get(group, ()))
                self._steps[other] = steps
                named = [*steps[:_MOST_STEPS], *(["others"] if len(steps) > _MOST_STEPS else [])]
                text = f"follows by {', '.join(dict.fromkeys(named))}"
                root = self._found[group][-1]
                self._found[other] = (Reason(text, relation.place.location), root)
                pending.append(other)
