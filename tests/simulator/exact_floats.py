"""Floating-point formats in exact rational arithmetic: what tests of numbers are held against."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np

NAN, INFINITY = "nan", "infinity"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A format: bits of the exponent and of the mantissa; whether it has infinities and NaNs."""

    name: str
    exponent: int
    mantissa: int
    special: bool = True
    largest: int = 0

    @property
    def bits(self):
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self):
        return 2 ** (self.exponent - 1) - 1

    @property
    def dtype(self):
        size = 8 if self.bits <= 8 else 16 if self.bits <= 16 else 64 if self.bits > 32 else 32
        return np.dtype(f"u{size // 8}")

    @property
    def infinity(self):
        return (2**self.exponent - 1) << self.mantissa

    @property
    def maximum(self):
        return self.largest or self.infinity - 1

    @property
    def smallest_normal(self):
        return Fraction(2) ** (1 - self.bias)

    def negative(self, bits):
        return bool(bits >> (self.bits - 1) & 1)

    def magnitude(self, bits):
        return bits & (2 ** (self.bits - 1) - 1)

    def is_nan(self, bits):
        return self.special and self.magnitude(bits) > self.infinity

    def value(self, bits):
        """The number as a fraction, or NAN, or INFINITY (of either sign)."""
        magnitude = self.magnitude(bits)
        if self.special and magnitude >= self.infinity:
            return INFINITY if magnitude == self.infinity else NAN
        field, rest = divmod(magnitude, 2**self.mantissa)
        rest += 2**self.mantissa if field else 0
        number = Fraction(rest) * Fraction(2) ** (max(field, 1) - self.bias - self.mantissa)
        return -number if self.negative(bits) else number

    def nearest_below(self, number):
        """Bits of the largest finite magnitude that is not above a positive fraction."""
        exponent = number.numerator.bit_length() - number.denominator.bit_length()
        exponent -= Fraction(2) ** exponent > number
        exponent = max(exponent, 1 - self.bias)
        steps = math.floor(number / Fraction(2) ** (exponent - self.mantissa))
        bits = ((exponent - 1 + self.bias) << self.mantissa) + steps
        return min(bits, self.maximum)

    def round(self, number, mode="rn", negative_zero=False, finite=False):
        """Bits of a fraction, rounded.

        Args:
          mode: rn, rna, rz, rm or rp.
          negative_zero: whether a result that is exactly zero is negative.
          finite: whether what is too large becomes the largest number.
        """
        sign = 1 << (self.bits - 1)
        if number == 0:
            return sign if negative_zero else 0
        negative, number = number < 0, abs(number)
        low = self.nearest_below(number)
        exact, rest = self.value(low), 0
        above = low + 1
        if low == self.maximum:
            step = exact - self.value(low - 1)
        else:
            step = self.value(above) - exact
        rest = (number - exact) / step
        if mode in ("rn", "rna"):
            up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and (mode == "rna" or low & 1))
        else:
            up = rest > 0 and mode == ("rm" if negative else "rp")
        bits = above if up else low
        if bits > self.maximum:
            bits = self.maximum if finite or not self.special else self.infinity
        return bits | (sign if negative else 0)


F16 = Kind("f16", 5, 10)
BF16 = Kind("bf16", 8, 7)
F32 = Kind("f32", 8, 23)
F64 = Kind("f64", 11, 52)
TF32 = Kind("tf32", 8, 10)
E4M3 = Kind("e4m3", 4, 3, special=False, largest=0x7E)
E5M2 = Kind("e5m2", 5, 2)
E2M3 = Kind("e2m3", 2, 3, special=False, largest=0x1F)
E3M2 = Kind("e3m2", 3, 2, special=False, largest=0x1F)
E2M1 = Kind("e2m1", 2, 1, special=False, largest=0x7)

KINDS = {one.name: one for one in (F16, BF16, F32, F64, TF32, E4M3, E5M2, E2M3, E3M2, E2M1)}


def root(number, kind, mode):
    """Bits of the square root of a positive fraction, rounded."""
    # As many bits as the format has and some, with the last one set if any were lost.
    shift = 2 * (kind.mantissa + kind.bias + 8)
    scaled = number * Fraction(4) ** shift
    whole = math.floor(scaled)
    found = math.isqrt(whole)
    inexact = found * found != scaled
    return kind.round(Fraction(2 * found + inexact, 2) / Fraction(2) ** shift, mode)


def patterns(kind, count, seed):
    """Bits of ``count`` numbers: special ones, any, and ones whose mantissas are mostly zeros near
    1 and near the smallest normal number, so that ties, cancellation and underflow are met."""
    random = np.random.default_rng([seed, kind.exponent, kind.mantissa])
    width, mantissa, infinity = kind.bits, kind.mantissa, kind.infinity
    one = kind.bias << mantissa
    edges = [0, 1, 2, 3, 2**mantissa - 1, 2**mantissa, 2**mantissa + 1, one - 1, one, one + 1]
    edges += [infinity - 1, infinity - 2, infinity, infinity + 1, infinity | 1 << (mantissa - 1)]
    edges += [2 ** (width - 1) - 1, one + (1 << mantissa), one + (1 << mantissa - 1)]
    edges = np.array(edges + [edge | 1 << (width - 1) for edge in edges], np.uint64)

    def near(lowest, highest):
        exponent = random.integers(lowest, highest, count, np.uint64)
        rest = random.integers(0, 2**mantissa, count, np.uint64)
        cleared = random.integers(0, mantissa + 1, count, np.uint64)
        rest = np.where(random.random(count) < 0.6, rest >> cleared << cleared, rest)
        sign = random.integers(0, 2, count, np.uint64) << np.uint64(width - 1)
        return sign | exponent << np.uint64(mantissa) | rest

    choices = [
        random.choice(edges, count),
        random.integers(0, 2**width - 1, count, np.uint64, endpoint=True),
        near(kind.bias - 4, kind.bias + 5),
        near(max(kind.bias // 2 - mantissa, 0), kind.bias // 2 + mantissa),
        near(0, 3),
    ]
    return np.choose(random.integers(0, 5, count), choices).astype(kind.dtype)


def flushed(kind, bits):
    """Zero of its sign for a subnormal number."""
    if kind.magnitude(bits) < 2**kind.mantissa:
        return bits & 1 << (kind.bits - 1)
    return bits
