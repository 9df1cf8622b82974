"""Layout inference of equations that have regions: calls, loops, branches, scopes, warps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pallasite import _jax, plugins
from pallasite.jaxpr_table import Region
from pallasite.jaxpr_visitor import Visitor
from pallasite.language.memory import memory_space_of
from pallasite.lowering.inference.allocations import allocation, first_value
from pallasite.lowering.inference.context import InferenceContext
from pallasite.lowering.inference.values import AbstractValue, OtherValue, ScalarValue
from pallasite.lowering.retracing import discharged, is_value
from pallasite.memory_events import EventKind

_UNKNOWN_TIMES = 16.0
"""Steps of a loop whose number is computed in the kernel."""


class Structure(Visitor[AbstractValue]):
    """What an equation makes whose regions say all about it.

    What branches return, and what a loop carries, becomes one value, with one layout.
    """

    def __init__(self, ctx: InferenceContext):
        super().__init__(ctx.walk.kernel.jaxprs)
        self.ctx = ctx
        self.branch: int | None = None
        self.counted = 0

    def unknown(self, variable: Any) -> AbstractValue:
        aval = variable.aval
        return self.ctx.result(aval) if isinstance(aval, _jax.ShapedArray) else OtherValue(aval)

    def region(
        self, equation: Any, region: Region, inputs: Sequence[AbstractValue]
    ) -> list[AbstractValue]:
        return self._infer(region, region.jaxpr, inputs)

    def _infer(
        self, region: Region, jaxpr: Any, inputs: Sequence[AbstractValue]
    ) -> list[AbstractValue]:
        times = None
        if region.is_loop:
            times = _UNKNOWN_TIMES if region.trips is None else max(region.trips, 1)
        if not region.per_warp:
            return self.ctx.infer(jaxpr, inputs, times=times, branch=self.branch)
        self.ctx.event(EventKind.SYNCHRONIZE)
        with self.ctx.warps():
            outputs = self.ctx.infer(jaxpr, inputs, times=times, branch=self.branch)
        self.ctx.event(EventKind.SYNCHRONIZE)
        return outputs

    # Branches and loops ---------------------------------------------------------------------------

    def branches(
        self, equation: Any, regions: Sequence[Region], operands: list[AbstractValue]
    ) -> dict[int, AbstractValue]:
        if len(regions) == 1:
            return self.call(equation, regions[0], operands)
        merged = {
            result: self.ctx.result(equation.outvars[result].aval, varying=False)
            for result in regions[0].results
            if result is not None
        }
        self.ctx.fork = None
        for region in regions:
            self.branch = self.counted
            self.counted += 1
            outputs = self.region(equation, region, self.inputs(equation, region, operands))
            self.branch = None
            self.ctx.returns(region.jaxpr, outputs, _by_output(region.results, merged))
        return merged

    def loop(
        self, equation: Any, regions: Sequence[Region], operands: list[AbstractValue]
    ) -> dict[int, AbstractValue]:
        *conditions, body = regions
        loop_divisors = plugins.manager().implementation("loop_divisors")
        divisors = loop_divisors(self.table, body, [_divisor(value) for value in operands])
        carried: dict[int, AbstractValue] = {}
        for _, operand in body.carried_operands():
            value, aval = operands[operand], equation.invars[operand].aval
            if isinstance(value, ScalarValue):
                carried[operand] = ScalarValue(divisors[operand])
            elif isinstance(aval, _jax.ShapedArray):
                carried[operand] = self.ctx.result(aval, varying=False)
            else:
                carried[operand] = value
        for operand, value in carried.items():
            self.ctx.becomes(operand, operands[operand], value)
        current = [carried.get(number, value) for number, value in enumerate(operands)]
        inputs = self.inputs(equation, body, current)
        for condition in conditions:
            self.region(equation, condition, self.inputs(equation, condition, current))
        outputs = self.region(equation, body, inputs)
        sources = dict(body.carried_operands())
        by_output = [sources.get(output) for output in range(len(outputs))]
        self.ctx.returns(body.jaxpr, outputs, _by_output(by_output, carried))
        return self.carried_results(body, current)

    # Scopes ---------------------------------------------------------------------------------------

    def call(
        self, equation: Any, region: Region, operands: list[AbstractValue]
    ) -> dict[int, AbstractValue]:
        if not region.scoped and not region.states:
            return super().call(equation, region, operands)
        jaxpr = region.jaxpr
        first = len(region.operands) - len(jaxpr.invars)
        states = dict(region.states)
        kept = [
            is_value(variable.aval)
            if position in region.scoped
            else position in states and not _is_reference(equation.outvars[states[position]])
            for position, variable in enumerate(jaxpr.invars, first)
        ]
        inputs = self.inputs(equation, region, operands)
        if any(kept) or states:
            jaxpr = discharged(self.ctx.walk.kernel, jaxpr, kept)
        outputs = self._infer(region, jaxpr, inputs)
        count = len(region.jaxpr.outvars)
        found = self.results(equation, region, outputs[:count], operands)
        finals = iter(outputs[count:])
        for position, is_kept in enumerate(kept, first):
            if is_kept:
                final = next(finals)
                if position in states:
                    found[states[position]] = final
        return found

    def allocation(self, equation: Any, region: Region, position: int) -> AbstractValue:
        variable = region.inputs[position]
        if is_value(variable.aval):
            return first_value(self.ctx, variable.aval)
        count = len(region.jaxpr.invars)
        names = region.jaxpr.debug_info.safe_arg_names(count)
        name = names[position - len(region.operands) + count]
        return allocation(self.ctx, variable, re.sub(r"^named_scratch\['(\w+)'\]$", r"\1", name))

    def state_reference(
        self, equation: Any, region: Region, position: int, operand: AbstractValue
    ) -> AbstractValue:
        aval = region.inputs[position].aval
        number = region.operands[position]
        assert number is not None
        if _is_reference(equation.invars[number]) or not is_value(aval):
            return operand
        value = first_value(self.ctx, aval, operand)
        layout = memory_space_of(aval).scope_layout(aval)
        if layout is not None:
            self.ctx.needs(number, operand, layout, "it starts a scope")
        return value


def _by_output(
    keys: Sequence[int | None], values: dict[int, AbstractValue]
) -> list[AbstractValue | None]:
    return [None if key is None else values.get(key) for key in keys]


def _divisor(value: AbstractValue) -> int:
    return value.divisor if isinstance(value, ScalarValue) else 1


def _is_reference(variable: Any) -> bool:
    return isinstance(variable.aval, _jax.AbstractRef)
