"""The base of walks over a kernel that follow its integers and conditions."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import JaxprTable, Visitor
from pallasite_std.checks import values as v

lax = _jax.lax_primitives


@dataclasses.dataclass(frozen=True, slots=True)
class Test:
    """A condition that holds where a symbol is from ``low`` to ``high``."""

    symbol: v.Symbol
    low: int
    high: int

    def negation(self) -> Test | None:
        """The condition that holds elsewhere, if it is one of these."""
        last = self.symbol.extent - 1
        if self.low == 0 and self.high < last:
            return Test(self.symbol, self.high + 1, last)
        if self.high == last and self.low > 0:
            return Test(self.symbol, 0, self.low - 1)
        return None


class Memory:
    """An allocation, or an operand of the kernel.

    Attributes:
      variable: the reference in the jaxpr.
      number: among the kernel's inputs and outputs; None for allocations.
      scope: the equation that allocates it, if that is known.
    """

    __slots__ = ("number", "scope", "variable")

    def __init__(self, variable: Any, number: int | None = None, scope: Any = None):
        self.variable = variable
        self.number = number
        self.scope = scope

    @property
    def aval(self) -> Any:
        """The type of the reference."""
        return self.variable.aval


class Places:
    """The values of grid axes, which all threads of a kernel share.

    Attributes:
      splits: of symbols.
      asked_for_thread: whether anything depends on the number of the thread.
      steps: of jaxprs, by their identities.
      relevant: operands that the events of equations depend on, by their identities.
      transfers: bytes of copies, by the identity of the equation and the argument.
      memories: allocations, by their variables and the numbers of threads that have their own.
      barriers: by their arrays and indices.
      events: what equations do, by their identities and by operands.
      loops: the same of long loops: their events, the operands after them, what it took.
    """

    def __init__(self, mesh: Any):
        sizes = {} if mesh is None else dict(mesh.shape)
        self.thread_name = None if mesh is None else mesh.thread_name
        self.axes = tuple(sizes)
        self.sizes = sizes
        cluster = set() if mesh is None else set(mesh.cluster_names)
        self.cluster = cluster
        self.splits = v.Splits()
        self.asked_for_thread = False
        self.transfers: dict[tuple[int, int], int] = {}
        self.steps: dict[int, Steps] = {}
        self.relevant: dict[int, tuple[int, ...]] = {}
        self.memories: dict[Any, Memory] = {}
        self.barriers: dict[Any, Any] = {}
        self.events: dict[Any, list[Any]] = {}
        self.loops: dict[Any, tuple[list[Any], list[Any], int]] = {}
        self._symbols: dict[Any, Any] = {}

    def of_block(self, position: Mapping[Any, int]) -> Places:
        """The same with the values of one block; what is known of equations is known there, too."""
        found = copy.copy(self)
        found._symbols = dict(position)
        found.loops = {}
        return found

    def position(self, name: Any) -> Any:
        """The position along an axis of the grid or of the cluster."""
        if name not in self.sizes:
            return None
        found = self._symbols.get(name)
        if found is None:
            found = v.symbol(self.sizes[name], str(name), blocks=True)
            self._symbols[name] = found
        return found

    def symbols(self) -> list[v.Symbol]:
        """Those of all axes that have more than one position."""
        found = [self.position(name) for name in self.axes if name != self.thread_name]
        return [value.terms[0][0] for value in found if isinstance(value, v.Form)]


@dataclasses.dataclass(slots=True)
class Step:
    """An equation that a walk has to look at. Values have places in a list.

    Attributes:
      equation: the equation.
      operands: the places of its operands.
      function: computes its result, if it is an integer.
      carries: whether it has jaxprs.
      results: the places of its results.
      references: those of results that are references, with their variables.
    """

    equation: Any
    operands: list[int]
    function: Callable[[ScalarVisitor, Any, Any], Any] | None
    carries: bool
    results: list[int]
    references: list[tuple[int, Any]]


@dataclasses.dataclass(slots=True)
class Steps:
    """The equations of a jaxpr that a walk has to look at.

    Attributes:
      jaxpr: where they are.
      steps: in order.
      constants: how many places there are before those of the inputs.
      inputs: how many inputs there are.
      values: what the places hold at first: those of literals their values, others None.
      outputs: the places of the outputs.
    """

    jaxpr: Any
    steps: list[Step]
    constants: int
    inputs: int
    values: list[Any]
    outputs: list[int]


class ScalarVisitor(Visitor[Any]):
    """Follows the integers of one thread.

    A value is what :mod:`pallasite_std.checks.values` has, a :class:`Test`, a :class:`Memory`, or
    None.
    """

    skips = True
    """Whether equations are left out that neither compute integers nor touch references."""

    def __init__(self, table: JaxprTable, places: Places, thread: int):
        super().__init__(table)
        self.places = places
        self.thread = thread

    def unknown(self, variable: Any) -> Any:
        aval = variable.aval
        return Memory(variable) if isinstance(aval, _jax.AbstractRef) else None

    def literal(self, atom: Any) -> Any:
        return int(atom.val) if is_scalar(atom.aval) else None

    def constant(self, variable: Any, value: Any) -> Any:
        return None

    def number(self, value: Any) -> int | None:
        return value if isinstance(value, int) else None

    def join(self, values: Sequence[Any], variable: Any) -> Any:
        first, *rest = values
        if all(value is first for value in rest):
            return first
        if any(isinstance(value, Test | Memory) for value in values):
            return None
        return v.hull(values)

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        if not self.skips:
            return super().run(jaxpr, operands)
        known = self.steps(jaxpr)
        values = known.values.copy()  # What is left out is not known.
        first = known.constants if len(operands) == known.inputs else 0
        values[first : first + len(operands)] = operands
        for step in known.steps:
            found = [values[place] for place in step.operands]
            equation = step.equation
            if step.function is not None:
                values[step.results[0]] = step.function(self, equation, found)
                continue
            results = (self.equation if step.carries else self.primitive)(equation, found)
            if results is not None:
                for place, result in zip(step.results, results, strict=True):
                    values[place] = result
                continue
            for place, variable in step.references:
                values[place] = self.unknown(variable)
        return [values[place] for place in known.outputs]

    def steps(self, jaxpr: Any) -> Steps:
        """The equations of a jaxpr that matter, for all walks over the kernel."""
        known: Steps | None = self.places.steps.get(id(jaxpr))
        if known is None:
            known = self.places.steps[id(jaxpr)] = self._steps(jaxpr)
        return known

    def _steps(self, jaxpr: Any) -> Steps:
        invars, constants = jaxpr.invars, jaxpr.constvars
        places: dict[Any, int] = {one: place for place, one in enumerate([*constants, *invars])}
        values: list[Any] = [None] * len(places)

        def place_of(atom: Any) -> int:
            if not isinstance(atom, _jax.Literal):
                found = places.get(atom)
                if found is not None:
                    return found
                places[atom] = len(values)
                values.append(None)
            else:
                values.append(self.literal(atom))
            return len(values) - 1

        steps: list[Step] = []
        for equation in jaxpr.eqns:
            primitive, results = equation.primitive, equation.outvars
            carries = primitive in self._carriers
            function = None if carries else _FUNCTIONS.get(primitive)
            if function is not None and not is_scalar(results[0].aval):
                function = None
            references = [one for one in results if _is_reference(one)]
            if not (carries or function or references or equation.effects):
                continue
            steps.append(
                Step(
                    equation,
                    [place_of(one) for one in equation.invars],
                    function,
                    carries,
                    [place_of(one) for one in results],
                    [(place_of(one), one) for one in references],
                )
            )
        outputs = [place_of(one) for one in jaxpr.outvars]
        return Steps(jaxpr, steps, len(constants), len(invars), values, outputs)

    def equation(self, equation: Any, operands: list[Any]) -> Sequence[Any] | None:
        if equation.primitive is _jax.jit_p:
            function = _NAMED.get(equation.params["name"])
            if function is not None and _is_of_jax(equation):
                return (function(self, *operands),)
        return super().equation(equation, operands)

    def scalar(self, equation: Any, operands: list[Any]) -> tuple[Any] | None:
        """The result of a primitive that computes an integer or a condition."""
        function = _FUNCTIONS.get(equation.primitive)
        if function is None or not is_scalar(equation.outvars[0].aval):
            return None
        return (function(self, equation, operands),)

    def axis(self, name: Any) -> Any:
        """The position along an axis."""
        if name == self.places.thread_name and name is not None:
            self.places.asked_for_thread = True
            return self.thread
        return self.places.position(name)


def _is_of_jax(equation: Any) -> bool:
    """Whether a jitted function of two scalars is one of JAX: programs may give theirs its name,
    and derivatives of it have other operands."""
    source = equation.params["jaxpr"].jaxpr.debug_info.func_src_info
    scalars = is_scalar(equation.outvars[0].aval) and len(equation.invars) == 2
    return scalars and f" at {_JAX}" in source


def _is_reference(variable: Any) -> bool:
    return isinstance(variable.aval, _jax.AbstractRef)


def is_scalar(aval: Any) -> bool:
    """Whether a type is that of integers or conditions that are followed."""
    return getattr(aval, "shape", None) == () and getattr(aval.dtype, "kind", "f") in "iub"


def _plain(value: Any) -> Any:
    return None if isinstance(value, Test) else value


def _axis_index(self: ScalarVisitor, equation: Any, operands: Any) -> Any:
    return self.axis(equation.params["axis_name"])


def _program_id(self: ScalarVisitor, equation: Any, operands: Any) -> Any:
    axis, axes = equation.params["axis"], self.places.axes
    return self.axis(axes[axis]) if 0 <= axis < len(axes) else None


def _num_programs(self: ScalarVisitor, equation: Any, operands: Any) -> Any:
    axis, axes = equation.params["axis"], self.places.axes
    return self.places.sizes[axes[axis]] if 0 <= axis < len(axes) else None


def _difference(self: ScalarVisitor, equation: Any, operands: Any) -> Any:
    result = v.add(_plain(operands[0]), _plain(operands[1]), -1)
    ends = v.bounds(result)
    wraps = equation.outvars[0].aval.dtype.kind == "u" and ends is not None and ends[0] < 0
    return None if wraps else result


def _divide(self: ScalarVisitor, a: Any, b: Any) -> Any:
    """Rounded towards zero; of numbers with one sign, also rounded down."""
    a, b = _plain(a), _plain(b)
    if isinstance(a, int) and isinstance(b, int):
        if b == 0:
            return None
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient
    return self.places.splits.divide(a, b)[0]


def _remainder(self: ScalarVisitor, a: Any, b: Any) -> Any:
    """With the sign of the dividend; of numbers with one sign, also with that of the divisor."""
    a, b = _plain(a), _plain(b)
    if isinstance(a, int) and isinstance(b, int):
        quotient = _divide(self, a, b)
        return None if quotient is None else a - quotient * b
    return self.places.splits.divide(a, b)[1]


def _floor_divide(self: ScalarVisitor, a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b else None
    return _divide(self, a, b)


def _floor_remainder(self: ScalarVisitor, a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return a % b if b else None
    return _remainder(self, a, b)


def _comparison(relation: str) -> Callable[[ScalarVisitor, Any, Any], Any]:
    def compare(self: ScalarVisitor, equation: Any, operands: Any) -> Any:
        a, b = operands
        if isinstance(a, Test) or isinstance(b, Test):
            return None
        if relation in ("eq", "ne"):
            known = v.equal(a, b)
            if known is not None:
                return known if relation == "eq" else 1 - known
        else:
            known = v.less(a, b) if relation in ("lt", "ge") else v.less(b, a)
            if known is not None:
                return known if relation in ("lt", "gt") else 1 - known
        if isinstance(b, v.Form) and isinstance(a, int):
            return _test(_MIRRORED[relation], b, a)
        if isinstance(a, v.Form) and isinstance(b, int):
            return _test(relation, a, b)
        return None

    return compare


_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def _test(relation: str, form: v.Form, number: int) -> Test | None:
    """``form relation number`` as a condition on one symbol."""
    if len(form.terms) != 1:
        return None
    (symbol, c), last = form.terms[0], form.terms[0][0].extent - 1
    if c < 0:
        number, c, relation = -number, -c, _MIRRORED[relation]
        number += form.constant
    else:
        number -= form.constant
    # Now c * symbol relation number, where both outcomes are possible.
    if relation in ("eq", "ne"):
        if number % c:
            return None
        test: Test | None = Test(symbol, number // c, number // c)
        return test if relation == "eq" or test is None else test.negation()
    if relation == "lt":
        return Test(symbol, 0, (number - 1) // c)
    if relation == "le":
        return Test(symbol, 0, number // c)
    if relation == "gt":
        return Test(symbol, number // c + 1, last)
    return Test(symbol, -(-number // c), last)


def _and(self: ScalarVisitor, equation: Any, operands: Any) -> Any:
    return _logical(equation, operands, 0)


def _or(self: ScalarVisitor, equation: Any, operands: Any) -> Any:
    return _logical(equation, operands, 1)


def _logical(equation: Any, operands: Any, decisive: int) -> Any:
    a, b = operands
    if equation.outvars[0].aval.dtype != np.bool_:
        if isinstance(a, int) and isinstance(b, int):
            return a | b if decisive else a & b
        return None
    for one, other in ((a, b), (b, a)):
        if isinstance(one, int):
            return decisive if one == decisive else other
    return a if a == b else None


def _not(self: ScalarVisitor, equation: Any, operands: Any) -> Any:
    (a,) = operands
    if equation.outvars[0].aval.dtype != np.bool_:
        return None
    if isinstance(a, Test):
        return a.negation()
    return 1 - a if isinstance(a, int) else None


def _select(self: ScalarVisitor, equation: Any, operands: Any) -> Any:
    which, *cases = operands
    if isinstance(which, int):
        return cases[min(max(which, 0), len(cases) - 1)]
    if any(isinstance(case, Test) for case in cases):
        return None
    return v.hull(cases)


def _converted(self: ScalarVisitor, equation: Any, operands: Any) -> Any:
    source = getattr(equation.invars[0].aval, "dtype", None)
    if source is None or source.kind not in "iub":
        return None
    target = equation.outvars[0].aval.dtype
    value = operands[0]
    if isinstance(value, Test) or target.itemsize >= 4:
        return value
    if target == np.bool_:
        return value if source == np.bool_ else None
    ends = v.bounds(value)
    inside = ends is not None and ends[0] >= 0 and ends[1] < 1 << (8 * target.itemsize - 1)
    return value if inside else None


def _sign(self: ScalarVisitor, equation: Any, operands: Any) -> Any:
    ends = v.bounds(_plain(operands[0]))
    if ends is None:
        return None
    low, high = ((end > 0) - (end < 0) for end in ends)
    return low if low == high else v.Range(low, high)


_FUNCTIONS: dict[Any, Callable[[ScalarVisitor, Any, Any], Any]] = {
    _jax.axis_index_p: _axis_index,
    _jax.program_id_p: _program_id,
    _jax.num_programs_p: _num_programs,
    _jax.multiple_of_p: lambda self, equation, operands: operands[0],
    lax.add_p: lambda self, equation, operands: v.add(*map(_plain, operands)),
    lax.sub_p: _difference,
    lax.mul_p: lambda self, equation, operands: v.multiply(*map(_plain, operands)),
    lax.neg_p: lambda self, equation, operands: v.multiply(_plain(operands[0]), -1),
    lax.div_p: lambda self, equation, operands: _divide(self, *operands),
    lax.rem_p: lambda self, equation, operands: _remainder(self, *operands),
    lax.min_p: lambda self, equation, operands: v.minimum(*map(_plain, operands)),
    lax.max_p: lambda self, equation, operands: v.maximum(*map(_plain, operands)),
    lax.sign_p: _sign,
    lax.eq_p: _comparison("eq"),
    lax.ne_p: _comparison("ne"),
    lax.lt_p: _comparison("lt"),
    lax.le_p: _comparison("le"),
    lax.gt_p: _comparison("gt"),
    lax.ge_p: _comparison("ge"),
    lax.and_p: _and,
    lax.or_p: _or,
    lax.not_p: _not,
    lax.select_n_p: _select,
    lax.convert_element_type_p: _converted,
}

_NAMED: dict[str, Callable[[ScalarVisitor, Any, Any], Any]] = {
    "floor_divide": _floor_divide,
    "remainder": _floor_remainder,
}
"""Functions of ``jax.numpy`` by the names of their jaxprs."""

_JAX = os.path.dirname(jax.__file__)
