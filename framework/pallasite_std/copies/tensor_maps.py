"""Planner of TMA copies between a window of global memory and a reference in shared memory.

The box of a TMA instruction fills shared memory densely, so the dimensions of the tensor map are
the extents of the shared memory's layout in the order of their strides: a tiled layout turns a
dimension into a count and a tile. Where that is not possible without reading wrong elements
beyond the end of the array, or beyond the limits of a box, the copy is split into several
instructions that share one descriptor.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from pallasite.plugin import InvalidValueError
from pallasite.plugin.layouts import Extent, Extents, MemoryLayout
from pallasite_std.copies import tensor_map_types as tt
from pallasite_std.copies.tensor_map_types import (
    BlockTerm,
    Coordinate,
    CoordinateTerm,
    Issue,
    TensorMapPlan,
    WindowDimension,
)


@dataclasses.dataclass
class _Tensor:
    """A dimension of the tensor map while it is being planned."""

    size: int
    stride: int
    box: int
    start: int | None
    dim: int
    divisor: int
    squeezed: bool = False
    moves: bool = False

    @property
    def covered(self) -> bool:
        """The box always covers the whole dimension."""
        return self.box == self.size and self.start == 0 and not self.moves


@dataclasses.dataclass
class _Axis:
    """An extent of shared memory: moving along it moves a tensor coordinate by ``step``."""

    tensor: _Tensor
    step: int
    count: int
    shared_stride: int
    boxed: bool


def _axes(
    shape: Sequence[int],
    strides: Sequence[int],
    window: Sequence[WindowDimension],
    shared: MemoryLayout,
) -> tuple[list[_Tensor], list[_Axis]]:
    """Tensor dimensions that are not in shared memory, and the axes that are."""
    kept = iter(shared.dims)
    alone: list[_Tensor] = []
    axes: list[_Axis] = []
    for dim, (part, size, stride) in enumerate(zip(window, shape, strides, strict=True)):
        extents = () if part.squeezed else next(kept)
        if not extents:
            alone.append(_Tensor(size, stride, 1, part.start, dim, 1, part.squeezed))
            continue
        extents = _by_swizzled_rows(extents, shared)
        weights = [math.prod(e.size for e in extents[i + 1 :]) for i in range(len(extents))]
        cut = next(
            position
            for position, weight in enumerate(weights)
            if size % weight == 0 and part.aligned(weight)
        )
        for position, extent in enumerate(extents[cut:], cut):
            weight = weights[position]
            outer = position == cut
            start = 0 if not outer else None if part.start is None else part.start // weight
            length = size // weight if outer else extent.size
            tensor = _Tensor(length, stride * weight, extent.size, start, dim, weight)
            axes.append(_Axis(tensor, 1, extent.size, extent.stride, True))
            if outer:
                # Tiles that do not divide the array, or that the window does not begin with: one
                # instruction for each, which moves along the same dimension.
                for major, step in zip(extents[:cut], weights, strict=False):
                    axes.append(_Axis(tensor, step // weight, major.size, major.stride, False))
    return alone, sorted(axes, key=lambda axis: -axis.shared_stride)


def _by_swizzled_rows(extents: Extents, shared: MemoryLayout) -> Extents:
    """Cuts the innermost run of a swizzled layout into the rows that a box can have."""
    row = 8 * shared.swizzle // shared.element_bits
    inner = extents[-1]
    if shared.swizzle == 16 or inner.stride != 1 or inner.size <= row or inner.size % row:
        return extents
    return (*extents[:-1], Extent(inner.size // row, row), Extent(row, 1))


type _BlockPart = tuple[_Axis, int, int, int]
"""(axis, divisor, modulus, indices of the axis in each share)."""


def _share(axes: list[_Axis], blocks: int, swizzle: int) -> list[_BlockPart]:
    """Narrows the axes, major to minor, to the share of one of ``blocks`` collective blocks."""
    parts: list[_BlockPart] = []
    rest, divisor = blocks, 1
    for axis in axes if swizzle == 16 else axes[:-1]:
        if rest == 1:
            break
        if axis.count % rest == 0:
            modulus = rest
        elif rest % axis.count == 0:
            modulus = axis.count
        else:
            break
        axis.count //= modulus
        if axis.boxed:
            axis.tensor.box = axis.count
        axis.tensor.moves = True
        parts.append((axis, divisor, modulus, axis.count))
        divisor *= modulus
        rest //= modulus
    if rest > 1:
        raise InvalidValueError(
            f"a copy cannot be shared by {blocks} blocks: the extents in shared memory "
            f"{[axis.count for axis in axes]} (major to minor) do not divide by it",
            expected="extents of which the major ones are divisible by the number of blocks, "
            "without splitting a swizzled row",
        )
    return parts


def _largest_part(count: int, unit: int) -> int:
    """The largest divisor of ``count`` that fits a box and is a multiple of ``unit``, or 0."""
    fitting = range(min(count, tt.MAXIMUM_BOX), 0, -1)
    return next((n for n in fitting if count % n == 0 and n % unit == 0), 0)


def _loops(axes: list[_Axis], bits: int) -> list[tuple[_Axis, int, int]]:
    """Cuts the axes until one box is dense and small enough; (axis, pieces, indices a piece)."""
    loops: list[tuple[_Axis, int, int]] = []
    reach, looping = 1, False
    position = len(axes)
    while position:
        position -= 1
        axis = axes[position]
        if axis.count == 1:
            continue
        looping = looping or axis.shared_stride != reach or not axis.boxed
        part = 1 if looping else axis.count
        if part > tt.MAXIMUM_BOX:
            innermost = axis.tensor.stride == 1
            part = _largest_part(axis.count, max(1, 128 // bits) if innermost else 1)
            if part and _factor(axes, position, part):
                position += 1
                reach *= part
                continue
            part = part or axis.count
        if part < axis.count:
            looping = True
            axis.tensor.moves = True
            loops.append((axis, axis.count // part, part))
            if axis.boxed:
                axis.tensor.box = part
        reach *= part
    return loops[::-1]


def _factor(axes: list[_Axis], position: int, part: int) -> bool:
    """Turns a too long axis into a count and a part, if more major axes have to stay boxed."""
    axis = axes[position]
    tensor = axis.tensor
    alone = all(other.count == 1 for other in axes[:position])
    if alone or tensor.size % part or tensor.start is None or tensor.start % part or tensor.moves:
        return False
    major = _Tensor(
        tensor.size // part, tensor.stride * part, axis.count // part, tensor.start // part,
        tensor.dim, tensor.divisor * part,
    )  # fmt: skip
    tensor.size, tensor.box, tensor.start = part, part, 0
    axes.insert(position, _Axis(major, 1, axis.count // part, axis.shared_stride * part, True))
    axis.count = part
    return True


@dataclasses.dataclass
class _Group:
    """A dimension of the final tensor map: one or more planned ones with their scales."""

    size: int
    stride: int
    box: int
    members: list[tuple[_Tensor, int]]


def _groups(tensors: list[_Tensor], swizzle: int) -> list[_Group]:
    """Drops and joins dimensions until there are at most five."""
    inner = tensors[-1]
    groups = [
        _Group(t.size, t.stride, t.box, [(t, 1)])
        for t in tensors
        if t is inner or t.moves or not (t.size == 1 and t.box == 1 and t.start in (0, None))
    ]
    position = len(groups) - 2
    while len(groups) > tt.MAXIMUM_RANK and position >= 0:
        major, minor = groups[position], groups[position + 1]
        swizzled = swizzle != 16 and position + 2 == len(groups)
        whole = all(tensor.covered for tensor, _ in minor.members)
        if (
            whole
            and not swizzled
            and major.stride == minor.size * minor.stride
            and major.box * minor.box <= tt.MAXIMUM_BOX
        ):
            scaled = [(tensor, scale * minor.size) for tensor, scale in major.members]
            joined = _Group(
                major.size * minor.size, minor.stride, major.box * minor.box, scaled + minor.members
            )
            groups[position : position + 2] = [joined]
        position -= 1
    squeezed = [g for g in groups if all(t.squeezed for t, _ in g.members)]
    if len(groups) > tt.MAXIMUM_RANK and len(squeezed) > 1:
        stride = math.gcd(*(g.stride for g in squeezed))
        size = 1 + sum((g.size - 1) * (g.stride // stride) for g in squeezed)
        members = [(t, s * (g.stride // stride)) for g in squeezed for t, s in g.members]
        rest = [g for g in groups if not any(g is other for other in squeezed)]
        groups = [_Group(size, stride, 1, members), *rest]
    if len(groups) > tt.MAXIMUM_RANK:
        raise InvalidValueError(
            f"the copy needs a tensor map of {len(groups)} dimensions "
            f"{tuple(g.size for g in groups)}, but TMA has at most {tt.MAXIMUM_RANK}",
            expected=f"at most {tt.MAXIMUM_RANK} dimensions that the copy does not cover whole",
            hint="merge dimensions of the array, or tile fewer of them",
        )
    return groups


def _check(groups: list[_Group], bits: int, swizzle: int, innermost_shared_stride: int) -> None:
    inner = groups[-1]
    if inner.stride != 1 or innermost_shared_stride != 1:
        raise InvalidValueError(
            "TMA needs one dimension that is contiguous in both global and shared memory, but the "
            f"innermost in shared memory has stride {inner.stride} in global memory and "
            f"{innermost_shared_stride} in shared memory",
            expected="the same innermost dimension, with stride 1, on both sides",
        )
    for group in groups[:-1]:
        if group.stride * bits % (8 * tt.STRIDE_ALIGNMENT):
            raise InvalidValueError(
                f"a stride of {group.stride} elements of {bits} bits in global memory is not a "
                f"multiple of {tt.STRIDE_ALIGNMENT} bytes",
                expected=f"a multiple of {8 * tt.STRIDE_ALIGNMENT // bits} elements",
                hint="pad the array, or copy it without TMA",
            )
        if group.stride * bits >= 8 * tt.MAXIMUM_STRIDE_BYTES:
            raise InvalidValueError(f"a stride of {group.stride} elements is beyond 2^40 bytes")
    for group in groups:
        if not 1 <= group.size <= tt.MAXIMUM_EXTENT:
            raise InvalidValueError(f"an extent of {group.size} in a TMA copy is not in 1..2^32")
        if group.box > tt.MAXIMUM_BOX:
            raise InvalidValueError(
                f"a TMA copy of {group.box} elements along one dimension exceeds "
                f"{tt.MAXIMUM_BOX} and cannot be split evenly",
                expected=f"at most {tt.MAXIMUM_BOX}, or a multiple of a number up to that",
                hint="tile the shared memory, or use an extent with a divisor below 257",
            )
    row = inner.box * bits
    if row % (8 * 16):
        raise InvalidValueError(
            f"the innermost dimension of a TMA copy has {inner.box} elements of {bits} bits",
            expected="a multiple of 16 bytes",
        )
    if swizzle != 16 and row != 8 * swizzle:
        raise InvalidValueError(
            f"the innermost dimension of a TMA copy has {inner.box} elements of {bits} bits, but "
            f"the swizzle is {swizzle} bytes",
            expected=f"exactly {swizzle} bytes, that is {8 * swizzle // bits} elements",
        )


def plan_tensor_map(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: str,
    window: Sequence[WindowDimension],
    shared: MemoryLayout,
    *,
    blocks: int = 1,
    reduction: str | None = None,
) -> TensorMapPlan:
    """Plans the copy of a window of an array in global memory from or to shared memory.

    Elements of the window outside the array are zero after a load and dropped by a store.

    Args:
      shape: extents of the array.
      strides: its strides in elements.
      dtype: name of the element type, as in NumPy and ml_dtypes.
      window: one entry for each dimension of the array.
      shared: layout of the shared memory; its shape is that of the window without the squeezed
        dimensions. Its first element is aligned to 128 bytes and to the swizzle's period.
      blocks: how many blocks of a cluster fetch a share each and multicast it to all.
      reduction: for stores that combine with what is there, one of ``REDUCTIONS``.

    Raises:
      InvalidValueError: the hardware cannot copy this; the message says which limit is exceeded.
    """
    return _plan(tuple(shape), tuple(strides), dtype, tuple(window), shared, blocks, reduction)


@functools.lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    window: tuple[WindowDimension, ...],
    shared: MemoryLayout,
    blocks: int,
    reduction: str | None,
) -> TensorMapPlan:
    bits = shared.element_bits
    code = tt.element_code(dtype, reduction)
    sizes = tuple(part.size for part in window if not part.squeezed)
    if len(window) != len(shape) or len(strides) != len(shape) or sizes != shared.shape:
        raise InvalidValueError(
            f"a window of extents {tuple(part.size for part in window)} of an array of shape "
            f"{tuple(shape)} does not fit shared memory of shape {shared.shape}"
        )
    if any(part.squeezed and part.size != 1 for part in window):
        raise InvalidValueError("only dimensions of extent 1 can be left out of shared memory")
    alone, axes = _axes(shape, strides, window, shared)
    if not axes:
        raise InvalidValueError(
            f"a TMA copy of a single element of {bits} bits", expected="a multiple of 16 bytes"
        )
    innermost = axes[-1].shared_stride
    parts = _share(axes, blocks, shared.swizzle)
    loops = _loops(axes, bits)
    tensors = alone + [axis.tensor for axis in axes if axis.boxed]
    groups = _groups(tensors, shared.swizzle)
    _check(groups, bits, shared.swizzle, innermost)
    where = {id(t): (i, scale) for i, g in enumerate(groups) for t, scale in g.members}
    block_terms = []
    for axis, divisor, modulus, count in parts:
        index, scale = where.get(id(axis.tensor), (0, 0))
        step, stride = count * axis.step * scale, count * axis.shared_stride
        block_terms.append(BlockTerm(index, divisor, modulus, step, stride))
    plan = TensorMapPlan(
        code=code,
        element_bits=bits,
        shape=tuple(g.size for g in groups),
        strides=tuple(g.stride for g in groups),
        box=tuple(g.box for g in groups),
        swizzle=shared.swizzle,
        coordinates=tuple(_coordinate(g) for g in groups),
        issues=_issues(loops, where, len(groups)),
        block_terms=tuple(block_terms),
        blocks=blocks,
    )
    _check_addresses(plan)
    if bits < 8:
        _check_bytes(plan, window)
    return plan


def start_alignment(window: Sequence[WindowDimension], shared: MemoryLayout) -> tuple[int, ...]:
    """What the start along each dimension of a window has to be a multiple of for a copy of whole
    tiles, which takes the fewest instructions."""
    kept = iter(shared.dims)
    result = []
    for part in window:
        extents = () if part.squeezed else next(kept)
        if extents:
            extents = _by_swizzled_rows(extents, shared)
        inner = math.prod(extent.size for extent in extents[1:])
        packed = bool(extents) and extents[-1].stride == 1 and shared.element_bits < 8
        result.append(math.lcm(inner, 8 // shared.element_bits) if packed else inner)
    return tuple(result)


def _check_bytes(plan: TensorMapPlan, window: Sequence[WindowDimension]) -> None:
    """Coordinates along packed elements have to be whole bytes."""
    packed = 8 // plan.element_bits
    start = plan.coordinates[-1]
    steps = [start.constant, plan.shape[-1], *(issue.coordinates[-1] for issue in plan.issues)]
    steps += [t.coordinate_step for t in plan.block_terms if t.tensor_dim == plan.rank - 1]
    for term in start.terms:
        known = window[term.dim].multiple_of
        steps.append(packed if known is None else known // term.divisor * term.scale)
    if any(step % packed for step in steps):
        raise InvalidValueError(
            f"a TMA copy of elements of {plan.element_bits} bits begins or ends inside of a byte",
            expected=f"starts and extents that are multiples of {packed} along the contiguous "
            "dimension",
        )


def _coordinate(group: _Group) -> Coordinate:
    constant = sum(t.start * scale for t, scale in group.members if t.start is not None)
    dynamic = [(t, scale) for t, scale in group.members if t.start is None]
    terms = tuple(CoordinateTerm(t.dim, t.divisor, scale) for t, scale in dynamic)
    return Coordinate(constant, terms)


def _issues(
    loops: list[tuple[_Axis, int, int]], where: dict[int, tuple[int, int]], rank: int
) -> tuple[Issue, ...]:
    total = math.prod(pieces for _, pieces, _ in loops)
    if total > tt.MAXIMUM_ISSUES:
        raise InvalidValueError(
            f"the copy would take {total} TMA instructions, because the window is not dense in "
            "shared memory or its tiles do not divide the array",
            expected=f"at most {tt.MAXIMUM_ISSUES}",
        )
    issues = []
    for places in itertools.product(*(range(pieces) for _, pieces, _ in loops)):
        coordinates, offset = [0] * rank, 0
        for place, (axis, _, part) in zip(places, loops, strict=True):
            index, scale = where[id(axis.tensor)]
            coordinates[index] += place * part * axis.step * scale
            offset += place * part * axis.shared_stride
        issues.append(Issue(tuple(coordinates), offset))
    return tuple(issues)


def _check_addresses(plan: TensorMapPlan) -> None:
    offsets = [issue.shared_offset for issue in plan.issues]
    offsets += [term.shared_stride for term in plan.block_terms]
    wrong = [o for o in offsets if o * plan.element_bits % (8 * tt.SHARED_ALIGNMENT)]
    if wrong:
        raise InvalidValueError(
            f"a part of the copy would start {wrong[0]} elements of {plan.element_bits} bits into "
            f"the shared memory, which is not a multiple of {tt.SHARED_ALIGNMENT} bytes",
            expected="parts (tiles, or shares of a cluster's blocks) of whole 128-byte units",
        )
