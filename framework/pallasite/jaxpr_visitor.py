"""The visitor of jaxprs: walks equations in order, and the regions of those that have some.

A walk over a kernel is a subclass that says what a value is to it (an MLIR value, an abstract value
of layout inference, a divisor, a known number), what a primitive makes of its operands, and where
it matters, what loops and branches mean. Which jaxprs an equation has, and what flows into and out
of them, comes from the table (:mod:`pallasite.jaxpr_table`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallasite import _jax
from pallasite.jaxpr_table import JaxprTable, Region, RegionKind, groups

_Literal = _jax.Literal


class LoopPolicy(enum.Enum):
    """How the default of :meth:`Visitor.loop` follows a loop.

    ONCE: one iteration, for which the carried values are what :meth:`Visitor.carried` leaves.
    FIXPOINT: until carried values, joined with those of the next iteration, no longer change.
    """

    ONCE = "once"
    FIXPOINT = "fixpoint"


class Visitor[Value]:
    """Walks jaxprs with a value for each variable.

    To be overridden: :meth:`primitive`, :meth:`unknown` and :meth:`literal`; and as needed the
    others. ``None`` as the result of an equation means that nothing is known of its results.

    Attributes:
      table: the primitives that carry jaxprs.
      loops: how loops are followed.
    """

    loops = LoopPolicy.ONCE

    def __init__(self, table: JaxprTable):
        self.table = table
        self._carriers = table.primitives

    # Values ---------------------------------------------------------------------------------------

    def unknown(self, variable: Any) -> Value:
        """A value of which nothing is known but the variable's type."""
        raise NotImplementedError

    def literal(self, atom: Any) -> Value:
        """The value of a literal."""
        return self.unknown(atom)

    def constant(self, variable: Any, value: Any) -> Value:
        """The value of a constant that a jaxpr holds."""
        return self.unknown(variable)

    def allocation(self, equation: Any, region: Region, position: int) -> Value:
        """The reference to memory that is allocated for an input of a region."""
        return self.unknown(region.inputs[position])

    def state_reference(
        self, equation: Any, region: Region, position: int, operand: Value
    ) -> Value:
        """The reference that begins as an operand, for an input of a region."""
        if _is_reference(equation, region, position):
            return operand
        return self.unknown(region.inputs[position])

    def number(self, value: Value) -> int | None:
        """The integer that a value is known to be."""
        return None

    def join(self, values: Sequence[Value], variable: Any) -> Value:
        """What is known of a variable that has one of several values."""
        first, *rest = values
        return first if all(value is first for value in rest) else self.unknown(variable)

    def carried(self, value: Value, variable: Any) -> Value:
        """What is known of a value that a loop carries after any number of iterations."""
        return self.unknown(variable)

    # Equations ------------------------------------------------------------------------------------

    def run(self, jaxpr: Any, operands: Sequence[Value]) -> list[Value]:
        """Visits the equations of a jaxpr; returns the values of its outputs.

        Args:
          jaxpr: what is visited.
          operands: of its inputs, and before them, of its constants, unless it holds their values.
        """
        inputs = jaxpr.invars
        constants = jaxpr.constvars
        if constants and len(operands) > len(inputs):
            inputs = [*constants, *inputs]
            constants = ()
        values: dict[Any, Value] = dict(zip(inputs, operands, strict=True))
        if constants:
            for variable, value in zip(constants, jaxpr.consts, strict=True):
                values[variable] = self.constant(variable, value)

        literal, unknown, equation_of = self.literal, self.unknown, self.equation
        visit = None if type(self).visit is Visitor.visit else self.visit
        # Kernels have many equations, and few visitors care how one gets to primitive().
        plain = None if type(self).equation is not Visitor.equation else self.primitive
        carriers = self._carriers

        def read(atom: Any) -> Value:
            return literal(atom) if isinstance(atom, _Literal) else values[atom]

        for equation in jaxpr.eqns:
            if visit is None:
                operands = [
                    literal(atom) if isinstance(atom, _Literal) else values[atom]
                    for atom in equation.invars
                ]
                if plain is None or equation.primitive in carriers:
                    results = equation_of(equation, operands)
                else:
                    results = plain(equation, operands)
            else:
                results = visit(equation, read)
            if results is None:
                for variable in equation.outvars:
                    values[variable] = unknown(variable)
            else:
                values.update(zip(equation.outvars, results, strict=True))
        return self.outputs(jaxpr, read)

    def visit(self, equation: Any, read: Callable[[Any], Value]) -> Sequence[Value] | None:
        """Reads the operands of an equation and visits it."""
        return self.equation(equation, [read(atom) for atom in equation.invars])

    def outputs(self, jaxpr: Any, read: Callable[[Any], Value]) -> list[Value]:
        """Reads the outputs of a jaxpr whose equations have been visited."""
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[Value]) -> Sequence[Value] | None:
        """Visits one equation; returns the values of its results, or None if nothing is known."""
        if equation.primitive in self._carriers:
            return self.structured(equation, self.table.regions(equation), operands)
        return self.primitive(equation, operands)

    def primitive(self, equation: Any, operands: list[Value]) -> Sequence[Value] | None:
        """An equation whose primitive carries no jaxprs."""
        return None

    # Regions --------------------------------------------------------------------------------------

    def structured(
        self, equation: Any, regions: Sequence[Region], operands: list[Value]
    ) -> Sequence[Value] | None:
        """An equation that has regions."""
        found: dict[int, Value] = {}
        for group in groups(regions):
            if group[0].kind is RegionKind.CALL:
                found.update(self.call(equation, group[0], operands))
            elif group[0].kind is RegionKind.BRANCH:
                found.update(self.branches(equation, group, operands))
            else:
                found.update(self.loop(equation, group, operands))
        return [
            found[position] if position in found else self.unknown(variable)
            for position, variable in enumerate(equation.outvars)
        ]

    def inputs(self, equation: Any, region: Region, operands: Sequence[Value]) -> list[Value]:
        """The values of a region's inputs."""
        if region.passed_on is not None:
            return [operands[operand] for operand in region.passed_on]
        states = dict(region.states)
        values: list[Value] = []
        for position, operand in enumerate(region.operands):
            if operand is None:
                if position in region.scoped:
                    values.append(self.allocation(equation, region, position))
                else:
                    values.append(self.unknown(region.inputs[position]))
            elif position in states:
                values.append(self.state_reference(equation, region, position, operands[operand]))
            else:
                values.append(operands[operand])
        return values

    def region(self, equation: Any, region: Region, inputs: Sequence[Value]) -> list[Value]:
        """Visits a region once; what has to be done before and after it belongs here."""
        return self.run(region.jaxpr, inputs)

    def results(
        self, equation: Any, region: Region, outputs: Sequence[Value], operands: Sequence[Value]
    ) -> dict[int, Value]:
        """The results of an equation, by number, that come from the outputs of a region."""
        found = {
            result: value
            for result, value in zip(region.results, outputs, strict=True)
            if result is not None
        }
        for position, result in region.states:
            operand = region.operands[position]
            if operand is not None and _is_reference(equation, region, position):
                found[result] = operands[operand]
        return found

    def call(self, equation: Any, region: Region, operands: list[Value]) -> dict[int, Value]:
        """A region that runs once; returns values of results by number."""
        inputs = self.inputs(equation, region, operands)
        outputs = self.region(equation, region, inputs)
        return self.results(equation, region, outputs, operands)

    def branches(
        self, equation: Any, regions: Sequence[Region], operands: list[Value]
    ) -> dict[int, Value]:
        """Regions of which one runs; returns values of results by number.

        If it is known which one, the others are not visited.
        """
        chosen = self.chosen(regions, operands)
        if chosen is not None:
            return self.call(equation, chosen, operands)
        ways = self.ways(equation, regions, operands)
        return {
            result: self.join([way[result] for way in ways], equation.outvars[result])
            for result in ways[0]
            if all(result in way for way in ways)
        }

    def chosen(self, regions: Sequence[Region], operands: Sequence[Value]) -> Region | None:
        """The branch that runs, if that is known."""
        selector = regions[0].selector
        number = None if selector is None else self.number(operands[selector])
        return None if number is None else regions[min(max(number, 0), len(regions) - 1)]

    def ways(
        self, equation: Any, regions: Sequence[Region], operands: list[Value]
    ) -> list[dict[int, Value]]:
        """The results of each branch; what is followed besides values is joined here."""
        return [self.call(equation, region, operands) for region in regions]

    def loop(
        self, equation: Any, regions: Sequence[Region], operands: list[Value]
    ) -> dict[int, Value]:
        """The conditions and the body of a loop; returns values of results by number."""
        body = regions[-1]
        if body.trips == 0:
            return self.carried_results(body, operands)
        current = list(operands)
        if self.loops is LoopPolicy.ONCE:
            for _, operand in body.carried_operands():
                current[operand] = self.carried(current[operand], equation.invars[operand])
            self.iteration(equation, regions, current)
            return self.carried_results(body, current)
        while True:
            following = self.iteration(equation, regions, current)
            for _, operand in body.carried_operands():
                pair = (current[operand], following[operand])
                following[operand] = self.join(pair, equation.invars[operand])
            if following == current:
                return self.carried_results(body, current)
            current = following

    def iteration(
        self, equation: Any, regions: Sequence[Region], operands: list[Value]
    ) -> list[Value]:
        """One iteration of a loop; returns the operands of the next one."""
        for condition in regions[:-1]:
            self.region(equation, condition, self.inputs(equation, condition, operands))
        return self.after(equation, regions[-1], operands)

    def after(self, equation: Any, body: Region, operands: list[Value]) -> list[Value]:
        """Visits a loop's body; returns the operands of the next iteration."""
        outputs = self.region(equation, body, self.inputs(equation, body, operands))
        following = list(operands)
        for output, operand in body.carried_operands():
            following[operand] = outputs[output]
        return following

    @staticmethod
    def carried_results(body: Region, operands: Sequence[Value]) -> dict[int, Value]:
        """The results of a loop that are carried values, from the operands of an iteration that
        would come next."""
        found: dict[int, Value] = {}
        for output, operand in body.carried_operands():
            result = body.results[output]
            if result is not None:
                found[result] = operands[operand]
        return found


def _is_reference(equation: Any, region: Region, position: int) -> bool:
    operand = region.operands[position]
    return operand is not None and isinstance(equation.invars[operand].aval, _jax.AbstractRef)


def effects_outside(region: Region) -> set[Any]:
    """The effects that a region has on what is around it, for the abstract evaluation of its
    primitive: those on its inputs are effects on the operands, those on its own memory none."""
    operands = dict(zip(region.inputs, region.operands, strict=True))
    found = set()
    for effect in region.jaxpr.effects:
        variable = _jax.input_of_effect(effect)
        if variable is None:
            found.add(effect)
        elif operands.get(variable) is not None:
            found.add(effect.replace(operands[variable]))
    return found


def with_insertions(
    table: JaxprTable, jaxpr: Any, before: Mapping[int, Sequence[tuple[Any, Any, Any]]]
) -> Any:
    """A jaxpr with further equations, also in the regions of its equations.

    Args:
      table: the primitives that carry jaxprs.
      jaxpr: an open or closed jaxpr.
      before: by the id of an equation, what comes before it: primitives without operands and
        results, with their parameters and effects.
    """
    equations = []
    changed = False
    for equation in jaxpr.eqns:
        for primitive, params, effects in before.get(id(equation), ()):
            equations.append(_jax.new_equation(primitive, params, effects, equation.source_info))
            changed = True
        if equation.primitive in table:
            regions = table.regions(equation)
            new = [with_insertions(table, region.jaxpr, before) for region in regions]
            if any(region.jaxpr is not one for region, one in zip(regions, new, strict=True)):
                equation = equation.replace(params=with_jaxprs(table, equation, regions, new))
                changed = True
        equations.append(equation)
    return jaxpr.replace(eqns=equations) if changed else jaxpr


def with_jaxprs(
    table: JaxprTable, equation: Any, regions: Sequence[Region], jaxprs: Sequence[Any]
) -> dict[str, Any]:
    """The parameters of an equation with other jaxprs for its regions."""
    entry = table.entry(equation.primitive)
    assert entry is not None
    if entry.with_jaxprs is not None:
        return entry.with_jaxprs(dict(equation.params), jaxprs)
    replaced = {id(region.jaxpr): new for region, new in zip(regions, jaxprs, strict=True)}

    def of(value: Any) -> Any:
        if type(value) in (tuple, list):
            items = [of(one) for one in value]
            same = all(a is b for a, b in zip(items, value, strict=True))
            return value if same else type(value)(items)
        return replaced.get(id(value), value)

    return {name: of(value) for name, value in equation.params.items()}
