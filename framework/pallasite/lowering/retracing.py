"""Tracing parts of a kernel again while it is lowered, in the surroundings that they are in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pallasite import _jax
from pallasite.language.memory import MemorySpace, memory_space_of
from pallasite.language.mesh import WARPS_PER_WARPGROUP

if TYPE_CHECKING:
    from pallasite.lowering.context import KernelContext, Mode, RuleContext, Value


@contextlib.contextmanager
def retracing(kernel: KernelContext, mode: Mode | None = None) -> Iterator[None]:
    """Lets parts of a kernel be traced again: named axes and the grid are known."""
    geometry = kernel.geometry
    axes = [*zip(geometry.grid_names, geometry.grid, strict=False)]
    axes += zip(geometry.cluster_names, geometry.cluster_extents, strict=False)
    if geometry.thread_name is not None:
        axes.append((geometry.thread_name, geometry.threads))
    axes += kernel.device_mesh.manual_sizes.items()
    if mode is not None and mode.warp_axis is not None:
        axes.append((mode.warp_axis, WARPS_PER_WARPGROUP))
    grid = [*geometry.grid, *geometry.cluster_extents, geometry.threads]
    ids = () if mode is None else mode.program_ids or ()
    grid += [1] * (len(ids) - len(grid))
    with (
        _jax.tracing_grid_env(tuple(grid), ()),
        _jax.extend_axis_env(axes),
        _jax.no_check_of_varying_axes(),
    ):
        yield


def is_value(aval: Any) -> bool:
    """Whether a reference type stands for a value that has no address, such as an accumulator; see
    ``MemorySpace.is_value``."""
    space = memory_space_of(aval)
    return isinstance(space, MemorySpace) and space.is_value


def discharged(
    kernel: KernelContext, jaxpr: Any, kept: Sequence[bool], mode: Mode | None = None
) -> Any:
    """The body of a scope as a function of the values of some of its references.

    The same body always gives the same jaxpr, so that what was found out about one holds.

    Args:
      kernel: the kernel that the scope is in.
      jaxpr: the body; its constants become inputs, before its own.
      kept: for each input of its own, whether it is replaced by its value.
      mode: where the scope is.

    Returns:
      A jaxpr that returns the last values after the results.
    """
    key = (id(jaxpr), tuple(kept))
    if key not in kernel.discharged:
        count = len(jaxpr.constvars)
        whole = _jax.convert_constvars_jaxpr(jaxpr) if count else jaxpr
        with retracing(kernel, mode):
            functional = _jax.discharge_state(
                whole, should_discharge=[False] * count + list(kept), strip_memory_space=True
            )
        kernel.discharged[key] = (jaxpr, functional)
    return kernel.discharged[key][1]


def lower_function(
    ctx: RuleContext,
    function: Callable[..., Any],
    *args: Value,
    avals: Sequence[Any] | None = None,
) -> list[Value]:
    """Lowers what a JAX function computes, at the current insertion point.

    Args:
      ctx: the rule's context.
      function: a function of arrays, traced here; it returns an array or a tree of arrays.
      *args: values of its arguments, as rules get them.
      avals: their abstract values; by default those of the rule's own operands.

    Returns:
      A value for each array of the result, in the order of ``jax.tree.leaves``.

    Raises:
      PallasiteError: whatever the rules of the function's primitives raise.
    """
    with retracing(ctx.kernel, ctx.mode):
        jaxpr, _ = _jax.trace_to_jaxpr(function, ctx.avals_in if avals is None else avals)
    return ctx.lower(jaxpr, args)
