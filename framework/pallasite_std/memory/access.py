"""Plans of transfers between registers and memory.

A plan splits the element offset of every element into a part that depends on the thread, a list
of terms, and a static part for each access, so that code needs few additions, and says how wide
the accesses can be.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from pallasite.plugin import InvalidValueError
from pallasite.plugin.layouts import (
    BANK_BYTES,
    BANKS,
    LANES,
    WARPS,
    Digit,
    MemoryLayout,
    Owner,
    RegisterLayout,
    Source,
    swizzle_bytes,
)
from pallasite.plugin.layouts import digits as dg

MAXIMUM_BYTES = 16
"""Bytes that one lane moves by one instruction at most."""


@dataclasses.dataclass(frozen=True)
class ThreadTerm:
    """``((lane or warp) // divisor % modulus) * stride`` elements."""

    owner: Owner
    divisor: int
    modulus: int
    stride: int

    def value(self, warp: int, lane: int) -> int:
        """The term for a known thread."""
        thread = warp if self.owner is Owner.WARP else lane
        return thread // self.divisor % self.modulus * self.stride


@dataclasses.dataclass(frozen=True)
class Access:
    """One load or store of :attr:`AccessPlan.width` consecutive elements.

    Attributes:
      offset: static element offset, to be added to the thread's offset.
      parts: the (register, vector element) of each element, in the order of memory.
      swizzle_xor: if the plan is separable, what to exclusive-or into the thread's swizzled byte
        offset ...
      swizzle_add: ... and then how many bytes to add.
      guards: pairs of a dimension and a limit, below which the thread's part of the index along it
        has to be for the elements not to be padding; or that it has to be, if True follows.
    """

    offset: int
    parts: tuple[Source, ...]
    swizzle_xor: int = 0
    swizzle_add: int = 0
    guards: tuple[tuple[int, ...], ...] = ()

    def bytes(self, plan: AccessPlan) -> int:
        """How many are moved, which the address is a multiple of; 1 for less than that."""
        return max(1, len(self.parts) * plan.element_bits // 8)


@dataclasses.dataclass(frozen=True)
class Tail:
    """What the thread that holds the last elements of a dimension accesses, where the others make
    an access of :attr:`AccessPlan.width` elements, or none.

    Attributes:
      parts: the places that such an access would fill.
      accesses: of those that hold an element; all have the same guards.
    """

    parts: tuple[Source, ...]
    accesses: tuple[Access, ...]


@dataclasses.dataclass(frozen=True)
class AccessPlan:
    """How the lanes of a warpgroup transfer an array.

    The byte address of an access is ``base + swizzle(bytes(thread offset + access offset))`` for
    a base aligned to the memory layout's ``atom_bytes``. If ``swizzle_separable`` it is also
    ``base + (swizzle(bytes(thread offset)) ^ access.swizzle_xor) + access.swizzle_add``.

    Attributes:
      thread_terms: their sum is the thread's element offset.
      register_offsets: static element offset of each register's first element.
      vector_offsets: element offset of each vector element relative to the first.
      width: elements for each access.
      accesses: all accesses, by increasing offset.
      tail: narrower ones, of elements at the end of a dimension that do not fill an access.
      swizzle_separable: the thread's and the accesses' offsets share no bits that the swizzle
        touches.
      lane_mask: lanes to let through to store every element once.
      warp_mask: the same for warps.
      element_bits: bits of one element.
      swizzle: of the memory layout, in bytes.
    """

    thread_terms: tuple[ThreadTerm, ...]
    register_offsets: tuple[int, ...]
    vector_offsets: tuple[int, ...]
    width: int
    accesses: tuple[Access, ...]
    swizzle_separable: bool
    lane_mask: int
    warp_mask: int
    element_bits: int
    swizzle: int
    tail: tuple[Tail, ...] = ()

    @property
    def everything(self) -> tuple[Access, ...]:
        """All accesses, those of tails last."""
        return (*self.accesses, *(access for tail in self.tail for access in tail.accesses))

    @property
    def width_bytes(self) -> int:
        """Bytes for each access."""
        return self.width * self.element_bits // 8

    def thread_offset(self, warp: int, lane: int) -> int:
        """The thread's element offset."""
        return sum(term.value(warp, lane) for term in self.thread_terms)

    def byte_address(self, access: Access, warp: int, lane: int) -> int:
        """The swizzled byte address of an access from the base."""
        offset = self.thread_offset(warp, lane) + access.offset
        return swizzle_bytes(offset * self.element_bits // 8, self.swizzle)

    @functools.cached_property
    def wavefronts(self) -> int:
        """Passes through shared memory that warp 0 needs for all accesses, by simulation."""
        return sum(self.passes(access) for access in self.accesses)

    @functools.cached_property
    def ideal_wavefronts(self) -> int:
        """The same without bank conflicts."""
        return sum(len(p) for p in map(self._phases, self.accesses))

    @property
    def conflict_factor(self) -> float:
        """Passes relative to the ideal: 1.0 means no bank conflicts."""
        return self.wavefronts / self.ideal_wavefronts

    def _phases(self, access: Access) -> list[list[int]]:
        step = min(LANES, BANKS * BANK_BYTES // max(self.width_bytes, BANK_BYTES))
        offsets = [lane + access.offset for lane in self._lane_offsets]
        addresses = [swizzle_bytes(at * self.element_bits // 8, self.swizzle) for at in offsets]
        return [addresses[first : first + step] for first in range(0, LANES, step)]

    @functools.cached_property
    def _lane_offsets(self) -> list[int]:
        return [self.thread_offset(0, lane) for lane in range(LANES)]

    def passes(self, access: Access) -> int:
        """Passes through shared memory that warp 0 needs for one access."""
        passes = 0
        for addresses in self._phases(access):
            # Which banks these are does not matter, only which of them are the same.
            start = addresses[0] // BANK_BYTES * BANK_BYTES
            passes += _passes(tuple([one - start for one in addresses]), self.width_bytes)
        return passes


@functools.lru_cache(maxsize=4096)
def _passes(addresses: tuple[int, ...], width: int) -> int:
    """Passes for accesses of ``width`` bytes that are made at once."""
    words = {
        word
        for address in addresses
        for word in range(address // BANK_BYTES, -(-(address + width) // BANK_BYTES))
    }
    return max(Counter(word % BANKS for word in words).values())


@dataclasses.dataclass(frozen=True)
class Piece:
    """A digit of the index that lies within one extent of memory.

    Attributes:
      digit: of the register layout.
      stride: elements in memory from one of its values to the next.
    """

    digit: Digit
    stride: int


def pieces_of(layout: RegisterLayout, memory: MemoryLayout) -> list[Piece]:
    """The digits of a register layout, cut so that each steps evenly through memory.

    Raises:
      InvalidValueError: the two layouts cut a dimension in ways that do not fit together.
    """
    if layout.flat:
        extents = [list(memory.flat_extents)]
    else:
        extents = [list(dim) for dim in memory.dims]
    pieces: list[Piece] = []
    for dim, (digits, own) in enumerate(zip(layout.dims, extents, strict=True)):
        # A digit that is cut scales its stride, exactly as an extent does.
        cut = [Digit(e.size, Owner.REGISTER, e.stride) for e in own]
        total, extent = dg.count(digits), layout.size if layout.flat else layout.shape[dim]
        if total != extent:
            # Padding lies beyond the major extent.
            inner = dg.count(cut[1:])
            cut[:1] = [Digit(-(-total // inner), Owner.REGISTER, cut[0].stride)]
        pairs = dg.refine(digits, cut)
        if pairs is None:
            where = "the flattened array" if layout.flat else f"dimension {dim}"
            raise InvalidValueError(
                f"registers in the layout {layout} cannot be transferred to or from memory laid "
                f"out as {memory}: along {where} the factors "
                f"{'x'.join(str(d.size) for d in digits)} of the registers and "
                f"{'x'.join(str(e.size) for e in own)} of the memory do not divide one another",
                hint="use another register layout, or a tiling whose extents divide the layout's; "
                "or compute every index",
            )
        pieces += [Piece(digit, memory_digit.stride) for digit, memory_digit in pairs]
    return pieces


def _static_offsets(pieces: Sequence[Piece], owner: Owner, total: int) -> tuple[int, ...]:
    own = [p for p in pieces if p.digit.owner is owner]
    return tuple(sum(p.digit.value(i) * p.stride for p in own) for i in range(total))


def _width(
    offsets: dict[int, Source], thread_strides: Sequence[int], bits: int, alignment_bytes: int
) -> int:
    """The largest number of elements that every access can move at once."""
    for width in (128, 64, 32, 16, 8, 4, 2, 1):
        size = width * bits
        if size % 8 or size > 8 * min(MAXIMUM_BYTES, alignment_bytes):
            continue
        if any(stride % width for stride in thread_strides):
            continue
        starts = [offset for offset in offsets if offset % width == 0]
        if len(starts) * width == len(offsets) and all(
            start + step in offsets for start in starts for step in range(width)
        ):
            return width
    return 0


def _padded_width(
    layout: RegisterLayout, pieces: Sequence[Piece], bits: int, alignment_bytes: int
) -> int:
    """Elements of a register that every access can move at once, in an array with padding."""
    own = [p for p in pieces if p.digit.owner is Owner.VECTOR]
    steps = sorted((p.stride, p.digit.stride, p.digit.size) for p in own)
    run = 1
    for stride, place, size in steps:
        if stride != run or place != run:
            break
        run *= size
    if run < layout.vector_length:
        run = 1
    strides = [p.stride for p in pieces if p not in own]
    # An access is padding as a whole, or not at all; unless elements at the end of the only
    # dimension with vectors are accessed apart.
    dims = enumerate(layout.dims)
    ends = [layout.shape[d] for d, dim in dims if dg.count(dim, Owner.VECTOR) > 1]
    if layout.flat:
        ends = [layout.size]
    if len(ends) == 1 and bits >= 8:
        ends = []
    for width in (128, 64, 32, 16, 8, 4, 2, 1):
        size = width * bits
        if run % width or size % 8 or size > 8 * min(MAXIMUM_BYTES, alignment_bytes):
            continue
        if not any(number % width for number in (*strides, *ends)):
            return width
    return 0


def _tails(
    layout: RegisterLayout, registers: Sequence[int], vector: Sequence[int], width: int
) -> Iterator[Tail]:
    """What remains of a dimension behind whole accesses of so many elements."""
    dims = [d for d, dim in enumerate(layout.dims) if dg.count(dim, Owner.VECTOR) > 1]
    if len(dims) != 1:
        return
    (dim,) = dims
    extent = layout.size if layout.flat else layout.shape[dim]
    if extent % width == 0:
        return
    order = sorted(range(layout.vector_length), key=lambda element: vector[element])
    step = layout.thread_step(dim)
    for register, first in itertools.product(range(layout.registers), range(0, len(order), width)):
        guards = layout.guards(register, order[first])
        if guards is None:
            continue
        start = layout.part_of_register(register, order[first], dim)
        last = extent - extent % width - start
        if last < 0 or last > layout.thread_reach(dim) or (step and last % step):
            continue
        others: tuple[tuple[int, ...], ...] = tuple(one for one in guards if one[0] != dim)
        parts = tuple((register, element) for element in order[first : first + width])
        accesses, done, rest = [], 0, extent % width
        while rest:
            run = 1 << (rest.bit_length() - 1)
            offset = registers[register] + vector[parts[done][1]]
            own = (*others, (dim, last, True))
            accesses.append(Access(offset, parts[done : done + run], guards=own))
            done, rest = done + run, rest - run
        yield Tail(parts, tuple(accesses))


def _guarded(
    layout: RegisterLayout, registers: Sequence[int], vector: Sequence[int], width: int
) -> Iterator[Access]:
    """The accesses of an array with padding, but for those that are nothing else."""
    order = sorted(range(layout.vector_length), key=lambda element: vector[element])
    for register in sorted(range(layout.registers), key=lambda number: registers[number]):
        for first in range(0, len(order), width):
            elements = order[first : first + width]
            guards = layout.guards(register, elements[-1])
            if guards is not None:
                offset = registers[register] + vector[elements[0]]
                yield Access(offset, tuple((register, e) for e in elements), guards=guards)


def _over_registers(
    layout: RegisterLayout,
    pieces: Sequence[Piece],
    registers: Sequence[int],
    bits: int,
    alignment_bytes: int,
) -> tuple[int, list[Access]]:
    """The accesses, with their width, of an array with padding whose registers have one element
    each; several that are neighbours in memory are accessed together."""
    single = list(_guarded(layout, registers, (0,), 1))
    own = [p for p in pieces if p.digit.owner is Owner.REGISTER]
    others = [p.stride for p in pieces if p not in own]
    places = {access.offset: access for access in single}
    for width in (16, 8, 4, 2):
        if width * bits > 8 * min(MAXIMUM_BYTES, alignment_bytes) or len(places) < len(single):
            continue
        starts = [offset for offset in places if offset % width == 0]
        if len(starts) * width != len(single) or any(stride % width for stride in others):
            continue
        groups = [[places.get(start + step) for step in range(width)] for start in starts]
        if all(len({one and one.guards for one in group}) == 1 for group in groups):
            accesses = []
            for start, group in zip(starts, groups, strict=True):
                parts = tuple(part for one in group if one for part in one.parts)
                accesses.append(Access(start, parts, guards=places[start].guards))
            return width, accesses
    return 1, single


@functools.lru_cache(maxsize=1024)
def plan_access(
    layout: RegisterLayout, memory: MemoryLayout, alignment_bytes: int = MAXIMUM_BYTES
) -> AccessPlan:
    """Plans the transfer of an array between registers and memory.

    Args:
      layout: where the elements are in registers.
      memory: where they are in memory; the same shape.
      alignment_bytes: what the address of element 0 is known to be a multiple of.

    Raises:
      InvalidValueError: the shapes differ, the two layouts cut a dimension in ways that do not
        fit together, or elements of less than a byte would have to be addressed singly.
    """
    if layout.shape != memory.shape:
        raise InvalidValueError(
            f"registers of shape {layout.shape} and memory of shape {memory.shape} differ"
        )
    bits = memory.element_bits
    pieces = pieces_of(layout, memory)
    threads = [p for p in pieces if p.digit.owner.is_thread]
    terms = tuple(
        ThreadTerm(p.digit.owner, p.digit.stride, p.digit.size, p.stride) for p in threads
    )
    registers = _static_offsets(pieces, Owner.REGISTER, layout.registers)
    vector = _static_offsets(pieces, Owner.VECTOR, layout.vector_length)
    places = [
        (r + v, (i, j))
        for (i, r), (j, v) in itertools.product(enumerate(registers), enumerate(vector))
    ]
    offsets = dict(places)
    if layout.is_padded:
        width = _padded_width(layout, pieces, bits, alignment_bytes)
    elif len(offsets) == len(places):
        width = _width(offsets, [t.stride for t in terms], bits, alignment_bytes)
    else:  # Several elements share an address (stride 0).
        width = 1 if bits >= 8 else 0
    if width == 0:
        raise InvalidValueError(
            f"elements of {bits} bits in the layout {layout} are not stored in whole bytes of "
            f"memory laid out as {memory}",
            expected=f"{8 // bits} neighbouring elements in every thread",
            hint=f"rows of a multiple of {8 // bits} elements, or convert to int8",
        )
    tail: tuple[Tail, ...] = ()
    if layout.is_padded:
        accesses = list(_guarded(layout, registers, vector, width))
        tail = tuple(_tails(layout, registers, vector, width))
        if width == 1 and layout.vector_length == 1:
            width, accesses = _over_registers(layout, pieces, registers, bits, alignment_bytes)
    elif len(offsets) == len(places):
        accesses = [
            Access(start, tuple(offsets[start + step] for step in range(width)))
            for start in sorted(offsets)
            if start % width == 0
        ]
    else:
        accesses = [Access(offset, (place,)) for offset, place in places]
    plan = AccessPlan(
        thread_terms=terms,
        register_offsets=registers,
        vector_offsets=vector,
        width=width,
        accesses=tuple(accesses),
        swizzle_separable=True,
        lane_mask=layout.lane_mask,
        warp_mask=layout.warp_mask,
        element_bits=bits,
        swizzle=memory.swizzle,
        tail=tail,
    )
    return with_swizzle(plan, memory)


def with_swizzle(plan: AccessPlan, memory: MemoryLayout) -> AccessPlan:
    """Fills in the swizzle of the accesses, or says that it cannot be separated."""
    bits = plan.element_bits
    atom = memory.atom_bytes - 1
    thread_bits = 0
    if atom:
        warps = [plan.thread_offset(warp, 0) for warp in range(WARPS)]
        lanes = [plan.thread_offset(0, lane) for lane in range(LANES)]
        for warp, lane in itertools.product(warps, lanes):
            thread_bits |= (warp + lane) * bits // 8
    accesses = plan.everything
    byte_offsets = [access.offset * bits // 8 for access in accesses]
    if any(offset & thread_bits & atom for offset in byte_offsets):
        return dataclasses.replace(plan, swizzle_separable=False)
    chunk = (memory.swizzle // 16 - 1) << 4
    swizzled = tuple(
        dataclasses.replace(
            access,
            swizzle_xor=swizzle_bytes(offset, memory.swizzle) & chunk,
            swizzle_add=offset & ~chunk,
        )
        for access, offset in zip(accesses, byte_offsets, strict=True)
    )
    rest = iter(swizzled[len(plan.accesses) :])
    tails = tuple(
        dataclasses.replace(tail, accesses=tuple(itertools.islice(rest, len(tail.accesses))))
        for tail in plan.tail
    )
    return dataclasses.replace(plan, accesses=swizzled[: len(plan.accesses)], tail=tails)
