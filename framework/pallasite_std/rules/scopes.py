"""Scopes: ``run_scoped`` allocates references, ``run_state`` begins with values."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from pallasite.plugin import (
    InvalidValueError,
    ProxyFence,
    RuleSet,
    Semantics,
    UnsupportedError,
)
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.layouts import Layout
from pallasite.plugin.lowering import (
    EstimatorContext,
    Geometry,
    LayoutContext,
    Resources,
    RuleContext,
    Value,
    discharged,
)
from pallasite_std.barriers.allocation import describe_barriers
from pallasite_std.barriers.base import is_barrier
from pallasite_std.memory.thread_arrays import EACH_THREAD, thread_array
from pallasite_std.spaces import note_space, space_of

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)


def _check_collective(geometry: Geometry, collective_axes: Any) -> tuple[Any, ...]:
    axes = collective_axes if isinstance(collective_axes, tuple) else (collective_axes,)
    axes = tuple(axis for axis in axes if axis is not None and axis != EACH_THREAD)
    if axes and axes != (geometry.thread_name,):
        raise InvalidValueError(
            "an allocation is shared by other axes than the kernel's threads",
            got=f"collective_axes={axes}",
            expected=f"({geometry.thread_name!r},) or none"
            if geometry.thread_name is not None
            else "none: the kernel has a single thread per block",
        )
    return axes


def _is_of_definition(collective_axes: Any) -> bool:
    """Whether the definition of a primitive has opened a scope."""
    return collective_axes in (EACH_THREAD, (EACH_THREAD,))


def _is_of_each(geometry: Geometry, collective_axes: Any) -> bool:
    """Whether each of several threads has memory of its own."""
    return geometry.threads > 1 and _is_of_definition(collective_axes)


def _describe(aval: Any) -> str:
    if is_barrier(aval):
        return describe_barriers(aval)
    return f"{aval.dtype}{list(aval.shape)}"


@rules.resources(_jax.run_scoped_p)
def _run_scoped_resources(
    ctx: EstimatorContext, *avals: Any, jaxpr: Any, collective_axes: Any, **params: Any
) -> Resources:
    total = ctx.estimate(jaxpr)
    axes = _check_collective(ctx.geometry, collective_axes)
    if _is_of_each(ctx.geometry, collective_axes):
        return total  # It is reserved when the scope is lowered.
    names = jaxpr.debug_info.safe_arg_names(len(jaxpr.invars))
    for variable, name in zip(jaxpr.invars, names, strict=True):
        space = space_of(variable.aval)
        needed = ctx.owned(
            space.resources(ctx, variable, axes),
            ctx.registry.owners_of_spaces.get(space.name, ctx.rules[-1].plugin),
        )
        name = re.sub(r"^named_scratch\['(\w+)'\]$", r"\1", name)
        if name.isidentifier():
            rows = tuple(
                dataclasses.replace(row, what=f"{name}: {row.what}") for row in needed.allocations
            )
            needed = dataclasses.replace(needed, allocations=rows)
        total = total + needed
    return total


@rules.lowering(_jax.run_scoped_p, Semantics.LANE)
def _run_scoped(
    ctx: RuleContext, *consts: Value, jaxpr: Any, collective_axes: Any, **params: Any
) -> list[Value]:
    geometry = ctx.kernel.geometry
    axes = _check_collective(geometry, collective_axes)
    of_each = _is_of_each(geometry, collective_axes)
    with contextlib.ExitStack() as scope:
        references = []
        memory = data = False
        for variable in jaxpr.invars:
            space = space_of(variable.aval)
            note_space(ctx, space)
            if space.is_value:
                references.append(space.enter_scope(ctx, variable.aval, axes))
                continue
            if of_each:
                references.append(scope.enter_context(thread_array(ctx, variable)))
                continue
            if space.per_block and geometry.threads > 1 and not axes:
                raise InvalidValueError(
                    "each thread of the block would allocate its own memory",
                    got=f"{_describe(variable.aval)} with collective_axes=()",
                    expected=f"collective_axes={geometry.thread_name!r}",
                )
            memory = memory or space.reuses_memory
            data = data or space.copied_to
            references.append(scope.enter_context(space.allocate(ctx, variable, axes)))
        if _is_of_definition(collective_axes):
            references = [dataclasses.replace(one, ordered=True) for one in references]
        if memory and not _is_first_scope(ctx):
            plan = ctx.kernel.plan
            fences: Sequence[ProxyFence] = ()
            if data and plan is None:
                fences = ctx.kernel.registry.memory.fences(ctx.target)
            elif data and plan is not None:
                fences = plan.fenced_scopes.get((ctx.path[:-1], ctx.path[-1]), ())
            _leave_earlier_scopes(ctx, fences, among_threads=bool(axes))
        kept = [space_of(variable.aval).is_value for variable in jaxpr.invars]
        if not any(kept):
            return ctx.lower(jaxpr, [*consts, *references])
        functional = discharged(ctx.kernel, jaxpr, kept, ctx.mode)
        return ctx.lower(functional, [*consts, *references])[: len(jaxpr.outvars)]


def _is_first_scope(ctx: RuleContext) -> bool:
    """Whether the kernel has not used any memory of scopes before, not even in a loop."""
    stack = ctx.kernel.shared
    untouched, stack.untouched = stack.untouched, False
    return untouched and ir.InsertionPoint.current.block == ctx.launch.entry


def _leave_earlier_scopes(
    ctx: RuleContext, fences: Sequence[ProxyFence], *, among_threads: bool
) -> None:
    """What has to come before memory of earlier scopes is used again.

    An asynchronous copy may be the first to write it, after ordinary writes of another scope, which
    its author does not know; so the fences between proxies are here. With a single thread, the
    barrier that comes before every copy does the rest.
    """
    for fence in fences:
        if fence.emit is not None:
            fence.emit(ctx)
    if among_threads:
        ctx.launch.block_barrier()


@rules.lowering(_jax.run_state_p, *_ALL)
def _run_state(
    ctx: RuleContext, *operands: Value, jaxpr: Any, is_initialized: Any, **params: Any
) -> list[Value]:
    """State that starts as arrays stays in registers: the body becomes a function of its values.

    References of the kernel are passed on as they are.
    """
    if not all(is_initialized):
        raise UnsupportedError(
            "run_state with references that have no initial value", expected="initial arrays"
        )
    if jaxpr.outvars:
        raise InvalidValueError(
            "the function that pl.run_state calls returns a value, which run_state does not",
            expected="a function that writes to its references; run_state returns their contents",
            hint="write it, ref[...] = value, or use pl.run_scoped, which returns it",
        )
    local = [not isinstance(aval, _jax.AbstractRef) for aval in ctx.avals_out]
    inner = [variable.aval for variable in jaxpr.invars]
    entered = [
        space_of(aval).enter_scope(ctx, aval, (), operand)
        if is_local and space_of(aval).is_value
        else operand
        for operand, is_local, aval in zip(operands, local, inner, strict=True)
    ]
    functional = discharged(ctx.kernel, jaxpr, local, ctx.mode)
    finals = iter(ctx.lower(functional, entered))
    values: list[Value] = []
    for operand, is_local, aval in zip(operands, local, inner, strict=True):
        value = next(finals) if is_local else operand
        if is_local and space_of(aval).is_value:
            value = space_of(aval).leave_scope(ctx, aval, value, operand)
        values.append(value)
    return values


def _scope_layouts(jaxpr: Any) -> list[Layout | None]:
    return [space_of(variable.aval).scope_layout(variable.aval) for variable in jaxpr.invars]


@rules.layout(_jax.run_state_p)
def _run_state_layout(
    ctx: LayoutContext, wanted: Any, *, jaxpr: Any, **params: Any
) -> list[Layout | None]:
    """State that is held in a certain layout should begin in it."""
    return _scope_layouts(jaxpr)


def _run_state_results(
    avals_in: Any, layouts: Any, *, jaxpr: Any, **params: Any
) -> list[Layout | None]:
    return _scope_layouts(jaxpr)


_run_state_layout.result_layouts = _run_state_results  # type: ignore[attr-defined]
