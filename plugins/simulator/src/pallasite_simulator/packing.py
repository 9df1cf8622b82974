"""Elements narrower than a byte: NumPy keeps each in a byte of its own, global memory several."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pallasite.plugin.lowering import PACKED_BITS
from pallasite_simulator.types import Array


def is_packed(dtype: Any) -> bool:
    """Whether elements share bytes in global memory."""
    return np.dtype(dtype).name in PACKED_BITS


def memory_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array in global memory."""
    dtype = np.dtype(dtype)
    bits: int = PACKED_BITS.get(dtype.name, 8 * dtype.itemsize)
    return -(-math.prod(shape) * bits // 8)


def pack(array: Array) -> Array:
    """The bytes of an array in global memory, the first element in the lowest bits; a view where
    elements have whole bytes."""
    bits = PACKED_BITS.get(array.dtype.name)
    if bits is None:
        contents: Array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return contents
    each = 8 // bits
    values = np.ascontiguousarray(array).reshape(-1).view(np.uint8) & np.uint8((1 << bits) - 1)
    padded = np.zeros(-(-len(values) // each) * each, np.uint8)
    padded[: len(values)] = values
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    packed: Array = np.bitwise_or.reduce(padded.reshape(-1, each) << shifts, axis=1)
    return packed


def unpack(contents: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """The array of the given bytes; a view where elements have whole bytes."""
    dtype = np.dtype(dtype)
    bits = PACKED_BITS.get(dtype.name)
    if bits is None:
        whole: Array = contents.view(dtype).reshape(shape)
        return whole
    each = 8 // bits
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    values = (contents[:, None] >> shifts) & np.uint8((1 << bits) - 1)
    values = values.reshape(-1)[: math.prod(shape)]
    found: Array
    if dtype.name.startswith("int"):
        # Negative numbers have all higher bits of their byte set.
        sign = np.uint8(1 << (bits - 1))
        found = ((values ^ sign) - sign).view(np.int8).astype(dtype)
    elif dtype.name.startswith("uint"):
        found = values.astype(dtype)
    else:
        found = values.view(dtype)
    return found.reshape(shape)
