"""What a definition is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


def _always(equation: Any) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Definition:
    """A primitive in terms of others.

    Attributes:
      function: takes the operands and the equation's parameters; returns the results.
      applies: whether an equation is replaced.
    """

    function: Callable[..., Sequence[Any]]
    applies: Callable[[Any], bool] = _always
