"""A plugin of another author with a loop and a conditional of its own: it says what the jaxprs are,
and how the primitives are lowered, and nothing else."""

from __future__ import annotations

from pallasite.plugin import JaxprPrimitive, RuleSet, Semantics, hookimpl, jax_internals
from pallasite.plugin.ir import ops
from pallasite.plugin.jaxprs import Region, RegionKind, effects_outside, loop_body

rules = RuleSet()
BOTH = (Semantics.LANE, Semantics.WARP)

# repeat: runs a function so many times ------------------------------------------------------------

repeat_p = jax_internals.Primitive("repeat")
repeat_p.multiple_results = True


def repeat(times, function, *carry):
    """``carry = function(*carry)``, so many times."""
    avals = [jax_internals.typeof(value) for value in carry]
    jaxpr, _ = jax_internals.trace_to_jaxpr(lambda *carry: function(*carry), avals)
    return repeat_p.bind(*jaxpr.consts, *carry, jaxpr=jaxpr, times=times)


def body(jaxpr, times):
    return loop_body(jaxpr, constants=len(jaxpr.constvars), trips=times)


@jax_internals.abstract_eval(repeat_p)
def _repeat_type(*avals, jaxpr, times):
    return [variable.aval for variable in jaxpr.outvars], effects_outside(body(jaxpr, times))


@rules.lowering(repeat_p, *BOTH)
def _repeat(ctx, *operands, jaxpr, times):
    constants, carry = operands[: len(jaxpr.constvars)], operands[len(jaxpr.constvars) :]
    for _ in range(times):
        carry = ctx.lower(jaxpr, [*constants, *carry])
    return carry


def rebind_repeat(equation, operands, functions):
    count = len(equation.params["jaxpr"].constvars)
    constants, carry = operands[:count], operands[count:]
    return repeat(equation.params["times"], lambda *carry: functions[0](*constants, *carry), *carry)


# choose: runs one of several functions ------------------------------------------------------------

choose_p = jax_internals.Primitive("choose")
choose_p.multiple_results = True


def choose(number, *functions):
    """Runs the function of that number, if there is one."""
    jaxprs = tuple(
        jax_internals.trace_to_jaxpr(lambda one=one: one() or (), [])[0] for one in functions
    )
    captured = [value for jaxpr in jaxprs for value in jaxpr.consts]
    choose_p.bind(number, *captured, jaxprs=jaxprs)


def branches(jaxprs):
    regions, first = [], 1
    for jaxpr in jaxprs:
        after = first + len(jaxpr.constvars)
        operands = tuple(range(first, after))
        regions.append(
            Region(
                jaxpr=jaxpr,
                kind=RegionKind.BRANCH,
                operands=operands,
                results=(),
                selector=0,
            )
        )
        first = after
    return regions


@jax_internals.abstract_eval(choose_p)
def _choose_type(*avals, jaxprs):
    return [], set().union(*map(effects_outside, branches(jaxprs)))


@rules.lowering(choose_p, *BOTH)
def _choose(ctx, number, *operands, jaxprs):
    for position, region in enumerate(branches(jaxprs)):
        with ops.when(ops.compare("eq", ctx.scalar(number), position)):
            ctx.lower(region.jaxpr, [operands[one - 1] for one in region.operands])
    return ()


class Plugin:
    """All of it."""

    rebind = staticmethod(rebind_repeat)

    @hookimpl
    def pallasite_lowering_rules(self):
        return rules.lowering_rules

    @hookimpl
    def pallasite_jaxpr_primitives(self):
        return [
            JaxprPrimitive(
                primitive=repeat_p,
                regions=lambda equation: [body(**equation.params)],
                rebind=self.rebind,
            ),
            JaxprPrimitive(
                primitive=choose_p,
                regions=lambda equation: branches(equation.params["jaxprs"]),
            ),
        ]
