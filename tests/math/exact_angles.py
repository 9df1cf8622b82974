"""Sines, cosines and tangents of floats of any size, by integer arithmetic."""

from __future__ import annotations

from fractions import Fraction

_BITS = 2600
_KEPT = 400


def _inverse_arctangent(n: int) -> int:
    """The arctangent of 1/n, times 2**_BITS."""
    term = (1 << _BITS) // n
    total, divisor, sign = term, 1, -1
    while term:
        term //= n * n
        divisor += 2
        total += sign * (term // divisor)
        sign = -sign
    return total


PI = 4 * (4 * _inverse_arctangent(5) - _inverse_arctangent(239))
"""Machin's formula; times 2**_BITS."""


def _series(x: int, first: int) -> int:
    """The sine (from the first power on) or the cosine (from 0 on) of a small angle."""
    term = x if first else 1 << _KEPT
    total, power = term, first
    while abs(term) > 1:
        term = -(term * x >> _KEPT) * x >> _KEPT
        term //= (power + 1) * (power + 2)
        power += 2
        total += term
    return total


def exact(name: str, x: float) -> Fraction:
    """``sin``, ``cos`` or ``tan`` of a float, to some 100 digits."""
    numerator, denominator = float(x).as_integer_ratio()
    angle = (numerator << _BITS) // denominator
    quarters = (4 * angle + PI) // (2 * PI)
    rest = angle - quarters * PI // 2 >> _BITS - _KEPT
    sine, cosine = _series(rest, 1), _series(rest, 0)
    for _ in range(quarters % 4):
        sine, cosine = cosine, -sine
    if name == "tan":
        return Fraction(sine, cosine)
    return Fraction(sine if name == "sin" else cosine, 1 << _KEPT)
