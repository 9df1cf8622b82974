"""Slices of arrays that are concatenated: a primitive that only a pass makes.

Bound arguments: the arrays, each of them once; parameters ``parts``, a tuple of :class:`Slice`, and
``dimension``, along which the slices are cut and follow each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallasite.plugin import jax_internals as _jax

joined_slices_p = _jax.Primitive("joined_slices")


@dataclasses.dataclass(frozen=True)
class Slice:
    """Part of an array.

    Attributes:
      operand: the number of the array.
      start: the first of the indices along the dimension.
      size: how many these are.
    """

    operand: int
    start: int
    size: int


@_jax.abstract_eval(joined_slices_p)
def _abstract_eval(*avals: Any, parts: Sequence[Slice], dimension: int) -> Any:
    shape = list(avals[0].shape)
    shape[dimension] = sum(part.size for part in parts)
    return avals[0].update(shape=tuple(shape)), set()
