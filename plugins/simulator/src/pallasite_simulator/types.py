"""The fundamental types of PTX (PTX ISA 5.2) and how NumPy holds them.

Registers hold bits: one unsigned integer (or bool, for predicates) for each lane, ``b128`` as two
64-bit words. Instructions see them as the type that they name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

Values = Any
"""An :data:`Array`, or a NumPy scalar where all lanes have the same value (NumPy's stubs cannot
type arithmetic on such a union)."""


@dataclasses.dataclass(frozen=True, slots=True)
class PtxType:
    """One type.

    Attributes:
      name: as in PTX, without the dot.
      bits: its size.
      kind: ``"predicate"``, ``"bits"``, ``"unsigned"``, ``"signed"``, ``"float"``, or ``"packed"``
        for several narrow values in one register.
      dtype: of values; packed types and types that NumPy cannot compute with are unsigned integers.
      storage: of registers of this size.
    """

    name: str
    bits: int
    kind: str
    dtype: np.dtype[Any]
    storage: np.dtype[Any]

    @property
    def bytes(self) -> int:
        """Its size in memory."""
        return max(1, self.bits // 8)

    @property
    def integer(self) -> bool:
        """Whether it is a bit string or an integer."""
        return self.kind in ("bits", "unsigned", "signed")


STORAGE: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.bool_),
    8: np.dtype(np.uint8),
    16: np.dtype(np.uint16),
    32: np.dtype(np.uint32),
    64: np.dtype(np.uint64),
    128: np.dtype((np.uint64, (2,))),
}
"""Bits of a register to what holds one lane of it."""


def _types() -> dict[str, PtxType]:
    found = {"pred": PtxType("pred", 1, "predicate", STORAGE[1], STORAGE[1])}

    def add(name: str, bits: int, kind: str, dtype: Any = None) -> None:
        value = STORAGE[bits] if dtype is None else np.dtype(dtype)
        found[name] = PtxType(name, bits, kind, value, STORAGE[bits])

    for bits in (8, 16, 32, 64):
        add(f"b{bits}", bits, "bits")
        add(f"u{bits}", bits, "unsigned")
        add(f"s{bits}", bits, "signed", f"int{bits}")
    add("b128", 128, "bits")
    add("f16", 16, "float", np.float16)
    add("bf16", 16, "float", ml_dtypes.bfloat16)
    add("f32", 32, "float", np.float32)
    add("tf32", 32, "float", np.float32)
    add("f64", 64, "float", np.float64)
    for name in ("f16x2", "bf16x2", "u16x2", "s16x2"):
        add(name, 32, "packed")
    add("f32x2", 64, "packed")
    for name in ("e4m3x2", "e5m2x2", "ue8m0x2"):
        add(name, 16, "packed")
    for name in ("e2m1x2",):
        add(name, 8, "packed")
    for name in ("e2m3x2", "e3m2x2"):
        add(name, 16, "packed")
    for name in ("e4m3x4", "e5m2x4", "e2m3x4", "e3m2x4"):
        add(name, 32, "packed")
    add("e2m1x4", 16, "packed")
    return found


TYPES: dict[str, PtxType] = _types()
"""All types by name."""
