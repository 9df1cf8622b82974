"""Parts of memory, as far as they are known without running a kernel, for checks of jaxprs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pallasite.plugin import jax_internals as _jax
from pallasite.plugin import plugins

if TYPE_CHECKING:
    from pallasite.plugin import ViewRule


@dataclasses.dataclass(frozen=True)
class IndexRange:
    """Indices of one dimension: the start is a number or a symbol, None if nothing is known."""

    start: Any
    size: int

    def overlaps(self, other: IndexRange, extent: int) -> bool:
        """Whether they certainly have an index in common."""
        if extent in (self.size, other.size):
            return True
        if isinstance(self.start, int) and isinstance(other.start, int):
            return self.start < other.start + other.size and other.start < self.start + self.size
        return self.start is not None and self.start is other.start

    def covers(self, other: IndexRange, extent: int) -> bool:
        """Whether all indices of the other one are certainly among these."""
        if self.size == extent:
            return True
        if isinstance(self.start, int) and isinstance(other.start, int):
            return self.start <= other.start and (
                other.start + other.size <= self.start + self.size
            )
        return self.start is not None and self.start is other.start and other.size <= self.size


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryRegion:
    """A box of an array in memory, or if it is not ``exact``, something within that box.

    Attributes:
      memory: what stands for the allocation; compared by identity.
      member: which of the arrays that share it, if it is a union.
      form: the views between that array and the one that is indexed.
      ranges: of indices, one for each dimension of the array that is indexed; None for all of it.
      extents: of that array.
      exact: see above.
    """

    memory: Any
    member: Any
    form: tuple[Any, ...]
    ranges: tuple[IndexRange, ...] | None
    extents: tuple[int, ...]
    exact: bool

    def overlaps(self, other: MemoryRegion) -> bool:
        """Whether they certainly have an element in common."""
        if self.memory is not other.memory or self.member != other.member:
            return False
        if self.ranges is None or other.ranges is None:
            return True
        if self.form != other.form:
            return False
        if self.exact and other.exact:
            return self._all(IndexRange.overlaps, other)
        return (self.exact and self._all(IndexRange.covers, other)) or (
            other.exact and other._all(IndexRange.covers, self)
        )

    def _all(
        self, relation: Callable[[IndexRange, IndexRange, int], bool], other: MemoryRegion
    ) -> bool:
        assert self.ranges is not None and other.ranges is not None
        return all(map(relation, self.ranges, other.ranges, self.extents))


class RegionBuilder:
    """What views cover of an allocation, one after the other.

    Attributes:
      member: which of the arrays that share the allocation.
      form: the views before the first index.
      ranges: of indices, one for each dimension of the array that is indexed; None before.
      extents: of that array.
      kept: which of these dimensions the current view has.
      exact: whether the view is all that the ranges select.
      elsewhere: whether it is not in this block's memory.
    """

    def __init__(self) -> None:
        self.member: Any = None
        self.form: list[Any] = []
        self.ranges: list[IndexRange] | None = None
        self.extents: tuple[int, ...] = ()
        self.kept: list[int] = []
        self.exact = True
        self.elsewhere = False

    def inexact(self, transform: Any) -> None:
        """A view that rearranges elements, or of which nothing is known."""
        if self.ranges is None:
            self.form.append(transform)
        else:
            self.exact = False

    def index(self, shape: Sequence[int], indices: Sequence[Any]) -> None:
        """Narrows the view to integers and slices, one for each dimension of ``shape``."""
        if self.ranges is None:
            self.extents = tuple(shape)
            self.ranges = [IndexRange(0, extent) for extent in self.extents]
            self.kept = list(range(len(self.extents)))
        if self.exact:
            self.kept, self.exact = _narrow(self.ranges, self.kept, indices)

    def transpose(self, transform: Any, permutation: Sequence[int]) -> None:
        """Permutes the dimensions of the view."""
        if self.ranges is not None and self.exact:
            self.kept = [self.kept[position] for position in permutation]
        else:
            self.inexact(transform)


def memory_region(
    memory: Any,
    transforms: Sequence[Any],
    rule_of: Callable[[type], ViewRule | None] | None = None,
) -> MemoryRegion | None:
    """The part of an allocation that a view covers; None if it is not in this block's memory.

    Args:
      memory: what stands for the allocation.
      transforms: the view, whose indices are numbers and symbols.
      rule_of: what a class of transforms means, as ``PassContext.view_rule`` says; by default,
        the plugins that are in use now are asked.
    """
    rule_of = rule_of or plugins.registry().view_rule
    builder = RegionBuilder()
    for transform in transforms:
        rule = rule_of(type(transform))
        if rule is None or rule.region is None:
            builder.inexact(transform)
        else:
            rule.region(builder, transform)
        if builder.elsewhere:
            return None
    ranges = None if builder.ranges is None else tuple(builder.ranges)
    form = tuple(builder.form)
    return MemoryRegion(memory, builder.member, form, ranges, builder.extents, builder.exact)


def _narrow(
    ranges: list[IndexRange], kept: Sequence[int], indices: Sequence[Any]
) -> tuple[list[int], bool]:
    """Applies indices to the dimensions that are left; returns those left then, and whether the
    ranges are exactly what is selected."""
    left = []
    exact = True
    for dimension, index in zip(kept, indices, strict=True):
        old = ranges[dimension]
        is_slice = isinstance(index, _jax.Slice)
        start, size = (index.start, index.size) if is_slice else (index, 1)
        if is_slice:
            left.append(dimension)
            if index.stride != 1 or not isinstance(size, int):
                exact = False
                continue
        if size == old.size and is_slice:
            continue
        if isinstance(old.start, int) and isinstance(start, int):
            ranges[dimension] = IndexRange(old.start + start, size)
        elif old.start == 0:
            ranges[dimension] = IndexRange(start, size)
        elif not isinstance(start, int) or start != 0:
            exact = False
        else:
            ranges[dimension] = IndexRange(old.start, size)
    return left, exact
