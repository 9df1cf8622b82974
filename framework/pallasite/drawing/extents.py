"""Which part of an array a picture shows, and how its indices are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Cut:
    """How much of an axis is drawn: the first ``shown`` of ``total``."""

    shown: int
    total: int

    @property
    def is_cut(self) -> bool:
        """Whether something is left out."""
        return self.shown < self.total


def cut(total: int, limit: int, period: int = 1) -> Cut:
    """As much of an axis as fits ``limit``, in whole periods if at least one fits."""
    if total <= limit:
        return Cut(total, total)
    return Cut(limit // period * period if period <= limit else limit, total)


def index_text(index: Sequence[int]) -> str:
    """An index as it is written in Python: ``[3, 5]``."""
    return f"[{', '.join(map(str, index))}]"


def numbers_text(numbers: Sequence[int]) -> str:
    """Some increasing numbers in words: ``3``, ``0 to 7``, or ``0, 8, 16``."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def array_text(dtype: str, shape: Sequence[int]) -> str:
    """A type such as ``float32[64, 16]``; without a dtype, ``shape [64, 16]``."""
    return f"{dtype or 'shape '}{index_text(shape)}"
