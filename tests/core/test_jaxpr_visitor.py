"""The visitor of jaxprs: with values that are numbers, visiting is evaluating."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallasite import _jax, plugins
from pallasite.errors import PluginError
from pallasite.jaxpr_table import JaxprPrimitive, JaxprTable, Region, RegionKind, call, loop_body
from pallasite.jaxpr_visitor import LoopPolicy, Visitor, with_insertions


@pytest.fixture(scope="module")
def table():
    return plugins.registry().jaxprs


# What JAX takes to run an operation of scalars, NumPy takes for a hundred of them.
EQUATIONS = {
    lax.add_p: np.add,
    lax.and_p: np.bitwise_and,
    lax.clamp_p: lambda low, x, high: np.minimum(np.maximum(x, low), high),
    lax.eq_p: np.equal,
    lax.ge_p: np.greater_equal,
    lax.gt_p: np.greater,
    lax.le_p: np.less_equal,
    lax.lt_p: np.less,
    lax.max_p: np.maximum,
    lax.mul_p: np.multiply,
    lax.ne_p: np.not_equal,
    lax.neg_p: np.negative,
    lax.rem_p: np.fmod,
    lax.select_n_p: lambda which, *cases: cases[int(which)],
    lax.sub_p: np.subtract,
}


class Evaluator(Visitor):
    """Values are NumPy arrays; loops run as often as they would."""

    def __init__(self, table):
        super().__init__(table)
        self.depth = self.visits = 0

    def literal(self, atom):
        return np.asarray(atom.val, atom.aval.dtype)

    def constant(self, variable, value):
        return np.asarray(value)

    def number(self, value):
        return int(value)

    def region(self, equation, region, inputs):
        self.visits += 1
        return super().region(equation, region, inputs)

    def primitive(self, equation, operands):
        if equation.primitive in EQUATIONS:
            (result,) = equation.outvars
            with np.errstate(over="ignore"):
                value = np.asarray(EQUATIONS[equation.primitive](*operands))
            assert value.dtype == result.aval.dtype
            return [value]
        params = equation.primitive.get_bind_params(equation.params)
        results = equation.primitive.bind(*operands, **params)
        return [
            np.asarray(x) for x in (results if equation.primitive.multiple_results else [results])
        ]

    def loop(self, equation, regions, operands):
        *conditions, body = regions
        trip = 0
        while body.trips is None or trip < body.trips:
            holds = [
                self.region(equation, c, self.inputs(equation, c, operands)) for c in conditions
            ]
            if not all(bool(one) for (one,) in holds):
                break
            operands = self.after(equation, body, operands)
            trip += 1
        return self.carried_results(body, operands)


def numpy_loop(low, high, body, carry):
    """What ``lax.fori_loop`` computes."""
    for i in range(low, high):
        carry = body(np.int32(i), carry)
    return carry


# Functions for JAX, and what NumPy is to compute for the same numbers.
LEAVES = (
    (lambda x, y: x + y,) * 2,
    (lambda x, y: x * 2 - y,) * 2,
    (lambda x, y: jnp.maximum(x, y) + 1, lambda x, y: np.maximum(x, y) + 1),
    (lambda x, y: jnp.where(x > y, x, -y), lambda x, y: x if x > y else -y),
)


@st.composite
def functions(draw, depth=3):
    """A function of two int32 scalars, of calls, branches and loops inside one another, for JAX and
    for NumPy."""
    if depth == 0:
        return draw(st.sampled_from(LEAVES))
    inner = functions(depth=depth - 1)
    kind = draw(
        st.sampled_from(["leaf", "jit", "remat", "custom", "cond", "switch", "fori", "while"])
    )
    (first, first_np), (second, second_np) = draw(inner), draw(inner)
    trips = draw(st.integers(0, 3))
    if kind == "leaf":
        return (
            lambda x, y: first(second(x, y), y),
            lambda x, y: first_np(second_np(x, y), y),
        )
    if kind in ("jit", "remat"):
        wrapped = {"jit": jax.jit, "remat": jax.checkpoint}[kind](lambda x, y: first(x, y))
        return (
            lambda x, y: wrapped(y, second(x, y)),
            lambda x, y: first_np(y, second_np(x, y)),
        )
    if kind == "custom":
        custom = jax.custom_jvp(lambda x, y: first(x, y))
        custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))
        return (
            lambda x, y: custom(x, second(y, x)),
            lambda x, y: first_np(x, second_np(y, x)),
        )
    if kind == "cond":
        return (
            lambda x, y: lax.cond(x % 2 == 0, first, second, x, y),
            lambda x, y: (first_np if x % 2 == 0 else second_np)(x, y),
        )
    if kind == "switch":
        third, third_np = draw(inner)
        return (
            lambda x, y: lax.switch(y % 5 - 1, [first, second, third], y, x),
            lambda x, y: [first_np, second_np, third_np][min(max(y % 5 - 1, 0), 2)](y, x),
        )
    if kind == "fori":  # A scan that carries two values, with a constant.

        def bodies(one, other):
            return lambda i, carry: (other(carry[1], i) % 1000, one(*carry) % 1000)

        return (
            lambda x, y: sum(lax.fori_loop(0, trips, bodies(first, second), (x, y))) + y,
            lambda x, y: sum(numpy_loop(0, trips, bodies(first_np, second_np), (x, y))) + y,
        )
    return (
        lambda x, y: lax.while_loop(
            lambda c: c[0] < trips + y % 3,
            lambda c: (c[0] + 1, first(c[1], second(x, c[0])) % 1000),
            (0, y),
        )[1],
        lambda x, y: numpy_loop(
            0, trips + y % 3, lambda i, c: first_np(c, second_np(x, i)) % 1000, y
        ),
    )


@settings(max_examples=60, deadline=None)
@given(functions(), st.integers(-9, 9), st.integers(-9, 9))
def test_visiting_with_numbers_is_evaluating(table, function, x, y):
    for_jax, for_numpy = function
    args = np.int32(x), np.int32(y)
    jaxpr = jax.make_jaxpr(for_jax)(*args)
    with np.errstate(over="ignore"):
        expected = for_numpy(*args)
    assert expected.dtype == np.int32
    assert [int(one) for one in Evaluator(table).run(jaxpr, args)] == [int(expected)]


def test_constants_that_jaxprs_hold(table):
    big = np.arange(5, dtype=np.int32)
    jaxpr = jax.make_jaxpr(lambda x: jax.jit(lambda x: x + big)(x) * 2)(np.int32(1))
    (result,) = Evaluator(table).run(jaxpr, [np.int32(1)])
    np.testing.assert_array_equal(result, (1 + big) * 2)


class Multiples(Visitor):
    """Values are what a number is a multiple of: 0 of everything, 1 of nothing in particular."""

    def unknown(self, variable):
        return 1

    def literal(self, atom):
        return abs(int(atom.val))

    def join(self, values, variable):
        return int(np.gcd.reduce(values))

    def carried(self, value, variable):
        return 1

    def primitive(self, equation, operands):
        name = equation.primitive.name
        if name == "add":
            return [int(np.gcd(*operands))]
        return [operands[0] * operands[1]] if name == "mul" else None


def rows(start, n):
    def body(_, carry):
        row, column = carry
        return row + 24, lax.cond(row > n, lambda: column + 8, lambda: column * 2)

    return lax.fori_loop(0, 10, body, (start * 16, 32))


@pytest.mark.parametrize(
    ("policy", "expected"), [(LoopPolicy.FIXPOINT, [8, 8]), (LoopPolicy.ONCE, [1, 1])]
)
def test_loops_and_branches_of_an_abstract_value(table, policy, expected):
    visitor = Multiples(table)
    visitor.loops = policy
    jaxpr = jax.make_jaxpr(rows)(np.int32(3), np.int32(4))
    assert visitor.run(jaxpr, [1, 1]) == expected


def test_all_equations_and_jaxprs(table):
    def function(x):
        return lax.cond(x > 0, lambda: jax.jit(lambda: lax.sin(x))(), lambda: lax.cos(x))

    jaxpr = jax.make_jaxpr(function)(1.0)
    names = [equation.primitive.name for equation in table.equations(jaxpr)]
    assert names == ["gt", "convert_element_type", "cond", "cos", "jit", "sin"]
    assert len(list(table.jaxprs(jaxpr))) == 4


def test_insertions_reach_into_regions(table):
    marker = _jax.Primitive("marker")
    marker.multiple_results = True

    def function(x):
        return lax.fori_loop(0, 3, lambda i, x: lax.cond(x > i, lax.sin, lax.cos, x), x)

    jaxpr = jax.make_jaxpr(function)(1.0)
    sine = next(e for e in table.equations(jaxpr) if e.primitive.name == "sin")
    changed = with_insertions(table, jaxpr, {id(sine): [(marker, {}, set())]})
    before, after = ([e.primitive.name for e in table.equations(one)] for one in (jaxpr, changed))
    place = before.index("sin")
    assert after == [*before[:place], "marker", *before[place:]]
    assert with_insertions(table, jaxpr, {}) is jaxpr


odd_p = _jax.Primitive("odd")
odd_p.multiple_results = True
odd_p.def_abstract_eval(lambda *avals, jaxpr: list(avals))


def odd_table(regions):
    return JaxprTable([JaxprPrimitive(primitive=odd_p, regions=regions, plugin="odd plugin")])


def odd_equation():
    inner = jax.make_jaxpr(lambda x, y: (x + y, y))(1, 1)
    return jax.make_jaxpr(lambda x, y: odd_p.bind(x, y, jaxpr=inner))(1, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(operands=(0,)), "1 operands for 2 inputs"),
        (dict(results=(0,)), "1 results for 2 outputs"),
        (dict(operands=(0, 2)), "an operand that is not among the equation's 2"),
        (dict(results=(0, 2)), "a result that is not among the equation's 2"),
        (dict(carried=(0,)), "1 carried inputs for 2 outputs"),
        (dict(operands=(0, None), carried=(0, 1)), "a carried input that is no operand"),
    ],
)
def test_descriptions_that_do_not_fit(fields, message):
    def regions(equation):
        whole = dict(operands=(0, 1), results=(0, 1), kind=RegionKind.LOOP_BODY) | fields
        return [Region(jaxpr=equation.params["jaxpr"], **whole)]

    with pytest.raises(
        PluginError, match="plugin 'odd plugin' describes a region of primitive odd"
    ) as caught:
        Evaluator(odd_table(regions)).run(odd_equation(), [np.int32(1), np.int32(2)])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("regions", "expected"),
    [
        (lambda e: [call(e.params["jaxpr"])], [3, 2]),
        (lambda e: [loop_body(e.params["jaxpr"], trips=4)], [9, 2]),
        (lambda e: [loop_body(e.params["jaxpr"], trips=0)], [1, 2]),
    ],
)
def test_the_same_jaxpr_as_a_call_and_as_a_loop(regions, expected):
    results = Evaluator(odd_table(regions)).run(odd_equation(), [np.int32(1), np.int32(2)])
    assert [int(one) for one in results] == expected
