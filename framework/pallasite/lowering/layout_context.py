"""What a layout rule gets to work with, under lane semantics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pallasite.extensions import LayoutRule
from pallasite.registry import Registry
from pallasite.semantics import Semantics
from pallasite.targets import Target

if TYPE_CHECKING:
    from pallasite.layouts.registers import Layout


@dataclasses.dataclass(frozen=True)
class LayoutContext:
    """The context of one equation.

    Attributes:
      registry: where rules come from.
      target: what is compiled for.
      primitive: of the equation.
      avals_in, avals_out: abstract values of operands and results.
      rules: the equation's rules that are being called, each by the one before it.
    """

    registry: Registry
    target: Target
    primitive: Any
    avals_in: Sequence[Any]
    avals_out: Sequence[Any]
    rules: tuple[LayoutRule, ...]

    def next_rule(self, wanted: Sequence[Layout | None], **params: Any) -> Sequence[Layout | None]:
        """Calls the rule that would be called if this one were not there, and returns its result.

        Raises:
          MissingRuleError: there is none.
        """
        table = self.registry.layouts
        rule = table.next(self.rules, Semantics.LANE, self.target, self.avals_in, params)
        found: Sequence[Layout | None] = rule.function(
            dataclasses.replace(self, rules=(*self.rules, rule)), wanted, **params
        )
        return found
