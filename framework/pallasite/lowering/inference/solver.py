"""Chooses layouts so that what the factors cost is small.

It starts from what equations need and make, propagates layouts from there over the relations, and
then moves one group or allocation at a time, with those that follow from it, as long as that helps.
The order is that of the program, so the result is the same every time.

The work is about linear in the size of the problem: for each allocation the sums of what its
factors cost are kept, by its candidates, so that a change of one array touches that array's factors
alone; a change that costs too much already without memory is not looked at any further; and a group
is not tried again before something changed that its attempt depended on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from pallasite.layouts.construct import default_strided
from pallasite.layouts.memory import MemoryLayout
from pallasite.layouts.registers import Layout
from pallasite.lowering.inference.costs import is_impossible
from pallasite.lowering.inference.factor_costs import UNIT, KnownFactor
from pallasite.lowering.inference.problem import Access, Copies, Factor, Fixed, Problem

_MOST_CANDIDATES = 12
"""Layouts that are tried for a group, besides the default one."""

_MOST_ROUNDS = 8
"""Improvement almost always ends after two or three."""

_MOST_FOLLOWERS = 64
"""Groups that change together with one."""

_LEAST_GAIN = 1
"""In millionths; less is no improvement."""

_KEPT = 0.25
"""What it takes to keep an array, whose loads are paid for elsewhere, of computing it."""

type Gain = tuple[int, dict[int, int]]
"""What a change adds to the costs, and by allocation the candidate that suits it better."""

_NOTHING: dict[int, Layout] = {}


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
        self._known = [
            KnownFactor(factor, number, tuple(problem.group(v) for v in factor.variables))
            for number, factor in enumerate(self.factors)
        ]
        self._of_group: dict[int, list[KnownFactor]] = {group: [] for group in self._groups}
        self._of_choice: list[list[KnownFactor]] = [[] for _ in problem.choices]
        for known in self._known:
            for group in dict.fromkeys(known.groups):
                self._of_group[group].append(known)
            for choice in known.choices:
                self._of_choice[choice].append(known)
        self._pinned = {
            problem.group(factor.variable)
            for factor in self.factors
            if isinstance(factor, Fixed) and factor.pinned
        }
        self.labels: dict[int, Layout] = {}
        self.memory: list[MemoryLayout] = []
        self._candidates: dict[int, list[Layout]] = {}
        self._layouts: dict[Layout, Layout] = {}
        self._sums: list[list[int]] = []
        self._parts: dict[KnownFactor, dict[int, list[int]]] = {}
        self._time = 0
        self._changed: dict[tuple[str, int], int] = {}
        self._settled: dict[int, tuple[int, set[tuple[str, int]]]] = {}

    def _copies(self) -> list[Factor]:
        """For each group, what all the work on it costs that several threads do."""
        found: dict[int, Copies] = {}
        accesses = {one.place for one in self._problem.factors if isinstance(one, Access)}
        for number, array in enumerate(self._problem.variables):
            if self.varying[number]:
                group = self._problem.group(number)
                one = found.setdefault(group, Copies(array.place, 0.0, group, array.bits))
                one.weight += array.weight * (_KEPT if array.place in accesses else 1.0)
                one.bits = max(one.bits, array.bits)
        return list(found.values())

    def solve(self) -> None:
        """Fills in ``labels`` and ``memory``."""
        self.memory = [choice.candidates[0] for choice in self._problem.choices]
        self._sum_up()
        for number in range(len(self.memory)):
            self._choose_memory(number)
        self._start()
        self._sum_up()
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
                    layout = self._propose(group, factor.layout)
                    self.labels.setdefault(group, layout)
        self._spread_labels(self._known)
        for group in self._groups:
            if group in self.labels:
                continue
            for known in self._of_group[group]:
                for layout in self._proposals(known, group):
                    self._propose(group, layout)
            self._propose_default(group)
            self.labels[group] = self._candidates[group][0]
            self._spread_labels(self._of_group[group])

    def _spread_labels(self, start: Iterable[KnownFactor]) -> None:
        """Gives layouts to groups that follow from others that have one.

        The relations are gone through in order, again and again until nothing follows any more,
        but only those one end of which got its layout since they were last seen.
        """
        pending = [known.number for known in start if known.is_relation]
        while pending:
            heapq.heapify(pending)
            later: list[int] = []
            queued = set(pending)
            while pending:
                number = heapq.heappop(pending)
                known = self._known[number]
                for group in set(known.groups):
                    if group in self.labels:
                        continue
                    for layout in self._proposals(known, group)[:1]:
                        self.labels[group] = self._propose(group, layout)
                        for other in self._of_group[group]:
                            if not other.is_relation:
                                continue
                            if other.number <= number:
                                later.append(other.number)
                            elif other.number not in queued:
                                queued.add(other.number)
                                heapq.heappush(pending, other.number)
            pending = list(dict.fromkeys(later))

    def _interned(self, layout: Layout) -> Layout:
        """The one object for layouts that are equal."""
        return self._layouts.setdefault(layout, layout)

    def _propose(self, group: int, layout: Layout) -> Layout:
        layout = self._interned(layout)
        found = self._candidates.setdefault(group, [])
        if layout not in found and len(found) < _MOST_CANDIDATES:
            found.append(layout)
        return layout

    def _propose_default(self, group: int) -> None:
        """The layout that any load and any conversion can do with is tried in any case."""
        variable = self._problem.variables[group]
        layout = self._interned(default_strided(variable.shape, variable.bits))
        found = self._candidates.setdefault(group, [])
        if layout not in found:
            found.append(layout)

    def _proposals(self, known: KnownFactor, group: int) -> list[Layout]:
        layouts = [self.labels.get(one) for one in known.groups]
        memory = [self.memory[choice] for choice in known.choices]
        return [
            layout
            for position, one in enumerate(known.groups)
            if one == group
            for layout in known.factor.proposals(position, layouts, memory)
        ]

    # Sums ---------------------------------------------------------------------------------------

    def _cost(self, known: KnownFactor, changes: Mapping[int, Layout] = _NOTHING) -> int:
        return known.cost(changes, self.labels, [self.memory[choice] for choice in known.choices])

    def _by_candidate(
        self, known: KnownFactor, number: int, changes: Mapping[int, Layout] = _NOTHING
    ) -> list[int]:
        """What a factor costs for each candidate of one of its choices."""
        position = known.choices.index(number)
        memory = [self.memory[choice] for choice in known.choices]
        found = []
        for candidate in self._problem.choices[number].candidates:
            memory[position] = candidate
            found.append(known.cost(changes, self.labels, memory))
        return found

    def _sum_up(self) -> None:
        """Makes the sums of the factors that are ready, those of groups that have layouts."""
        self._sums = [[0] * len(choice.candidates) for choice in self._problem.choices]
        self._parts = {}
        for known in self._known:
            if known.choices and all(group in self.labels for group in known.groups):
                self._add(known)

    def _add(self, known: KnownFactor) -> None:
        parts = self._parts[known] = {}
        for number in known.choices:
            parts[number] = part = self._by_candidate(known, number)
            self._sums[number] = [a + b for a, b in zip(self._sums[number], part, strict=True)]

    def _update(self, factors: Iterable[KnownFactor]) -> None:
        """Brings the sums up to date for factors whose costs have changed."""
        for known in factors:
            for number, part in self._parts.get(known, {}).items():
                self._sums[number] = [a - b for a, b in zip(self._sums[number], part, strict=True)]
                self._changed["choice", number] = self._time
            if known.choices:
                self._add(known)

    # Improving ----------------------------------------------------------------------------------

    def _improve(self, group: int) -> bool:
        if group in self._pinned or self._is_settled(group):
            return False
        factors = self._of_group[group]
        choices = dict.fromkeys(choice for known in factors for choice in known.choices)
        if not any(map(self._cost, factors)) and not any(map(self._present, choices)):
            return False
        for known in factors:
            for layout in self._proposals(known, group):
                self._propose(group, layout)
        self._propose_default(group)
        gain, best, memory = -_LEAST_GAIN, _NOTHING, dict[int, int]()
        concerned: set[KnownFactor] = set()
        for layout in self._candidates[group]:
            if layout is self.labels[group]:
                continue
            for changes in self._moves(group, layout):
                touched = self._touched(changes)
                concerned.update(touched)
                found = self._gain(changes, touched, gain)
                if found is not None and found[0] < gain:
                    (gain, memory), best = found, changes
        if not best:
            depends = {("group", one) for known in concerned for one in known.groups}
            depends |= {("choice", one) for known in concerned for one in known.choices}
            self._settled[group] = self._time, depends
            return False
        self._time += 1
        self.labels.update(best)
        for one in best:
            self._changed["group", one] = self._time
        self._update(self._touched(best))
        for number, candidate in memory.items():
            self._move_memory(number, candidate)
        return True

    def _is_settled(self, group: int) -> bool:
        """Whether nothing changed since a change of this group last turned out to be of no use."""
        if group not in self._settled:
            return False
        since, depends = self._settled[group]
        if since == self._time:
            return True
        changed = self._changed
        return all(changed.get(one, 0) <= since for one in depends)

    def _present(self, number: int) -> int:
        """What the factors of an allocation cost as it lies now."""
        return self._sums[number][self._position(number)]

    def _position(self, number: int) -> int:
        return self._problem.choices[number].candidates.index(self.memory[number])

    def _moves(self, group: int, layout: Layout) -> Iterable[dict[int, Layout]]:
        yield (alone := {group: layout})
        # What moves elements of odd shapes suits any two layouts, at a cost.
        for costly in (False, True) if layout.size & (layout.size - 1) else (False,):
            if len(changes := self._with_followers(alone, costly)) > 1:
                yield changes

    def _with_followers(self, start: dict[int, Layout], costly: bool) -> dict[int, Layout]:
        """A change with those of the groups whose layouts follow from it, or suit it at a cost."""
        changes = dict(start)
        pending = list(start)
        while pending and len(changes) < _MOST_FOLLOWERS:
            group = pending.pop(0)
            for known in self._of_group[group]:
                if not known.is_relation:
                    continue
                operand, result = known.groups
                other, position = (result, 1) if operand == group else (operand, 0)
                if other in changes or other in self._pinned:
                    continue
                ends = [changes.get(end) or self.labels[end] for end in (operand, result)]
                if known.suits(*ends) and not (costly and self._cost(known, changes)):
                    continue
                layouts: list[Layout | None] = [None, None]
                layouts[1 - position] = changes[group]
                found = known.factor.proposals(position, layouts, ())
                if found and found[0] != self.labels[other]:
                    changes[other] = self._interned(found[0])
                    pending.append(other)
        return changes

    def _touched(self, changes: Mapping[int, Layout]) -> list[KnownFactor]:
        """The factors of the groups that change."""
        if len(changes) == 1:
            (group,) = changes
            return self._of_group[group]
        return list(dict.fromkeys(known for group in changes for known in self._of_group[group]))

    def _gain(
        self, changes: Mapping[int, Layout], touched: list[KnownFactor], most: int
    ) -> Gain | None:
        """What a change adds to the costs, with the memory that had better lie otherwise then;
        None if that is ``most`` or more for sure."""
        gain = 0
        with_memory = []
        for known in touched:
            if known.choices:
                with_memory.append(known)
            else:
                gain += self._cost(known, changes) - self._cost(known)
        by_choice: dict[int, list[KnownFactor]] = {}
        for known in with_memory:
            for number in known.choices:
                by_choice.setdefault(number, []).append(known)
        if all(len(known.choices) == 1 for known in with_memory):
            # No cost is negative, so what the others of an allocation cost is the least.
            least = gain
            for number, factors in by_choice.items():
                rest = self._sums[number]
                for known in factors:
                    part = self._parts[known][number]
                    rest = [a - b for a, b in zip(rest, part, strict=True)]
                least += min(rest) - self._present(number)
            if least >= most:
                return None
        gain += sum(self._cost(known, changes) - self._cost(known) for known in with_memory)
        memory = {}
        for number, factors in by_choice.items():
            sums = list(self._sums[number])
            for known in factors:
                before, after = (
                    self._parts[known][number],
                    self._by_candidate(known, number, changes),
                )
                sums = [a - b + c for a, b, c in zip(sums, before, after, strict=True)]
            position = self._position(number)
            best = sums.index(min(sums))  # The first ones are preferred.
            if best != position:
                memory[number] = best
                gain -= sums[position] - sums[best]
        return gain, memory

    def _choose_memory(self, number: int) -> bool:
        """Takes the best layout of an allocation; the first ones are preferred."""
        sums = self._sums[number]
        best = sums.index(min(sums))
        if best == self._position(number):
            return False
        self._time += 1
        self._move_memory(number, best)
        return True

    def _move_memory(self, number: int, candidate: int) -> None:
        self.memory[number] = self._problem.choices[number].candidates[candidate]
        self._changed["choice", number] = self._time
        # Factors of several allocations cost something else now in the layouts of the others.
        self._update(known for known in self._of_choice[number] if len(known.choices) > 1)

    def impossible(self) -> list[Factor]:
        """Factors that cannot be satisfied by what was chosen."""
        return [
            known.factor
            for known in self._known
            if is_impossible(self._cost(known) / known.factor.weight / UNIT)
        ]
