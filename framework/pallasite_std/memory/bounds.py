"""Between which numbers the indices are that lanes hold in registers.

Comparisons of them whose result is known are no instructions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import KernelContext, StateKey

type Bounds = tuple[tuple[int, int], ...]
"""Of each element of a register, the least and the greatest value in any thread."""


@dataclasses.dataclass
class Indices:
    """Registers of a kernel of which bounds are known."""

    known: dict[ir.Value, Bounds] = dataclasses.field(default_factory=dict)

    def note(self, kernel: KernelContext, register: ir.Value, bounds: Bounds) -> None:
        """Notes the bounds of a register that is emitted, unless it will be thrown away: others may
        take its place in MLIR's memory, and so equal it."""
        if not kernel.on_trial:
            self.known[register] = bounds

    def compared(self, name: str, one: ir.Value, other: ir.Value) -> ir.Value | None:
        """The result of a comparison (``"lt"``, ``"le"``, ``"gt"``, ``"ge"``, ``"eq"`` or ``"ne"``)
        of two registers; None if it depends on the thread, or on more than what is known."""
        ours, theirs = self.known.get(one), self.known.get(other)
        if ours is None or theirs is None:
            return None
        results = [_result(name, a, b) for a, b in zip(ours, theirs, strict=True)]
        found = [result for result in results if result is not None]
        if len(found) != len(results):
            return None
        return ops.from_elements([ops.i1_constant(result) for result in found])


def _result(name: str, one: tuple[int, int], other: tuple[int, int]) -> bool | None:
    match name:
        case "gt" | "ge":
            return _result({"gt": "lt", "ge": "le"}[name], other, one)
        case "ne":
            equal = _result("eq", one, other)
            return None if equal is None else not equal
        case "lt":
            return True if one[1] < other[0] else False if one[0] >= other[1] else None
        case "le":
            return True if one[1] <= other[0] else False if one[0] > other[1] else None
        case "eq":
            return False if one[1] < other[0] or other[1] < one[0] else None
    return None


def _no_indices(kernel: KernelContext) -> Indices:
    return Indices()


_INDICES = StateKey("standard.indices", _no_indices)


def indices_of(kernel: KernelContext) -> Indices:
    """The registers of a kernel of which bounds are known."""
    return kernel.state(_INDICES)


def bounds_of(firsts: Sequence[int], reach: int) -> Bounds:
    """Of elements that are each a number and what threads add to it, ``reach`` at most."""
    return tuple((first, first + reach) for first in firsts)


def holds(dtype: np.dtype[Any], bounds: Bounds) -> bool:
    """Whether numbers of a type are integers that can be so large."""
    return dtype.kind in "iu" and max(high for _, high in bounds) <= np.iinfo(dtype).max
