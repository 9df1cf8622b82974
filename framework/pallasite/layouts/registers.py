"""Register layouts: which lane, register and vector element holds each element of an array.

A :class:`RegisterLayout` is for one static shape. It writes every logical index as a mixed-radix
number whose digits are read off the warp, the lane, the register number or the position in the
register's vector (:mod:`pallasite.layouts.digits`). Warp and lane bits that no digit reads mean
that several threads hold the same elements. Digits that go beyond a dimension's extent make
padding: places that hold no element, whose values are undefined. Registers are numbered row-major
over the register digits in the order of their occurrence, so two layouts that place every element
alike and number the registers alike compare equal.

Operations that need no data movement between threads return a :class:`Rearrangement`: the new
layout and, for each new register, where its elements are found in the old registers.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from pallasite.errors import InvalidValueError
from pallasite.layouts import digits as dg
from pallasite.layouts import reduction, transforms
from pallasite.layouts.digits import LANES, WARPS, Digit, Digits, Owner

type Source = tuple[int, int]
"""Where an element is found: (old register, element in its vector)."""


class Layout(abc.ABC):
    """Base of :class:`RegisterLayout` and :class:`SplatLayout`."""

    shape: tuple[int, ...]
    vector_length: int

    @property
    def size(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    @abc.abstractmethod
    def registers(self) -> int:
        """Number of registers (vectors of ``vector_length`` elements) in every lane."""

    @property
    @abc.abstractmethod
    def replication(self) -> int:
        """How many threads hold each element."""

    def transpose(self, permutation: Sequence[int]) -> Rearrangement:
        """Dimension ``i`` of the result is dimension ``permutation[i]``."""
        return transforms.transpose(self, permutation)

    def reshape(self, shape: Sequence[int]) -> Rearrangement:
        """The same row-major sequence of elements in another shape."""
        return transforms.reshape(self, shape)

    def expand_dims(self, dims: Sequence[int]) -> Rearrangement:
        """Inserts dimensions of extent 1; ``dims`` are their places in the result."""
        return transforms.expand_dims(self, dims)

    def squeeze(self, dims: Sequence[int]) -> Rearrangement:
        """Removes dimensions of extent 1."""
        return transforms.squeeze(self, dims)

    def slice(self, starts: Sequence[int], sizes: Sequence[int]) -> Rearrangement:
        """The part ``[start, start + size)`` of every dimension; only whole registers."""
        return transforms.slice_(self, tuple(starts), tuple(sizes))

    def broadcast_in_dim(self, shape: Sequence[int], dims: Sequence[int]) -> Rearrangement:
        """Dimension ``i`` becomes ``dims[i]`` of ``shape``; copies are made in registers."""
        return transforms.broadcast_in_dim(self, shape, dims)

    def broadcast_with_target(self, target: Layout, dims: Sequence[int]) -> Rearrangement:
        """Like :meth:`broadcast_in_dim`, into a layout that is given."""
        return transforms.broadcast_with_target(self, target, dims)

    def reduce(self, axes: Sequence[int]) -> Layout:
        """The layout that is left when the elements along ``axes`` have been combined."""
        return transforms.reduce(self, axes)

    def reduction_plan(self, axes: Sequence[int]) -> reduction.ReductionPlan:
        """How to combine the elements along ``axes``."""
        return reduction.reduction_plan(self, axes)


@dataclasses.dataclass(frozen=True)
class Rearrangement:
    """A new layout of elements that every thread already holds.

    Attributes:
      layout: the new layout.
      sources: for each new register, for each element of its vector, the old (register, element).
    """

    layout: Layout
    sources: tuple[tuple[Source, ...], ...]

    @property
    def registers(self) -> tuple[int, ...] | None:
        """For each new register the old one it equals; None if vectors are taken apart."""
        whole = tuple(range(self.layout.vector_length))
        result = []
        for sources in self.sources:
            if tuple(e for _, e in sources) != whole or len({r for r, _ in sources}) != 1:
                return None
            result.append(sources[0][0])
        return tuple(result)


@dataclasses.dataclass(frozen=True)
class SplatLayout(Layout):
    """All elements are equal; every lane holds the value in one scalar register."""

    shape: tuple[int, ...] = ()

    @property
    def vector_length(self) -> int:  # type: ignore[override]
        """Always 1: the register is a scalar."""
        return 1

    @property
    def registers(self) -> int:
        """Always 1."""
        return 1

    @property
    def replication(self) -> int:
        """Every thread holds the value."""
        return LANES * WARPS

    def __str__(self) -> str:
        return f"splat{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class RegisterLayout(Layout):
    """A placement of the elements of an array of static shape over a warpgroup's registers.

    The constructor brings the digits into canonical form: no digits of size 1, register digits
    renumbered row-major, joinable neighbours joined, ``flat`` only where it is needed.

    Attributes:
      shape: the logical shape; every extent is at least 1.
      dims: for each dimension its digits, major to minor; their sizes multiply to the extent, or
        to more, which is padding. If ``flat``, a single entry that describes the row-major
        flattened array, behind whose end padding may lie.
      vector_length: elements per register; the vector digits address exactly that many.
      flat: some digit straddles the boundary between two dimensions.

    Raises:
      InvalidValueError: digits that do not fit the shape, or that read one thread bit twice.
    """

    shape: tuple[int, ...]
    dims: tuple[Digits, ...]
    vector_length: int = 1
    flat: bool = False

    def __post_init__(self) -> None:
        shape, dims, flat = _canonical(tuple(self.shape), tuple(map(tuple, self.dims)), self.flat)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "flat", flat)
        if dg.count(self.digits, Owner.VECTOR) != self.vector_length:
            raise InvalidValueError(
                f"the vector digits of {self} do not address vectors of {self.vector_length}"
            )

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Layouts are keys of many caches, and have many digits.
        return hash((self.shape, self.dims, self.vector_length, self.flat))

    @functools.cached_property
    def digits(self) -> Digits:
        """All digits, dimensions major to minor; those of the row-major flattened array."""
        return tuple(itertools.chain.from_iterable(self.dims))

    @functools.cached_property
    def extents(self) -> tuple[int, ...]:
        """The shape with padding; without it, if that lies behind the flattened array."""
        return self.shape if self.flat else tuple(dg.count(dim) for dim in self.dims)

    @property
    def is_padded(self) -> bool:
        """Whether some places hold no element."""
        return dg.count(self.digits) != self.size

    def thread_reach(self, dim: int) -> int:
        """The most that lane and warp add to the index along a dimension."""
        return sum((d.size - 1) * w for d, w in self.weighted_dims[dim] if d.owner.is_thread)

    def thread_step(self, dim: int) -> int:
        """What all that lane and warp add to the index along a dimension is a multiple of; 0 if
        they add nothing."""
        return math.gcd(*(w for d, w in self.weighted_dims[dim] if d.owner.is_thread))

    @functools.cached_property
    def registers(self) -> int:
        """Number of registers in every lane."""
        return dg.count(self.digits, Owner.REGISTER)

    @functools.cached_property
    def lane_count(self) -> int:
        """Number of lanes of a warp that hold different elements."""
        return dg.count(self.digits, Owner.LANE)

    @functools.cached_property
    def warp_count(self) -> int:
        """Number of warps that hold different elements."""
        return dg.count(self.digits, Owner.WARP)

    @property
    def replication(self) -> int:
        """How many threads hold an element, at most (fewer if a count does not divide)."""
        return -(-LANES // self.lane_count) * -(-WARPS // self.warp_count)

    @functools.cached_property
    def weighted_dims(self) -> tuple[tuple[tuple[Digit, int], ...], ...]:
        """Per entry of ``dims``, pairs (digit, weight): the index is the sum of value x weight."""
        result = []
        for dim in self.dims:
            weight, pairs = 1, []
            for digit in reversed(dim):
                pairs.append((digit, weight))
                weight *= digit.size
            result.append(tuple(reversed(pairs)))
        return tuple(result)

    def register_indices(self) -> list[tuple[int, ...]]:
        """For each register the part of the index that its number contributes.

        One coordinate per entry of ``dims``: a logical multi-index, or a 1-tuple with the
        row-major linear index if ``flat``.
        """
        return [
            tuple(
                sum(d.value(register) * w for d, w in dim if d.owner is Owner.REGISTER)
                for dim in self.weighted_dims
            )
            for register in range(self.registers)
        ]

    def element_at(self, warp: int, lane: int, register: int, vector: int = 0) -> tuple[int, ...]:
        """The logical multi-index of the element at a place; the meaning of the layout.

        It is outside the shape where the place is padding."""
        place = {Owner.WARP: warp, Owner.LANE: lane, Owner.REGISTER: register, Owner.VECTOR: vector}
        index = tuple(
            sum(d.value(place[d.owner]) * w for d, w in dim) for dim in self.weighted_dims
        )
        if not self.flat:
            return index
        inner = self.size // self.shape[0]
        return (index[0] // inner, *dg.unravel(index[0] % inner, self.shape[1:]))

    def guards(
        self, register: int, vector: int = 0, axes: Sequence[int] | None = None
    ) -> tuple[tuple[int, int], ...] | None:
        """What makes a place one of an element, in a layout with padding (along some axes).

        Returns:
          Pairs of a dimension and a limit that what lane and warp add to the index along it has to
          be below; empty if every thread has an element there, None if none has. In a flat layout
          dimension 0 is the flattened array.
        """
        limits: list[tuple[int, int]] = []
        if self.is_padded and self.flat:
            limits = [(0, self.size - self.part_of_register(register, vector))]
        elif self.is_padded:
            limits = [
                (d, self.shape[d] - start)
                for d, start in enumerate(self.element_at(0, 0, register, vector))
                if axes is None or d in axes
            ]
        if any(limit <= 0 for _, limit in limits):
            return None
        # Limits that mean the same are the same.
        steps = [self.thread_step(d) or 1 for d, _ in limits]
        limits = [(d, -(-n // step) * step) for (d, n), step in zip(limits, steps, strict=True)]
        return tuple((d, limit) for d, limit in limits if self.thread_reach(d) >= limit)

    def part_of_register(self, register: int, vector: int, dim: int = 0) -> int:
        """What register and vector element add to the index of an entry of ``dims``."""
        place = {Owner.REGISTER: register, Owner.VECTOR: vector, Owner.LANE: 0, Owner.WARP: 0}
        return sum(d.value(place[d.owner]) * w for d, w in self.weighted_dims[dim])

    @functools.cached_property
    def lane_mask(self) -> int:
        """Bit ``i`` is set if lane ``i`` is the first of the lanes with the same elements."""
        return _primary_mask(self.digits, Owner.LANE, LANES)

    @functools.cached_property
    def warp_mask(self) -> int:
        """Bit ``i`` is set if warp ``i`` is the first of the warps with the same elements."""
        return _primary_mask(self.digits, Owner.WARP, WARPS)

    def __str__(self) -> str:
        dims = ", ".join("(" + " ".join(map(str, dim)) + ")" for dim in self.dims)
        return f"{list(self.shape)}:{'flat ' if self.flat else ''}[{dims}]"


@functools.lru_cache(maxsize=1024)
def _primary_mask(digits: Digits, owner: Owner, total: int) -> int:
    own = [d for d in digits if d.owner is owner]
    return sum(1 << i for i in range(total) if sum(d.value(i) * d.stride for d in own) == i)


def _check_threads(digits: Digits, owner: Owner, total: int) -> None:
    reach = 1
    for digit in sorted((d for d in digits if d.owner is owner), key=lambda d: d.stride):
        if digit.stride % reach or digit.stride * digit.size > total:
            raise InvalidValueError(
                f"the {owner.value} digits overlap or exceed the {total} {owner.value}s",
                got=", ".join(str(d) for d in digits if d.owner is owner),
            )
        reach = digit.stride * digit.size


@functools.lru_cache(maxsize=4096)
def _canonical(
    shape: tuple[int, ...], dims: tuple[Digits, ...], flat: bool
) -> tuple[tuple[int, ...], tuple[Digits, ...], bool]:
    if any(extent < 1 for extent in shape):
        raise InvalidValueError(f"shape {shape} has an empty dimension and no register layout")
    merged = tuple(dg.merge(dim) for dim in dims)
    if flat:
        # Padding behind the flattened array is behind its major dimension.
        split = dg.split_at_dimensions(merged[0], shape, surplus=True)
        if split is not None:
            merged, flat = split, False
    sizes = tuple(dg.count(dim) for dim in merged)
    wanted = (math.prod(shape),) if flat else shape
    pads = [n > extent > 1 for n, extent in zip(sizes, wanted, strict=False)]
    if len(sizes) != len(wanted) or any(
        n != extent and not pad for n, extent, pad in zip(sizes, wanted, pads, strict=True)
    ):
        raise InvalidValueError(f"digits of sizes {sizes} do not describe shape {shape}")
    everything = tuple(itertools.chain.from_iterable(merged))
    _check_threads(everything, Owner.LANE, LANES)
    _check_threads(everything, Owner.WARP, WARPS)
    return shape, tuple(dg.merge(dim) for dim in _renumber(merged)), flat


def _renumber(dims: Sequence[Digits]) -> tuple[Digits, ...]:
    """Registers row-major in order of occurrence; vector elements compacted, order kept."""
    places = [(d, i, j) for i, dim in enumerate(dims) for j, d in enumerate(dim)]
    vectors = sorted((d.stride, i, j) for d, i, j in places if d.owner is Owner.VECTOR)
    strides: dict[tuple[int, int], int] = {}
    reach = 1
    for _, i, j in vectors:
        strides[i, j] = reach
        reach *= dims[i][j].size
    reach = 1
    for digit, i, j in reversed(places):
        if digit.owner is Owner.REGISTER:
            strides[i, j] = reach
            reach *= digit.size
    return tuple(
        tuple(Digit(d.size, d.owner, strides.get((i, j), d.stride)) for j, d in enumerate(dim))
        for i, dim in enumerate(dims)
    )


def rearranged(
    shape: Sequence[int],
    dims: Sequence[Sequence[Digit]],
    flat: bool = False,
    first_register: int = 0,
) -> Rearrangement:
    """The layout with the given digits, whose strides still refer to the *old* numbering.

    A register digit of stride 0 makes copies. ``first_register`` is added to every old register.
    """
    own = tuple(tuple(dim) for dim in dims)
    everything = [d for dim in own for d in dim if d.size > 1]
    vectors = sorted((d for d in everything if d.owner is Owner.VECTOR), key=lambda d: -d.stride)
    elements = _enumerate(vectors)
    layout = RegisterLayout(tuple(shape), own, len(elements), flat)
    old = _enumerate([d for d in everything if d.owner is Owner.REGISTER])
    pairs = itertools.product([first_register + r for r in old], elements)
    return Rearrangement(layout, tuple(itertools.batched(pairs, len(elements))))


def _enumerate(digits: Sequence[Digit]) -> list[int]:
    """The owner's old number for every combination of digit values, row-major."""
    result = [0]
    for d in digits:
        steps = [i * d.stride for i in range(d.size)]
        result = [before + step for before in result for step in steps]
    return result
