"""Mathematical constants to 60 digits, and their splittings into sums of floats."""

from __future__ import annotations

import functools
from fractions import Fraction

from pallasite_std.math.values import Format, split

LN2 = Fraction("0.693147180559945309417232121458176568075500134360255254120680")
LOG2_E = Fraction("1.44269504088896340735992468100189213742664595415298593413545")
HALF_PI = Fraction("1.57079632679489661923132169163975144209858469968755291048747")
TWO_OVER_PI = Fraction("0.636619772367581343075535053490057448137838582961825794990670")


@functools.cache
def parts(number: Fraction, format: Format, count: int, head_bits: int = 0) -> tuple[float, ...]:
    """:func:`split`, remembered."""
    return split(number, format, count, head_bits)
