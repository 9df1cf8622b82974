"""Where matrices are in tensor memory: PTX ISA 9.7.16.10.5, data path layouts A to G."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from pallasite_blackwell.simulation.tensor_memory import LANES
from pallasite_simulator.types import Array


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where a block has its rows of D (and of A, if that is in tensor memory).

    The columns of D are cut into equal parts, each of which has lanes of its own.

    Attributes:
      name: of the layout in the PTX ISA.
      rows: of a block.
      lanes: for each part, the lane of each row: of shape (parts, rows).
    """

    name: str
    rows: int
    lanes: Array

    @property
    def halves(self) -> bool:
        """Whether half of the lanes are used, those from lane 0 or from lane 16 on."""
        return self.name in ("C", "F")

    @property
    def parts(self) -> int:
        """Into how many parts the columns are cut."""
        return len(self.lanes)


@functools.cache
def placement(m: int, group: int, sparse: bool, stationary: bool) -> Placement:
    """The layout of an instruction; ``m`` is of both blocks together."""
    scattered = 32 * (np.arange(64) // 16) + np.arange(64) % 16
    if group == 2:
        if m == 256:
            return _folded("A", 128, 1)
        return Placement("C", 64, scattered[None]) if sparse else _folded("B", 64, 2)
    if m == 128:
        return _folded("D", 128, 1)
    if stationary:
        return _folded("E", 64, 2) if m == 64 else _folded("G", 32, 4)
    return Placement("F", 64, scattered[None])


def _folded(name: str, rows: int, parts: int) -> Placement:
    starts = np.arange(parts) * (LANES // parts)
    return Placement(name, rows, starts[:, None] + np.arange(rows))
