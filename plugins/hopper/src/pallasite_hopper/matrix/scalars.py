"""What is known of integers and conditions of a kernel without running it: numbers and symbols.

Symbols stand for values that are not known; the same function of the same values is the same symbol
wherever it is computed, so a number of a slot that is computed twice is recognised.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pallasite.plugin import jax_internals as _jax

lax = _jax.lax_primitives

_LIMIT = 1 << 31


class Symbol:
    """A value that is not known; equal only to itself."""


def _divide(a: int, b: int) -> int | None:
    """Rounds towards zero."""
    if b == 0:
        return None
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _remainder(a: int, b: int) -> int | None:
    """Has the sign of the dividend."""
    quotient = _divide(a, b)
    return None if quotient is None else a - quotient * b


_ARITHMETIC: dict[Any, Callable[..., Any]] = {
    lax.add_p: operator.add,
    lax.sub_p: operator.sub,
    lax.mul_p: operator.mul,
    lax.div_p: _divide,
    lax.rem_p: _remainder,
    lax.max_p: max,
    lax.min_p: min,
    lax.neg_p: operator.neg,
    lax.sign_p: lambda x: (x > 0) - (x < 0),
    lax.eq_p: operator.eq,
    lax.ne_p: operator.ne,
    lax.lt_p: operator.lt,
    lax.le_p: operator.le,
    lax.gt_p: operator.gt,
    lax.ge_p: operator.ge,
    lax.and_p: operator.and_,
    lax.or_p: operator.or_,
    lax.xor_p: operator.xor,
    lax.select_n_p: lambda which, *cases: cases[which],
    lax.convert_element_type_p: lambda x: x,
    _jax.multiple_of_p: lambda x: x,
}

_PLACES = (_jax.axis_index_p, _jax.program_id_p, _jax.num_programs_p)


class Scalars:
    """Computes with numbers and symbols, in one thread of a block.

    Args:
      number: of the thread.
      name: of the axis of threads, or None.
    """

    def __init__(self, number: int, name: Any):
        self._number = number
        self._name = name
        self._symbols: dict[Any, Symbol] = {}
        self._literals: dict[int, tuple[Any, int | None]] = {}

    def literal(self, atom: Any) -> Any:
        """What is known of a constant."""
        found = self._literals.get(id(atom))
        if found is None:
            number = int(atom.val) if _is_scalar(atom.aval) else None
            found = self._literals[id(atom)] = atom, number
        return found[1]

    @staticmethod
    def computes(equation: Any) -> bool:
        """Whether an equation has one integer or condition as its result."""
        outputs = equation.outvars
        return len(outputs) == 1 and _is_scalar(outputs[0].aval)

    def result(self, equation: Any, operands: Sequence[Any]) -> Any:
        """The number or symbol that an equation computes."""
        primitive = equation.primitive
        function = _ARITHMETIC.get(primitive)
        if function is not None:
            if all(map(_is_number, operands)):
                value = function(*operands)
                if value is not None and -_LIMIT <= value < _LIMIT:
                    return int(value)
                return Symbol()
            if primitive in (lax.convert_element_type_p, _jax.multiple_of_p):
                return operands[0]
            return self._symbol((primitive, *operands), operands)
        params = equation.params
        if primitive is _jax.axis_index_p and params["axis_name"] == self._name is not None:
            return self._number
        if primitive is lax.not_p and equation.outvars[0].aval.dtype == np.bool_:
            if isinstance(operands[0], int):
                return 1 - operands[0]
            return self._symbol((primitive, *operands), operands)
        if primitive in _PLACES:
            return self._symbol((primitive, str(params)), ())
        return Symbol()

    def _symbol(self, key: Any, operands: Sequence[Any]) -> Symbol:
        if None in operands:
            return Symbol()
        found = self._symbols.get(key)
        if found is None:
            found = self._symbols[key] = Symbol()
        return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int)


def _is_scalar(aval: Any) -> bool:
    return getattr(aval, "shape", None) == () and aval.dtype in (np.int32, np.bool_)
