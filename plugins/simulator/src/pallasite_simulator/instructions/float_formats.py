"""Floating-point formats: how many bits, which patterns are special."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallasite_simulator.types import Values


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format: a sign, ``exponent`` bits with the usual bias, ``mantissa``
    bits without the leading one.

    Attributes:
      nan: bits of the NaN that instructions return.
      infinite: whether the largest exponent means infinity and NaN, as in IEEE 754. Otherwise it is
        one like the others.
      maximum: bits of the largest finite number.
    """

    name: str
    exponent: int
    mantissa: int
    nan: int
    infinite: bool = True
    maximum: int = 0

    def __post_init__(self) -> None:
        if not self.maximum:
            object.__setattr__(self, "maximum", self.infinity - 1)

    @property
    def bits(self) -> int:
        """Its size."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """What is added to exponents."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 1 << (self.bits - 1)

    @property
    def magnitude(self) -> int:
        """All bits but the sign."""
        return self.sign - 1

    @property
    def infinity(self) -> int:
        """Bits of infinity."""
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def smallest_normal(self) -> int:
        """Bits of the smallest number that is not subnormal."""
        return 1 << self.mantissa

    @property
    def one(self) -> int:
        """Bits of 1."""
        return self.bias << self.mantissa

    @property
    def quiet(self) -> int:
        """The bit that makes a NaN a quiet one."""
        return 1 << (self.mantissa - 1)


F16 = Format("f16", 5, 10, 0x7FFF)
BF16 = Format("bf16", 8, 7, 0x7FFF)
F32 = Format("f32", 8, 23, 0x7FFFFFFF)
F64 = Format("f64", 11, 52, 0xFFF8000000000000)
# Held in the upper bits of 32.
TF32 = Format("tf32", 8, 10, 0x3FFFF)
E4M3 = Format("e4m3", 4, 3, 0x7F, infinite=False, maximum=0x7E)
E5M2 = Format("e5m2", 5, 2, 0x7F)
# These have no NaN: the largest number stands for it.
E2M3 = Format("e2m3", 2, 3, 0x1F, infinite=False, maximum=0x1F)
E3M2 = Format("e3m2", 3, 2, 0x1F, infinite=False, maximum=0x1F)
E2M1 = Format("e2m1", 2, 1, 0x7, infinite=False, maximum=0x7)

FORMATS: dict[str, Format] = {
    one.name: one for one in (F16, BF16, F32, F64, TF32, E4M3, E5M2, E2M3, E3M2, E2M1)
}


def flush(values: Values, kind: Format) -> Values:
    """Bit patterns with subnormal numbers replaced by zeros of their sign (``.ftz``)."""
    dtype: Any = values.dtype.type
    magnitude = values & dtype(kind.magnitude)
    return np.where(magnitude < dtype(kind.smallest_normal), values & dtype(kind.sign), values)
