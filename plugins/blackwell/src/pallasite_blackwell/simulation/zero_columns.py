"""Zero-column masks: PTX ISA 9.7.16.4.3. The columns of B that they name count as zeros.

The table of the PTX ISA and its examples disagree on which of the two spans is that of the zeros;
the examples are followed, as hardware is reported to do.
"""

from __future__ import annotations

import functools

import numpy as np

from pallasite_simulator.types import Array

_PARTS = {128: 1, 64: 2, 32: 4}
"""Masks of their own for parts of the columns, by M."""

_RESERVED = 0xC0000070_00000000

MOST_SHIFT = {128: 32, 64: 32, 32: 16}
"""By how many columns B may be shifted, by M."""


def shift_of(descriptor: int) -> int:
    """How many columns of B are left out before the first."""
    return descriptor >> 56 & 63


@functools.lru_cache(maxsize=256)
def zero_columns(descriptor: int, m: int, n: int) -> Array:
    """Which columns count as zeros, bool of shape (n,).

    Raises:
      ValueError: the descriptor has no meaning, or none that is published.
    """
    if descriptor & _RESERVED:
        raise ValueError("bits 36 to 38, 62 and 63 are zeros")
    if not descriptor >> 39 & 1:
        return np.zeros(n, np.bool_)
    zeros = (descriptor >> 40 & 255) + 1
    used = (descriptor >> 48 & 255) + 1
    parts = _PARTS[m]
    found = []
    for part in range(parts):
        skipped, first = descriptor >> 8 * part & 255, descriptor >> 32 + part & 1
        if skipped >= (zeros if first else used):
            raise ValueError("more columns are skipped than the first span has")
        place = np.arange(skipped, skipped + n // parts) % (used + zeros)
        found.append(place < zeros if first else place >= used)
    return np.concatenate(found)
