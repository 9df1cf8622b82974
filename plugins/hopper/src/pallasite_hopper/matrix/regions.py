"""Parts of shared memory, as far as they are known without running a kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import SourceLocation
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.language import transforms as tr


class Memory:
    """An allocation of shared memory, or an array in global memory."""

    def __init__(self, variable: Any):
        aval = variable.aval
        self.shape: tuple[int, ...] = tuple(getattr(aval, "shape", ()))
        self.shared = getattr(aval, "memory_space", None) is MemorySpace.SMEM and hasattr(
            aval, "inner_aval"
        )


class Accumulator:
    """An accumulator.

    Attributes:
      multiplied: where a product is added to it, if one is.
      read: whether anything may read it.
    """

    def __init__(self) -> None:
        self.multiplied: SourceLocation | str | None = None
        self.read = False


@dataclasses.dataclass(frozen=True)
class _Range:
    """Indices of one dimension: the start is a number or a symbol, None if nothing is known."""

    start: Any
    size: int

    def certainly_meets(self, other: _Range, extent: int) -> bool:
        """Whether they have an index in common."""
        if extent in (self.size, other.size):
            return True
        if isinstance(self.start, int) and isinstance(other.start, int):
            return self.start < other.start + other.size and other.start < self.start + self.size
        return self.start is not None and self.start is other.start

    def certainly_covers(self, other: _Range, extent: int) -> bool:
        """Whether all indices of the other one are among these."""
        if self.size == extent:
            return True
        if isinstance(self.start, int) and isinstance(other.start, int):
            return self.start <= other.start and (
                other.start + other.size <= self.start + self.size
            )
        return self.start is not None and self.start is other.start and other.size <= self.size


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """A box of an array in memory, or if it is not ``exact``, something within that box.

    Attributes:
      memory: the allocation.
      member: which of the arrays that share it, if it is a union.
      form: the views between that array and the one that is indexed.
      ranges: of indices, one for each dimension of the array that is indexed; None for all of it.
      extents: of that array.
      exact: see above.
    """

    memory: Memory
    member: Any
    form: tuple[Any, ...]
    ranges: tuple[_Range, ...] | None
    extents: tuple[int, ...]
    exact: bool

    def certainly_meets(self, other: Region) -> bool:
        """Whether they have an element in common."""
        if self.memory is not other.memory or self.member != other.member:
            return False
        if self.ranges is None or other.ranges is None:
            return True
        if self.form != other.form:
            return False
        if self.exact and other.exact:
            return self._all(_Range.certainly_meets, other)
        return (self.exact and self._all(_Range.certainly_covers, other)) or (
            other.exact and other._all(_Range.certainly_covers, self)
        )

    def _all(self, relation: Any, other: Region) -> bool:
        assert self.ranges is not None and other.ranges is not None
        return all(map(relation, self.ranges, other.ranges, self.extents))


def region_of(reference: Any) -> Region | None:
    """The part of shared memory behind a reference; None if it is not in this block's.

    Args:
      reference: a TransformedRef whose ``ref`` is a :class:`Memory`, and whose indices are numbers
        and symbols.
    """
    memory = reference.ref
    if not isinstance(memory, Memory) or not memory.shared:
        return None
    member = None
    form: list[Any] = []
    ranges: list[_Range] | None = None
    extents: tuple[int, ...] = ()
    # Which dimensions of the array the current view has.
    kept: list[int] = []
    exact = True
    for view in reference.transforms:
        if isinstance(view, tr.ClusterRefTransform | tr.PeerMemRef | tr.MulticastRef):
            return None
        if isinstance(view, tr.ExtractAliasedRef):
            member = view
            continue
        if isinstance(view, _jax.NDIndexer):
            if ranges is None:
                extents = tuple(view.shape)
                ranges = [_Range(0, extent) for extent in extents]
                kept = list(range(len(extents)))
            if not exact:
                continue
            kept, exact = _narrow(ranges, kept, view.indices)
        elif ranges is None:
            form.append(view)
        elif isinstance(view, _jax.TransposeTransform) and exact:
            kept = [kept[position] for position in view.permutation]
        else:
            exact = False
    found = None if ranges is None else tuple(ranges)
    return Region(memory, member, tuple(form), found, extents, exact)


def _narrow(
    ranges: list[_Range], kept: Sequence[int], indices: Sequence[Any]
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
            ranges[dimension] = _Range(old.start + start, size)
        elif old.start == 0:
            ranges[dimension] = _Range(start, size)
        elif not isinstance(start, int) or start != 0:
            exact = False
        else:
            ranges[dimension] = _Range(old.start, size)
    return left, exact
