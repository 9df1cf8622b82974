"""How long code for an array of an odd shape may be, beside that for the next powers of two."""

from __future__ import annotations

import math

from pallasite.plugin.layouts import LANES, WARPS

_WIDEST = 128
"""Bits of the widest access."""

_WORD = 32

_TIMES = 2
"""How much longer code may be."""


def most_code(shape: tuple[int, ...], bits: int) -> float:
    """Instructions, at most, of a lane that loads an array, combines it with another and stores the
    result: so many times as many as where the extents are the next powers of two."""
    elements = math.prod(1 << (n - 1).bit_length() for n in shape) / (LANES * WARPS)
    accesses = max(1.0, elements * bits / _WIDEST)
    # Of halves of words, one instruction combines two; of bytes, none does.
    words = elements * bits / _WORD if bits >= _WORD // 2 else elements
    return _TIMES * (2 * accesses + max(1.0, words))


def is_wide(run: int, bits: int) -> bool:
    """Whether so many neighbours are moved at once by accesses that are worth no wider ones."""
    return math.gcd(run, _WIDEST // bits) * bits >= _WIDEST // 2
