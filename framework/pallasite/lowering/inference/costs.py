"""How costs of layouts compare: what is impossible, refused or uncertain, and who knows the rest.

What transfers and conversions cost is up to the implementation ``"layout_costs"`` of a plugin. The
numbers only have to order the choices.
"""

from __future__ import annotations

from typing import Protocol, cast

from pallasite import plugins
from pallasite.language.memory import MemorySpace
from pallasite.layouts.memory import MemoryLayout
from pallasite.layouts.registers import Layout

IMPOSSIBLE = 1e12
"""More than all that is possible costs together."""

UNCERTAIN = 1e4
"""What an equation costs that works only if a start is a multiple of what is not known."""

REFUSED = 1e6
"""What an equation costs that the lowering refuses, with an error that says more than ours."""


def is_impossible(cost: float) -> bool:
    """Whether a factor's cost, before it is weighed, says that it cannot be satisfied."""
    return cost >= IMPOSSIBLE / 1e4


class LayoutCosts(Protocol):
    """What the layouts of arrays cost, in passes through shared memory (128 bytes each)."""

    def access(
        self, layout: Layout, memory: MemoryLayout, alignment: int, space: MemorySpace
    ) -> float:
        """Of loading or storing an array once, at an address that is a multiple of ``alignment``
        bytes."""

    def conversion(self, source: Layout, target: Layout, bits: int) -> float:
        """Of bringing an array of elements of ``bits`` bits from one layout into another."""

    def copies(self, layout: Layout, bits: int) -> float:
        """Of computing and keeping each element in several threads, for one operation."""


def layout_costs() -> LayoutCosts:
    """The costs by the plugins that are there."""
    return cast(LayoutCosts, plugins.implementation("layout_costs"))
