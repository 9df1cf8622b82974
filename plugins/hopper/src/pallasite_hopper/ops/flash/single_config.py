"""How the gradients of attention are divided among the blocks of one kernel."""

from __future__ import annotations

import dataclasses
import enum

TILE = 64
"""Keys, or queries, of the tile that a block owns: the rows of one instruction."""

OWN, OTHER = 3, 3
"""Places for tiles that a block has all the time, and in each stage."""


class Kind(enum.Enum):
    """Which gradients a block has."""

    VALUES = "values"
    KEYS = "keys"
    BOTH = "keys and values"
    QUERIES = "queries"

    @property
    def by_keys(self) -> bool:
        """Whether the block owns a tile of keys."""
        return self is not Kind.QUERIES

    @property
    def of_scores(self) -> bool:
        """Whether it needs the gradients of the scores."""
        return self is not Kind.VALUES

    @property
    def of_values(self) -> bool:
        """Whether it has the gradient of the values."""
        return self in (Kind.VALUES, Kind.BOTH)


@dataclasses.dataclass(frozen=True)
class SingleConfig:
    """How the work is divided.

    Attributes:
      columns: queries, or keys, of the tiles that a block goes through, 32 or 64.
      stages: buffers for these tiles.
      together: whether the same block has the gradients of its keys and of its values.
      split: blocks, of one cluster, that share a tile of keys, 1, 2, 4 or 8: each goes through a
        part of the queries that see it, of all heads, and they add up what they have.
    """

    columns: int = 64
    stages: int = 2
    together: bool = False
    split: int = 1

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Of blocks, those with most steps first."""
        if self.together:
            return (Kind.BOTH, Kind.QUERIES)
        return (Kind.KEYS, Kind.VALUES, Kind.QUERIES)


def shared_bytes(size: int, columns: int, stages: int) -> int:
    """Shared memory of tiles of heads of ``size`` elements, and a little more."""
    return 2 * size * (OWN * TILE + OTHER * stages * columns) + 1024
