"""Ways to make register layouts: strided over the threads, and by tiling."""

from __future__ import annotations

import dataclasses
import functools
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


@functools.lru_cache(maxsize=4096)
def padded(shape: tuple[int, ...], vector_length: int = 1) -> RegisterLayout:
    """The threads in powers of two over the dimensions, each of which is padded to whole numbers.

    Of the ways to distribute them, one with few elements in each lane, and whose lanes access
    neighbours in row-major memory.

    Raises:
      InvalidValueError: ``vector_length`` does not divide the last extent.
    """
    if not shape or vector_length < 1 or shape[-1] % vector_length:
        raise InvalidValueError(f"vectors of {vector_length} do not divide rows of shape {shape}")
    vectors = (*shape[:-1], shape[-1] // vector_length)
    best: tuple[int, int, tuple[int, ...], tuple[int, ...]] | None = None
    for lanes in reversed(_splits(LANES, len(shape))):
        if any(n > 1 and n >= 2 * e for n, e in zip(lanes, vectors, strict=True)):
            continue
        touched = _sectors(shape, lanes, vector_length)
        least = -(-math.prod(-(-e // n) for e, n in zip(vectors, lanes, strict=True)) // WARPS)
        if best is not None and least * (16 * vector_length + 2 * touched + 1) > best[0]:
            continue
        for warps in _splits(WARPS, len(shape)):
            threads = [a * b for a, b in zip(lanes, warps, strict=True)]
            if any(n > 1 and n >= 2 * e for n, e in zip(threads, vectors, strict=True)):
                continue
            count = math.prod(-(-e // n) for e, n in zip(vectors, threads, strict=True))
            # Few warps share a row, so that they exchange little where rows are reduced; nor do
            # they where other dimensions are, if warps lie along one.
            shared = warps[-1] if len(shape) > 1 else 1
            shared += 4 * max(0, sum(n > 1 for n in warps) - 1)
            key = (count * (16 * vector_length + 2 * touched + shared), touched, lanes, warps)
            if best is None or key < best:
                best = key
    assert best is not None  # One thread along each dimension is always possible.
    dims = []
    inner = [1, 1]
    for dim in reversed(range(len(shape))):
        own = []
        for split, owner, place in ((best[2], Owner.LANE, 0), (best[3], Owner.WARP, 1)):
            own.append(Digit(split[dim], owner, inner[place]))
            inner[place] *= split[dim]
        count = -(-vectors[dim] // (own[0].size * own[1].size))
        dims.append((Digit(count, Owner.REGISTER, 1), *reversed(own)))
    dims[0] = (*dims[0], Digit(vector_length, Owner.VECTOR, 1))
    return RegisterLayout(shape, tuple(reversed(dims)), vector_length)


def _sectors(shape: tuple[int, ...], lanes: Sequence[int], vector_length: int) -> int:
    """About how many groups of 8 neighbours in row-major memory the lanes access at a time."""
    touched, size = 1, 1
    for dim in reversed(range(len(shape))):
        own = lanes[dim] * (vector_length if size == 1 and dim == len(shape) - 1 else 1)
        touched = min(own * touched, -(-own * size // 8))
        size *= shape[dim]
    return touched


@functools.cache
def _splits(threads: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Powers of two for the dimensions, whose product is at most so many threads."""
    if rank == 0:
        return ((),)
    powers = [1 << bit for bit in range(threads.bit_length())]
    return tuple((own, *rest) for own in powers for rest in _splits(threads // own, rank - 1))


@functools.lru_cache(maxsize=4096)
def even(
    shape: tuple[int, ...], vector_length: int, widest: int = 1, least: int = 1
) -> RegisterLayout:
    """:func:`strided`, or with vectors of ``least`` to ``widest`` elements :func:`padded`, where
    that means much less work for each lane."""
    exact = strided(shape, vector_length)
    if exact.registers == 1:
        return exact
    widths = [n for n in (16, 8, 4, 2, 1) if least <= n <= max(least, widest)]
    others = [padded(shape, n) for n in widths if shape and shape[-1] % n == 0]
    best = min(others, key=_work, default=exact)
    # In a flat layout nothing can be reduced.
    return best if _work(best) * 1.25 < _work(exact) * (2 if exact.flat else 1) else exact


def _work(layout: RegisterLayout) -> int:
    """Of a lane, if a transfer of a register takes as long as the work on two elements."""
    return layout.registers * (layout.vector_length + 2)


def default_vector_length(shape: Sequence[int], bits: int) -> int:
    """The widest vector of at most 16 bytes that fills all threads, else that divides the size; of
    few elements of an odd shape, the narrowest of which no thread has several."""
    size, threads = math.prod(shape), LANES * WARPS
    widths = [n for n in (128, 64, 32, 16, 8, 4, 2, 1) if n * bits <= 128 and size % n == 0]
    few = [n for n in reversed(widths) if n * bits >= 8 and size <= n * threads]
    few = few if size & (size - 1) else []
    return next((n for n in widths if size % (n * threads) == 0), [*few, *widths, 1][0])


def default_strided(shape: Sequence[int], bits: int) -> RegisterLayout:
    """:func:`even` with :func:`default_vector_length` for elements of ``bits`` bits."""
    return even(tuple(shape), default_vector_length(shape, bits), 128 // bits, max(1, 8 // bits))


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
