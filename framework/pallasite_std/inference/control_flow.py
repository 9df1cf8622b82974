"""Calls, loops, branches and scopes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallasite.plugin import EventKind, RuleSet
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import (
    AbstractValue,
    InferenceContext,
    MemoryValue,
    OtherValue,
    ScalarValue,
    open_layout,
)
from pallasite.plugin.ir import types
from pallasite.plugin.language import AbstractRefUnion, MemorySpace, memory_space_of, union_members
from pallasite.plugin.lowering import carried_divisors, discharged
from pallasite_std.rules.references import is_value

rules = RuleSet()

_UNKNOWN_TIMES = 16.0
"""Steps of a loop whose number is computed in the kernel."""


# Calls --------------------------------------------------------------------------------------------


@rules.inference(_jax.jit_p)
@rules.inference(_jax.remat_p)
def _jit(
    ctx: InferenceContext, *operands: AbstractValue, jaxpr: Any, **params: Any
) -> list[AbstractValue]:
    return ctx.infer(jaxpr, operands)


@rules.inference(_jax.closed_call_p)
@rules.inference(_jax.custom_jvp_call_p)
@rules.inference(_jax.custom_vjp_call_p)
def _call(
    ctx: InferenceContext, *operands: AbstractValue, call_jaxpr: Any, **params: Any
) -> list[AbstractValue]:
    return ctx.infer(call_jaxpr, operands)


@rules.inference(_jax.mpmd_map_p)
def _warp_map(
    ctx: InferenceContext, *operands: AbstractValue, jaxprs: Sequence[Any], **params: Any
) -> None:
    ctx.event(EventKind.SYNCHRONIZE)
    with ctx.warps():
        for jaxpr in jaxprs:
            ctx.infer(jaxpr, operands)
    ctx.event(EventKind.SYNCHRONIZE)


# Loops and branches -------------------------------------------------------------------------------


def _carried(
    ctx: InferenceContext,
    body: Any,
    constants: Sequence[AbstractValue],
    values: Sequence[AbstractValue],
    avals: Sequence[Any],
) -> list[AbstractValue]:
    divisors = [1] * len(values)
    if len(body.invars) == len(constants) + len(values):  # Nothing else is scanned.
        divisors = carried_divisors(
            ctx.walk.kernel.registry.jaxprs, body, map(_divisor, constants), map(_divisor, values)
        )
    carried: list[AbstractValue] = []
    for value, aval, divisor in zip(values, avals, divisors, strict=True):
        if isinstance(value, ScalarValue):
            carried.append(ScalarValue(divisor))
        else:
            is_array = isinstance(aval, _jax.ShapedArray)
            carried.append(ctx.result(aval, spread=False) if is_array else value)
    return carried


def _divisor(value: AbstractValue) -> int:
    return value.divisor if isinstance(value, ScalarValue) else 1


@rules.inference(_jax.scan_p)
def _scan(
    ctx: InferenceContext,
    *operands: AbstractValue,
    jaxpr: Any,
    length: Any,
    ft_in: Any,
    **params: Any,
) -> list[AbstractValue]:
    consts, carries = _jax.scan_operand_counts({"ft_in": ft_in})[:2]
    values = operands[consts : consts + carries]
    avals = ctx.avals_in[consts : consts + carries]
    carried = _carried(ctx, jaxpr, operands[:consts], values, avals)
    for position, (value, inner) in enumerate(zip(values, carried, strict=True), consts):
        ctx.becomes(position, value, inner)
    scanned = [ctx.result(variable.aval) for variable in jaxpr.invars[consts + carries :]]
    results = ctx.infer(jaxpr, [*operands[:consts], *carried, *scanned], times=max(int(length), 1))
    ctx.returns(jaxpr, results[:carries], carried)
    stacked = [ctx.result(aval) for aval in ctx.avals_out[carries:]]
    return [*carried, *stacked]


@rules.inference(_jax.while_p)
def _while(
    ctx: InferenceContext,
    *operands: AbstractValue,
    cond_jaxpr: Any,
    body_jaxpr: Any,
    cond_nconsts: int,
    body_nconsts: int,
    **params: Any,
) -> list[AbstractValue]:
    first = cond_nconsts + body_nconsts
    constants = operands[cond_nconsts:first]
    carried = _carried(ctx, body_jaxpr, constants, operands[first:], ctx.avals_in[first:])
    for position, (value, inner) in enumerate(zip(operands[first:], carried, strict=True), first):
        ctx.becomes(position, value, inner)
    ctx.infer(cond_jaxpr, [*operands[:cond_nconsts], *carried], times=_UNKNOWN_TIMES)
    results = ctx.infer(body_jaxpr, [*constants, *carried], times=_UNKNOWN_TIMES)
    ctx.returns(body_jaxpr, results, carried)
    return carried


@rules.inference(_jax.cond_p)
def _cond(
    ctx: InferenceContext,
    index: AbstractValue,
    *operands: AbstractValue,
    branches: Sequence[Any],
    **params: Any,
) -> list[AbstractValue]:
    if len(branches) == 1:
        return ctx.infer(branches[0], operands)
    merged: list[AbstractValue] = [ctx.result(aval, spread=False) for aval in ctx.avals_out]
    for number, branch in enumerate(branches):
        results = ctx.infer(branch, operands, branch=number)
        ctx.returns(branch, results, merged)
    return merged


# Scopes -------------------------------------------------------------------------------------------


@rules.inference(_jax.run_scoped_p)
def _run_scoped(
    ctx: InferenceContext, *consts: AbstractValue, jaxpr: Any, **params: Any
) -> list[AbstractValue]:
    names = jaxpr.debug_info.safe_arg_names(len(jaxpr.invars))
    kept = [is_value(variable.aval) for variable in jaxpr.invars]
    values = [
        _begin(ctx, variable.aval)
        if is_local
        else _allocation(ctx, variable, re.sub(r"^named_scratch\['(\w+)'\]$", r"\1", name))
        for variable, is_local, name in zip(jaxpr.invars, kept, names, strict=True)
    ]
    if not any(kept):
        return ctx.infer(jaxpr, [*consts, *values])
    functional = discharged(ctx.walk.kernel, jaxpr, kept)
    return ctx.infer(functional, [*consts, *values])[: len(jaxpr.outvars)]


def _begin(ctx: InferenceContext, aval: Any, initial: AbstractValue | None = None) -> AbstractValue:
    """The value at the beginning of the scope of a reference that stands for one."""
    sources = [] if initial is None else [initial]
    value = ctx.result(aval.inner_aval, *sources, spread=False)
    if hasattr(aval, "value_layout"):
        ctx.makes(value, aval.value_layout(), "it is an accumulator", pinned=True)
    return value


def _allocation(ctx: InferenceContext, variable: Any, name: str) -> AbstractValue:
    aval = variable.aval
    extended = _jax.issubdtype(getattr(aval, "dtype", np.float32), _jax.extended)
    if extended or memory_space_of(aval) is not MemorySpace.SMEM:
        return OtherValue(aval)
    path = (*ctx.path, id(ctx.equation))
    shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
    if isinstance(aval, AbstractRefUnion):
        members: dict[Any, int] = {}
        for offset, member_shape, member_dtype in union_members(aval):
            value = MemoryValue(MemorySpace.SMEM, member_shape, member_dtype, name=name)
            candidates = open_layout(value, types.bit_width(member_dtype))
            key = (offset, str(member_dtype), member_shape)
            members[key] = ctx.walk.allocation(
                path, variable, value, candidates, ctx.place, member=key
            )
        union = MemoryValue(MemorySpace.SMEM, shape, dtype, None, members, name)
        ctx.event(EventKind.ALLOCATE, union)
        return union
    value = MemoryValue(MemorySpace.SMEM, shape, dtype, name=name)
    bits = types.bit_width(dtype)
    candidates = open_layout(value, bits)
    number = ctx.walk.allocation(path, variable, value, candidates, ctx.place)
    allocation = MemoryValue(MemorySpace.SMEM, shape, dtype, number, name=name)
    ctx.event(EventKind.ALLOCATE, allocation)
    return allocation


@rules.inference(_jax.run_state_p)
def _run_state(
    ctx: InferenceContext, *operands: AbstractValue, jaxpr: Any, **params: Any
) -> list[AbstractValue]:
    local = [not isinstance(aval, _jax.AbstractRef) for aval in ctx.avals_out]
    entered: list[AbstractValue] = []
    for position, (operand, is_local, variable) in enumerate(
        zip(operands, local, jaxpr.invars, strict=True)
    ):
        if is_local and is_value(variable.aval):
            value = _begin(ctx, variable.aval, operand)
            if hasattr(variable.aval, "scope_layout"):
                ctx.needs(position, operand, variable.aval.scope_layout(), "it starts a scope")
            entered.append(value)
        else:
            entered.append(operand)
    functional = discharged(ctx.walk.kernel, jaxpr, local)
    finals = iter(ctx.infer(functional, entered))
    return [
        next(finals) if is_local else operand
        for operand, is_local in zip(operands, local, strict=True)
    ]
