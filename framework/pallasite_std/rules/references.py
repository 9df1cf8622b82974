"""Reading and writing references, and allocating them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin import (
    SHARED_MEMORY,
    InvalidTypeError,
    InvalidValueError,
    ProxyFence,
    RuleSet,
    Semantics,
    UnsupportedError,
)
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.ir import ops
from pallasite.plugin.language import MemorySpace, is_barrier
from pallasite.plugin.lowering import (
    Allocation,
    EstimatorContext,
    Geometry,
    MemoryReference,
    RegisterArray,
    Resources,
    RuleContext,
    Value,
    aligned,
    buffer_bytes,
    discharged,
    is_value,
    load_array,
    reserve,
    resolve,
    shared_reference,
    store_array,
)
from pallasite_std.barriers.allocation import (
    allocate_barriers,
    barrier_resources,
    describe_barriers,
)
from pallasite_std.rules.semaphores import BLOCK_SEMAPHORES

rules = RuleSet()
_ALL = (Semantics.LANE, Semantics.WARP)


def require_scalar(ctx: RuleContext, shape: Sequence[int], what: str) -> None:
    """Raises if a single warp accesses an array: it has no layout for one warp."""
    if ctx.in_warp and math.prod(shape) != 1:
        raise InvalidValueError(
            f"a single warp {what} an array",
            got=f"shape {list(shape)}",
            expected="scalars inside a warp-mapped region",
            hint="move the access out of the region, or index single elements",
        )


def read(ctx: RuleContext, reference: Value, transforms: Sequence[Any] = ()) -> RegisterArray:
    """Loads what a reference views, in the hinted layout if there is one."""
    memory = resolve(ctx, reference, transforms, other_blocks=True)
    aval = ctx.avals_out[0]
    require_scalar(ctx, aval.shape, "reads")
    return load_array(ctx.launch, memory, ctx.layout_hint, ctx.vector_limit)


def orders_stores(ctx: RuleContext, memory: MemoryReference) -> bool:
    """Whether a store has to come with barriers before and after it.

    Memory that the kernel never reads needs none. In warpgroup semantics, the barriers that shared
    memory needs are part of the plan.
    """
    if not ctx.auto_barriers:
        return False
    if memory.space is not MemorySpace.SMEM:
        return memory.may_be_read
    return ctx.kernel.plan is None or ctx.in_warp or memory.remote is not None


def write(
    ctx: RuleContext, memory: MemoryReference, value: RegisterArray, *, exchanged: bool = False
) -> None:
    """Stores a value so that all lanes of the thread see it afterwards.

    Memory that the kernel never reads needs no barriers.
    """
    require_scalar(ctx, memory.shape, "writes")
    ordered = orders_stores(ctx, memory)
    if ordered:
        ctx.synchronize()
    if ctx.in_warp or (memory.layout.size == 1 and not exchanged):
        # One lane stores a scalar; the others would store the same.
        with ops.when(ctx.leader):
            store_array(ctx.launch, memory, value)
    else:
        store_array(ctx.launch, memory, value)
    if ordered:
        ctx.synchronize()


@rules.lowering(_jax.get_p, *_ALL)
def _get(ctx: RuleContext, reference: Value, *leaves: Value, tree: Any, **params: Any) -> Value:
    if hasattr(reference, "read"):
        return reference.read(ctx, jax.tree.unflatten(tree, leaves))
    return read(ctx, reference, jax.tree.unflatten(tree, leaves))


@rules.lowering(_jax.swap_p, *_ALL)
def _swap(
    ctx: RuleContext,
    reference: Value,
    value: RegisterArray,
    *leaves: Value,
    tree: Any,
    **params: Any,
) -> Value:
    transforms = jax.tree.unflatten(tree, leaves)
    if hasattr(reference, "write"):
        return reference.write(ctx, transforms, value)
    memory = resolve(ctx, reference, transforms, other_blocks=True)
    used = any(ctx.used)
    old: RegisterArray | None = None
    if used:
        layout = None if value.is_splat else value.layout
        old = load_array(ctx.launch, memory, layout)
    write(ctx, memory, value)
    return old if old is not None else value


def _no_wishes(
    avals_in: Sequence[Any], avals_out: Sequence[Any], wanted: Any, **params: Any
) -> list[None]:
    return [None] * len(avals_in)


@rules.layout(_jax.get_p)
def _get_layout(avals_in: Any, avals_out: Any, wanted: Any, **params: Any) -> list[None]:
    return _no_wishes(avals_in, avals_out, wanted)


@rules.layout(_jax.swap_p)
def _swap_layout(avals_in: Any, avals_out: Any, wanted: Any, **params: Any) -> list[None]:
    return _no_wishes(avals_in, avals_out, wanted)


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

    transforms = jax.tree.unflatten(tree, leaves)
    memory = resolve(ctx, reference, transforms, other_blocks=True)
    layout = None if value.is_splat else value.layout
    old = load_array(ctx.launch, memory, layout)
    write(ctx, memory, binary(ctx, "add", old, value, old.dtype))
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
        needed = scoped_resources(ctx, variable, axes)
        name = re.sub(r"^named_scratch\['(\w+)'\]$", r"\1", name)
        if name.isidentifier():
            rows = tuple(
                dataclasses.replace(row, what=f"{name}: {row.what}") for row in needed.allocations
            )
            needed = dataclasses.replace(needed, allocations=rows)
        total = total + needed
    return total


def scoped_resources(ctx: EstimatorContext, variable: Any, axes: tuple[Any, ...]) -> Resources:
    """What the scoped allocation behind a variable reserves.

    A plugin's reference type says it itself with ``scoped_resources(ctx, axes)``.
    """
    aval = variable.aval
    if hasattr(aval, "scoped_resources"):
        result: Resources = aval.scoped_resources(ctx, axes)
        return result
    if is_barrier(aval):
        return barrier_resources(ctx, variable)
    if aval.memory_space is MemorySpace.SMEM:
        size = buffer_bytes(aval.shape, aval.dtype)
        return reserve(SHARED_MEMORY, aligned(size), _describe(aval), ctx.location, size=size)
    if _jax.issubdtype(aval.dtype, _jax.semaphore_dtype):
        return Resources({BLOCK_SEMAPHORES: math.prod(aval.shape)})
    if aval.memory_space is MemorySpace.REGS:
        return Resources()
    raise _no_such_allocation(aval)


def _no_such_allocation(aval: Any) -> UnsupportedError:
    return UnsupportedError(
        f"an allocation in {aval.memory_space}",
        got=_describe(aval),
        expected="plgpu.SMEM, plgpu.Barrier, plgpu.ClusterBarrier or a semaphore",
    )


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
            aval = variable.aval
            if is_value(aval):
                references.append(aval.enter_scope(ctx, axes))
                continue
            if hasattr(aval, "allocate"):
                references.append(scope.enter_context(aval.allocate(ctx, axes)))
                continue
            if geometry.threads > 1 and not axes:
                raise InvalidValueError(
                    "each thread of the block would allocate its own memory",
                    got=f"{_describe(aval)} with collective_axes=()",
                    expected=f"collective_axes={geometry.thread_name!r}",
                )
            memory = True
            data = data or aval.memory_space is MemorySpace.SMEM and not is_barrier(aval)
            references.append(scope.enter_context(_allocate(ctx, variable)))
        if memory and not _is_first_scope(ctx):
            plan = ctx.kernel.plan
            fences: Sequence[ProxyFence] = ()
            if data and plan is None:
                fences = ctx.kernel.registry.memory.fences(ctx.target)
            elif data and plan is not None:
                fences = plan.fenced_scopes.get((ctx.path[:-1], ctx.path[-1]), ())
            _leave_earlier_scopes(ctx, fences, among_threads=bool(axes))
        kept = [is_value(variable.aval) for variable in jaxpr.invars]
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


def _is_semaphore(aval: Any) -> bool:
    return bool(_jax.issubdtype(aval.dtype, _jax.semaphore_dtype))


@contextlib.contextmanager
def _allocate(ctx: RuleContext, variable: Any) -> Any:
    aval = variable.aval
    if is_barrier(aval):
        with allocate_barriers(ctx, variable) as barrier:
            yield barrier
        return
    if _is_semaphore(aval):
        from pallasite_std.rules.semaphores import block_semaphores

        with block_semaphores(ctx, aval) as reference:
            yield reference
        return
    if aval.memory_space is not MemorySpace.SMEM:
        raise _no_such_allocation(aval)
    size = buffer_bytes(aval.shape, aval.dtype)
    with ctx.kernel.shared.allocate(size) as offset:
        ctx.launch.note(Allocation("smem", _describe(aval), size, offset, ctx.location))
        reference = shared_reference(ctx.launch, offset, aval.shape, aval.dtype)
        yield _laid_out(ctx, variable, reference)


def _laid_out(ctx: RuleContext, variable: Any, reference: MemoryReference) -> MemoryReference:
    """An allocation in the layout that inference has chosen for it, or for its members."""
    if ctx.kernel.plan is None:
        return reference
    members = {}
    for (path, key, member), layout in ctx.kernel.plan.memory.items():
        if path == ctx.path and key == id(variable):
            if member is None:
                return dataclasses.replace(reference, layout=layout)
            members[member] = layout
    return dataclasses.replace(reference, members=members) if members else reference


def check_dtype(value: RegisterArray, dtype: Any, what: str) -> None:
    """Raises unless ``value`` has the dtype."""
    if value.dtype != np.dtype(dtype):
        raise InvalidTypeError(what, got=str(value.dtype), expected=str(dtype))
