"""Rules for one semantics or another, those of plugins among them."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from rules_plugin import registered

import pallasite
from pallasite import gpu as plgpu
from pallasite.plugin import (
    SHARED_MEMORY,
    InvalidTypeError,
    InvalidValueError,
    MissingRuleError,
    RuleSet,
    Semantics,
)
from pallasite.plugin.jax_internals import mpmd_map
from pallasite.plugin.jaxprs import JaxprPrimitive, call
from pallasite.plugin.layouts import named
from pallasite.plugin.lowering import lower_function, relayout

SHAPE = (64, 64)
ARRAY = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
X = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
LANE, WARPGROUP = Semantics.LANE, Semantics.WARPGROUP
WGMMA = named.resolve("WGMMA", (), {}, SHAPE, 32)
WIDE = named.resolve("WGMMA_UPCAST_2X", (), {}, SHAPE, 32)
numbers = itertools.count()


class Negation:
    """A primitive for minus, with rules that note which of them is called, and for what."""

    def __init__(self):
        self.primitive = Primitive(f"negation_{next(numbers)}")
        self.primitive.def_abstract_eval(lambda x: x)
        self.rules = RuleSet()
        self.called = []

    def __call__(self, x):
        return self.primitive.bind(x)

    def rule(self, semantics, result=None, **options):
        """Registers a rule; it makes its result in the layout ``result``, if that is given."""

        @self.rules.lowering(self.primitive, semantics, **options)
        def negate(ctx, x):
            self.called.append((semantics.name, ctx.semantics.name, x.layout))
            (negated,) = lower_function(ctx, lambda x: -x, x)
            return negated if result is None else relayout(ctx, negated, result)

    @property
    def names(self):
        return [name for name, *_ in self.called]


@pytest.fixture
def negation():
    return Negation()


def kernel_of(function, **params):
    """A kernel of an array in the layout WGMMA; the result meets it again."""

    @plgpu.kernel(out_type=ARRAY, compiler_params=plgpu.CompilerParams(**params))
    def kernel(x_ref, o_ref):
        x = plgpu.layout_cast(x_ref[...], plgpu.Layout.WGMMA)
        o_ref[...] = x + function(x)

    return kernel


def check(kernel, expected):
    np.testing.assert_allclose(np.asarray(kernel(X)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kinds", "lane", "warpgroup"),
    [
        ([LANE], "LANE", "LANE"),
        ([WARPGROUP], None, "WARPGROUP"),
        ([LANE, WARPGROUP], "LANE", "WARPGROUP"),
        ([WARPGROUP, LANE], "LANE", "WARPGROUP"),
    ],
    ids=["lane", "warpgroup", "both", "both, the other way round"],
)
def test_the_rule_for_the_semantics_of_the_kernel_is_asked_first(
    negation, semantics, kinds, lane, warpgroup
):
    for kind in kinds:
        negation.rule(kind)
    wanted = lane if semantics is plgpu.LoweringSemantics.Lane else warpgroup
    with registered(negation.rules):
        kernel = kernel_of(lambda x: 3 * negation(x))
        if wanted is None:
            with pytest.raises(MissingRuleError) as error:
                pallasite.compile(kernel, ARRAY, target="sm_90a")
            first = str(error.value).splitlines()[0]
            assert first.endswith(
                f"no lowering rule for primitive {negation.primitive.name!r} under LANE semantics"
                " on target 'sm_90a'"
            )
            assert "try: use it under WARPGROUP semantics" in str(error.value)
            return
        check(kernel, X - 3 * X)
    kernel_semantics = "LANE" if semantics is plgpu.LoweringSemantics.Lane else "WARPGROUP"
    assert set(negation.called) == {(wanted, kernel_semantics, WGMMA)}


def in_a_loop(negate):
    def function(x):
        def body(i, carry):
            return negate(carry) + x * i.astype(jnp.float32)

        return lax.fori_loop(0, 3, body, jnp.zeros(SHAPE, jnp.float32))

    return function, lambda x: x


def in_a_branch(negate):
    return lambda x: lax.cond(x[0, 0] < 1e9, negate, lambda x: x, x), lambda x: -x


def in_a_call(negate):
    return jax.jit(lambda x: negate(x) * 2), lambda x: -2 * x


def by_itself(negate):
    return lambda x: negate(x), lambda x: -x


@pytest.mark.parametrize("surroundings", [by_itself, in_a_loop, in_a_branch, in_a_call])
@pytest.mark.parametrize("result", [None, WIDE], ids=["as it comes", "in a layout of its own"])
@pytest.mark.parametrize("declared", [False, True])
def test_a_rule_that_takes_any_layout(negation, surroundings, result, declared):
    options = {"result_layouts": lambda avals: [result]} if declared else {}
    negation.rule(WARPGROUP, result, layouts="any", **options)
    negation.rule(LANE)
    function, expected = surroundings(negation)
    with registered(negation.rules):
        check(kernel_of(function), X + expected(X))
    assert set(negation.names) == {"WARPGROUP"}


def test_no_rule_of_inference_is_called_for_one_that_takes_any_layout(negation):
    negation.rule(WARPGROUP, layouts="any")
    negation.rule(LANE)

    @negation.rules.inference(negation.primitive)
    def infer(ctx, x):
        ctx.needs(0, x, WIDE, "it works on words", pinned=True)
        return ctx.result(None, x)

    kernel = kernel_of(lambda x: negation(x))
    with registered(negation.rules):
        compiled = pallasite.compile(kernel, ARRAY, target="sm_90a")
    assert compiled.layouts.conversions == ()
    assert {layout for *_, layout in negation.called} == {WGMMA}


def test_the_rule_of_inference_is_that_of_the_primitive_otherwise(negation):
    negation.rule(WARPGROUP)

    @negation.rules.inference(negation.primitive, WARPGROUP)
    def infer(ctx, x):
        ctx.needs(0, x, WIDE, "it works on words", pinned=True)
        return ctx.result(None, x)

    with registered(negation.rules):
        check(kernel_of(lambda x: negation(x) * 2), -X)
    assert {layout for *_, layout in negation.called} == {WIDE}


def test_declared_layouts_of_results_are_known_to_inference(negation):
    """The sum is in the declared layout, and the report names the conversion."""
    negation.rule(
        WARPGROUP, WIDE, layouts="any", result_layouts=lambda avals: [WIDE for _ in avals]
    )
    with registered(negation.rules):
        compiled = pallasite.compile(kernel_of(negation), ARRAY, target="sm_90a")
    (conversion,) = compiled.layouts.conversions
    assert {conversion.source, conversion.target} == {"WGMMA", "WGMMA_UPCAST_2X"}


def test_layouts_of_results_without_any_layout_of_operands(negation):
    with pytest.raises(
        InvalidValueError, match='expected: layouts="any", with or without'
    ) as error:
        negation.rule(WARPGROUP, result_layouts=lambda avals: [WIDE])
    assert "is wrong about layouts" in str(error.value)


def test_a_rule_that_calls_the_one_for_lanes(negation):
    negation.rule(LANE)

    @negation.rules.lowering(negation.primitive, WARPGROUP)
    def twice(ctx, x):
        negation.called.append(("WARPGROUP", ctx.semantics.name, x.layout))
        return ctx.next_rule(ctx.next_rule(x))

    with registered(negation.rules):
        check(kernel_of(negation), 2 * X)
    assert set(negation.names) == {"WARPGROUP", "LANE"}


def test_warps_have_rules_of_their_own(negation, semantics):
    """In a warp-mapped region, no rule for warpgroups or lanes is asked."""
    negation.rule(LANE)
    negation.rule(WARPGROUP)
    negation.rule(Semantics.WARP)

    @plgpu.kernel(out_type=jax.ShapeDtypeStruct((4,), jnp.float32))
    def kernel(o_ref):
        def body():
            warp = lax.axis_index("warp")
            o_ref[warp] = negation(warp.astype(jnp.float32))

        mpmd_map([(plgpu.WarpMesh(axis_name="warp"), body)], name="region")()

    with registered(negation.rules):
        np.testing.assert_array_equal(np.asarray(kernel()), [-0.0, -1, -2, -3])
    assert set(negation.names) == {"WARP"}


TILE = Semantics("TILE", falls_back_to=Semantics.WARPGROUP)
THREAD = Semantics("THREAD", falls_back_to=Semantics.LANE)


@pytest.mark.parametrize(
    ("own", "others"), [(TILE, "WARPGROUP"), (THREAD, "LANE")], ids=["TILE", "THREAD"]
)
def test_a_semantics_of_a_plugin(negation, own, others):
    negation.rule(LANE)
    negation.rule(WARPGROUP)
    with registered(negation.rules):
        check(kernel_of(lambda x: 3 * negation(x), lowering_semantics=own), X - 3 * X)
    assert {(name, here) for name, here, _ in negation.called} == {(others, own.name)}
    negation.called.clear()
    negation.rule(own)
    with registered(negation.rules):
        check(kernel_of(lambda x: 5 * negation(x), lowering_semantics=own), X - 5 * X)
    assert set(negation.names) == {own.name}


def test_layouts_are_inferred_under_a_semantics_that_falls_back_to_warpgroup():
    kernel = kernel_of(lambda x: x * 2, lowering_semantics=TILE)
    assert pallasite.compile(kernel, ARRAY, target="sm_90a").layouts is not None
    kernel = kernel_of(lambda x: x * 2, lowering_semantics=THREAD)
    assert pallasite.compile(kernel, ARRAY, target="sm_90a").layouts is None


def test_a_semantics_of_a_region(negation):
    """A rule lowers a nested jaxpr in a mode of its own."""
    negation.rule(LANE)
    negation.rule(THREAD)
    scope_p = Primitive(f"scope_{next(numbers)}")
    scope_p.multiple_results = True
    scope_p.def_abstract_eval(lambda *avals, jaxpr: jaxpr.out_avals)

    @negation.rules.lowering(scope_p, LANE)
    def scope(ctx, *operands, jaxpr):
        mode = dataclasses.replace(ctx.mode, semantics=THREAD)
        return ctx.lower(jaxpr.jaxpr, operands, mode=mode)

    def scoped(x):
        return scope_p.bind(x, jaxpr=jax.make_jaxpr(negation)(x))[0]

    described = JaxprPrimitive(
        primitive=scope_p, regions=lambda equation: [call(equation.params["jaxpr"].jaxpr)]
    )
    semantics = plgpu.LoweringSemantics.Lane
    with registered(negation.rules, jaxprs=[described]):
        kernel = kernel_of(lambda x: scoped(negation(x)) * 2, lowering_semantics=semantics)
        check(kernel, 3 * X)
    assert {(name, here) for name, here, _ in negation.called} == {
        ("LANE", "LANE"),
        ("THREAD", "THREAD"),
    }


@pytest.mark.parametrize("own", [Semantics.WARP, Semantics("ALONE")], ids=["WARP", "ALONE"])
def test_kernels_need_a_semantics_of_warpgroups(own):
    with pytest.raises(InvalidTypeError) as error:
        plgpu.CompilerParams(lowering_semantics=own)
    assert str(error.value).splitlines()[-2:] == [
        f"  got: Semantics.{own.name}",
        "  expected: LoweringSemantics.Lane or LoweringSemantics.Warpgroup, or a Semantics of a"
        " plugin that falls back to one of them",
    ]


def test_semantics_of_the_core_are_those_of_the_language():
    params = plgpu.CompilerParams(lowering_semantics=Semantics.LANE)
    assert params == plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    assert params.semantics is Semantics.LANE
    assert plgpu.CompilerParams().semantics is Semantics.WARPGROUP


def test_resources_for_the_semantics_of_the_kernel(negation, semantics):
    negation.rule(LANE)
    scratch = {None: 1024, WARPGROUP: 3072}
    for kind, size in scratch.items():

        @negation.rules.resources(negation.primitive, *([kind] if kind else []))
        def needs(ctx, x, size=size):
            return ctx.reserve(SHARED_MEMORY, size, "scratch of a test")

    def shared():
        kernel = kernel_of(negation)
        return pallasite.compile(kernel, ARRAY, target="sm_90a").resources.shared_memory_bytes

    with registered(negation.rules):
        found = shared()
    expected = 1024 if semantics is plgpu.LoweringSemantics.Lane else 3072
    assert expected <= found < expected + 1024
