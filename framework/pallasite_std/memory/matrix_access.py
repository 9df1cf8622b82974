"""Transfers by ``ldmatrix`` and ``stmatrix``, which move matrices of 8 rows of 16 bytes.

An access moves up to four matrices. Each lane gives the address of one row and holds one word of
each matrix: lane ``l`` the word ``l % 4`` of row ``l // 4``, or, if the matrices are transposed,
the 16-bit elements of rows ``2 * (l % 4)`` and the next in column ``l // 4`` (PTX ISA 9.7.14.5.15,
``ldmatrix``, and 9.7.14.5.16, ``stmatrix``). The registers of the tensor cores are laid out so.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from pallasite.plugin import InvalidValueError
from pallasite.plugin.layouts import MemoryLayout, Owner, RegisterLayout, Source
from pallasite_std.memory.access import (
    Access,
    AccessPlan,
    Piece,
    ThreadTerm,
    pieces_of,
    plan_access,
    with_swizzle,
)

ROW_BYTES = 16
WORD_BITS = 32
_MOST_MATRICES = 4
_COUNTED = 4
"""Accesses of a plan whose bank conflicts are counted."""


@dataclasses.dataclass(frozen=True)
class MatrixPlan:
    """How the lanes of a warpgroup transfer an array by matrices.

    Attributes:
      rows: the addresses: what each lane gives, of 16 bytes. The parts of an access are those of
        its first matrix, then those of the second, and so on.
      matrices: of each access: 1, 2 or 4.
      transposed: whether the elements of a word are in different rows.
    """

    rows: AccessPlan
    matrices: int
    transposed: bool

    def words(self, access: Access) -> list[tuple[Source, ...]]:
        """For each matrix of an access the (register, vector element) of the word's elements."""
        size = len(access.parts) // self.matrices
        return [access.parts[start : start + size] for start in range(0, len(access.parts), size)]


type TransferPlan = AccessPlan | MatrixPlan


@functools.lru_cache(maxsize=1024)
def plan_transfer(
    layout: RegisterLayout, memory: MemoryLayout, alignment_bytes: int, *, matrices: bool
) -> TransferPlan:
    """The plan by plain accesses, or the one by matrices if that may be used and takes fewer
    passes through shared memory.

    Where both take as many, as they do for words without bank conflicts, fewer instructions were
    measured not to make kernels faster.

    Args:
      layout: where the elements are in registers.
      memory: where they are in memory; the same shape.
      alignment_bytes: what the address of element 0 is known to be a multiple of.
      matrices: whether the memory and the target have transfers of matrices.

    Raises:
      InvalidValueError: see :func:`~pallasite_std.memory.access.plan_access`.
    """
    plain = plan_access(layout, memory, alignment_bytes)
    if not matrices or plain.width_bytes > WORD_BITS // 8:
        return plain
    plan = plan_matrix_access(layout, memory, alignment_bytes)
    if plan is None or transfer_passes(plan.rows) >= transfer_passes(plain):
        return plain
    return plan


def transfer_passes(plan: AccessPlan) -> float:
    """About how many passes through shared memory a warp needs for an array."""
    count = len(plan.everything)
    # All accesses look alike, but for where they begin.
    some = plan.everything[:: max(1, count // _COUNTED)]
    return sum(map(plan.passes, some)) * count / len(some)


@dataclasses.dataclass(frozen=True)
class _Factor:
    """A factor of a number: ``size`` values, ``stride`` elements apart in memory."""

    size: int
    stride: int


@functools.lru_cache(maxsize=1024)
def plan_matrix_access(
    layout: RegisterLayout, memory: MemoryLayout, alignment_bytes: int = ROW_BYTES
) -> MatrixPlan | None:
    """Plans the transfer of an array by matrices; None if it has no rows that lie as they must.

    The arguments are those of :func:`~pallasite_std.memory.access.plan_access`.
    """
    bits = memory.element_bits
    if alignment_bytes % ROW_BYTES or bits > 16 or layout.is_padded:
        return None
    try:
        pieces = pieces_of(layout, memory)
    except InvalidValueError:
        return None
    lanes = _lane_strides(pieces)
    if lanes is None:
        return None
    own = [factor for piece in pieces for factor in _own_factors(piece)]
    row, word = ROW_BYTES * 8 // bits, WORD_BITS // bits
    if lanes[:2] == [word, 2 * word]:
        transposed, across = False, lanes[2:]
        within = [1 << bit for bit in range(word.bit_length() - 1)]
    elif bits == 16 and lanes[2:] == [1, 2, 4] and lanes[1] == 2 * lanes[0]:
        transposed, within = True, [lanes[0] // 2]
        across = [lanes[0] // 2, *lanes[:2]]
    else:
        return None
    for stride in within:
        if _Factor(2, stride) not in own:
            return None
        own.remove(_Factor(2, stride))
    warps = [piece for piece in pieces if piece.digit.owner is Owner.WARP]
    strides = [*across, *(factor.stride for factor in own), *(piece.stride for piece in warps)]
    if any(stride % row for stride in strides) or any(factor.stride == 0 for factor in own):
        return None
    return _plan(layout, memory, bits, transposed, across, within, own, warps)


def _plan(
    layout: RegisterLayout,
    memory: MemoryLayout,
    bits: int,
    transposed: bool,
    across: Sequence[int],
    within: Sequence[int],
    own: Sequence[_Factor],
    warps: Sequence[Piece],
) -> MatrixPlan | None:
    plain = plan_access(layout, memory, ROW_BYTES)
    sources: dict[int, Source] = {}
    for (register, start), (element, step) in itertools.product(
        enumerate(plain.register_offsets), enumerate(plain.vector_offsets)
    ):
        sources[start + step] = register, element
    if len(sources) != layout.registers * layout.vector_length:
        return None
    # The next chunks of a row make the matrices of one access: then the fewest addresses differ by
    # the swizzle.
    halves = sorted((f for f in own if f.size == 2), key=lambda factor: factor.stride)
    chosen = halves[: _MOST_MATRICES.bit_length() - 1]
    rest = list(own)
    for factor in chosen:
        rest.remove(factor)
    terms = [*across, *(factor.stride for factor in chosen)]
    inner = _sums([_Factor(2, stride) for stride in within])
    matrices = _sums(chosen)
    accesses = [
        Access(
            start,
            tuple(sources[start + matrix + element] for matrix in matrices for element in inner),
        )
        for start in sorted(_sums(rest))
    ]
    rows = AccessPlan(
        thread_terms=(
            *_lane_terms(terms),
            *(
                ThreadTerm(Owner.WARP, piece.digit.stride, piece.digit.size, piece.stride)
                for piece in warps
            ),
        ),
        register_offsets=plain.register_offsets,
        vector_offsets=plain.vector_offsets,
        width=ROW_BYTES * 8 // bits,
        accesses=tuple(accesses),
        swizzle_separable=True,
        lane_mask=plain.lane_mask,
        warp_mask=plain.warp_mask,
        element_bits=bits,
        swizzle=memory.swizzle,
    )
    return MatrixPlan(with_swizzle(rows, memory), len(matrices), transposed)


def _lane_strides(pieces: Sequence[Piece]) -> list[int] | None:
    """How far apart in memory the elements of lanes are that differ in one bit of their number,
    for each bit; None if lanes are numbered in another way, or hold the same."""
    strides: dict[int, int] = {}
    for piece in pieces:
        digit = piece.digit
        if digit.owner is not Owner.LANE:
            continue
        if digit.size & (digit.size - 1) or digit.stride & (digit.stride - 1):
            return None
        for bit in range(digit.size.bit_length() - 1):
            number = digit.stride.bit_length() - 1 + bit
            if number in strides:
                return None
            strides[number] = piece.stride << bit
    return [strides[bit] for bit in range(5)] if sorted(strides) == list(range(5)) else None


def _own_factors(piece: Piece) -> list[_Factor]:
    """A lane's own digit as factors of 2 and a rest, minor to major."""
    if piece.digit.owner.is_thread:
        return []
    size, stride = piece.digit.size, piece.stride
    factors = []
    while size % 2 == 0:
        factors.append(_Factor(2, stride))
        size, stride = size // 2, 2 * stride
    return [*factors, *([_Factor(size, stride)] if size > 1 else [])]


def _sums(factors: Sequence[_Factor]) -> list[int]:
    """All offsets, that of the first factor running fastest."""
    offsets = [0]
    for factor in factors:
        offsets = [step * factor.stride + old for step in range(factor.size) for old in offsets]
    return offsets


def _lane_terms(strides: Sequence[int]) -> list[ThreadTerm]:
    """The terms of the bits of a lane's number, joined where they are evenly spaced."""
    terms: list[ThreadTerm] = []
    for bit, stride in enumerate(strides):
        last = terms[-1] if terms else None
        if last is not None and stride == last.stride * last.modulus:
            terms[-1] = dataclasses.replace(last, modulus=2 * last.modulus)
        else:
            terms.append(ThreadTerm(Owner.LANE, 1 << bit, 2, stride))
    return terms
