"""Which weights the dropout of attention keeps, by the documented generator written once more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LOW = np.uint64(2**32 - 1)


def philox(counters: tuple[np.ndarray, np.ndarray], key: np.ndarray) -> tuple[np.ndarray, ...]:
    """Philox 2x32 with 7 rounds, in 64 bits."""
    left, right = (one.astype(np.uint64) for one in counters)
    key = key.astype(np.uint64)
    for _ in range(7):
        product = left * np.uint64(0xD256D193)
        left, right = (product >> np.uint64(32)) ^ key ^ right, product & LOW
        key = (key + np.uint64(0x9E3779B9)) & LOW
    return left, right


def hashed(value: np.ndarray) -> np.ndarray:
    """The permutation of 32-bit words that makes keys from seeds."""
    value = value.astype(np.uint64)
    for shift, multiplier in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
        value = ((value ^ (value >> np.uint64(shift))) * np.uint64(multiplier)) & LOW
    return value


def kept(seed: int, shape: Sequence[int], rate: float) -> np.ndarray:
    """Which weights of (batch, heads, queries, keys) dropout keeps."""
    batch, heads, queries, keys = shape
    of_seed = hashed(hashed(np.array(seed & 0xFFFFFFFF, np.uint64)))
    key = hashed((of_seed + np.arange(batch * heads, dtype=np.uint64)) & LOW)[:, None, None]
    query, of_key = np.arange(queries)[:, None], np.arange(keys)
    words = np.stack(philox((query & ~8, of_key & ~8), key), axis=-1)
    chosen = np.where(of_key % 16 < 8, words[..., 0], words[..., 1])
    bits = np.where(query % 16 < 8, chosen & np.uint64(0xFFFF), chosen >> np.uint64(16))
    return (bits >= np.uint64(round(rate * 2**16))).reshape(shape)


def growth(rate: float) -> float:
    """The factor of the weights that are kept."""
    return 1 / (1 - round(rate * 2**16) / 2**16)
