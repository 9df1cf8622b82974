"""Elements of matrices: from bytes to single precision.

All element types are exact in single precision. Elements of 4 and 6 bits are packed, or, for
``.kind::f8f6f4`` and ``.kind::mxf8f6f4``, in containers (PTX ISA 9.7.16.10.2): in shared memory 16
of them are followed by padding up to 16 bytes, in tensor memory each has a byte.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from pallasite_simulator.instructions.tensor_core import FORMATS
from pallasite_simulator.types import Array

BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "e4m3": 8,
    "e5m2": 8,
    "e2m3": 6,
    "e3m2": 6,
    "e2m1": 4,
    "s8": 8,
    "u8": 8,
}
"""Bits of an element without padding."""

_NARROW: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


@functools.cache
def table(name: str) -> Array:
    """The values of all bit patterns of a type of up to 8 bits, float32."""
    if name in ("s8", "u8"):
        held = np.arange(256, dtype=np.uint8)
        return (held.view(np.int8) if name == "s8" else held).astype(np.float32)
    patterns = np.arange(1 << BITS[name], dtype=np.uint8)
    found: Array = patterns.view(_NARROW[name]).astype(np.float32)
    return found


def decode(contents: Array, name: str, *, padded: bool = False) -> Array:
    """Elements of rows of bytes.

    Args:
      contents: uint8, of shape (rows, bytes), contiguous.
      name: of the type.
      padded: whether 16 elements of less than 8 bits are followed by padding up to 16 bytes.

    Returns:
      float32, of shape (rows, elements).
    """
    bits = BITS[name]
    if bits >= 16:
        return FORMATS[name].decode(contents.view(np.uint32))
    if bits == 8:
        return np.take(table(name), contents)
    if padded:
        pieces = contents.reshape(len(contents), -1, 16)[..., : 2 * bits]
        return np.take(table(name), unpack(pieces, bits)).reshape(len(contents), -1)
    return np.take(table(name), unpack(contents, bits))


def decode_containers(contents: Array, name: str) -> Array:
    """Elements in bytes of tensor memory: those of 4 bits are in bits 2 to 5, those of 6 bits in
    bits 0 to 5."""
    bits = BITS[name]
    if bits == 4:
        return np.take(table(name), contents >> 2 & 15)
    if bits == 6:
        return np.take(table(name), contents & 63)
    return decode(contents, name)


def unpack(contents: Array, bits: int) -> Array:
    """The elements of 4 or 6 bits that bytes (in the last dimension) hold, lowest bits first."""
    if bits == 4:
        both = np.stack([contents & 15, contents >> 4], axis=-1)
        return both.reshape(*contents.shape[:-1], -1)
    threes = contents.reshape(*contents.shape[:-1], -1, 3).astype(np.uint32)
    word = threes[..., 0] | threes[..., 1] << 8 | threes[..., 2] << 16
    four = word[..., None] >> np.array([0, 6, 12, 18], np.uint32) & 63
    return four.astype(np.uint8).reshape(*contents.shape[:-1], -1)


@functools.cache
def scale_table(name: str) -> Array:
    """The values of all bytes of scale factors (``"ue8m0"`` or ``"ue4m3"``), float64."""
    patterns = np.arange(256, dtype=np.uint8)
    if name == "ue8m0":
        found = np.ldexp(1.0, np.arange(256) - 127)
        found[255] = np.nan
        return found
    values: Array = (patterns & 0x7F).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return values
