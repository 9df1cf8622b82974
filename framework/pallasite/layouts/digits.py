"""Mixed-radix digits: the vocabulary in which register layouts are written.

A warpgroup has 4 warps of 32 lanes. Each lane holds an array in numbered registers, and each
register is a vector of elements. A :class:`Digit` says that a part of an element's index is read
off one of those four numbers, its *owner*.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence

LANES = 32
"""Lanes of a warp."""
WARPS = 4
"""Warps of a warpgroup."""
THREADS = LANES * WARPS
"""Lanes of a warpgroup."""


class Owner(enum.Enum):
    """Which number of (register, vector element, lane, warp) a digit is read from."""

    REGISTER = "register"
    VECTOR = "vector"
    LANE = "lane"
    WARP = "warp"

    @property
    def is_thread(self) -> bool:
        """True for lanes and warps, whose value is only known when the program runs."""
        return self in (Owner.LANE, Owner.WARP)


@dataclasses.dataclass(frozen=True)
class Digit:
    """The number ``(owner index // stride) % size``, a factor of an index along one dimension.

    Attributes:
      size: number of values, at least 1.
      owner: whose number is read: lane 0..31, warp 0..3, register, element of the vector.
      stride: divisor of that number.
    """

    size: int
    owner: Owner
    stride: int

    def value(self, owner_index: int) -> int:
        """The digit's value for the given lane, warp, register or vector element."""
        return owner_index // self.stride % self.size

    def split(self, minor: int) -> tuple[Digit, Digit]:
        """The same digit as two: a major one and a minor one of size ``minor`` (must divide)."""
        assert self.size % minor == 0, (self, minor)
        return (
            Digit(self.size // minor, self.owner, self.stride * minor),
            Digit(minor, self.owner, self.stride),
        )

    def __str__(self) -> str:
        return f"{self.owner.value} {self.size}" + (f"/{self.stride}" if self.stride > 1 else "")


type Digits = tuple[Digit, ...]


def count(digits: Iterable[Digit], owner: Owner | None = None) -> int:
    """The product of the sizes of the digits (of one owner, if given)."""
    return math.prod(d.size for d in digits if owner is None or d.owner is owner)


def merge(digits: Iterable[Digit]) -> Digits:
    """Drops digits of size 1 and joins neighbours that read adjoining parts of one number."""
    result: list[Digit] = []
    for digit in digits:
        if digit.size == 1:
            continue
        if result:
            major = result[-1]
            if major.owner is digit.owner and major.stride == digit.size * digit.stride:
                result[-1] = Digit(major.size * digit.size, digit.owner, digit.stride)
                continue
        result.append(digit)
    return tuple(result)


def take_minor(digits: Sequence[Digit], size: int) -> tuple[Digits, Digits] | None:
    """Cuts off the minor digits whose sizes multiply to ``size``.

    Returns:
      (the remaining major digits, the minor ones), or None when a digit would have to be cut at
      a place that does not divide it.
    """
    majors = list(digits)
    minors: list[Digit] = []
    while size > 1:
        if not majors:
            return None
        digit = majors.pop()
        if size % digit.size == 0:
            minors.append(digit)
            size //= digit.size
        elif digit.size % size == 0:
            major, minor = digit.split(size)
            majors.append(major)
            minors.append(minor)
            size = 1
        else:
            return None
    return tuple(majors), tuple(reversed(minors))


def split_at_dimensions(
    digits: Sequence[Digit], shape: Sequence[int], *, surplus: bool = False
) -> tuple[Digits, ...] | None:
    """Distributes the digits of a row-major flattened array over the dimensions of ``shape``.

    With ``surplus``, the first dimension of more than one element gets what is left over.
    Returns None when a digit straddles two dimensions and cannot be cut between them.
    """
    dims: list[Digits] = []
    remaining: Digits = tuple(digits)
    top = next((d for d, n in enumerate(shape) if n > 1), 0) if surplus else -1
    for dim, extent in reversed(list(enumerate(shape))):
        if dim == top:
            dims += [remaining, *[()] * dim]
            break
        taken = take_minor(remaining, extent)
        if taken is None:
            return None
        remaining, minors = taken
        dims.append(minors)
    return tuple(reversed(dims))


def refine(first: Sequence[Digit], second: Sequence[Digit]) -> list[tuple[Digit, Digit]] | None:
    """Cuts two digit lists into pairs of equal sizes, major to minor.

    Returns None when a boundary of one list falls inside a digit of the other where it does not
    divide it, or when the total sizes differ.
    """
    left, right = list(first), list(second)
    pairs: list[tuple[Digit, Digit]] = []
    while left and right:
        a, b = left.pop(), right.pop()
        if a.size > b.size:
            if a.size % b.size:
                return None
            major, a = a.split(b.size)
            left.append(major)
        elif b.size > a.size:
            if b.size % a.size:
                return None
            major, b = b.split(a.size)
            right.append(major)
        pairs.append((a, b))
    if left or right:
        return None
    pairs.reverse()
    return pairs


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The multi-index of a row-major linear index."""
    result: list[int] = []
    for extent in reversed(shape):
        result.append(index % extent)
        index //= extent
    return tuple(reversed(result))
