"""Zero-column masks: PTX ISA 9.7.16.4.3. The columns of B that they name count as zeros."""

from __future__ import annotations

import functools

import numpy as np

from pallasite_simulator.types import Array

_PARTS = {128: 1, 64: 2, 32: 4}
"""Masks of their own for parts of the columns, by M."""


@functools.lru_cache(maxsize=256)
def zero_columns(descriptor: int, m: int, n: int) -> Array:
    """Which columns count as zeros, bool of shape (n,).

    Raises:
      ValueError: the descriptor shifts columns, whose meaning is not published.
    """
    if descriptor >> 56 & 63:
        raise ValueError("a shift of the columns")
    if not descriptor >> 39 & 1:
        return np.zeros(n, np.bool_)
    used = (descriptor >> 40 & 255) + 1
    zeroed = (descriptor >> 48 & 255) + 1
    parts = _PARTS[m]
    found = []
    for part in range(parts):
        skipped, first = descriptor >> 8 * part & 255, descriptor >> 32 + part & 1
        place = np.arange(skipped, skipped + n // parts) % (used + zeroed)
        found.append(place < zeroed if first else place >= used)
    return np.concatenate(found)
