"""Changes of shape that leave every element in the thread that holds it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from pallasite.errors import InvalidValueError
from pallasite.layouts import conversion
from pallasite.layouts import digits as dg
from pallasite.layouts import registers as rg
from pallasite.layouts.digits import Digit, Digits, Owner


def unchanged(layout: rg.Layout) -> rg.Rearrangement:
    """The identity."""
    elements = range(layout.vector_length)
    return rg.Rearrangement(
        layout, tuple(tuple((r, e) for e in elements) for r in range(layout.registers))
    )


def _splat(shape: Sequence[int]) -> rg.Rearrangement:
    return rg.Rearrangement(rg.SplatLayout(tuple(shape)), (((0, 0),),))


def _registers(layout: rg.Layout) -> rg.RegisterLayout:
    assert isinstance(layout, rg.RegisterLayout)
    return layout


def _unflattened(layout: rg.RegisterLayout, what: str) -> tuple[Digits, ...]:
    if layout.flat:
        raise InvalidValueError(
            f"{what} of the layout {layout}: its threads run across the boundaries of dimensions",
            hint="convert the array to a tiled layout, or to a shape whose minor extents are "
            "powers of two",
        )
    return layout.dims


def transpose(layout: rg.Layout, permutation: Sequence[int]) -> rg.Rearrangement:
    """Dimension ``i`` of the result is dimension ``permutation[i]`` of ``layout``."""
    permutation = tuple(permutation)
    if sorted(permutation) != list(range(len(layout.shape))):
        raise InvalidValueError(
            f"{permutation} is not a permutation of the dimensions of shape {layout.shape}"
        )
    shape = tuple(layout.shape[p] for p in permutation)
    if isinstance(layout, rg.SplatLayout):
        return _splat(shape)
    if permutation == tuple(range(len(shape))):
        return unchanged(layout)
    dims = _unflattened(_registers(layout), "transpose")
    return rg.rearranged(shape, [dims[p] for p in permutation])


def _is_linear(layout: rg.RegisterLayout) -> bool:
    """True if consecutive vectors of the flattened array go to consecutive threads."""
    order = [Owner.REGISTER, Owner.WARP, Owner.LANE, Owner.VECTOR]
    digits = dg.merge(layout.digits)
    places = [order.index(d.owner) for d in digits]
    return places == sorted(set(places)) and all(d.stride == 1 for d in digits)


def reshape(layout: rg.Layout, shape: Sequence[int]) -> rg.Rearrangement:
    """The same row-major sequence of elements in another shape.

    Raises:
      InvalidValueError: the sizes differ, or a digit of a layout that is not strided would
        straddle two dimensions of the new shape.
    """
    shape = tuple(shape)
    if math.prod(shape) != layout.size:
        raise InvalidValueError(
            f"cannot reshape {layout.shape} ({layout.size} elements) to {shape} "
            f"({math.prod(shape)} elements)"
        )
    if isinstance(layout, rg.SplatLayout):
        return _splat(shape)
    layout = _registers(layout)
    if layout.is_padded and (layout.flat or layout.size == max(layout.shape)):
        return rg.rearranged(shape, (layout.digits,), flat=True)
    dims = _regrouped(layout, shape)
    if dims is not None:
        return rg.rearranged(shape, dims)
    if layout.is_padded or (not layout.flat and not _is_linear(layout)):
        raise InvalidValueError(
            f"cannot reshape {layout.shape} to {shape} in the layout {layout}: a factor that one "
            "thread or register number describes would straddle two dimensions",
            expected="new extents whose products fall on the factors "
            f"{'x'.join(str(d.size) for d in layout.digits)} (major to minor) or divide them",
            hint="convert the array to a strided layout first",
        )
    return rg.rearranged(shape, (layout.digits,), flat=True)


def _regrouped(layout: rg.RegisterLayout, shape: tuple[int, ...]) -> tuple[Digits, ...] | None:
    """The digits of each dimension of another shape; None if one would straddle two of them.

    Only the major one of the dimensions that are split or joined can be padded: an element's index
    along it tells whether it is one.
    """
    if not layout.is_padded:
        return dg.split_at_dimensions(layout.digits, shape)
    result: list[Digits] = []
    old, new = len(layout.shape) - 1, len(shape) - 1
    while old >= 0 or new >= 0:
        # The next dimensions, from the minor ones, with as many elements before and after.
        first_old, first_new = old, new
        olds = layout.shape[old] if old >= 0 else 1
        news = shape[new] if new >= 0 else 1
        while olds != news:
            if olds < news:
                old -= 1
                olds *= layout.shape[old]
            else:
                new -= 1
                news *= shape[new]
        group = range(max(old, 0), first_old + 1)
        major = next((d for d in group if layout.shape[d] > 1), None)
        if any(layout.extents[d] != layout.shape[d] for d in group if d != major):
            return None
        remaining: Digits = tuple(itertools.chain.from_iterable(layout.dims[d] for d in group))
        sizes = shape[max(new, 0) : first_new + 1]
        top = next((i for i, n in enumerate(sizes) if n > 1), 0)
        own: list[Digits] = []
        for place in reversed(range(len(sizes))):
            if place == top:
                own.append(remaining)
                remaining = ()
                continue
            taken = dg.take_minor(remaining, sizes[place])
            if taken is None:
                return None
            remaining, minors = taken
            own.append(minors)
        result += own
        old, new = max(old - 1, -1), max(new - 1, -1)
    return tuple(reversed(result))


def expand_dims(layout: rg.Layout, dims: Sequence[int]) -> rg.Rearrangement:
    """Inserts dimensions of extent 1 at the places ``dims`` of the result."""
    rank = len(layout.shape) + len(dims)
    new = {d % rank for d in dims}
    old = iter(layout.shape)
    return reshape(layout, [1 if i in new else next(old) for i in range(rank)])


def squeeze(layout: rg.Layout, dims: Sequence[int]) -> rg.Rearrangement:
    """Removes dimensions, which must have extent 1."""
    gone = {d % len(layout.shape) for d in dims}
    wrong = [d for d in gone if layout.shape[d] != 1]
    if wrong:
        raise InvalidValueError(
            f"cannot squeeze dimension {wrong[0]} of shape {layout.shape}: its extent is not 1"
        )
    return reshape(layout, [n for i, n in enumerate(layout.shape) if i not in gone])


def _slice_dim(dim: int, digits: Digits, extent: int, start: int, size: int) -> tuple[Digits, int]:
    """The digits of a slice of one dimension and the register number it starts at."""
    kept: list[Digit] = []
    first = 0
    inner = dg.count(digits)
    if start == 0 and size == extent:
        return digits, 0
    for position, digit in enumerate(digits):
        outer, inner = inner, inner // digit.size
        if start == 0 and size == outer:
            return (*kept, *digits[position:]), first
        low, high = start // inner, (start + size - 1) // inner
        whole = start % inner == 0 and (size % inner == 0 or high > low)
        if digit.owner is not Owner.REGISTER and start == 0 and 1 < size < outer <= 2 * size:
            return (*kept, *digits[position:]), first  # What is left over is padding.
        if digit.owner is not Owner.REGISTER or not (whole or low == high):
            raise InvalidValueError(
                f"the slice of {size} elements from {start} (within a block of {outer}) of "
                f"dimension {dim} does not fall on whole registers",
                expected="start and size that are multiples of "
                f"{outer if digit.owner is not Owner.REGISTER else inner}",
                hint="convert the array to another layout, or slice in memory",
            )
        first += low * digit.stride
        if whole:
            kept.append(Digit(high - low + 1, Owner.REGISTER, digit.stride))
            return (*kept, *digits[position + 1 :]), first
        start %= inner
    return tuple(kept), first


@functools.lru_cache(maxsize=4096)
def slice_(layout: rg.Layout, starts: tuple[int, ...], sizes: tuple[int, ...]) -> rg.Rearrangement:
    """The part ``[start, start + size)`` of every dimension; only whole registers.

    Raises:
      InvalidValueError: the bounds are outside the shape, or fall inside a thread's digit.
    """
    bounds = list(zip(layout.shape, starts, sizes, strict=True))
    for dim, (extent, start, size) in enumerate(bounds):
        if start < 0 or size < 1 or start + size > extent:
            raise InvalidValueError(
                f"the slice of {size} elements from {start} is outside dimension {dim} of shape "
                f"{layout.shape}"
            )
    if isinstance(layout, rg.SplatLayout):
        return _splat(sizes)
    if sizes == layout.shape:
        return unchanged(layout)
    dims, first = [], 0
    for dim, digits in enumerate(_unflattened(_registers(layout), "slice")):
        kept, register = _slice_dim(dim, digits, layout.shape[dim], starts[dim], sizes[dim])
        dims.append(kept)
        first += register
    return rg.rearranged(sizes, dims, first_register=first)


def _check_broadcast(layout: rg.Layout, shape: Sequence[int], dims: Sequence[int]) -> None:
    fits = len(dims) == len(layout.shape) and list(dims) == sorted(set(dims))
    if not fits or any(not 0 <= d < len(shape) for d in dims):
        raise InvalidValueError(
            f"broadcast dimensions {tuple(dims)} do not map shape {layout.shape} into {shape}",
            expected="one strictly increasing dimension of the result for each of the operand",
        )
    for i, d in enumerate(dims):
        if layout.shape[i] not in (1, shape[d]):
            raise InvalidValueError(
                f"cannot broadcast {layout.shape} to {tuple(shape)} along {tuple(dims)}: extent "
                f"{layout.shape[i]} of dimension {i} is neither 1 nor {shape[d]}"
            )


def broadcast_in_dim(
    layout: rg.Layout, shape: Sequence[int], dims: Sequence[int]
) -> rg.Rearrangement:
    """Dimension ``i`` becomes ``dims[i]`` of ``shape``; new extents are copies in registers.

    Extents of 1 are stretched too.
    """
    shape = tuple(shape)
    _check_broadcast(layout, shape, dims)
    if isinstance(layout, rg.SplatLayout):
        return _splat(shape)
    layout = _registers(layout)
    new = [Digit(extent, Owner.REGISTER, 0) for extent in shape]
    if layout.flat and not layout.is_padded:
        rank = len(layout.shape)
        if shape[len(shape) - rank :] == layout.shape and dims[0] == len(shape) - rank:
            flat = (*new[: len(shape) - rank], *layout.dims[0])
            return rg.rearranged(shape, (flat,), flat=True)
    result: list[Digits] = [(digit,) for digit in new]
    for digits, d in zip(_unflattened(layout, "broadcast"), dims, strict=True):
        if digits:
            result[d] = digits
    return rg.rearranged(shape, result)


def broadcast_with_target(
    layout: rg.Layout, target: rg.Layout, dims: Sequence[int]
) -> rg.Rearrangement:
    """Like :func:`broadcast_in_dim`, into the layout ``target``.

    Raises:
      InvalidValueError: a thread would need elements that it does not hold.
    """
    _check_broadcast(layout, target.shape, dims)
    if isinstance(layout, rg.SplatLayout):
        elements = (((0, 0),) * target.vector_length,) * target.registers
        return rg.Rearrangement(target, elements)
    layout = _registers(layout)
    if isinstance(target, rg.SplatLayout):
        raise InvalidValueError(f"the layout {layout} cannot be broadcast to a splat")
    target = _registers(target)
    stretched = [target.shape[d] != n for d, n in zip(dims, layout.shape, strict=True)]
    new = [d for d in range(len(target.shape)) if d not in dims or stretched[dims.index(d)]]
    if new and target.flat:
        _unflattened(target, f"broadcast of {layout.shape}")
    ends = zip(dims, stretched, strict=True)
    kept = [] if target.flat else [target.dims[d] for d, wide in ends if not wide]
    if layout.flat or target.flat:
        if layout.flat != target.flat and (layout.is_padded or target.is_padded):
            # Padding behind rows, and behind the flattened array.
            _unflattened(layout if layout.flat else target, f"broadcast of {layout.shape}")
        whole = target.digits if target.flat else tuple(itertools.chain.from_iterable(kept))
        lists: tuple[list[Digits], list[Digits]] = ([layout.digits], [whole])
    else:
        narrow = [own for own, wide in zip(layout.dims, stretched, strict=True) if not wide]
        lists = (narrow, kept)
    sources = conversion.local_sources(layout, target, *lists)
    if sources is None:
        raise InvalidValueError(
            f"the layout {layout} is not the target {target} reduced over dimensions {new}",
            hint="convert the operand to the reduced target layout first",
        )
    return rg.Rearrangement(target, sources)


def reduce(layout: rg.Layout, axes: Sequence[int]) -> rg.Layout:
    """The layout without the dimensions ``axes``; of one element left, a splat."""
    rank = len(layout.shape)
    gone = {a % rank for a in axes}
    shape = tuple(n for i, n in enumerate(layout.shape) if i not in gone)
    if isinstance(layout, rg.SplatLayout) or math.prod(shape) == 1:
        return rg.SplatLayout(shape)
    layout = _registers(layout)
    if shape == layout.shape:
        return layout
    if all(layout.shape[a] == 1 for a in gone):
        return squeeze(layout, sorted(gone)).layout
    dims = [d for i, d in enumerate(_unflattened(layout, "reduction")) if i not in gone]
    vector_length = dg.count(itertools.chain.from_iterable(dims), Owner.VECTOR)
    return rg.RegisterLayout(shape, tuple(dims), vector_length)
