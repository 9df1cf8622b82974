"""What a definition is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def _always(equation: Any) -> bool:
    return True


def _own(equation: Any, producers: Mapping[Any, Any]) -> Any:
    return equation


@dataclasses.dataclass(frozen=True)
class Definition:
    """A primitive in terms of others.

    Attributes:
      function: takes the operands and the equation's parameters; returns the results.
      applies: whether an equation is replaced.
      operands: an equation that does the same to other operands, given what makes each variable.
    """

    function: Callable[..., Sequence[Any]]
    applies: Callable[[Any], bool] = _always
    operands: Callable[[Any, Mapping[Any, Any]], Any] = _own
