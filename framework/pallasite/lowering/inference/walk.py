"""The walk over a kernel's jaxprs that sets up the problem of layout inference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pallasite import _jax, plugins
from pallasite.errors import SourceLocation
from pallasite.ir import types
from pallasite.jaxpr_visitor import Visitor
from pallasite.layouts.memory import MemoryLayout
from pallasite.lowering.equations import check_elements, errors_at_equation
from pallasite.lowering.inference.allocations import tiled
from pallasite.lowering.inference.context import InferenceContext, Record
from pallasite.lowering.inference.fences import Branches, Key
from pallasite.lowering.inference.plan import EquationPlan, LayoutPlan, Path
from pallasite.lowering.inference.problem import (
    Fixed,
    MemoryChoice,
    Place,
    Problem,
    Relation,
    Variable,
)
from pallasite.lowering.inference.releases import BarrierEvent, releases
from pallasite.lowering.inference.solver import Solver
from pallasite.lowering.inference.structure import Structure
from pallasite.lowering.inference.values import (
    ANY,
    AbstractValue,
    ArrayValue,
    MemoryValue,
    OtherValue,
    ScalarValue,
)
from pallasite.lowering.inference.without_rules import with_any_layouts, without_rule
from pallasite.lowering.layout_report import Insertion
from pallasite.plugin_values import wrong_value
from pallasite.rules import InferenceRule

if TYPE_CHECKING:
    from pallasite.layouts.registers import Layout
    from pallasite.lowering.context import KernelContext


class Walk:
    """Visits every equation once for each way to it, and collects factors.

    Attributes:
      kernel: the kernel that is lowered.
      problem: what has been found.
      divisor_of_result: what a scalar is a multiple of; the implementation of that name.
      outputs: by path and id of a jaxpr, variables that its results become.
    """

    def __init__(self, kernel: KernelContext):
        self.kernel = kernel
        self.divisor_of_result = plugins.manager().implementation("divisor_of_result")
        self.location: SourceLocation | None = kernel.location
        self.problem = Problem()
        self.outputs: dict[tuple[Path, int], list[int | None]] = {}
        self.records: dict[tuple[Path, int], Record] = {}
        self.allocations: dict[tuple[Path, int, Any], int] = {}
        self.kept: list[Any] = []
        self.events: list[Any] = []
        self.branches: Branches = ()
        self.barrier_events: list[BarrierEvent] = []
        self.anchor: Key | None = None
        self.places: dict[Key, Place] = {}
        self.added: dict[Key, Insertion] = {}

    def jaxpr(
        self,
        path: Path,
        jaxpr: Any,
        values: Sequence[AbstractValue],
        weight: float,
        in_warp: bool = False,
    ) -> list[AbstractValue]:
        """Visits the equations of a jaxpr; returns the values of its results."""
        self.kept.append(jaxpr)
        return _JaxprWalk(self, path, jaxpr, weight, in_warp).run(jaxpr, values)

    def allocation(
        self,
        path: Path,
        variable: Any,
        value: MemoryValue,
        candidates: list[MemoryLayout],
        place: Place,
        member: Any = None,
    ) -> int:
        """Adds the choice of an allocation's layout (or of one of a union's members)."""
        self.problem.choices.append(MemoryChoice(value, candidates, place))
        number = len(self.problem.choices) - 1
        self.allocations[path, id(variable), member] = number
        return number

    def keep_row_major(self, value: MemoryValue) -> None:
        """Leaves no choice for an allocation: it is row-major."""
        if value.choice is not None:
            choice = self.problem.choices[value.choice]
            choice.given = True
            del choice.candidates[1:]

    def propose_tiles(self, value: MemoryValue, height: int) -> None:
        """Proposes layouts for an allocation, in tiles of so many rows."""
        assert value.choice is not None
        choice = self.problem.choices[value.choice]
        if not choice.given:
            found = tiled(value.shape, choice.candidates[0].element_bits, height)
            choice.candidates += [one for one in found if one not in choice.candidates]

    # The solution ---------------------------------------------------------------------------------

    def plan(self, solver: Solver) -> LayoutPlan:
        """The plan that a solution means."""
        plan = LayoutPlan(kept=self.kept)

        def label(variable: int | None) -> Layout | None:
            if variable is None or not solver.varying[variable]:
                return None
            return solver.labels[self.problem.group(variable)]

        for key, record in self.records.items():
            operands: dict[int, Layout] = {}
            materialized: set[int] = set()
            hint = label(record.results[0]) if record.results else None
            for position, need in record.needs.items():
                if isinstance(need, Fixed):
                    if solver.varying[need.variable]:
                        operands[position] = need.layout
                elif isinstance(need, Relation):
                    one, other = label(need.operand), label(need.result)
                    if one is not None and other is not None:
                        pair = need.best(one, other)[1]
                        if pair is not None:
                            operands[position], hint = pair
                else:
                    layout = label(need)
                    if layout is not None:
                        operands[position] = layout
                        materialized.add(position)
            results = tuple(label(number) for number in record.results)
            if not operands and not any(results):
                continue
            count = max(operands, default=-1) + 1
            plan.equations[key] = EquationPlan(
                tuple(operands.get(position) for position in range(count)),
                frozenset(materialized),
                hint,
                results,
            )
        for place, outputs in self.outputs.items():
            plan.outputs[place] = tuple(label(number) for number in outputs)
        for allocation, number in self.allocations.items():
            plan.memory[allocation] = solver.memory[number]
        kernel = self.kernel
        implementation = plugins.manager().implementation
        missing_fences = implementation("missing_fences")
        missing_barriers = implementation("missing_barriers")
        fences = missing_fences(self.events, kernel.registry.memory.fences(kernel.target))
        plan.fenced_scopes.update(fences.scopes)
        if not kernel.params.unsafe_no_auto_barriers:
            for key, inserted in fences.before.items():
                plan.before[key] = [(fence.primitive, dict(fence.params)) for fence in inserted]
            plan.barriers.update(missing_barriers(self.events, plan.before))
        plan.releases.update(releases(self.barrier_events))
        return plan


class _JaxprWalk(Visitor[AbstractValue]):
    """The walk over one jaxpr, in one place.

    Args:
      walk: what collects the factors.
      path: the calls around the jaxpr.
      jaxpr: what is visited.
      weight: how often it runs, about.
      in_warp: whether single warps run it.
    """

    def __init__(self, walk: Walk, path: Path, jaxpr: Any, weight: float, in_warp: bool):
        super().__init__(walk.kernel.jaxprs)
        self.walk = walk
        self.path = path
        self.weight = weight
        self.in_warp = in_warp
        self.used = {
            atom
            for atoms in (*(equation.invars for equation in jaxpr.eqns), jaxpr.outvars)
            for atom in atoms
            if not isinstance(atom, _jax.Literal)
        }

    def constant(self, variable: Any, value: Any) -> AbstractValue:
        aval = variable.aval
        if not isinstance(aval, _jax.ShapedArray):
            return OtherValue(aval)
        return ScalarValue() if aval.shape == () else self._splat(aval)

    def literal(self, atom: Any) -> AbstractValue:
        aval = atom.aval
        if aval.shape != ():
            return self._splat(aval)
        if np.dtype(aval.dtype).kind in "iu":
            number = int(atom.val)
            return ScalarValue(abs(number) or ANY, number)
        return ScalarValue()

    def _splat(self, aval: Any) -> ArrayValue:
        bits = types.bit_width(aval.dtype)
        variable = Variable(tuple(aval.shape), bits, [], False, Place(None, "constant"))
        return ArrayValue(self.walk.problem.variable(variable), tuple(aval.shape), bits)

    def equation(self, equation: Any, operands: list[AbstractValue]) -> Sequence[AbstractValue]:
        carries = equation.primitive in self.table
        if equation.outvars and not carries and _is_scalar(equation):
            return self._scalars(equation, operands)
        ctx = InferenceContext(self.walk, equation, self.path, self.weight, self.in_warp)
        with errors_at_equation(equation):
            check_elements(equation)
            ctx.declared_events(operands)
            registry = self.walk.kernel.registry
            lowering, rule = ctx.find_rule(registry.lowering), ctx.find_rule(registry.inference)
            if lowering is not None and lowering.layouts == "any":
                results = with_any_layouts(ctx, operands, lowering)
            elif rule is not None:
                found = ctx.call(rule, operands, equation.params)
                results = _as_results(ctx, rule, found)
            elif carries:
                regions = self.table.regions(equation)
                results = list(Structure(ctx).structured(equation, regions, operands) or ())
            else:
                results = without_rule(ctx, operands)
        self._note(ctx, results)
        return results

    def _scalars(self, equation: Any, operands: Sequence[AbstractValue]) -> list[AbstractValue]:
        divisors = [value.divisor if isinstance(value, ScalarValue) else 1 for value in operands]
        divisor = self.walk.divisor_of_result(equation, divisors)
        return [ScalarValue(divisor) for _ in equation.outvars]

    def _note(self, ctx: InferenceContext, results: Sequence[AbstractValue]) -> None:
        ctx.record.results = [
            value.variable if isinstance(value, ArrayValue) else None for value in results
        ]
        for number, variable in zip(ctx.record.results, ctx.equation.outvars, strict=True):
            if number is None or variable in self.used or number in ctx.record.needs.values():
                continue  # What a loop carries is used inside of it.
            if self.walk.problem.variables[number].place == ctx.place:
                self.walk.problem.variables[number].used = False
        if ctx.record.needs or any(number is not None for number in ctx.record.results):
            self.walk.records[ctx.path, id(ctx.equation)] = ctx.record


def _is_scalar(equation: Any) -> bool:
    return all(
        isinstance(atom.aval, _jax.ShapedArray) and atom.aval.shape == ()
        for atom in (*equation.invars, *equation.outvars)
    )


def _as_results(ctx: InferenceContext, rule: InferenceRule, found: Any) -> list[AbstractValue]:
    several, count = ctx.equation.primitive.multiple_results, len(ctx.equation.outvars)
    if several and isinstance(found, Iterable | None) and not isinstance(found, str):
        results = list(found or ())
    else:
        results = [found]
    if len(results) != count or not all(map(ctx.suits, results, ctx.avals_out)):
        plugin = plugins.manager().label(rule.plugin)
        what = f"pallasite_inference_rules of plugin {plugin}: the rule for {rule.primitive}"
        raise wrong_value(what, found, f"an abstract value for each of {count} results")
    return results
