"""What one user thread is while a kernel, or a part of it, is lowered."""

from __future__ import annotations

import dataclasses
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Semantics:
    """What one user thread is, and which rules apply there.

    ``Semantics.LANE``: a warpgroup of 128 lanes whose arrays have explicit register layouts.
    ``Semantics.WARP``: one warp, inside a warp-mapped region.
    ``Semantics.WARPGROUP``: a warpgroup whose layouts are inferred; falls back to LANE.

    Where a primitive has no rule for a semantics, the rules for the one that it falls back to are
    asked. A plugin makes a semantics of its own with ``Semantics("TILE",
    falls_back_to=Semantics.WARPGROUP)``: whole kernels get it by
    ``CompilerParams(lowering_semantics=...)``, regions by a rule that lowers a nested jaxpr in a
    mode with it. Semantics of one name that fall back to the same are one, whoever makes them, so
    rules of two plugins for them contradict each other like any others.

    Attributes:
      name: for messages, in capitals.
      falls_back_to: whose rules apply where there is none for this one, or None.
    """

    name: str
    falls_back_to: Semantics | None = None

    LANE: ClassVar[Semantics]
    WARP: ClassVar[Semantics]
    WARPGROUP: ClassVar[Semantics]

    def __post_init__(self) -> None:
        # Rules are looked up for each equation.
        object.__setattr__(self, "_hash", hash((self.name, self.falls_back_to)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    @property
    def chain(self) -> tuple[Semantics, ...]:
        """This semantics and those that it falls back to, most specific first."""
        rest = () if self.falls_back_to is None else self.falls_back_to.chain
        return (self, *rest)

    def extends(self, other: Semantics) -> bool:
        """Whether it is ``other`` or falls back to it, at once or by way of others."""
        return other in self.chain

    def __repr__(self) -> str:
        return f"Semantics.{self.name}"


Semantics.LANE = Semantics("LANE")
Semantics.WARP = Semantics("WARP")
Semantics.WARPGROUP = Semantics("WARPGROUP", falls_back_to=Semantics.LANE)
