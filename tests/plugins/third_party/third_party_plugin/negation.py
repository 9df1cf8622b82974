"""A primitive with a rule of its own for warpgroup semantics."""

from __future__ import annotations

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import lower_function

rules = RuleSet()
negate_p = _jax.Primitive("negate")
negate_p.def_abstract_eval(lambda x: x)


def negate(x):
    """``-x``."""
    return negate_p.bind(x)


@rules.lowering(negate_p, Semantics.LANE)
def _of_lane(ctx, x):
    ops.inline_assembly("// third party: negate, LANE", "~{memory}")
    (result,) = lower_function(ctx, lambda x: -x, x)
    return result


@rules.lowering(negate_p, Semantics.WARPGROUP, layouts="any")
def _of_warpgroup(ctx, x):
    ops.inline_assembly("// third party: negate, WARPGROUP", "~{memory}")
    (result,) = lower_function(ctx, lambda x: 0 - x, x)
    return result
