"""Which weights the dropout of attention keeps, from the documented hash."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def hashed(value: np.ndarray) -> np.ndarray:
    """The permutation of 32-bit words that dropout documents, written once more."""
    value = value.astype(np.uint64)
    low = np.uint64(2**32 - 1)
    for shift, multiplier in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
        value = ((value ^ (value >> np.uint64(shift))) * np.uint64(multiplier)) & low
    return value.astype(np.uint32)


def kept(seed: int, shape: Sequence[int], rate: float) -> np.ndarray:
    """Which weights of (batch, heads, queries, keys) dropout keeps."""
    batch, heads, queries, keys = shape

    def word(number: int) -> np.ndarray:
        return np.asarray(number, np.uint32)

    with np.errstate(over="ignore"):
        start = hashed(hashed(word(seed)) + word(0)) + np.arange(batch * heads, dtype=np.uint32)
        first = hashed(hashed(start)[:, None] + np.arange(queries, dtype=np.uint32))
        second = hashed(first + word(0x9E3779B9))
        inner = hashed(first[..., None] + np.arange(keys, dtype=np.uint32))
        result = hashed(inner ^ second[..., None])
    return (result >= np.uint32(round(rate * 2**32))).reshape(shape)
