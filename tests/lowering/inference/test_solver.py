"""The solver on small problems made by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallasite import plugins
from pallasite.layouts import named, strided
from pallasite.layouts.proposals import proposals_for
from pallasite.layouts.registers import Layout
from pallasite.lowering.inference.problem import Factor, Fixed, Place, Problem, Relation, Variable
from pallasite.lowering.inference.solver import Solver
from pallasite.target_selection import find_target
from pallasite_std.inference import relations
from pallasite_std.inference.costs import conversion_cost
from pallasite_std.memory.relayout import rows_in_registers

PROPOSALS = proposals_for(plugins.registry(), find_target("sm_100a"))

PLACE = Place(None, "made-up")
SHAPE = (128, 64)
BITS = 32


def wgmma(shape: tuple[int, ...] = SHAPE) -> Layout:
    return named.resolve("WGMMA", (), {}, shape, BITS)


def rows(shape: tuple[int, ...] = SHAPE) -> Layout:
    return strided(shape, 4)


class Made:
    """A problem to which arrays and factors are added one by one."""

    def __init__(self) -> None:
        self.problem = Problem()

    def array(
        self,
        shape: tuple[int, ...] = SHAPE,
        *,
        varying: bool = True,
        sources=(),
        weight: float = 1.0,
    ) -> int:
        made = Variable(shape, BITS, list(sources), varying, PLACE, weight=weight)
        return self.problem.variable(made)

    def fixed(self, variable: int, layout: Layout, weight: float = 1.0, **options) -> Fixed:
        factor = Fixed(PLACE, weight, variable, layout, BITS, **options)
        self.problem.factors.append(factor)
        return factor

    def related(self, operand: int, result: int, pairs, weight: float = 1.0) -> Relation:
        factor = Relation(PLACE, weight, operand, result, pairs, (BITS, BITS))
        self.problem.factors.append(factor)
        return factor

    def solve(self) -> Solver:
        solver = Solver(self.problem)
        solver.solve()
        return solver

    def layout(self, solver: Solver, variable: int) -> Layout:
        return solver.labels[self.problem.group(variable)]


def cost_of(made: Made, solver: Solver, factor: Factor) -> float:
    """What a factor costs by its weight, in the layouts that were chosen."""
    layouts = [made.layout(solver, variable) for variable in factor.variables]
    memory = [solver.memory[choice] for choice in factor.choices]
    return factor.weight * factor.cost(layouts, memory)


def total(made: Made, solver: Solver) -> float:
    return sum(cost_of(made, solver, factor) for factor in made.problem.factors)


def total_with_copies(made: Made, solver: Solver) -> float:
    return sum(cost_of(made, solver, factor) for factor in solver.factors)


@pytest.mark.parametrize(("inside", "outside"), [(16.0, 1.0), (1.0, 16.0)])
def test_the_conversion_is_where_it_runs_less_often(inside, outside):
    made = Made()
    x = made.array()
    made.fixed(x, rows(), outside, makes=True)
    made.fixed(x, wgmma(), inside)
    solver = made.solve()
    assert made.layout(solver, x) == (wgmma() if inside > outside else rows())
    assert total(made, solver) == conversion_cost(rows(), wgmma(), BITS)


def test_the_conversion_is_where_the_array_is_small():
    """A reduction of an array that is loaded by rows, which a matrix product wants as it has it."""
    made = Made()
    x, row = made.array(), made.array(SHAPE[:1])
    wanted = named.resolve("WGMMA_ROW", (), {}, SHAPE[:1], BITS)
    made.fixed(x, rows(), makes=True)
    made.related(x, row, relations.reduction(SHAPE, (1,), PROPOSALS))
    made.fixed(row, wanted)
    solver = made.solve()
    assert made.layout(solver, x) == rows()
    left = next(iter(relations.reduction(SHAPE, (1,), PROPOSALS)(rows(), None)))[1]
    assert total(made, solver) == conversion_cost(left, wanted, BITS)
    assert total(made, solver) < conversion_cost(rows(), wgmma(), BITS)


def test_a_layout_follows_over_a_chain_of_relations():
    made = Made()
    x = made.array()
    turned, row, wide = made.array(SHAPE[::-1]), made.array(SHAPE[1:]), made.array(SHAPE)
    made.related(x, turned, relations.transpose((1, 0), PROPOSALS))
    made.related(turned, row, relations.reduction(SHAPE[::-1], (1,), PROPOSALS))
    made.related(row, wide, relations.broadcast(SHAPE[1:], SHAPE, (1,), PROPOSALS))
    made.problem.join(x, wide)  # They meet in an element-wise operation.
    made.fixed(x, wgmma(), makes=True, pinned=True)
    solver = made.solve()
    assert total(made, solver) == 0
    assert made.layout(solver, wide) == wgmma()
    assert made.layout(solver, turned) == wgmma().transpose((1, 0)).layout
    assert made.layout(solver, row) == wgmma().reduce((0,))


def test_a_chain_that_needs_no_conversion_is_found_from_a_bad_beginning():
    """Both narrow arrays have to change together, and nothing else has to."""
    made = Made()
    x, row, narrow = made.array(), made.array(SHAPE[1:]), made.array((1, SHAPE[1]))
    made.fixed(x, rows(), 8.0)
    made.related(x, row, relations.reduction(SHAPE, (0,), PROPOSALS))
    made.related(row, narrow, relations.broadcast(SHAPE[1:], (1, SHAPE[1]), (1,), PROPOSALS))
    made.related(narrow, x, relations.broadcast((1, SHAPE[1]), SHAPE, (0, 1), PROPOSALS))
    solver = made.solve()
    assert made.layout(solver, x) == rows()
    assert total(made, solver) == 0


@pytest.mark.parametrize("weight", [1.0, 256.0])
def test_copies_cost_where_the_array_is_computed_often(weight):
    """Two warps have each element: that is cheaper than a conversion, unless it is much work."""
    made = Made()
    twice = rows_in_registers(SHAPE)
    assert twice.replication == 2
    x = made.array(weight=weight)
    made.fixed(x, twice, makes=True)
    made.fixed(x, twice)
    made.fixed(x, rows(), 0.1)
    solver = made.solve()
    assert made.layout(solver, x) == (twice if weight == 1.0 else rows())


def test_copies_of_small_arrays_are_cheap():
    """A row statistic, once for each lane of a quad, is cheaper than a conversion of it."""
    made = Made()
    x, row = made.array(), made.array(SHAPE[:1], weight=8.0)
    made.fixed(x, wgmma(), makes=True, pinned=True)
    made.related(x, row, relations.reduction(SHAPE, (1,), PROPOSALS))
    solver = made.solve()
    wanted = named.resolve("WGMMA_ROW", (), {}, SHAPE[:1], BITS)
    assert made.layout(solver, row) == wanted
    assert wanted.replication > 1
    assert (
        0 < total_with_copies(made, solver) < conversion_cost(wanted, strided(SHAPE[:1], 1), BITS)
    )


def test_splats_have_no_layout():
    made = Made()
    x = made.array(varying=False)
    y = made.array(varying=False, sources=[x])
    made.fixed(y, wgmma())
    solver = made.solve()
    assert solver.varying == [False, False]
    assert not solver.labels


def test_what_depends_on_spread_arrays_is_spread():
    made = Made()
    first = made.array(varying=False)
    carried = made.array(varying=False, sources=[first])
    loaded = made.array()
    made.problem.variables[carried].sources.append(loaded)
    made.fixed(carried, wgmma())
    solver = made.solve()
    assert solver.varying == [False, True, True]
    assert made.layout(solver, carried) == wgmma()


def test_pinned_layouts_are_kept_whatever_the_others_cost():
    made = Made()
    x = made.array()
    made.fixed(x, rows(), 1e6)
    pinned = made.fixed(x, wgmma(), pinned=True)
    solver = made.solve()
    assert made.layout(solver, x) == wgmma()
    assert cost_of(made, solver, pinned) == 0
    assert solver.impossible() == []


def test_two_pinned_layouts_are_impossible():
    made = Made()
    x = made.array()
    first = made.fixed(x, wgmma(), pinned=True)
    second = made.fixed(x, rows(), pinned=True)
    (factor,) = made.solve().impossible()
    assert factor in (first, second)


def test_what_is_dear_is_not_impossible():
    made = Made()
    x = made.array()
    made.fixed(x, rows(), 1e6)
    made.fixed(x, wgmma(), 1e6)
    assert made.solve().impossible() == []


# Random problems ----------------------------------------------------------------------------------


@st.composite
def problems(draw):
    """Arrays in a chain of changes of shape, some of which are joined or needed in a layout."""
    made = Made()
    numbers = [made.array()]
    extents = [SHAPE]
    for _ in range(draw(st.integers(0, 4))):
        shape = extents[-1]
        kind = draw(st.sampled_from(["transpose", "reduce", "broadcast"]))
        if kind == "transpose" and len(shape) == 2:
            after, pairs = shape[::-1], relations.transpose((1, 0), PROPOSALS)
        elif kind == "reduce" and len(shape) == 2:
            axis = draw(st.integers(0, 1))
            after, pairs = (shape[1 - axis],), relations.reduction(shape, (axis,), PROPOSALS)
        elif len(shape) == 1:
            kept = draw(st.integers(0, 1))
            after = (shape[0], 64) if kept == 0 else (64, shape[0])
            pairs = relations.broadcast(shape, after, (kept,), PROPOSALS)
        else:
            continue
        numbers.append(made.array(after))
        extents.append(after)
        made.related(numbers[-2], numbers[-1], pairs, draw(st.sampled_from([1.0, 16.0])))
    for number, shape in zip(numbers, extents, strict=True):
        for layout in (wgmma(shape), rows(shape)) if len(shape) == 2 else (strided(shape, 1),):
            if draw(st.booleans()):
                weight = draw(st.sampled_from([1.0, 16.0]))
                made.fixed(number, layout, weight, makes=draw(st.booleans()))
    for one, other in itertools.combinations(range(len(numbers)), 2):
        if extents[one] == extents[other] and draw(st.booleans()):
            made.problem.join(numbers[one], numbers[other])
    return made


@settings(deadline=None)
@given(problems())
def test_solutions_are_complete_possible_and_always_the_same(made):
    solver = made.solve()
    assert set(solver.labels) == {made.problem.group(v) for v in range(len(made.problem.variables))}
    for group, layout in solver.labels.items():
        assert layout.shape == made.problem.variables[group].shape
    assert solver.impossible() == []
    assert made.solve().labels == solver.labels


@settings(deadline=None)
@given(problems())
def test_no_single_change_is_better(made):
    """For each group, the layouts that anything needs or makes, and that follow from neighbours."""
    solver = made.solve()
    best = total_with_copies(made, solver)
    chosen = dict(solver.labels)
    for group in chosen:
        candidates = [
            factor.layout
            for factor in made.problem.factors
            if isinstance(factor, Fixed) and made.problem.group(factor.variable) == group
        ]
        for layout in candidates:
            solver.labels[group] = layout
            assert total_with_copies(made, solver) >= best - 1e-3
        solver.labels[group] = chosen[group]
