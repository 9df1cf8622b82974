"""Layout inference of primitives that plugins bring, with a rule and without."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jaxlib.mlir.dialects import arith

import pallasite
from pallasite import RuleSet, Semantics, _jax, plugins
from pallasite import gpu as plgpu
from pallasite.errors import InvalidValueError, PluginError
from pallasite.language.effects import memory_effect
from pallasite.layouts import named
from pallasite.lowering.recording import recording
from pallasite_std.memory.relayout import relayout
from pallasite_std.primitives import arguments
from pallasite_std.rules.shape import same_layout_hint

PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
SHAPE = (64, 64)
ONE = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
numbers = itertools.count()


def primitive() -> Primitive:
    made = Primitive(f"negated_{next(numbers)}")
    made.def_abstract_eval(lambda x: x)
    return made


def negated(ctx, x):
    """Minus its operand, in the operand's layout."""
    return x.map(arith.negf)


@pytest.fixture
def register():
    """Registers rules as a plugin of this process."""
    made = []

    def add(rules: RuleSet) -> None:
        class Plugin:
            @pallasite.hookimpl
            def pallasite_lowering_rules(self):
                return rules.lowering_rules

            @pallasite.hookimpl
            def pallasite_layout_rules(self):
                return rules.layout_rules

            @pallasite.hookimpl
            def pallasite_inference_rules(self):
                return rules.inference_rules

        name = f"made-up-{next(numbers)}"
        plugins.register(Plugin(), name=name)
        made.append(name)

    yield add
    for name in made:
        plugins.unregister(name)


def kernel_of(function):
    def body(x_ref, out):
        x = plgpu.layout_cast(x_ref[...], plgpu.Layout.WGMMA)
        out[...] = x + function(x)

    return plgpu.kernel(body, out_type=ONE, compiler_params=PARAMS)


def layouts_of(function, name):
    """The layouts of the results of a primitive, and the report."""
    with recording() as kernels:
        pallasite.compile(kernel_of(function), ONE, target="sm_90a")
    (found,) = kernels
    made = [
        layout for layout, uses in found.registers.items() for use in uses if use.primitive == name
    ]
    return made, found.report


WGMMA = named.resolve("WGMMA", (), {}, SHAPE, 32)
WIDE = named.resolve("WGMMA_UPCAST_2X", (), {}, SHAPE, 32)


def test_a_layout_rule_of_elementwise_operations_is_enough(register):
    rules, p = RuleSet(), primitive()
    rules.lowering(p, Semantics.LANE)(negated)
    rules.layout(p)(same_layout_hint)
    register(rules)
    made, report = layouts_of(p.bind, p.name)
    assert made == [WGMMA]
    assert report.conversions == ()
    x = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    np.testing.assert_array_equal(np.asarray(kernel_of(lambda x: 2 * p.bind(x))(x)), -x)


def test_without_any_rule_the_result_is_converted(register):
    rules, p = RuleSet(), primitive()

    @rules.lowering(p, Semantics.LANE)
    def lower(ctx, x):
        return relayout(ctx, negated(ctx, x), WIDE)

    register(rules)
    x = np.random.default_rng(1).standard_normal(SHAPE, np.float32)
    got = np.asarray(kernel_of(lambda x: 2 * p.bind(x))(x))
    np.testing.assert_array_equal(got, -x)


def test_a_rule_says_what_it_needs_and_makes(register):
    rules, p = RuleSet(), primitive()

    @rules.lowering(p, Semantics.LANE)
    def lower(ctx, x):
        if x.layout != WIDE:
            raise InvalidValueError("another layout", got=str(x.layout))
        return negated(ctx, x)

    @rules.inference(p)
    def infer(ctx, x):
        ctx.needs(0, x, WIDE, "it works on words")
        result = ctx.result(None, x)
        ctx.makes(result, WIDE, "it works on words")
        return result

    register(rules)
    made, report = layouts_of(p.bind, p.name)
    assert made == [WIDE]
    # Once, for the primitive and for the sum, rather than twice for the primitive alone.
    (one,) = report.conversions
    assert (one.primitive, one.source, one.target) == ("layout_cast", "WGMMA", "WGMMA_UPCAST_2X")
    x = np.random.default_rng(2).standard_normal(SHAPE, np.float32)
    got = np.asarray(kernel_of(lambda x: 2 * p.bind(x))(x))
    np.testing.assert_array_equal(got, -x)


def test_a_layout_of_another_shape(register):
    """A defect of the rule, not of the kernel."""
    rules, p = RuleSet(), primitive()
    rules.lowering(p, Semantics.LANE)(negated)
    wrong = named.resolve("WGMMA", (), {}, (64, 32), 32)

    @rules.inference(p)
    def infer(ctx, x):
        ctx.needs(0, x, wrong, "it is wrong")
        return ctx.result(None, x)

    register(rules)
    with pytest.raises(PluginError, match=r"\(64, 32\) for an array of shape \(64, 64\)"):
        pallasite.compile(kernel_of(p.bind), ONE, target="sm_90a")


@pytest.fixture
def looked_at(register):
    """A function of a reference, whose primitive has no rule of layout inference."""
    rules, p = RuleSet(), _jax.Primitive(f"look_at_{next(numbers)}")
    p.multiple_results = True
    _jax.abstract_eval(p)(lambda *avals, args_tree: ((), {memory_effect}))
    arguments.no_discharge(p)
    rules.lowering(p, Semantics.LANE)(lambda ctx, *operands, args_tree: [])
    register(rules)
    return lambda reference: arguments.bind(p, arguments.reference(reference, "what"))


def test_memory_that_a_primitive_without_a_rule_uses_is_row_major(looked_at):
    """Although the store of a column would be faster otherwise."""

    def body(x_ref, out, tile):
        tile[...] = plgpu.layout_cast(x_ref[...], plgpu.Layout.WGMMA)
        looked_at(tile)
        out[...] = tile[...]

    scratch = [plgpu.SMEM(SHAPE, jnp.float32)]
    kernel = plgpu.kernel(body, out_type=ONE, scratch_types=scratch, compiler_params=PARAMS)
    (tile,) = pallasite.compile(kernel, ONE, target="sm_90a").layouts.shared
    assert tile.layout == "row-major"
    assert any(reason.text.endswith(" uses it") for reason in tile.why)


def test_memory_that_both_such_a_primitive_and_a_product_use(looked_at):
    def body(x_ref, out, a, b):
        a[...] = x_ref[...]
        b[...] = x_ref[...]
        looked_at(b)

        def scope(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        out[...] = pl.run_scoped(scope, plgpu.ACC(SHAPE, jnp.float32))

    scratch = [plgpu.SMEM(SHAPE, jnp.bfloat16)] * 2
    kernel = plgpu.kernel(body, out_type=ONE, scratch_types=scratch, compiler_params=PARAMS)
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    with pytest.raises(InvalidValueError, match="b is used in ways that no layout") as caught:
        pallasite.compile(kernel, x, target="sm_90a")
    assert " has no rule of layout inference" in str(caught.value)
