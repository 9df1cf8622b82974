"""Values of plugins that loops and branches carry in registers."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from jaxlib.mlir import ir


class CarriedValue(abc.ABC):
    """A value other than a ``RegisterArray`` that a loop or a branch can change.

    Its registers become values that the loop carries; all else about it stays as it is.
    """

    @abc.abstractmethod
    def carry_registers(self) -> Sequence[ir.Value]:
        """The registers, always as many and of the same types."""

    @abc.abstractmethod
    def with_registers(self, registers: Sequence[ir.Value]) -> CarriedValue:
        """The value with other registers in place of its own."""
