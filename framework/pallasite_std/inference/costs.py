"""What transfers and conversions cost, in passes through shared memory (128 bytes each).

The numbers only have to order the choices: passes of all four warps, and for what has no passes
the time that so many of them would take.
"""

from __future__ import annotations

import functools

from pallasite.plugin import InvalidValueError
from pallasite.plugin.inference import IMPOSSIBLE
from pallasite.plugin.language import MemorySpace
from pallasite.plugin.layouts import (
    LANES,
    WARPS,
    ConversionKind,
    Layout,
    MemoryLayout,
    Owner,
    RegisterLayout,
    SplatLayout,
    conversion,
    reduction_plan,
)
from pallasite_std.memory.access import AccessPlan
from pallasite_std.memory.matrix_access import MatrixPlan, plan_transfer, transfer_passes
from pallasite_std.memory.relayout import fits_scratch

SYNCHRONIZATION = 32.0
"""A barrier of the warpgroup."""

_SECTOR = 32
"""Bytes of global memory that are moved together."""

_VECTOR = 128
"""Bits that a lane can access at once."""

_MISALIGNED, _PARTIAL = 1.5, 2.0
"""Accesses to a sector, on average, up to which rows that do not begin at sectors are at fault; and
what each beyond them costs: the L2 cache takes as long for a part of a sector as for all of it."""

_ELEMENT_BY_ELEMENT = 16.0
"""How much slower an access is whose addresses are computed one by one."""

_LOOP_STEP = 1.0
"""Of a warp, in a loop that moves an element of each lane: its instructions stay in the cache."""

_END = 4.0
"""An access of one thread to a part of the last vector, in a branch of its own."""

_ROOMY = 128
"""Registers of a lane that one array can take without others being spilled."""

_WORDS = 1.5
"""How much longer it takes to exchange elements of two words than two elements."""

TRUTHS = 1
"""Bits of an element where it matters that what registers hold are conditions."""

_PACKED = 1.5
"""Instructions that make a byte of a condition, or a condition of a byte."""

_FETCH = 8.0
"""An instruction that is fetched to be run once."""

_SPILL = 2.0
"""A register that is stored to local memory and loaded again."""


@functools.lru_cache(maxsize=4096)
def copies_cost(layout: Layout, bits: int) -> float:
    """Of computing and keeping each element in several threads, for one operation.

    An array of which each element lies in one thread costs nothing here, whatever its layout. Four
    warps issue an instruction each in the time of a pass through shared memory.
    """
    if isinstance(layout, SplatLayout):
        return 0.0
    elements = layout.registers * layout.vector_length
    extra = elements - -(-layout.size // (LANES * WARPS))
    if extra <= 0:
        return 0.0
    spilled = max(0.0, elements * bits / 32 - _ROOMY)
    return extra + _SPILL * min(extra, spilled)


_PORTIONS = 1e7
"""What it costs to move an array in portions: more than anything that needs none."""


@functools.lru_cache(maxsize=4096)
def conversion_cost(source: Layout, target: Layout, bits: int) -> float:
    """Of bringing an array of elements of ``bits`` bits from one layout into another."""
    if source == target or isinstance(source, SplatLayout):
        return 0.0
    if bits == TRUTHS:
        elements = sum(one.registers * one.vector_length for one in (source, target))
        return conversion_cost(source, target, 8) + _PACKED * elements
    if isinstance(target, SplatLayout):
        return IMPOSSIBLE
    kind = conversion(source, target).kind
    if kind is ConversionKind.SHARED_MEMORY:
        passes = WARPS * (_scratch_passes(source, bits) + _scratch_passes(target, bits))
        apart = _taken_apart(source, bits) + _taken_apart(target, bits)
        found = 2 * SYNCHRONIZATION + 2 * max(passes, 2.0 * WARPS) + apart
        return found if fits_scratch(source, target, bits) else _PORTIONS + found
    return 0.5 + target.registers / 64


def _taken_apart(layout: Layout, bits: int) -> float:
    """What it takes that registers of an array of an odd shape are no vectors of its rows: bytes
    are taken out of words, or put together; elements of several rows are accessed one by one."""
    assert isinstance(layout, RegisterLayout)
    if not layout.size & (layout.size - 1):
        return 0.0
    outer = () if layout.flat else layout.dims[:-1]
    if any(d.owner is Owner.VECTOR and d.size > 1 for digits in outer for d in digits):
        return _FETCH * layout.registers * (layout.vector_length - 1)
    narrow = bits == 8 and layout.vector_length < 4
    return float(layout.registers * layout.vector_length) if narrow else 0.0


def _scratch_passes(layout: Layout, bits: int) -> float:
    """Passes of a warp that stores or loads an array in a layout, if there are no conflicts."""
    assert isinstance(layout, RegisterLayout)
    size = layout.registers * layout.vector_length * bits / 8
    # Lanes that load the same take part in one pass, but each of them gets 16 bytes at most; and
    # narrow vectors of odd shapes take a pass each.
    least = float(layout.registers) if layout.is_padded else 0.0
    return max(size * layout.lane_count / 128, size / 16, least)


@functools.lru_cache(maxsize=4096)
def movement_cost(source: Layout, target: Layout, bits: int, run: int | None = None) -> float:
    """Of storing an array to scratch memory and loading part of it, or more than it.

    Args:
      source, target: layouts that are stored and loaded.
      bits: of an element.
      run: elements that are loaded together, if not as many as the layouts allow.
    """
    passes = 0.0
    for layout, most in ((source, None), (target, run)):
        if isinstance(layout, RegisterLayout):
            # Narrow vectors take a pass each.
            pieces = 1 if most is None else -(-layout.vector_length // most)
            passes += max(_scratch_passes(layout, bits), layout.registers * pieces)
    return 2 * SYNCHRONIZATION + 2 * WARPS * max(passes, 2.0)


def ordering_cost(pieces: int) -> float:
    """Of bringing what is in scratch memory into another order, by so many moves in a loop."""
    return SYNCHRONIZATION + WARPS * _LOOP_STEP * -(-pieces // (LANES * WARPS))


@functools.lru_cache(maxsize=4096)
def reduction_cost(
    layout: Layout, result: Layout, axes: tuple[int, ...], bits: int, in_pairs: bool = False
) -> float:
    """Of what lanes and warps exchange in a reduction of an array in this layout, and of what
    several of them reduce alike.

    Args:
      layout, result: of the array, and of what is left of it.
      axes: that are reduced.
      bits: of an element.
      in_pairs: whether one instruction combines, as others do, two elements that share a register
        with two others; so it counts how many there are.
    """
    if not isinstance(layout, RegisterLayout):
        return 0.0
    try:
        plan = reduction_plan(layout, axes)
    except InvalidValueError:
        return 0.0
    values = len(plan.register_groups) * len(plan.vector_groups) * max(1.0, bits / 32)
    if bits > 32 and _is_odd(layout):
        values *= _WORDS
    # Of lanes whose number is no power of two, it takes more to find out which are others.
    steps = len(plan.lane_masks) + sum(rotation.size + 1 for rotation in plan.lane_rotations)
    # Narrow elements take a register each while they are reduced.
    cost = copies_cost(layout, max(bits, 32)) + WARPS * values * steps
    if in_pairs and layout.size & (layout.size - 1):
        cost += layout.registers * max(1.0, layout.vector_length / 2)
    return cost + 2 * SYNCHRONIZATION + 2 * WARPS * values if plan.crosses_warps else cost


@functools.lru_cache(maxsize=4096)
def access_cost(layout: Layout, memory: MemoryLayout, alignment: int, space: MemorySpace) -> float:
    """Of loading or storing an array once.

    Args:
      layout: of the array in registers.
      memory: of the array in memory.
      alignment: bytes that the address is a multiple of.
      space: which memory.
    """
    if isinstance(layout, SplatLayout):
        return 0.0
    assert isinstance(layout, RegisterLayout)
    shared = space.is_shared
    try:
        plan = plan_transfer(layout, memory, min(16, alignment), matrices=shared)
    except InvalidValueError:
        if memory.element_bits < 8:
            return IMPOSSIBLE  # Elements that share bytes are not moved one by one.
        size = memory.size * memory.element_bits / 8 / 128
        return _ELEMENT_BY_ELEMENT * max(size, 8.0)
    if isinstance(plan, MatrixPlan):
        plan = plan.rows
    issue = len(plan.everything) / 4
    if shared:
        return WARPS * transfer_passes(plan) + issue
    # What several warps load comes out of the cache; lanes are counted in the sectors. One thread
    # accesses the end of an odd extent.
    sectors = len(plan.accesses) * _sectors(plan)
    passes = sectors / 4
    ends, partial = len(plan.everything) - len(plan.accesses), 0.0
    # Rows that are no multiple of a vector begin anywhere, whatever lanes access them.
    whole_vectors = layout.shape and layout.shape[-1] * memory.element_bits % _VECTOR == 0
    if whole_vectors and any(n & (n - 1) for n in layout.shape):
        whole = memory.size * memory.element_bits / 8 / _SECTOR
        partial = _PARTIAL * max(0.0, layout.warp_count * sectors - _MISALIGNED * whole)
    if not _is_odd(layout):
        return layout.warp_count * passes + ends + issue + partial
    # Narrow accesses take a pass each, of the warps that load the same, too.
    passes = max(passes, len(plan.accesses))
    all_warps = layout.warp_count * passes
    row = layout.flat or len(layout.shape) == 1
    if row and layout.is_padded and memory.is_contiguous:
        all_warps = memory.size * memory.element_bits / 8 / 128  # Without the padding.
    cost = max(all_warps, WARPS * len(plan.accesses)) + _END * ends + issue + partial
    return cost + (_reordered(plan) if memory.element_bits < 32 else 0)


def _reordered(plan: AccessPlan) -> int:
    """Elements that share registers with others than in memory, or are accessed alone."""
    count = 0
    vectors = len(plan.vector_offsets) > 1 and plan.vector_offsets[1] == 1
    for access in plan.accesses:
        register, first = access.parts[0]
        run = [(register, first + number) for number in range(len(access.parts))]
        if list(access.parts) != run or (vectors and len(access.parts) == 1):
            count += len(access.parts)
    return count


def _is_odd(layout: RegisterLayout) -> bool:
    """Whether a layout is that of an odd shape."""
    threads = (digit.size for digit in layout.digits if digit.owner.is_thread)
    return layout.is_padded or any(size & (size - 1) for size in threads)


def _sectors(plan: AccessPlan) -> int:
    """Sectors that the lanes of a warp touch in one access."""
    access = plan.everything[0]
    touched: set[int] = set()
    for lane in range(LANES):
        address = plan.byte_address(access, 0, lane)
        last = address + max(plan.width_bytes, 1) - 1
        touched.update(range(address // _SECTOR, last // _SECTOR + 1))
    return len(touched)


class LayoutCosts:
    """The functions as layout inference asks for them."""

    access = staticmethod(access_cost)
    conversion = staticmethod(conversion_cost)
    copies = staticmethod(copies_cost)


LAYOUT_COSTS = LayoutCosts()
