"""The report of layout inference: the layouts that it chose, why, and what it converts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pallasite.plugin import InvalidValueError
from pallasite.plugin.inference import (
    UNCERTAIN,
    Access,
    Factor,
    Fixed,
    MemoryChoice,
    MemoryUse,
    Relation,
    Variable,
    is_impossible,
    view_of,
)
from pallasite.plugin.language import UnswizzleTransform, UntilingTransform
from pallasite.plugin.layouts import (
    ConversionKind,
    Layout,
    MemoryLayout,
    RegisterLayout,
    conversion,
)
from pallasite.plugin.lowering import (
    ArrayLayout,
    Insertion,
    LayoutConversion,
    LayoutReport,
    Reason,
    SharedLayout,
    describe_memory,
    name_of,
)
from pallasite_std.inference.costs import conversion_cost
from pallasite_std.inference.reasons import Reasons
from pallasite_std.memory.matrix_access import MatrixPlan, plan_transfer

if TYPE_CHECKING:
    from pallasite.plugin.inference import Inference, Problem, Solver


def layout_report(inference: Inference) -> LayoutReport:
    """What layout inference of a kernel has chosen and inserted, and why."""
    problem, solver = inference.walk.problem, inference.solver
    return LayoutReport(
        tuple(_arrays(problem, solver)),
        tuple(_shared(problem, solver)),
        tuple(_conversions(problem, solver)),
        tuple(_insertions(inference)),
    )


def _insertions(inference: Inference) -> Iterator[Insertion]:
    """In the order of the program; where there is a fence, it is a barrier as well."""
    for key, place in inference.walk.places.items():
        if key in inference.plan.before:
            yield Insertion(place.location, place.primitive, "fence")
        elif key in inference.plan.barriers:
            yield Insertion(place.location, place.primitive, "barrier")
        elif key in inference.walk.added:
            yield inference.walk.added[key]


# Arrays -------------------------------------------------------------------------------------------


def _arrays(problem: Problem, solver: Solver) -> Iterator[ArrayLayout]:
    reasons = Reasons(problem, solver)
    seen = set()
    for number, variable in enumerate(problem.variables):
        layout = solver.labels.get(problem.group(number))
        if not (solver.varying[number] and variable.used) or layout is None:
            continue
        if math.prod(variable.shape) < 2:
            continue
        made = ArrayLayout(
            variable.place.location,
            variable.place.primitive,
            variable.dtype,
            variable.shape,
            name_of(layout),
            reasons.of(number),
        )
        if made not in seen:
            seen.add(made)
            yield made


# Conversions --------------------------------------------------------------------------------------


def _conversions(problem: Problem, solver: Solver) -> list[LayoutConversion]:
    found: dict[LayoutConversion, float] = {}
    for factor in problem.factors:
        if any(problem.group(v) not in solver.labels for v in factor.variables):
            continue
        for variable, source, target, why in _ends(factor, problem, solver):
            kind = conversion(source, target).kind
            through = "shared memory" if kind is ConversionKind.SHARED_MEMORY else "registers"
            made = LayoutConversion(
                factor.place.location,
                factor.place.primitive,
                variable.dtype,
                variable.shape,
                name_of(source),
                name_of(target),
                through,
                conversion_cost(source, target, variable.bits),
                0.0,
                (Reason(why, factor.place.location),),
            )
            found[made] = found.get(made, 0.0) + factor.weight
    return [dataclasses.replace(made, times=times) for made, times in found.items()]


def _ends(
    factor: Factor, problem: Problem, solver: Solver
) -> Iterator[tuple[Variable, Layout, Layout, str]]:
    """The conversions at an equation: the array, its layouts before and after, and why."""
    labels = [solver.labels[problem.group(v)] for v in factor.variables]
    name = factor.place.primitive
    if isinstance(factor, Fixed) and labels[0] != factor.layout:
        variable = problem.variables[factor.variable]
        if factor.makes:
            yield variable, factor.layout, labels[0], factor.why or f"{name} makes it otherwise"
        else:
            yield variable, labels[0], factor.layout, factor.why or f"{name} needs it so"
    elif isinstance(factor, Relation):
        pair = factor.best(labels[0], labels[1])[1]
        if pair is None:
            return
        operand, result = (problem.variables[v] for v in factor.variables)
        if labels[0] != pair[0]:
            yield operand, labels[0], pair[0], f"{name} needs it so"
        if pair[1] != labels[1]:
            yield result, pair[1], labels[1], f"{name} makes it otherwise"


# Shared memory ------------------------------------------------------------------------------------


def _shared(problem: Problem, solver: Solver) -> Iterator[SharedLayout]:
    seen = set()
    for number, choice in enumerate(problem.choices):
        uses = [f for f in problem.factors if number in f.choices and _is_used(f, problem, solver)]
        layout = solver.memory[number]
        value = choice.value
        shown = _declared(uses, choice) if choice.given else layout
        made = SharedLayout(
            choice.place.location,
            value.name,
            str(value.dtype),
            shown.shape,
            describe_memory(shown),
            tuple(dict.fromkeys(_why(uses, layout, choice, problem, solver))),
        )
        if made not in seen:
            seen.add(made)
            yield made


def _declared(uses: list[Factor], choice: MemoryChoice) -> MemoryLayout:
    """The layout of the logical shape that the program declares: the first views of the array."""
    layout = choice.candidates[0]
    for use in uses:
        if isinstance(use, Access | MemoryUse):
            first = itertools.takewhile(
                lambda view: isinstance(view, UntilingTransform | UnswizzleTransform),
                use.transforms,
            )
            return view_of(choice.value, layout, list(first)).layout
    return layout


def _is_used(factor: Factor, problem: Problem, solver: Solver) -> bool:
    return all(problem.group(v) in solver.labels for v in factor.variables)


def _why(
    uses: list[Factor],
    layout: MemoryLayout,
    choice: MemoryChoice,
    problem: Problem,
    solver: Solver,
) -> Iterator[Reason]:
    def cost(use: Factor, memory: MemoryLayout) -> float:
        return use.cost([solver.labels[problem.group(v)] for v in use.variables], [memory])

    others = [candidate for candidate in choice.candidates if candidate != layout]
    if layout != choice.candidates[0]:
        others = choice.candidates[:1]  # What it would have if nothing asked for another.
    decided = choice.given
    if choice.given:
        yield Reason("the program declares it")
    for use in uses:
        place = use.place
        if not others or not all(cost(use, other) > cost(use, layout) for other in others):
            continue
        decided = True
        if isinstance(use, MemoryUse):
            yield Reason(use.why or place.primitive, place.location)
        elif isinstance(use, Access):
            labels = [solver.labels[problem.group(v)] for v in use.variables]
            here, there = (_conflicts(use, labels[0], m) for m in (layout, others[0]))
            if is_impossible(cost(use, others[0])):
                text = f"{use.what} needs it so"
            elif here == 1.0 and there is not None and there > 1.0:
                other = f"{describe_memory(others[0])} takes {there:.3g} times as long"
                text = f"{use.what} has no bank conflicts; {other}"
            else:
                text = f"{use.what} is faster so"
            yield Reason(text, place.location)
    if not decided:
        yield Reason("no other is faster" if uses else "nothing uses it")
    for use in uses:
        if cost(use, layout) >= UNCERTAIN and not is_impossible(cost(use, layout)):
            text = f"{use.place.primitive} trusts that a computed start is that of a tile"
            yield Reason(text, use.place.location)
        if isinstance(use, Access) and use.root.space.is_shared:
            label = solver.labels[problem.group(use.variable)]
            factor = _conflicts(use, label, layout)
            if factor is None:
                text = f"{use.what} goes element by element"
                yield Reason(text, use.place.location)
            elif factor > 1.0:
                text = f"{use.what} has bank conflicts: {factor:.3g} times as long"
                yield Reason(text, use.place.location)


def _conflicts(access: Access, label: Layout, memory: MemoryLayout) -> float | None:
    """How much longer an access takes for bank conflicts; None if it cannot be planned."""
    view = access.view([memory])
    if view is None or not isinstance(label, RegisterLayout):
        return None
    try:
        plan = plan_transfer(label, view.layout, min(16, view.offset_alignment), matrices=True)
        return (plan.rows if isinstance(plan, MatrixPlan) else plan).conflict_factor
    except InvalidValueError:
        return None
