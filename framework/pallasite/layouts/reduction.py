"""Plans of reductions: what to combine in registers, across lanes, and across warps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from pallasite.layouts import registers as rg
from pallasite.layouts.digits import LANES, WARPS, Digit, Owner


@dataclasses.dataclass(frozen=True)
class LaneRotation:
    """One step of combining over a lane digit whose size or stride is not a power of two.

    A lane combines its value with those of the lanes ``source(lane, k)``, k in 1..size-1.
    """

    size: int
    stride: int
    modulus: int

    def source(self, lane: int, step: int) -> int:
        """The lane that holds the value ``step`` places on, cyclically, along the digit."""
        lane %= self.modulus
        digit = lane // self.stride % self.size
        return lane + ((digit + step) % self.size - digit) * self.stride


@dataclasses.dataclass(frozen=True)
class ReductionPlan:
    """The steps of a reduction, in the order in which they are to be done.

    Attributes:
      layout: layout of the result.
      register_groups: for each register of the result, the operand's registers to combine
        element by element.
      vector_groups: for each vector element of the result, the elements of the combined
        register to combine.
      lane_masks: lanes combine with the lane whose number differs by each of these bits
        (butterfly shuffles), one after the other.
      lane_rotations: further steps among lanes, where butterflies do not fit.
      warp_digits: the reduced digits of the warp number; empty if no warp is involved.
      warp_partners: for each warp the warps, itself or its equal included, whose values combine.
      lane_mask: lanes of a warp that hold different results after the lane steps (bit mask).
    """

    layout: rg.Layout
    register_groups: tuple[tuple[int, ...], ...]
    vector_groups: tuple[tuple[int, ...], ...]
    lane_masks: tuple[int, ...] = ()
    lane_rotations: tuple[LaneRotation, ...] = ()
    warp_digits: tuple[Digit, ...] = ()
    warp_partners: tuple[tuple[int, ...], ...] = tuple((w,) for w in range(WARPS))
    lane_mask: int = 1

    @property
    def crosses_warps(self) -> bool:
        """True if partial results have to be exchanged between warps."""
        return bool(self.warp_digits)


def _groups(kept: Sequence[Digit], gone: Sequence[Digit]) -> tuple[tuple[int, ...], ...]:
    def numbers(digits: Sequence[Digit]) -> list[int]:
        ranges = [range(0, d.size * d.stride, d.stride) for d in digits]
        return [sum(values) for values in itertools.product(*ranges)]

    inner = numbers(gone)
    return tuple(tuple(k + g for g in inner) for k in numbers(kept))


def _lane_steps(
    lanes: Sequence[Digit], gone: Sequence[Digit]
) -> tuple[tuple[int, ...], tuple[LaneRotation, ...]]:
    masks: list[int] = []
    rotations: list[LaneRotation] = []
    top = max((d.stride * d.size for d in lanes), default=1)
    for digit in gone:
        if (digit.size & (digit.size - 1)) == (digit.stride & (digit.stride - 1)) == 0:
            masks += [digit.stride << bit for bit in range(digit.size.bit_length() - 1)]
        else:
            rotations.append(LaneRotation(digit.size, digit.stride, top))
    return tuple(sorted(masks)), tuple(rotations)


def reduction_plan(layout: rg.Layout, axes: Sequence[int]) -> ReductionPlan:
    """How to combine the elements along ``axes`` (negative ones count from the end).

    Raises:
      InvalidValueError: the layout is flat and neither all nor only unit dimensions are reduced.
    """
    result = layout.reduce(axes)
    if isinstance(layout, rg.SplatLayout):
        return ReductionPlan(result, ((0,),), ((0,),))
    assert isinstance(layout, rg.RegisterLayout)
    gone_axes = {a % len(layout.shape) for a in axes}
    everything = all(n == 1 or i in gone_axes for i, n in enumerate(layout.shape))
    if layout.flat:
        gone = list(layout.digits) if everything else []
        kept = [] if everything else list(layout.digits)
    else:
        gone = [d for i, dim in enumerate(layout.dims) if i in gone_axes for d in dim]
        kept = [d for i, dim in enumerate(layout.dims) if i not in gone_axes for d in dim]

    def of(digits: Sequence[Digit], owner: Owner) -> list[Digit]:
        return [d for d in digits if d.owner is owner]

    lane_digits = of(layout.digits, Owner.LANE)
    masks, rotations = _lane_steps(lane_digits, of(gone, Owner.LANE))
    warps = of(gone, Owner.WARP)
    kept_warps = of(kept, Owner.WARP)
    reduced = _groups((), warps)[0]
    partners = tuple(
        tuple(sum(d.value(w) * d.stride for d in kept_warps) + r for r in reduced)
        for w in range(WARPS)
    )
    kept_lanes = of(kept, Owner.LANE)
    vectors = sorted(of(kept, Owner.VECTOR), key=lambda d: -d.stride)
    primary = [i for i in range(LANES) if sum(d.value(i) * d.stride for d in kept_lanes) == i]
    return ReductionPlan(
        layout=result,
        register_groups=_groups(of(kept, Owner.REGISTER), of(gone, Owner.REGISTER)),
        vector_groups=_groups(vectors, of(gone, Owner.VECTOR)),
        lane_masks=masks,
        lane_rotations=rotations,
        warp_digits=tuple(warps),
        warp_partners=partners,
        lane_mask=sum(1 << i for i in primary),
    )
