"""A primitive that carries a jaxpr: it runs a function so many times."""

from __future__ import annotations

from pallasite.plugin import JaxprPrimitive, RuleSet, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import effects_outside, loop_body

rules = RuleSet()
repeat_p = _jax.Primitive("repeat")
repeat_p.multiple_results = True


def repeat(times, function, *carry):
    """Does ``carry = function(*carry)`` so many times; the function returns a list."""
    avals = [_jax.typeof(value) for value in carry]
    jaxpr, _ = _jax.trace_to_jaxpr(function, avals)
    return repeat_p.bind(*jaxpr.consts, *carry, jaxpr=jaxpr, times=times)


def _region(jaxpr, times):
    return loop_body(jaxpr, constants=len(jaxpr.constvars), trips=times)


@_jax.abstract_eval(repeat_p)
def _repeat_type(*avals, jaxpr, times):
    return [variable.aval for variable in jaxpr.outvars], effects_outside(_region(jaxpr, times))


@rules.lowering(repeat_p, Semantics.LANE, Semantics.WARP)
def _repeat(ctx, *operands, jaxpr, times):
    constants, carry = operands[: len(jaxpr.constvars)], operands[len(jaxpr.constvars) :]
    for _ in range(times):
        carry = ctx.lower(jaxpr, [*constants, *carry])
    return carry


REPEAT = JaxprPrimitive(primitive=repeat_p, regions=lambda equation: [_region(**equation.params)])
