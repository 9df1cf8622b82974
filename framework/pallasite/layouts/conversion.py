"""Relayouts: what it takes to bring an array from one register layout into another."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence

from pallasite.errors import InvalidValueError
from pallasite.layouts import digits as dg
from pallasite.layouts import registers as rg
from pallasite.layouts.digits import Digits, Owner


class ConversionKind(enum.Enum):
    """The cheapest known way of converting."""

    SAME = "same"
    REGISTER_PERMUTATION = "register_permutation"
    SHARED_MEMORY = "shared_memory"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """How to convert between two layouts of one shape.

    Attributes:
      kind: the way.
      sources: unless through shared memory, for each target register, for each element of its
        vector, the source (register, element).
    """

    kind: ConversionKind
    sources: tuple[tuple[rg.Source, ...], ...] | None = None


def local_sources(
    source: rg.RegisterLayout,
    target: rg.RegisterLayout,
    source_dims: Sequence[Digits],
    target_dims: Sequence[Digits],
) -> tuple[tuple[rg.Source, ...], ...] | None:
    """Where the elements of the target are found if every thread already holds its own.

    Args:
      source: layout of the array that is there.
      target: layout of the array that is wanted.
      source_dims: digits of the source, one entry per compared dimension.
      target_dims: the target's digits of the same dimensions; its other digits select nothing.

    Returns:
      For each target register and vector element the source (register, element), or None if
      some thread would need an element that it does not hold at a place known statically.
    """
    pairs: list[tuple[dg.Digit, dg.Digit]] = []
    for old, new in zip(source_dims, target_dims, strict=True):
        refined = dg.refine(old, new)
        if refined is None:
            return None
        pairs += refined
    steps = []
    for old_digit, new_digit in pairs:
        if old_digit.owner.is_thread or new_digit.owner.is_thread:
            if old_digit != new_digit:
                return None
            continue
        steps.append((old_digit, new_digit))

    def places(owner: Owner, count: int) -> list[rg.Source]:
        """What each number of an owner adds to the source's register and element."""
        found = []
        for wanted in (Owner.REGISTER, Owner.VECTOR):
            mine = [(old, new) for old, new in steps if old.owner is wanted and new.owner is owner]
            found.append([sum(n.value(at) * o.stride for o, n in mine) for at in range(count)])
        return list(zip(*found, strict=True))

    elements = places(Owner.VECTOR, target.vector_length)
    registers = places(Owner.REGISTER, target.registers)
    return tuple(tuple((a + c, b + d) for c, d in elements) for a, b in registers)


def conversion(source: rg.Layout, target: rg.Layout) -> Conversion:
    """Classifies the conversion between two layouts of the same shape.

    Raises:
      InvalidValueError: the shapes differ, or the target is a splat and the source is not.
    """
    if source.shape != target.shape:
        raise InvalidValueError(
            f"cannot convert between layouts of shapes {source.shape} and {target.shape}"
        )
    if source == target:
        elements = range(source.vector_length)
        every = tuple(tuple((r, e) for e in elements) for r in range(source.registers))
        return Conversion(ConversionKind.SAME, every)
    if isinstance(source, rg.SplatLayout):
        sources = (((0, 0),) * target.vector_length,) * target.registers
        return Conversion(ConversionKind.REGISTER_PERMUTATION, sources)
    assert isinstance(source, rg.RegisterLayout)
    if isinstance(target, rg.SplatLayout):
        if source.size > 1:
            raise InvalidValueError(
                f"an array in the layout {source} cannot become a splat: its elements may differ"
            )
        return Conversion(ConversionKind.REGISTER_PERMUTATION, (((0, 0),),))
    assert isinstance(target, rg.RegisterLayout)
    lists = (source.dims, target.dims)
    if source.flat != target.flat and (source.is_padded or target.is_padded):
        # Padding behind rows, and behind the flattened array.
        return Conversion(ConversionKind.SHARED_MEMORY)
    if source.flat or target.flat:
        flattened = (tuple(itertools.chain.from_iterable(dims)) for dims in lists)
        lists = tuple((digits,) for digits in flattened)  # type: ignore[assignment]
    found = local_sources(source, target, *lists)
    if found is None:
        return Conversion(ConversionKind.SHARED_MEMORY)
    return Conversion(ConversionKind.REGISTER_PERMUTATION, found)
