"""Rules of plugins that are for certain operands, targets or semantics, and that call the next."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from rules_plugin import registered

import pallasite
from pallasite import gpu as plgpu
from pallasite.plugin import SHARED_MEMORY, MissingRuleError, PluginError, RuleSet, Semantics
from pallasite.plugin.ir import ops
from pallasite.plugin.jax_internals import get_p, run_scoped_p
from pallasite.plugin.language import SMEM, any_operand
from pallasite.plugin.layouts import named

SHAPE = (64, 64)
ARRAY = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
X = np.random.default_rng(0).standard_normal(SHAPE, np.float32)


def mark(text):
    """Emits a comment that is found in the PTX."""
    ops.inline_assembly(f"// {text}", "")


def of_halves(avals, params):
    return avals[0].dtype == np.float16


@plgpu.kernel(out_type=ARRAY)
def negate_both(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = -x - (-x.astype(jnp.float16)).astype(jnp.float32)


def marks(kernel, target="sm_90a", *arguments):
    """The comments of rules in the PTX of a kernel, in order."""
    ptx = pallasite.compile(kernel, *(arguments or (ARRAY,)), target=target).ptx
    found = (line.partition("// rule: ")[2].strip() for line in ptx.splitlines())
    return [one for one in found if one]


def test_a_rule_for_some_operands_calls_the_next_one(semantics):
    rules = RuleSet()

    @rules.lowering(lax.neg_p, Semantics.LANE, operands=of_halves)
    def negate(ctx, x):
        mark("rule: halves")
        return ctx.next_rule(x)

    without = pallasite.compile(negate_both, ARRAY, target="sm_90a").ptx
    with registered(rules):
        assert marks(negate_both) == ["halves"]
        np.testing.assert_array_equal(
            np.asarray(negate_both(X)), -X + X.astype(np.float16).astype(np.float32)
        )
    assert pallasite.compile(negate_both, ARRAY, target="sm_90a").ptx == without


def test_a_rule_for_a_memory_space():
    rules = RuleSet()

    @rules.lowering(get_p, Semantics.LANE, operands=any_operand(SMEM))
    def load(ctx, *operands, **params):
        mark("rule: shared")
        return ctx.next_rule(*operands, **params)

    @plgpu.kernel(out_type=ARRAY, scratch_types=[plgpu.SMEM(SHAPE, jnp.float32)])
    def kernel(x_ref, o_ref, tile):
        tile[...] = x_ref[...]
        o_ref[...] = tile[...] + x_ref[...]

    with registered(rules):
        assert marks(kernel) == ["shared"]
        np.testing.assert_array_equal(np.asarray(kernel(X)), 2 * X)


def test_the_chain_goes_by_semantics_operands_and_targets():
    rules = RuleSet()
    cases = {
        "warpgroup": (Semantics.WARPGROUP, {}),
        "operands": (Semantics.LANE, {"operands": of_halves}),
        "named": (Semantics.LANE, {"targets": ("sm_90a",)}),
        "featured": (Semantics.LANE, {"requires": ("wgmma",)}),
        "overriding": (Semantics.LANE, {"overrides": ("standard",)}),
    }
    for name, (semantics, options) in cases.items():

        def negate(ctx, x, name=name):
            mark(f"rule: {name}")
            return ctx.next_rule(x)

        rules.lowering(lax.neg_p, semantics, **options)(negate)
    plain, halves = ["warpgroup", "named", "featured", "overriding"], list(cases)
    with registered(rules):
        assert marks(negate_both) == [*plain, *halves]
        assert marks(negate_both, "sm_90") == [
            *("warpgroup", "overriding"),
            *("warpgroup", "operands", "overriding"),
        ]


def test_the_operands_of_the_next_rule_may_be_others():
    rules = RuleSet()

    @rules.lowering(lax.neg_p, Semantics.LANE, overrides=("standard",))
    def negate(ctx, x):
        return ctx.next_rule(ctx.next_rule(ctx.next_rule(x)))

    with registered(rules):
        np.testing.assert_array_equal(
            np.asarray(negate_both(X)), -X + X.astype(np.float16).astype(np.float32)
        )


def test_there_is_no_next_rule():
    rules = RuleSet()
    twice_p = jax.extend.core.Primitive("twice")
    twice_p.def_abstract_eval(lambda x: x)
    rules.lowering(twice_p, Semantics.LANE)(lambda ctx, x: ctx.next_rule(x))

    @plgpu.kernel(out_type=ARRAY)
    def kernel(x_ref, o_ref):
        o_ref[...] = twice_p.bind(x_ref[...])  # here

    with registered(rules), pytest.raises(MissingRuleError) as error:
        pallasite.compile(kernel, ARRAY, target="sm_90a")
    lines = str(error.value).splitlines()
    assert lines[0].endswith(
        "the lowering rule of plugin 'made-up' for primitive 'twice' calls the next one, and there"
        " is none on target 'sm_90a'"
    )
    assert lines[1:] == [
        "  expected: a rule that is less specific, or one that this one overrides",
        "  try: register this rule for fewer cases (operands=, requires=, targets=), or let it do"
        " without another",
    ]
    assert "test_hook_rules.py" in lines[0]


def test_two_plugins_for_the_same_operands():
    first, second = RuleSet(), RuleSet()
    for rules in (first, second):
        rules.lowering(lax.neg_p, Semantics.LANE, operands=of_halves)(lambda ctx, x: x)
    with (
        registered(first, "first"),
        registered(second, "second"),
        pytest.raises(PluginError) as error,
    ):
        pallasite.compile(negate_both, ARRAY, target="sm_90a")
    assert (
        str(error.value)
        .splitlines()[0]
        .startswith(
            "plugins 'first' and 'second' both register equally specific LANE lowering rules of"
            " primitive 'neg' for operands of which of_halves is true for target"
        )
    )


def test_resources_for_some_operands_and_targets():
    rules = RuleSet()

    @rules.resources(run_scoped_p, overrides=("standard",), targets=("sm_90a",))
    def more(ctx, *avals, **params):
        return ctx.next_rule(*avals, **params) + ctx.reserve(SHARED_MEMORY, 1024, "more")

    @plgpu.kernel(out_type=ARRAY)
    def kernel(x_ref, o_ref):
        def scope(tile):
            tile[...] = x_ref[...]
            o_ref[...] = tile[...]

        pl.run_scoped(scope, plgpu.SMEM(SHAPE, jnp.float32))

    def shared(target):
        return pallasite.compile(kernel, ARRAY, target=target).resources.shared_memory_bytes

    before = {target: shared(target) for target in ("sm_90a", "sm_90")}
    with registered(rules):
        assert {target: shared(target) - before[target] for target in before} == {
            "sm_90a": 1024,
            "sm_90": 0,
        }


WIDE = named.resolve("WGMMA_UPCAST_2X", (), {}, SHAPE, 32)


def test_inference_for_some_operands():
    """Of two negations, the one of words has to be in another layout than the one of halves."""
    rules = RuleSet()

    @rules.inference(lax.neg_p, operands=lambda avals, params: not of_halves(avals, params))
    def infer(ctx, x):
        result = ctx.next_rule(x)
        ctx.needs(0, x, WIDE, "a test wants it so", pinned=True)
        return result

    seen = []

    @rules.lowering(lax.neg_p, Semantics.LANE, overrides=("standard",))
    def negate(ctx, x):
        seen.append((str(x.dtype), x.layout == WIDE))
        return ctx.next_rule(x)

    @plgpu.kernel(out_type=ARRAY)
    def kernel(x_ref, o_ref):
        half = -plgpu.layout_cast(x_ref[...].astype(jnp.float16), plgpu.Layout.WGMMA)
        o_ref[...] = -x_ref[...]
        o_ref[...] += half.astype(jnp.float32)

    with registered(rules):
        pallasite.compile(kernel, ARRAY, target="sm_90a")
    assert sorted(seen) == [("float16", False), ("float32", True)]


def test_hints_for_some_operands(lane_semantics):
    """A hint that the next rule knows nothing of reaches the load."""
    rules = RuleSet()
    asked, seen = [], []
    wgmma = named.resolve("WGMMA", (), {}, SHAPE, 16)

    @rules.layout(lax.neg_p, operands=of_halves)
    def hint(ctx, wanted, **params):
        asked.append(ctx.next_rule(wanted, **params))
        return [wgmma]

    @rules.lowering(lax.neg_p, Semantics.LANE, overrides=("standard",))
    def negate(ctx, x):
        seen.append((str(x.dtype), x.layout == wgmma))
        return ctx.next_rule(x)

    @plgpu.kernel(out_type=(ARRAY, jax.ShapeDtypeStruct(SHAPE, jnp.float16)))
    def kernel(x_ref, half_ref, o_ref, half_o_ref):
        o_ref[...] = -x_ref[...]
        half_o_ref[...] = -half_ref[...]

    with registered(rules):
        half = jax.ShapeDtypeStruct(SHAPE, jnp.float16)
        pallasite.compile(kernel, ARRAY, half, target="sm_90a")
    assert asked == [[None]]
    assert seen == [("float32", False), ("float16", True)]
