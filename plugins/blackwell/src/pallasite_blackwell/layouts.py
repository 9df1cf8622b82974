"""Register layouts of what is moved to and from tensor memory (PTX ISA, ``tcgen05.ld``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pallasite.plugin import InvalidValueError, LayoutProposal, NamedLayout, TargetPredicate
from pallasite.plugin.layouts import (
    RegisterLayout,
    Replicated,
    TiledSpecification,
    fragment_tiles,
    tiled_specification,
)

ROWS = tiled_specification(fragment_tiles(128, 8, (2,)), (-7,), (-3, -2))
TRANSPOSED = tiled_specification(
    fragment_tiles(128, 8, (2, 2), (2, 1)), (-10,), (-6, -3, -5), vector_dim=-2
)

FRAGMENT_64 = tiled_specification(fragment_tiles(64, 8, (2,)), (-7,), (-3, -2))
"""64 rows as fragments: 16 rows for each warp."""


def native(vector_length: int = 2) -> TiledSpecification:
    """One of 128 rows for each lane; columns in vectors of ``vector_length``."""
    return tiled_specification(((128, vector_length), (32, vector_length)), (-4,), (-2,))


def m64_collective(columns: int) -> TiledSpecification:
    """64 rows, where the warps 2 and 3 hold the right half of the columns."""
    _check_columns(columns)
    return tiled_specification(
        ((64, columns), (32, columns // 2), (8, 8), (2,)), (-6, -7), (-3, -2)
    )


def m64_collective_native(columns: int, packing: int = 1) -> TiledSpecification:
    """Like :func:`m64_collective`, with one row for each lane."""
    _check_columns(columns)
    if packing not in (1, 2, 4, 8):
        raise InvalidValueError(f"packing {packing} is not 1, 2, 4 or 8")
    return tiled_specification(((64, columns), (32, columns // 2), (packing,)), (-4, -5), (-3,))


def _check_columns(columns: int) -> None:
    if columns < 16 or columns % 16:
        raise InvalidValueError(f"{columns} columns are not a multiple of 16")


def _columns(shape: tuple[int, ...]) -> tuple[int]:
    return (shape[-1],)


NAMED = (
    NamedLayout(name="TCGEN05", specification=ROWS),
    NamedLayout(name="TCGEN05_TRANSPOSED", specification=TRANSPOSED),
    NamedLayout(
        name="TCGEN05_ROW",
        specification=tiled_specification(((128,), (32,), (8,), (1,)), (-4,), (-2, Replicated(4))),
        public=False,
    ),
    NamedLayout(
        name="TCGEN05_TMEM_NATIVE",
        specification=lambda bits, *args, **kwargs: native(*args, **kwargs),
        arguments=lambda shape: (),
    ),
    NamedLayout(
        name="TCGEN05_M64_COLLECTIVE",
        specification=lambda bits, *args, **kwargs: m64_collective(*args, **kwargs),
        arguments=_columns,
    ),
    NamedLayout(
        name="TCGEN05_M64_COLLECTIVE_NATIVE",
        specification=lambda bits, *args, **kwargs: m64_collective_native(*args, **kwargs),
        arguments=_columns,
    ),
)


_MAKERS: tuple[Callable[[tuple[int, ...]], TiledSpecification], ...] = (
    lambda shape: ROWS,
    lambda shape: TRANSPOSED,
    lambda shape: native(),
    lambda shape: m64_collective(shape[-1]),
)


def _propose(shape: tuple[int, ...]) -> Iterable[RegisterLayout]:
    if len(shape) != 2:
        return
    for make in _MAKERS:
        try:
            yield make(shape).layout(shape)
        except InvalidValueError:
            continue


PROPOSALS = (
    LayoutProposal(
        name="tensor-memory",
        propose=_propose,
        target=TargetPredicate(frozenset({"tcgen05"})),
        order=10,
    ),
)
