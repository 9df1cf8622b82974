"""Reading and writing references, and allocating them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import InvalidTypeError, InvalidValueError, ProxyFence, RuleSet, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import MemorySpace, is_barrier
from pallasite.plugin.lowering import (
    EstimatorContext,
    Geometry,
    LayoutContext,
    RegisterArray,
    Resources,
    RuleContext,
    Value,
    discharged,
)
from pallasite_std.barriers.allocation import describe_barriers
from pallasite_std.spaces import space_of

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)


def _space(ctx: RuleContext, reference: Value) -> MemorySpace:
    """The memory space of a reference that is read or written.

    Raises:
      InvalidTypeError: it is none.
    """
    space = getattr(reference, "space", None)
    if not isinstance(space, MemorySpace):
        raise InvalidTypeError(
            f"primitive {ctx.primitive} cannot access this reference",
            got=type(reference).__name__,
            expected="a reference to global or shared memory",
        )
    return space


@rules.lowering(_jax.get_p, *_ALL)
def _get(ctx: RuleContext, reference: Value, *leaves: Value, tree: Any, **params: Any) -> Value:
    return _space(ctx, reference).read(ctx, reference, jax.tree.unflatten(tree, leaves))


@rules.lowering(_jax.swap_p, *_ALL)
def _swap(
    ctx: RuleContext,
    reference: Value,
    value: RegisterArray,
    *leaves: Value,
    tree: Any,
    **params: Any,
) -> Value:
    return _space(ctx, reference).write(ctx, reference, jax.tree.unflatten(tree, leaves), value)


@rules.layout(_jax.get_p)
def _get_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


@rules.layout(_jax.swap_p)
def _swap_layout(ctx: LayoutContext, wanted: Any, **params: Any) -> list[None]:
    return [None] * len(ctx.avals_in)


_get_layout.accesses_memory = lambda operands, results: results[0]  # type: ignore[attr-defined]
_swap_layout.accesses_memory = lambda operands, results: operands[1]  # type: ignore[attr-defined]


@rules.lowering(_jax.addupdate_p, *_ALL)
def _addupdate(
    ctx: RuleContext,
    reference: Value,
    value: RegisterArray,
    *leaves: Value,
    tree: Any,
    **params: Any,
) -> Sequence[Value]:
    from pallasite_std.rules.arithmetic import binary

    def add(old: RegisterArray, new: RegisterArray) -> RegisterArray:
        return binary(ctx, "add", old, new, old.dtype)

    transforms = jax.tree.unflatten(tree, leaves)
    _space(ctx, reference).update(ctx, reference, transforms, value, add)
    return ()


# Scoped allocation ----------------------------------------------------------------------------


def _check_collective(geometry: Geometry, collective_axes: Any) -> tuple[Any, ...]:
    axes = collective_axes if isinstance(collective_axes, tuple) else (collective_axes,)
    axes = tuple(axis for axis in axes if axis is not None)
    if axes and axes != (geometry.thread_name,):
        raise InvalidValueError(
            "an allocation is shared by other axes than the kernel's threads",
            got=f"collective_axes={axes}",
            expected=f"({geometry.thread_name!r},) or none"
            if geometry.thread_name is not None
            else "none: the kernel has a single thread per block",
        )
    return axes


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
    names = jaxpr.debug_info.safe_arg_names(len(jaxpr.invars))
    for variable, name in zip(jaxpr.invars, names, strict=True):
        needed = space_of(variable.aval).resources(ctx, variable, axes)
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
    with contextlib.ExitStack() as scope:
        references = []
        memory = data = False
        for variable in jaxpr.invars:
            space = space_of(variable.aval)
            if space.is_value:
                references.append(space.enter_scope(ctx, variable.aval, axes))
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


def check_dtype(value: RegisterArray, dtype: Any, what: str) -> None:
    """Raises unless ``value`` has the dtype."""
    if value.dtype != np.dtype(dtype):
        raise InvalidTypeError(what, got=str(value.dtype), expected=str(dtype))


__all__ = ["check_dtype", "rules"]
