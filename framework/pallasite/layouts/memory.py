"""Memory layouts: where in memory each element of an array lies.

Every logical dimension is a mixed-radix number of :class:`Extent` digits, each with a stride of
its own, so that tiled arrays are arrays of their logical shape. A swizzle permutes 16-byte chunks
by the byte address, as the TMA engine and the tensor cores do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from pallasite.errors import InvalidValueError

BANKS = 32
"""Banks of shared memory."""

BANK_BYTES = 4
"""Bytes of a bank's words: accesses of a warp to different words of one bank conflict."""

SWIZZLES = (16, 32, 64, 128)
"""Swizzle widths in bytes; 16 means none."""


@dataclasses.dataclass(frozen=True)
class Extent:
    """A digit of an index: ``size`` values, ``stride`` elements apart in memory."""

    size: int
    stride: int

    def __str__(self) -> str:
        return f"{self.size}:{self.stride}"


type Extents = tuple[Extent, ...]
"""Extents of one logical dimension, major to minor."""


@dataclasses.dataclass(frozen=True)
class OffsetTerm:
    """``((start // divisor) % modulus) * stride`` elements; no modulus if it is None.

    Attributes:
      values: how many values the quotient has, 0 and up, after the modulus; None if unknown.
    """

    divisor: int
    modulus: int | None
    stride: int
    values: int | None = dataclasses.field(default=None, compare=False)

    def value(self, start: int) -> int:
        """The term for a known start."""
        quotient = start // self.divisor
        return (quotient if self.modulus is None else quotient % self.modulus) * self.stride


@dataclasses.dataclass(frozen=True)
class MemorySlice:
    """A part of a memory layout.

    Attributes:
      layout: layout of the part.
      offset: element offset of its first element, as far as it is static.
      terms: what a dynamic start adds to the offset (empty for a static start).
      alignment: a dynamic start is assumed to be a multiple of this.
    """

    layout: MemoryLayout
    offset: int = 0
    terms: tuple[OffsetTerm, ...] = ()
    alignment: int = 1

    def element_offset(self, start: int = 0) -> int:
        """The element offset of the part for a known value of the dynamic start."""
        return self.offset + sum(term.value(start) for term in self.terms)


@dataclasses.dataclass(frozen=True)
class MemoryLayout:
    """Placement of an array in memory.

    The constructor drops extents of 1 and joins neighbours that are one evenly spaced run.

    Attributes:
      dims: for each logical dimension its extents, major to minor.
      swizzle: width of the swizzled rows in bytes: 16 (none), 32, 64 or 128.
      element_bits: bits of one element.

    Raises:
      InvalidValueError: an unknown swizzle or a size below 1.
    """

    dims: tuple[Extents, ...]
    swizzle: int = 16
    element_bits: int = 32

    def __post_init__(self) -> None:
        if self.swizzle not in SWIZZLES:
            raise InvalidValueError(
                f"a swizzle of {self.swizzle} bytes does not exist", expected="16, 32, 64 or 128"
            )
        if any(e.size < 1 for dim in self.dims for e in dim):
            raise InvalidValueError("a memory layout needs extents of at least 1", got=str(self))
        object.__setattr__(self, "dims", tuple(merge_extents(dim) for dim in self.dims))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.swizzle, self.element_bits))

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return tuple(math.prod(e.size for e in dim) for dim in self.dims)

    @property
    def size(self) -> int:
        """Number of logical elements."""
        return math.prod(self.shape)

    @property
    def flat_extents(self) -> Extents:
        """The extents of the row-major flattened array."""
        return merge_extents([e for dim in self.dims for e in dim])

    @property
    def cosize(self) -> int:
        """Number of elements from the first to the last address, both included."""
        return 1 + sum((e.size - 1) * abs(e.stride) for dim in self.dims for e in dim)

    @property
    def is_contiguous(self) -> bool:
        """True if the elements lie one after the other in row-major order, without swizzle."""
        extents = self.flat_extents
        packed = not extents or (len(extents) == 1 and extents[0].stride == 1)
        return packed and self.swizzle == 16

    @property
    def is_dense(self) -> bool:
        """True if the elements fill consecutive addresses in some order."""
        reach = 1
        for extent in sorted(self.flat_extents, key=lambda e: e.stride):
            if extent.stride != reach:
                return False
            reach *= extent.size
        return True

    def contiguous_run(self, dim: int) -> int:
        """How many consecutive indices along ``dim`` are consecutive in memory."""
        extents = self.dims[dim]
        return extents[-1].size if extents and extents[-1].stride == 1 else 1

    def offset(self, index: Sequence[int]) -> int:
        """Element offset of a multi-index, before the swizzle."""
        offset = 0
        for i, extents in zip(index, self.dims, strict=True):
            for e in reversed(extents):
                i, value = divmod(i, e.size)
                offset += value * e.stride
        return offset

    def swizzle_bytes(self, address: int) -> int:
        """The byte address at which the swizzle puts what belongs to ``address``.

        For a swizzle of ``s`` bytes the bits [4, 4 + log2(s / 16)) are exclusive-ored with the
        bits [7, 7 + log2(s / 16)).
        """
        return swizzle_bytes(address, self.swizzle)

    def byte_address(self, index: Sequence[int]) -> int:
        """Swizzled byte address of an element, from a base aligned to :attr:`atom_bytes`."""
        return self.swizzle_bytes(self.offset(index) * self.element_bits // 8)

    @property
    def atom_bytes(self) -> int:
        """The period of the swizzle in bytes: 8 times its width, or 1 if there is none."""
        return 1 if self.swizzle == 16 else 8 * self.swizzle

    def with_swizzle(self, swizzle: int) -> MemoryLayout:
        """The same placement with another swizzle (bytes)."""
        return dataclasses.replace(self, swizzle=swizzle)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the one of the widest steps in memory to that of the narrowest.

        Dimensions of extent 1, which have no steps, keep their places.
        """
        moved = [i for i, dim in enumerate(self.dims) if dim]
        by_step = iter(sorted(moved, key=lambda i: -min(e.stride for e in self.dims[i])))
        return tuple(next(by_step) if dim else i for i, dim in enumerate(self.dims))

    def with_dims(self, dims: Sequence[Sequence[Extent]]) -> MemoryLayout:
        """Other dimensions over the same memory."""
        return MemoryLayout(tuple(map(tuple, dims)), self.swizzle, self.element_bits)

    def transpose(self, permutation: Sequence[int]) -> MemoryLayout:
        """Dimension ``i`` of the result is dimension ``permutation[i]``."""
        if sorted(permutation) != list(range(len(self.dims))):
            raise InvalidValueError(
                f"{tuple(permutation)} is not a permutation of the dimensions of {self.shape}"
            )
        return self.with_dims([self.dims[p] for p in permutation])

    def reshape(self, shape: Sequence[int]) -> MemoryLayout:
        """The same row-major sequence of elements in another shape.

        Raises:
          InvalidValueError: the sizes differ, or an extent would have to be cut unevenly.
        """
        shape = tuple(shape)
        if math.prod(shape) != self.size:
            raise InvalidValueError(f"cannot reshape a reference of shape {self.shape} to {shape}")
        remaining: Extents = self.flat_extents
        dims: list[Extents] = []
        for size in reversed(shape):
            cut = cut_minor(remaining, size)
            if cut is None:
                raise InvalidValueError(
                    f"cannot reshape a reference of shape {self.shape} to {shape}: its elements "
                    f"lie in memory as {self}",
                    expected="extents that fall on or divide the tiles of the memory layout",
                )
            remaining, minor = cut
            dims.append(minor)
        return self.with_dims(dims[::-1])

    def tile(self, tiling: Sequence[int]) -> MemoryLayout:
        """Splits the trailing dimensions: (..., m, n) becomes (..., m/t0, n/t1, t0, t1).

        Raises:
          InvalidValueError: a tile extent does not divide its dimension.
        """
        first = len(self.dims) - len(tiling)
        if first < 0:
            raise InvalidValueError(f"the tiling {tuple(tiling)} has more dimensions than "
                                    f"shape {self.shape}")  # fmt: skip
        counts: list[Extents] = []
        tiles: list[Extents] = []
        for dim, extent in enumerate(tiling, first):
            cut = cut_minor(self.dims[dim], extent)
            if cut is None:
                raise InvalidValueError(
                    f"dimension {dim} of shape {self.shape} does not split into tiles of {extent}",
                    got=str(self),
                    expected=f"a tile extent that divides {self.shape[dim]} and the memory layout",
                )
            counts.append(cut[0])
            tiles.append(cut[1])
        return self.with_dims([*self.dims[:first], *counts, *tiles])

    def untile(self, tiling: Sequence[int]) -> MemoryLayout:
        """Joins counts and tiles: (..., m/t0, n/t1, t0, t1) becomes (..., m, n).

        Raises:
          InvalidValueError: the trailing extents are not the tiling.
        """
        rank = len(tiling)
        first = len(self.dims) - 2 * rank
        if first < 0 or self.shape[first + rank :] != tuple(tiling):
            raise InvalidValueError(
                f"a reference of shape {self.shape} is not tiled by {tuple(tiling)}",
                expected=f"{2 * rank} or more dimensions that end in {tuple(tiling)}",
            )
        joined = [self.dims[first + i] + self.dims[first + rank + i] for i in range(rank)]
        return self.with_dims([*self.dims[:first], *joined])

    def slice(self, dim: int, start: int | None, size: int) -> MemorySlice:
        """The indices ``[start, start + size)`` of a dimension; ``start`` None is dynamic.

        Raises:
          InvalidValueError: the part is out of bounds, or it cuts a tile unevenly.
        """
        return _slice(self, dim, start, size)

    def index(self, dim: int, start: int | None) -> MemorySlice:
        """One index of a dimension, which is dropped; ``start`` None is dynamic."""
        return _index(self, dim, start)

    def _slice_extents(
        self, dim: int, start: int | None, size: int
    ) -> tuple[Extents, int, tuple[OffsetTerm, ...], int]:
        known = 0 if start is None else start
        if known < 0 or size < 1 or known + size > self.shape[dim]:
            raise InvalidValueError(
                f"the slice of {size} elements from {'a dynamic start' if start is None else start}"
                f" is outside dimension {dim} of shape {self.shape}"
            )
        kept: list[Extent] = []
        offset, rest, inner, alignment = 0, size, 1, 1
        terms: list[OffsetTerm] = []
        for position in reversed(range(len(self.dims[dim]))):
            extent = self.dims[dim][position]
            value = known // inner % extent.size
            if rest % extent.size == 0 and rest > 1:
                fits, rest = value == 0, rest // extent.size
                kept.append(extent)
                alignment = inner * extent.size
            else:
                straddles = start is None and position > 0 and extent.size % rest != 0
                fits = value + rest <= extent.size and not straddles
                if position > 0 and rest > 1:
                    alignment = inner * rest
                kept.append(Extent(rest, extent.stride))
                modulus = extent.size if position > 0 else None
                terms.append(OffsetTerm(inner, modulus, extent.stride, extent.size))
                offset += value * extent.stride
                rest = 1
            if not fits:
                raise InvalidValueError(
                    f"the slice of {size} elements from "
                    f"{'a dynamic start' if start is None else start} of dimension {dim} cuts "
                    f"through a tile of shape {self.shape}, which lies in memory as {self}",
                    expected=f"start and size that are multiples of {inner * extent.size}, or that "
                    f"stay within such a block in steps of {inner}",
                )
            inner *= extent.size
        return (
            merge_extents(kept[::-1]),
            offset,
            tuple(terms[::-1]) if start is None else (),
            alignment if start is None else 1,
        )

    def __str__(self) -> str:
        dims = ", ".join("(" + " ".join(map(str, dim)) + ")" for dim in self.dims)
        swizzle = "" if self.swizzle == 16 else f" swizzle {self.swizzle}"
        return f"[{dims}]{swizzle}"


# Layout inference asks for the same slices of the same layouts again and again.
@functools.lru_cache(maxsize=4096)
def _slice(layout: MemoryLayout, dim: int, start: int | None, size: int) -> MemorySlice:
    extents, offset, terms, alignment = layout._slice_extents(dim, start, size)
    dims = [*layout.dims[:dim], extents, *layout.dims[dim + 1 :]]
    return MemorySlice(layout.with_dims(dims), offset, terms, alignment)


@functools.lru_cache(maxsize=4096)
def _index(layout: MemoryLayout, dim: int, start: int | None) -> MemorySlice:
    part = _slice(layout, dim, start, 1)
    dims = [*layout.dims[:dim], *layout.dims[dim + 1 :]]
    return dataclasses.replace(part, layout=layout.with_dims(dims))


def row_major(shape: Sequence[int], element_bits: int, swizzle: int = 16) -> MemoryLayout:
    """Elements one after the other, the last index fastest."""
    return _row_major(tuple(shape), element_bits, swizzle)


@functools.lru_cache(maxsize=1024)
def _row_major(shape: tuple[int, ...], element_bits: int, swizzle: int) -> MemoryLayout:
    dims = [(Extent(size, math.prod(shape[dim + 1 :])),) for dim, size in enumerate(shape)]
    return MemoryLayout(tuple(dims), swizzle, element_bits)


def swizzle_bytes(address: int, swizzle: int) -> int:
    """Swizzles a byte address; see :meth:`MemoryLayout.swizzle_bytes`."""
    return address ^ (address >> 3 & (swizzle // 16 - 1) << 4)


def merge_extents(extents: Sequence[Extent]) -> Extents:
    """Drops extents of 1 and joins neighbours that are one evenly spaced run."""
    result: list[Extent] = []
    for extent in extents:
        if extent.size == 1:
            continue
        if result and result[-1].stride == extent.size * extent.stride:
            result[-1] = Extent(result[-1].size * extent.size, extent.stride)
        else:
            result.append(extent)
    return tuple(result)


def cut_minor(extents: Sequence[Extent], size: int) -> tuple[Extents, Extents] | None:
    """Cuts off the minor extents whose sizes multiply to ``size``: (major, minor), or None."""
    majors, minors = list(extents), []
    while size > 1:
        if not majors:
            return None
        extent = majors.pop()
        if size % extent.size == 0:
            minors.append(extent)
            size //= extent.size
        elif extent.size % size == 0:
            majors.append(Extent(extent.size // size, extent.stride * size))
            minors.append(Extent(size, extent.stride))
            size = 1
        else:
            return None
    return tuple(majors), tuple(reversed(minors))
