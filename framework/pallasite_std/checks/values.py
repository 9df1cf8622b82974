"""What is known of a kernel's integers without running it: numbers, affine forms, ranges.

An integer that is computed of the position in the grid and of loops' counters is a form, c0 + c1 *
s1 + ..., whose symbols take every combination of their values. So the ends of its range are reached
by some block in some iteration. A quotient or remainder of a form is one again where the symbol
counts in units of the divisor: it is split into two, as a position of a grid is by ``divmod``. Of
anything else the range may be known; what is not known at all is ``None``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

LIMIT = 1 << 31
"""Integers of kernels are below; what leaves the range is not followed."""


class Symbol:
    """A number from 0 to ``extent - 1`` that takes all of these values.

    Attributes:
      extent: how many values it has.
      blocks: whether another value means another block of the grid.
      name: for messages.
    """

    __slots__ = ("blocks", "extent", "name")

    def __init__(self, extent: int, name: str, *, blocks: bool):
        self.extent = extent
        self.name = name
        self.blocks = blocks

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """``constant`` and a multiple of each of some symbols.

    Attributes:
      constant: the number.
      terms: pairs of a symbol and its coefficient, which is not 0.
    """

    constant: int
    terms: tuple[tuple[Symbol, int], ...]

    @property
    def low(self) -> int:
        """The least value."""
        return self.constant + sum(c * (s.extent - 1) for s, c in self.terms if c < 0)

    @property
    def high(self) -> int:
        """The greatest value."""
        return self.constant + sum(c * (s.extent - 1) for s, c in self.terms if c > 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """A number from ``low`` to ``high``.

    Attributes:
      low: not above the least value.
      high: not below the greatest value.
      reached: whether both are values that it takes.
    """

    low: int
    high: int
    reached: bool = False


Value = int | Form | Range | None


def make_form(constant: int, terms: Mapping[Symbol, int]) -> Value:
    """The form of a constant and coefficients; a number if these are 0."""
    kept = tuple((symbol, c) for symbol, c in terms.items() if c and symbol.extent > 1)
    return _limited(Form(constant, kept)) if kept else _number(constant)


def _number(value: int) -> int | None:
    return value if -LIMIT <= value < LIMIT else None


def _limited(form: Form) -> Form | None:
    return form if form.low >= -LIMIT and form.high < LIMIT else None


def symbol(extent: int, name: str, *, blocks: bool = False) -> Value:
    """A new symbol as a value; the number 0 if that is its only value."""
    return make_form(0, {Symbol(extent, name, blocks=blocks): 1})


def bounds(value: Any) -> tuple[int, int] | None:
    """The least and the greatest value, or None."""
    if type(value) is int:
        return value, value
    if isinstance(value, Form | Range):
        return value.low, value.high
    return None


def are_reached(value: Any) -> bool:
    """Whether both bounds are certainly taken."""
    return isinstance(value, Form) or (isinstance(value, Range) and value.reached)


def _ranged(low: int, high: int, *, reached: bool = False) -> Value:
    if low == high:
        return low if -LIMIT <= low < LIMIT else None
    return Range(low, high, reached) if low >= -LIMIT and high < LIMIT else None


def add(a: Value, b: Value, sign: int = 1) -> Value:
    """``a + sign * b``; ``sign`` is 1 or -1."""
    if a is None or b is None:
        return None
    if isinstance(b, int):
        if isinstance(a, int):
            return _number(a + sign * b)
        if isinstance(a, Form):
            return _limited(Form(a.constant + sign * b, a.terms))
    if isinstance(a, int | Form) and isinstance(b, int | Form):
        constant = _constant(a) + sign * _constant(b)
        terms = dict(_terms(a))
        for one, coefficient in _terms(b):
            terms[one] = terms.get(one, 0) + sign * coefficient
        return make_form(constant, terms)
    (a_low, a_high), (b_low, b_high) = _known(a), _known(b)
    if sign < 0:
        b_low, b_high = -b_high, -b_low
    reached = (isinstance(a, int) and are_reached(b)) or (isinstance(b, int) and are_reached(a))
    return _ranged(a_low + b_low, a_high + b_high, reached=reached)


def multiply(a: Value, b: Value) -> Value:
    """``a * b``."""
    if a is None or b is None:
        return None
    if isinstance(a, int):
        a, b = b, a
    if isinstance(b, int):
        if isinstance(a, int):
            return _number(a * b)
        if isinstance(a, Form):
            return make_form(_constant(a) * b, {one: c * b for one, c in _terms(a)})
        ends = (a.low * b, a.high * b)
        return _ranged(min(ends), max(ends), reached=a.reached)
    (a_low, a_high), (b_low, b_high) = _known(a), _known(b)
    ends4 = (a_low * b_low, a_low * b_high, a_high * b_low, a_high * b_high)
    return _ranged(min(ends4), max(ends4))


def minimum(a: Value, b: Value) -> Value:
    """``min(a, b)``."""
    return _extremum(a, b, min)


def maximum(a: Value, b: Value) -> Value:
    """``max(a, b)``."""
    return _extremum(a, b, max)


def _extremum(a: Value, b: Value, function: Any) -> Value:
    first, second = bounds(a), bounds(b)
    if first is None or second is None:
        return None
    low, high = function(first[0], second[0]), function(first[1], second[1])
    if first[1] <= second[0]:
        return a if function is min else b
    if second[1] <= first[0]:
        return b if function is min else a
    # A form's values between its ends need not all be taken, the ends are.
    number = isinstance(a, int) or isinstance(b, int)
    reached = number and (are_reached(a) or are_reached(b))
    return _ranged(low, high, reached=reached)


def less(a: Value, b: Value) -> int | None:
    """Whether ``a < b``, if that is always or never so."""
    first, second = bounds(a), bounds(b)
    if first is None or second is None:
        return None
    if isinstance(a, Form) and isinstance(b, Form):
        difference = bounds(add(a, b, -1))
        if difference is not None:
            return 1 if difference[1] < 0 else 0 if difference[0] >= 0 else None
    return 1 if first[1] < second[0] else 0 if first[0] >= second[1] else None


def equal(a: Value, b: Value) -> int | None:
    """Whether ``a == b``, if that is always or never so."""
    if isinstance(a, int) and isinstance(b, int):
        return int(a == b)
    if isinstance(a, Form) and a == b:
        return 1
    difference = bounds(add(a, b, -1))
    if difference is None or difference[0] <= 0 <= difference[1]:
        return None
    return 0


class Splits:
    """Symbols that are quotients and remainders of others.

    Attributes:
      parts: for a symbol s: a number d and symbols q and r with s = d * q + r.
    """

    def __init__(self) -> None:
        self.parts: dict[Symbol, tuple[int, Symbol, Symbol]] = {}

    def expand(self, value: Value) -> Value:
        """The same value, without symbols that have been split."""
        while isinstance(value, Form) and any(one in self.parts for one, _ in value.terms):
            terms: dict[Symbol, int] = {}
            for one, c in value.terms:
                divisor, quotient, remainder = self.parts.get(one, (0, one, one))
                if one in self.parts:
                    terms[quotient] = terms.get(quotient, 0) + c * divisor
                    terms[remainder] = terms.get(remainder, 0) + c
                else:
                    terms[one] = terms.get(one, 0) + c
            value = make_form(value.constant, terms)
        return value

    def divide(self, value: Value, divisor: Value) -> tuple[Value, Value]:
        """Quotient and remainder, for a value that is not negative and a positive number."""
        value = self.expand(value)
        ends = bounds(value)
        if not isinstance(divisor, int) or divisor <= 0 or ends is None or ends[0] < 0:
            return None, None
        if isinstance(value, int):
            return divmod(value, divisor)
        if isinstance(value, Form):
            exact = self._exact(value, divisor)
            if exact is not None:
                return exact
            # A symbol takes its values whatever the others are once none is a part of another.
            value = self.expand(value)
            ends = bounds(value) or ends
        whole = (ends[0] // divisor, ends[1] // divisor)
        every = isinstance(value, Form) and any(
            abs(c) == 1 and one.extent >= divisor for one, c in value.terms
        )
        rest: Value = value if whole == (0, 0) else _ranged(0, divisor - 1, reached=every)
        return _ranged(*whole, reached=are_reached(value)), rest

    def _exact(self, form: Form, divisor: int) -> tuple[Value, Value] | None:
        high = {one: c // divisor for one, c in form.terms if c % divisor == 0}
        low = {one: c for one, c in form.terms if c % divisor}
        quotient, remainder = divmod(form.constant, divisor)
        rest = make_form(remainder, low)
        ends = bounds(rest)
        if ends is None:
            return None
        if ends[0] >= 0 and ends[1] < divisor:
            return make_form(quotient, high), rest
        # The symbol with the greatest coefficient counts across a multiple of the divisor.
        one = max(low, key=lambda each: low[each])
        c = low[one]
        units = divisor // c if c > 0 and divisor % c == 0 else 0
        if units < 2 or one.extent % units or one.extent == units:
            return None
        self.parts[one] = (
            units,
            Symbol(one.extent // units, f"{one.name} // {units}", blocks=one.blocks),
            Symbol(units, f"{one.name} % {units}", blocks=one.blocks),
        )
        expanded = self.expand(form)
        return self._exact(expanded, divisor) if isinstance(expanded, Form) else None


def hull(values: Sequence[Value]) -> Value:
    """What is known of a number that is one of several."""
    first, *rest = values
    if all(value == first for value in rest):
        return first
    ends = [bounds(value) for value in values]
    known = [one for one in ends if one is not None]
    if len(known) < len(ends):
        return None
    return _ranged(min(low for low, _ in known), max(high for _, high in known))


def _constant(value: int | Form) -> int:
    return value if isinstance(value, int) else value.constant


def _terms(value: int | Form) -> tuple[tuple[Symbol, int], ...]:
    return () if isinstance(value, int) else value.terms


def _known(value: int | Form | Range) -> tuple[int, int]:
    ends = bounds(value)
    assert ends is not None
    return ends
