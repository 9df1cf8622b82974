"""Parts of shared memory, as far as they are known without running a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallasite.plugin import SourceLocation, ViewRule
from pallasite.plugin.language import (
    MemorySpace,
    memory_space_of,
)
from pallasite_std.api import MemoryRegion, memory_region


class Memory:
    """An allocation of shared memory, or an array in global memory."""

    def __init__(self, variable: Any):
        aval = variable.aval
        self.shape: tuple[int, ...] = tuple(getattr(aval, "shape", ()))
        space = memory_space_of(aval)
        self.shared = isinstance(space, MemorySpace) and space.is_shared


class Accumulator:
    """An accumulator.

    Attributes:
      multiplied: where a wgmma accumulates into it, if any does.
      read: whether anything may read it.
    """

    def __init__(self) -> None:
        self.multiplied: SourceLocation | str | None = None
        self.read = False


def region_of(
    reference: Any, rule_of: Callable[[type], ViewRule | None] | None = None
) -> MemoryRegion | None:
    """The part of shared memory behind a reference; None if it is not in this block's.

    Args:
      reference: a TransformedRef whose ``ref`` is a :class:`Memory`, and whose indices are numbers
        and symbols.
      rule_of: see :func:`pallasite_std.api.memory_region`.
    """
    memory = reference.ref
    if not isinstance(memory, Memory) or not memory.shared:
        return None
    return memory_region(memory, reference.transforms, rule_of)
