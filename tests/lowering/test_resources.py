"""What the resource estimator finds: sums, maxima, control flow, and primitives without a rule."""

from __future__ import annotations

import contextlib
import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive

from kernels import array, compile_kernel, make, spec_of
from pallasite import plugins
from pallasite.errors import PluginError, ResourceError, UnsupportedError
from pallasite.language.memory import SMEM
from pallasite.lowering.entry import estimate_kernel
from pallasite.lowering.resources import Resources, check_limits, nothing, reserve
from pallasite.plugin import RuleSet, hookimpl
from pallasite.resource import Resource
from pallasite.target_selection import find_target

KIB = 1024


def using(size, ref, then=None):
    """Allocates shared memory of so many bytes for a scope."""

    def scope(scratch):
        scratch[0] = ref[0]
        if then is not None:
            then()
        ref[1] = scratch[0]

    pl.run_scoped(scope, SMEM((size // 4,), jnp.float32))


def one_after_the_other(o):
    using(4 * KIB, o)
    using(2 * KIB, o)


def nested(o):
    using(4 * KIB, o, lambda: using(2 * KIB, o))


def branches(o):
    lax.switch(
        pl.program_id(0),
        [lambda: using(1 * KIB, o), lambda: using(8 * KIB, o), lambda: using(2 * KIB, o)],
    )


def counted_loop(o):
    lax.fori_loop(0, 5, lambda i, c: (using(3 * KIB, o), c)[1], 0)


def conditional_loop(o):
    def condition(number):
        using(5 * KIB, o)
        return o[0] > number.astype(jnp.float32)

    def body(number):
        using(6 * KIB, o)
        return number + 1

    lax.while_loop(condition, body, 0)


def call(o):
    jax.jit(lambda: using(7 * KIB, o))()


def rounded(o):
    using(4, o)


@pytest.mark.parametrize(
    ("body", "kibibytes"),
    [
        (one_after_the_other, 4), (nested, 6), (branches, 8), (counted_loop, 3),
        (conditional_loop, 6), (call, 7), (rounded, 1),
    ],
)  # fmt: skip
def test_shared_memory(body, kibibytes):
    kernel = make((4,), grid=(3,), grid_names=("i",))(lambda x, o: body(o))
    assert compile_kernel(kernel, array(4)).resources.shared_memory_bytes == kibibytes * KIB


def test_primitive_that_holds_a_jaxpr_needs_a_rule():
    unknown = Primitive("unknown_call")
    unknown.def_abstract_eval(lambda x, bodies: x)

    @make((4,))
    def kernel(x, o):
        inner = jax.make_jaxpr(lambda x: x + 1)(jnp.float32(0))
        o[0] = unknown.bind(x[0], bodies=(inner.jaxpr,))

    with pytest.raises(UnsupportedError, match="unknown_call holds a jaxpr") as caught:
        compile_kernel(kernel, array(4))
    assert caught.value.location is not None
    assert caught.value.location.file == __file__


@jax.custom_vjp
def doubled(x):
    return x * 2


doubled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))


@pytest.mark.parametrize("function", [doubled, jax.checkpoint(jnp.tanh), jax.nn.relu])
def test_calls_of_other_kinds(function):
    @make((128,))
    def kernel(x, o):
        o[...] = function(x[...])

    compile_kernel(kernel, array(128))


SLOTS, COLUMNS = Resource("slots", unit="slots"), Resource("columns", unit="columns")


def _amounts(slots, columns, what):
    return reserve(SLOTS, slots, what, None) + reserve(COLUMNS, columns, what, None)


def test_peaks_of_several_resources():
    """Each has a peak of its own, and the rows of those who ask for it."""
    one, other = _amounts(4, 1, "one"), _amounts(2, 5, "other")
    either = one | other
    assert either.amounts() == {SLOTS: 4, COLUMNS: 5}
    assert [(row.what, row.amount, row.unit) for row in either.allocations] == [
        ("one", 4, "slots"),
        ("other", 5, "columns"),
    ]
    both = one + other
    assert both.amounts() == {SLOTS: 6, COLUMNS: 6} and len(both.allocations) == 4
    assert (either + Resources({SLOTS: 1})).amount(SLOTS) == 5
    assert nothing().amounts() == {} and nothing().amount(SLOTS) == 0


def test_resources_of_one_pool_share_a_limit():
    wide = Resource("wide_slots", unit="slots", pool="slots")
    target = dataclasses.replace(plugins.registry().targets["sm_90"], limits={"slots": 6})
    found = reserve(SLOTS, 4, "narrow", None) + reserve(wide, 3, "wide", None)
    check_limits("k", reserve(wide, 6, "wide", None), target, plugins.registry())
    with pytest.raises(ResourceError) as caught:
        check_limits("k", found, target, plugins.registry())
    assert str(caught.value).splitlines() == [
        "kernel k exceeds available slots: slots=7",
        "            4 slots  narrow",
        "            3 slots  wide",
        "  expected: at most 6 slots per block on sm_90",
    ]


def test_two_plugins_with_different_resources_of_one_name():
    """Whichever rule asks second is told, and equal records are one resource."""
    first_p, second_p = Primitive("first"), Primitive("second")
    for primitive in (first_p, second_p):
        primitive.def_abstract_eval(lambda x: x)

    def plugin(primitive, resource):
        rules = RuleSet()

        @rules.resources(primitive)
        def _(ctx, x):
            return ctx.reserve(resource, 1, "one")

        @hookimpl
        def pallasite_resource_rules():
            return rules.resource_rules

        return types.SimpleNamespace(pallasite_resource_rules=pallasite_resource_rules)

    @make((128,))
    def kernel(x, o):
        o[...] = second_p.bind(first_p.bind(x[...]))

    def estimate(other):
        with contextlib.ExitStack() as stack:
            for name, made in (("one", plugin(first_p, SLOTS)), ("two", plugin(second_p, other))):
                plugins.register(made, name)
                stack.callback(plugins.unregister, name)
            spec = spec_of(kernel, array(128))
            return estimate_kernel(spec, find_target("sm_90a"))

    unlimited = dataclasses.replace(SLOTS, limited=False)
    with pytest.raises(PluginError) as caught:
        estimate(unlimited)
    text = str(caught.value)
    assert "plugins 'one' and 'two' have different resources that are both named 'slots'" in text
    assert "limited=True" in text and "limited=False" in text
    with pytest.raises(ResourceError, match="2 slots|slots=1"):
        estimate(dataclasses.replace(SLOTS))
