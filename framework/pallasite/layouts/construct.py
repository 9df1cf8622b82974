"""Ways to make register layouts: strided over the threads, and by tiling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from pallasite.errors import InvalidValueError
from pallasite.layouts.digits import LANES, WARPS, Digit, Owner
from pallasite.layouts.registers import RegisterLayout


def strided(shape: Sequence[int], vector_length: int = 1) -> RegisterLayout:
    """Consecutive vectors of the row-major flattened array go to consecutive threads.

    Element ``((register * 128 + warp * 32 + lane) * vector_length + v)`` where the size is a
    multiple of ``128 * vector_length``. For other sizes as many lanes, then warps, as divide the
    number of vectors hold different elements, and the remaining threads hold copies.

    Raises:
      InvalidValueError: ``vector_length`` does not divide the number of elements.
    """
    size = math.prod(shape)
    if vector_length < 1 or size % vector_length:
        raise InvalidValueError(
            f"vectors of {vector_length} elements do not divide shape {tuple(shape)}",
            expected=f"a divisor of {size}",
        )
    vectors = size // vector_length
    lanes = max(n for n in range(1, LANES + 1) if vectors % n == 0)
    warps = max(n for n in range(1, WARPS + 1) if vectors // lanes % n == 0)
    digits = (
        Digit(vectors // (lanes * warps), Owner.REGISTER, 1),
        Digit(warps, Owner.WARP, 1),
        Digit(lanes, Owner.LANE, 1),
        Digit(vector_length, Owner.VECTOR, 1),
    )
    return RegisterLayout(tuple(shape), (digits,), vector_length, flat=True)


def default_vector_length(shape: Sequence[int], bits: int) -> int:
    """The widest vector of at most 16 bytes that fills all threads, else that divides the size."""
    size = math.prod(shape)
    widths = [n for n in (128, 64, 32, 16, 8, 4, 2, 1) if n * bits <= 128]
    for unit in (LANES * WARPS, 1):
        for width in widths:
            if size % (unit * width) == 0:
                return width
    return 1


def default_strided(shape: Sequence[int], bits: int) -> RegisterLayout:
    """:func:`strided` with :func:`default_vector_length` for elements of ``bits`` bits."""
    return strided(shape, default_vector_length(shape, bits))


@dataclasses.dataclass(frozen=True)
class Replicated:
    """An entry of warp or lane dimensions: that many of them hold the same elements."""

    times: int


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tiles applied one after the other, each to the trailing dimensions left by the last.

    One tile replaces its dimensions by (counts..., tile extents...). Ranks must not increase.
    """

    tiles: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiles", tuple(tuple(tile) for tile in self.tiles))
        ranks = [len(tile) for tile in self.tiles]
        if not ranks or min(ranks) < 1 or ranks != sorted(ranks, reverse=True):
            raise InvalidValueError(
                "tiles must be non-empty and of non-increasing rank", got=self.tiles
            )
        if any(extent < 1 for tile in self.tiles for extent in tile):
            raise InvalidValueError("tile extents must be positive", got=self.tiles)

    def __str__(self) -> str:
        return "".join(str(tile) for tile in self.tiles)


@dataclasses.dataclass(frozen=True)
class _Factor:
    dim: int
    size: int
    weight: int


def _factors(shape: tuple[int, ...], tiling: Tiling) -> list[_Factor]:
    factors = [_Factor(dim, size, 1) for dim, size in enumerate(shape)]
    for tile in tiling.tiles:
        if len(tile) > len(factors):
            raise InvalidValueError(
                f"the tiling {tiling} needs at least {len(tile)} dimensions, "
                f"but the shape is {shape}"
            )
        kept, tiled = factors[: -len(tile)], factors[-len(tile) :]
        for factor, extent in zip(tiled, tile, strict=True):
            if factor.size % extent:
                raise InvalidValueError(
                    f"dimension {factor.dim} of shape {shape} does not tile: the tile extent "
                    f"{extent} of {tiling} does not divide {factor.size}",
                    expected=f"dimension {factor.dim} to be a multiple of {factor.weight * extent}",
                )
        counts = [
            _Factor(f.dim, f.size // t, f.weight * t) for f, t in zip(tiled, tile, strict=True)
        ]
        factors = (
            kept + counts + [_Factor(f.dim, t, f.weight) for f, t in zip(tiled, tile, strict=True)]
        )
    return factors


def _owned(
    factors: list[_Factor], rank: int, dims: Sequence[int | Replicated], owner: Owner, total: int
) -> dict[int, Digit]:
    digits: dict[int, Digit] = {}
    stride = 1
    for entry in reversed(tuple(dims)):
        if isinstance(entry, Replicated):
            stride *= entry.times
            continue
        if not -rank <= entry < 0:
            raise InvalidValueError(
                f"the {owner.value} dimension {entry} is not a dimension of the tiled shape",
                expected=f"-{rank} to -1",
            )
        position = len(factors) + entry
        if position in digits:
            raise InvalidValueError(f"the {owner.value} dimension {entry} is given twice")
        digits[position] = Digit(factors[position].size, owner, stride)
        stride *= factors[position].size
    if stride != total:
        raise InvalidValueError(
            f"the {owner.value} dimensions {tuple(dims)} are distributed over {stride}"
            f" {owner.value}s",
            expected=f"exactly {total}; Replicated(n) stands for n {owner.value}s with equal data",
        )
    return digits


def tiled(
    shape: Sequence[int],
    tiling: Tiling,
    warp_dims: Sequence[int | Replicated],
    lane_dims: Sequence[int | Replicated],
    vector_dim: int,
) -> RegisterLayout:
    """A layout given by a tiling of the trailing dimensions of ``shape``.

    Args:
      shape: the logical shape; its trailing extents are multiples of the first tile.
      tiling: the tiles.
      warp_dims: dimensions of the tiled shape (negative), major to minor, distributed over the 4
        warps; or ``Replicated(n)``.
      lane_dims: the same for the 32 lanes.
      vector_dim: the dimension (negative) held in the vector of each register.

    Raises:
      InvalidValueError: the shape does not tile, or the dimensions do not name the threads.
    """
    shape = tuple(shape)
    factors = _factors(shape, tiling)
    rank = sum(map(len, tiling.tiles))
    owned: dict[int, Digit] = {}
    groups = (
        _owned(factors, rank, warp_dims, Owner.WARP, WARPS),
        _owned(factors, rank, lane_dims, Owner.LANE, LANES),
        _owned(factors, rank, (vector_dim,), Owner.VECTOR, factors[vector_dim].size),
    )
    for group in groups:
        twice = owned.keys() & group.keys()
        if twice:
            dim = min(twice) - len(factors)
            raise InvalidValueError(f"dimension {dim} of the tiled shape is used twice")
        owned.update(group)
    dims: list[list[tuple[int, Digit]]] = [[] for _ in shape]
    for position, factor in enumerate(factors):
        digit = owned.get(position, Digit(factor.size, Owner.REGISTER, 1))
        if factor.size > 1:
            dims[factor.dim].append((factor.weight, digit))
    ordered = tuple(tuple(d for _, d in sorted(dim, key=lambda p: -p[0])) for dim in dims)
    return RegisterLayout(shape, ordered, factors[vector_dim].size)
