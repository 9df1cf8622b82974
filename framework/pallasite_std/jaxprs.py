"""The primitives of JAX and Pallas that carry jaxprs: calls, loops, branches, scopes, warps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import primitives

from pallasite.plugin import UnsupportedError
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.jaxprs import JaxprPrimitive, Region, RegionKind, branches, call
from pallasite.plugin.language import WarpMesh
from pallasite_std.batched_loops import while_each

type Functions = list[Callable[..., list[Any]]]

# Calls --------------------------------------------------------------------------------------------

_CALLS = {
    _jax.call_p: "call_jaxpr",
    _jax.closed_call_p: "call_jaxpr",
    _jax.custom_jvp_call_p: "call_jaxpr",
    _jax.custom_vjp_call_p: "call_jaxpr",
    _jax.custom_vmap_p: "call",
    _jax.eval_jaxpr_p: "call_jaxpr",
    _jax.jit_p: "jaxpr",
    _jax.remat_p: "jaxpr",
}
"""The parameter that holds the jaxpr."""


def _called(parameter: str) -> Callable[[Any], Sequence[Region]]:
    return lambda equation: (call(equation.params[parameter]),)


# Branches -----------------------------------------------------------------------------------------


def _cond_regions(equation: Any) -> Sequence[Region]:
    return branches(equation.params["branches"])


def _rebind_cond(equation: Any, operands: list[Any], functions: Functions) -> Sequence[Any]:
    index, *arguments = operands
    taken = [lambda one=one: one(*arguments) for one in functions]
    if len(taken) == 2:
        return list(lax.cond(lax.convert_element_type(index, bool), taken[1], taken[0]))
    return list(lax.switch(index, taken))


# Loops --------------------------------------------------------------------------------------------


def _scan_regions(equation: Any) -> Sequence[Region]:
    jaxpr = equation.params["jaxpr"]
    constants, carries, scanned = _jax.scan_operand_counts(equation.params)
    stacked = len(jaxpr.outvars) - carries
    body = Region(
        jaxpr=jaxpr,
        kind=RegionKind.LOOP_BODY,
        operands=(*range(constants + carries), *(None,) * scanned),
        results=(*range(carries), *(None,) * stacked),
        carried=(*range(constants, constants + carries), *(None,) * stacked),
        trips=int(equation.params["length"]),
    )
    return (body,)


def _rebind_scan(equation: Any, operands: list[Any], functions: Functions) -> Sequence[Any]:
    params = equation.params
    constants, carries, _ = _jax.scan_operand_counts(params)

    def body(carry: list[Any], elements: list[Any]) -> tuple[list[Any], list[Any]]:
        results = functions[0](*operands[:constants], *carry, *elements)
        return results[:carries], results[carries:]

    carry, stacked = lax.scan(
        body,
        operands[constants : constants + carries],
        operands[constants + carries :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _while_regions(equation: Any) -> Sequence[Region]:
    params = equation.params
    conditions, constants = params["cond_nconsts"], params["body_nconsts"]
    first, count = conditions + constants, len(equation.outvars)
    carried = range(first, first + count)
    condition = Region(
        jaxpr=params["cond_jaxpr"],
        kind=RegionKind.LOOP_CONDITION,
        operands=(*range(conditions), *carried),
        results=(None,),
    )
    body = Region(
        jaxpr=params["body_jaxpr"],
        kind=RegionKind.LOOP_BODY,
        operands=(*range(conditions, first), *carried),
        results=tuple(range(count)),
        carried=tuple(range(constants, constants + count)),
    )
    return condition, body


def _rebind_while(equation: Any, operands: list[Any], functions: Functions) -> Sequence[Any]:
    conditions, constants = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    first = conditions + constants

    def condition(*carry: Any) -> Any:
        return functions[0](*operands[:conditions], *carry)[0]

    def body(*carry: Any) -> list[Any]:
        return functions[1](*operands[conditions:first], *carry)

    if equation.params["cond_jaxpr"].outvars[0].aval.shape:
        return while_each(condition, body, operands[first:])
    return list(lax.while_loop(lambda c: condition(*c), lambda c: body(*c), operands[first:]))


# Scopes -------------------------------------------------------------------------------------------


def _run_scoped_regions(equation: Any) -> Sequence[Region]:
    jaxpr = equation.params["jaxpr"]
    captured, own = len(jaxpr.constvars), len(jaxpr.invars)
    region = Region(
        jaxpr=jaxpr,
        operands=(*range(captured), *(None,) * own),
        results=tuple(range(len(jaxpr.outvars))),
        scoped=frozenset(range(captured, captured + own)),
    )
    return (region,)


def _rebind_run_scoped(equation: Any, operands: list[Any], functions: Functions) -> Sequence[Any]:
    def body(*scoped: Any) -> list[Any]:
        return functions[0](*operands, *scoped)

    avals = [variable.aval for variable in equation.params["jaxpr"].invars]
    new, _ = _jax.trace_to_jaxpr(body, avals, traced_for="run_scoped")
    return list(_jax.run_scoped_p.bind(*new.consts, **{**equation.params, "jaxpr": new}))


def _run_state_regions(equation: Any) -> Sequence[Region]:
    jaxpr = equation.params["jaxpr"]
    numbers = iter(range(len(equation.invars)))
    operands = tuple(
        next(numbers) if initialized else None for initialized in equation.params["is_initialized"]
    )
    region = Region(
        jaxpr=jaxpr,
        operands=operands,
        results=(None,) * len(jaxpr.outvars),
        states=tuple((position, position) for position in range(len(operands))),
    )
    return (region,)


class _Initial:
    """A value for ``run_state``, with the type of the reference that it initialises."""

    def __init__(self, aval: Any, value: Any):
        self.aval = aval
        self.value = value


_jax.ref_type_aval_mappings[_Initial] = lambda initial: (initial.aval, initial.value)


def _rebind_run_state(equation: Any, operands: list[Any], functions: Functions) -> Sequence[Any]:
    is_reference = [
        isinstance(operand, _jax.TransformedRef)
        or isinstance(_jax.typeof(operand), _jax.AbstractRef)
        for operand in operands
    ]
    initial = [
        _Initial(variable.aval, operand)
        for variable, operand, captured in zip(
            equation.params["jaxpr"].invars, operands, is_reference, strict=True
        )
        if not captured
    ]

    def body(references: list[Any]) -> None:
        remaining = iter(references)
        functions[0](
            *[
                operand if captured else next(remaining)
                for operand, captured in zip(operands, is_reference, strict=True)
            ]
        )

    final = iter(_jax.run_state(body)(initial))
    return [
        operand if captured else next(final)
        for operand, captured in zip(operands, is_reference, strict=True)
    ]


# Warps --------------------------------------------------------------------------------------------


def _mpmd_map_regions(equation: Any) -> Sequence[Region]:
    regions = []
    for mesh, jaxpr in zip(equation.params["meshes"], equation.params["jaxprs"], strict=True):
        count = len(jaxpr.invars)
        all_operands = count == len(equation.invars)
        region = Region(
            jaxpr=jaxpr,
            operands=tuple(range(count)) if all_operands else (None,) * count,
            results=(None,) * len(jaxpr.outvars),
            per_warp=isinstance(mesh, WarpMesh),
        )
        regions.append(region)
    return regions


def _rebind_mpmd_map(equation: Any, operands: list[Any], functions: Functions) -> Sequence[Any]:
    params = equation.params
    if len(functions) != 1 or len(params["jaxprs"][0].invars) != len(operands):
        raise UnsupportedError("this use of mpmd_map cannot be traced anew")

    def body() -> None:
        functions[0](*operands)

    mapped = [(params["meshes"][0], body)]
    _jax.mpmd_map(mapped, compiler_params=params["compiler_params"], name=params["name"])()
    return []


JAXPR_PRIMITIVES: tuple[JaxprPrimitive, ...] = (
    *(
        JaxprPrimitive(primitive=primitive, regions=_called(parameter))
        for primitive, parameter in _CALLS.items()
    ),
    JaxprPrimitive(primitive=_jax.cond_p, regions=_cond_regions, rebind=_rebind_cond),
    JaxprPrimitive(primitive=_jax.scan_p, regions=_scan_regions, rebind=_rebind_scan),
    JaxprPrimitive(primitive=_jax.while_p, regions=_while_regions, rebind=_rebind_while),
    JaxprPrimitive(
        primitive=_jax.run_scoped_p, regions=_run_scoped_regions, rebind=_rebind_run_scoped
    ),
    JaxprPrimitive(
        primitive=_jax.run_state_p, regions=_run_state_regions, rebind=_rebind_run_state
    ),
    JaxprPrimitive(primitive=_jax.mpmd_map_p, regions=_mpmd_map_regions, rebind=_rebind_mpmd_map),
    # Their jaxprs say what the primitives' names say.
    *(
        JaxprPrimitive(primitive=primitive, regions=lambda equation: ())
        for primitive in (
            *(
                primitives.scatter_p,
                primitives.scatter_add_p,
                primitives.scatter_mul_p,
                primitives.scatter_min_p,
                primitives.scatter_max_p,
            ),
            lax.scatter_sub_p,
        )
    ),
)
