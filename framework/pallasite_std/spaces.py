"""The memory spaces of the standard library: barriers, and semaphores."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pallasite.plugin import is_own, manager, note_code
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import GMEM, MemorySpace, memory_space_of
from pallasite_std.barriers.base import BARRIER_SPACE

if TYPE_CHECKING:
    from pallasite.plugin.lowering import EstimatorContext, Resources, RuleContext


class Barriers(MemorySpace):
    """Barriers of all kinds, in shared memory; what they are is in the dtype of the reference."""

    name = BARRIER_SPACE

    def resources(self, ctx: EstimatorContext, variable: Any, axes: tuple[Any, ...]) -> Resources:
        """Barriers of different scopes are different ones."""
        from pallasite_std.barriers.allocation import barrier_resources

        del axes
        return barrier_resources(ctx, variable)

    def allocate(
        self, ctx: RuleContext, variable: Any, axes: tuple[Any, ...]
    ) -> AbstractContextManager[Any]:
        """Behind the scoped allocations; initialised where the kernel begins."""
        from pallasite_std.barriers.allocation import allocate_barriers

        del axes
        manager: AbstractContextManager[Any] = allocate_barriers(ctx, variable)
        return manager

    def view(self, ctx: RuleContext, reference: Any, transform: Any) -> Any:
        """Some of an array of barriers."""
        from pallasite_std.views.barriers import view_barriers

        return view_barriers(ctx, reference, transform)


class Semaphores(MemorySpace):
    """Counters of a block, in global memory that the launch clears."""

    name = "SEMAPHORES"

    def resources(self, ctx: EstimatorContext, variable: Any, axes: tuple[Any, ...]) -> Resources:
        """A block has as many as are live at once."""
        from pallasite.plugin.lowering import Resources
        from pallasite_std.rules.semaphores import BLOCK_SEMAPHORES

        del ctx, axes
        return Resources({BLOCK_SEMAPHORES: math.prod(variable.aval.shape)})

    def allocate(
        self, ctx: RuleContext, variable: Any, axes: tuple[Any, ...]
    ) -> AbstractContextManager[Any]:
        """The next ones of the block's part."""
        from pallasite_std.rules.semaphores import block_semaphores

        del axes
        return block_semaphores(ctx, variable.aval)


BARRIERS = Barriers()
SEMAPHORES = Semaphores()


def space_of(aval: Any) -> MemorySpace:
    """Where a scope's variable is allocated.

    References to semaphores are ones to global memory to JAX, as they are where they are used.
    """
    space = memory_space_of(aval)
    if _jax.issubdtype(getattr(aval, "dtype", None), _jax.semaphore_dtype):
        return SEMAPHORES
    return space if isinstance(space, MemorySpace) else GMEM


def note_space(ctx: RuleContext, space: MemorySpace) -> None:
    """Notes that a space of a plugin that did not come with Pallasite emits code."""
    owner = ctx.kernel.registry.owners_of_spaces.get(space.name, "standard")
    if not is_own(owner):
        note_code(f"memory space {space.name} of plugin {manager().label(owner)}")
