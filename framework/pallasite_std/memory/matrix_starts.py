"""Where matrices in shared memory may start that tensor cores read through descriptors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pallasite.plugin import InvalidValueError
from pallasite.plugin.layouts import MemoryLayout

_CHUNK = 16
"""Bytes that are never taken apart."""

_GROUP = 8
"""Swizzled rows that make a block."""


@dataclasses.dataclass(frozen=True)
class MatrixStep:
    """What a view that is selected while the kernel runs adds to the start: multiples of ``size``
    bytes that stay below ``reach`` bytes (None if that is not known)."""

    size: int
    reach: int | None


def _swizzle_block(swizzle: int) -> tuple[int, int]:
    """Bytes after which the pattern of a swizzle repeats itself, and of one of its rows."""
    return (_CHUNK, _CHUNK) if swizzle == _CHUNK else (_GROUP * swizzle, swizzle)


def check_matrix_starts(
    layout: MemoryLayout,
    starts: Sequence[Sequence[int]],
    offset: int,
    steps: Sequence[MatrixStep],
    what: str,
) -> None:
    """Raises unless every matrix starts in the first row of a block.

    The pattern of a swizzle is fixed to addresses, so a start further down would need a base
    offset, which the views that are possible leave no use for.

    Args:
      layout: of the operand.
      starts: of its matrices, in bytes from the first element.
      offset: of the first element in bytes, from an address that is a multiple of 1024.
      steps: what is added while the kernel runs.
      what: the operand's name, for messages.

    Raises:
      InvalidValueError: with the first of the starts that the tensor cores cannot have.

    PTX ISA: "Matrix Descriptor Format".
    """
    period, row = _swizzle_block(layout.swizzle)
    places = [offset + start for listed in starts for start in listed]
    bad = [place for place in places if place % period >= row or place % _CHUNK]
    for step in steps:
        inside = step.reach is not None and step.reach <= row and step.size % _CHUNK == 0
        if step.size % period and not inside:
            bad.append(step.size)
    if bad:
        raise InvalidValueError(
            f"{what} starts inside of a block of the tensor cores",
            got=f"a view that starts at, or in steps of, {bad[0]} bytes, in memory laid out as"
            f" {layout.transpose((1, 0)) if what == 'b' else layout}",
            expected=f"rows from a multiple of 8 (blocks of {period} bytes), and along the"
            f" contiguous dimension multiples of {_CHUNK} bytes",
            hint="if a start is computed in the kernel, say what it is a multiple of:"
            " pl.multiple_of(start, 8)",
        )
