"""What the integers that a loop carries are multiples of.

The body of a loop is not there yet when its first instructions are emitted, so what it makes of the
carried values is found in its program: a row that starts at a multiple of 64 and grows by 64 stays
one. :func:`pallasite_std.memory.divisibility.known_divisor` looks back from there.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import ANY
from pallasite.plugin.ir import ops
from pallasite.plugin.jaxprs import JaxprTable, LoopPolicy, Region, Visitor, loop_body
from pallasite.plugin.lowering import RegisterArray, Value
from pallasite_std.memory.divisibility import known_divisor, with_divisor


def mark_carried(
    table: JaxprTable, body: Any, constants: Sequence[Value], starts: Sequence[Value]
) -> Callable[[Sequence[Value]], list[Value]]:
    """A function that marks the values that a loop carries with what they are multiples of.

    Args:
      table: the primitives that carry jaxprs.
      body: the program of one step, of the constants and the carried values.
      constants: what the loop does not change.
      starts: what it carries into the first step.
    """
    region = loop_body(body, constants=len(constants))
    found = loop_divisors(table, region, [_known(value) for value in (*constants, *starts)])
    divisors = [found[len(constants) + number] for number in range(len(starts))]

    def mark(values: Sequence[Value]) -> list[Value]:
        return [
            value.map(lambda register, divisor=divisor: with_divisor(register, divisor))
            if 1 < divisor < ANY
            else value
            for value, divisor in zip(values, divisors, strict=True)
        ]

    return mark


def loop_divisors(table: JaxprTable, body: Region, operands: Sequence[int]) -> dict[int, int]:
    """What the values that a loop carries are multiples of in every step, by operand.

    Args:
      table: the primitives that carry jaxprs.
      body: the loop's body.
      operands: what the operands are multiples of before the first step.
    """
    found = {operand: operands[operand] for _, operand in body.carried_operands()}
    visitor = _VISITORS.get(table) or _Divisors(table)
    if table.remembers:
        _VISITORS[table] = visitor
    while any(divisor > 1 for divisor in found.values()):
        inputs = [1 if one is None else found.get(one, operands[one]) for one in body.operands]
        outputs = visitor.run(body.jaxpr, inputs)
        common = {
            operand: math.gcd(found[operand], outputs[output])
            for output, operand in body.carried_operands()
        }
        if common == found:
            break
        found = common
    return found


_VISITORS: weakref.WeakKeyDictionary[JaxprTable, _Divisors] = weakref.WeakKeyDictionary()
"""By the table of the work on one kernel: loops are asked about by inference and by lowering, from
the outermost to the innermost."""


def _known(value: Value) -> int:
    if not isinstance(value, RegisterArray) or value.shape != () or not value.is_splat:
        return 1
    scalar = value.scalar
    return known_divisor(scalar) if scalar.type in (ops.i32(), ops.i64()) else 1


class _Divisors(Visitor[int]):
    """Values are what a number is known to be a multiple of."""

    loops = LoopPolicy.FIXPOINT

    def __init__(self, table: JaxprTable):
        # Not the table itself: that is what the visitor is kept for.
        super().__init__(weakref.proxy(table))
        self._runs: dict[tuple[int, tuple[int, ...]], tuple[Any, list[int]]] = {}

    def run(self, jaxpr: Any, operands: Sequence[int]) -> list[int]:
        """As ever, but once only for the same operands: else each level of a nest of loops would
        be gone through several times for each time that the level around it is."""
        key = (id(jaxpr), tuple(operands))
        found = self._runs.get(key)
        if found is None:
            found = self._runs[key] = jaxpr, super().run(jaxpr, operands)
        return found[1]

    def unknown(self, variable: Any) -> int:
        return 1

    def literal(self, atom: Any) -> int:
        if atom.aval.shape != () or atom.aval.dtype.kind not in "iu":
            return 1
        number: int = abs(int(atom.val))
        return number or ANY

    def join(self, values: Sequence[int], variable: Any) -> int:
        return math.gcd(*values)

    def structured(
        self, equation: Any, regions: Sequence[Region], operands: list[int]
    ) -> Sequence[int] | None:
        if not any(_whole(variable) for variable in equation.outvars):
            return None
        return super().structured(equation, regions, operands)

    def primitive(self, equation: Any, operands: list[int]) -> Sequence[int] | None:
        divisor = divisor_of_result(equation, operands)
        return None if divisor == 1 else [divisor]


def _whole(atom: Any) -> bool:
    aval = atom.aval
    # A key of random numbers, say, has a type of its own, without a kind.
    return getattr(aval, "shape", None) == () and getattr(aval.dtype, "kind", None) in ("i", "u")


def _product(divisors: Sequence[int]) -> int:
    return ANY if ANY in divisors else math.prod(divisors)


def _common(divisors: Sequence[int]) -> int:
    return math.gcd(*divisors)


_RULES: dict[Any, Callable[[Sequence[int]], int]] = {
    **dict.fromkeys((lax.add_p, lax.sub_p, lax.max_p, lax.min_p, lax.rem_p), _common),
    **dict.fromkeys((lax.neg_p, lax.abs_p, lax.convert_element_type_p, lax.clamp_p), _common),
    lax.mul_p: _product,
    lax.and_p: lambda divisors: max(divisor & -divisor for divisor in divisors),
    lax.select_n_p: lambda divisors: math.gcd(*divisors[1:]),
}


def divisor_of_result(equation: Any, divisors: Sequence[int]) -> int:
    """What the scalar that an equation makes is known to be a multiple of.

    Args:
      equation: an equation of scalars.
      divisors: what its operands are multiples of.
    """
    primitive = equation.primitive
    if not all(_whole(atom) for atom in equation.outvars):
        return 1
    if primitive is _jax.multiple_of_p:
        return math.lcm(*equation.params["values"], *divisors)
    if primitive in _RULES:
        return _RULES[primitive](divisors)
    return 1
