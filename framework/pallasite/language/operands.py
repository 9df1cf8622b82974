"""Predicates of operands: which equations of a primitive a rule is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pallasite import _jax
from pallasite.language.memory import memory_space_of
from pallasite.rules import OperandPredicate


@dataclasses.dataclass(frozen=True)
class _AnyOperand:
    """Whether an operand's abstract value is of one of some types, or in one of some spaces."""

    types: tuple[type, ...]
    spaces: tuple[Any, ...]

    def __call__(self, avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
        return any(
            isinstance(aval, self.types)
            or (isinstance(aval, _jax.AbstractRef) and memory_space_of(aval) in self.spaces)
            for aval in avals
        )


def any_operand(*kinds: Any) -> OperandPredicate:
    """The predicate of a rule for equations that have an operand of one of some kinds.

    Args:
      *kinds: memory spaces, of references, and types of abstract values.
    """
    types = tuple(kind for kind in kinds if isinstance(kind, type))
    spaces = tuple(kind for kind in kinds if not isinstance(kind, type))
    names = [kind.__name__ for kind in types] + [f"in {space}" for space in spaces]
    return OperandPredicate(_AnyOperand(types, spaces), f"an operand {' or '.join(names)}")
