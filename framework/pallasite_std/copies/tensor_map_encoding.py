"""TMA descriptors as JAX's kernel launcher wants them: checked here, encoded by it at each launch.

The launcher takes the driver's ``CUtensorMapDataType`` and ``CUtensorMapSwizzle`` numbers, sizes
and strides in elements, major to minor. It has no packed types, so elements below one byte become
bytes here. What it or the driver would refuse at run time is refused here, at the user's line.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallasite.plugin import InternalError, InvalidValueError
from pallasite.plugin.lowering import TensorMapParameter

MAX_RANK = 5
MAX_BOX_EXTENT = 256
MAX_EXTENT = 2**32
MAX_STRIDE_BYTES = 2**40

_SWIZZLE_ENUM = {16: 0, 32: 1, 64: 2, 128: 3}
"""Swizzle span in bytes (16: none) to ``CUtensorMapSwizzle``."""


@dataclasses.dataclass(frozen=True)
class _ElementType:
    """``cuda`` is the ``CUtensorMapDataType``; ``bytes`` of one unit; elements ``packed`` in it."""

    cuda: int
    bytes: int
    packed: int = 1


_ELEMENT_TYPES = {
    0: _ElementType(0, 1, packed=2),  # 4-bit
    1: _ElementType(0, 1),  # 8-bit
    2: _ElementType(1, 2),  # 16-bit integer
    3: _ElementType(2, 4),  # 32-bit unsigned or signless
    4: _ElementType(4, 8),  # 64-bit unsigned or signless
    5: _ElementType(6, 2),  # float16
    6: _ElementType(7, 4),  # float32
    7: _ElementType(9, 2),  # bfloat16
    8: _ElementType(0, 1, packed=4),  # 2-bit
    9: _ElementType(3, 4),  # 32-bit signed
    10: _ElementType(5, 8),  # 64-bit signed
}
"""Element type code of ``TensorMapParameter`` to the driver's type."""

ELEMENT_BYTES = {element.cuda: element.bytes for element in _ELEMENT_TYPES.values()}
"""``CUtensorMapDataType`` to the bytes of one unit."""


@dataclasses.dataclass(frozen=True)
class TensorMapEncoding:
    """The launcher's arguments for one descriptor, in units of the driver's data type."""

    element_type: int
    swizzle: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    def create(self, launcher: Any) -> Any:
        """The launcher's parameter object; out-of-bounds elements read as zeros."""
        return launcher.create_tma_descriptor_parameter(
            self.element_type,
            self.swizzle,
            list(self.shape),
            list(self.strides),
            list(self.box),
            0,
        )


def encode(parameter: TensorMapParameter) -> TensorMapEncoding:
    """Checks a descriptor against the hardware's limits and converts it to the launcher's units.

    Raises:
      InvalidValueError: the driver would refuse the descriptor; carries the user's source line.
      InternalError: an element type code that does not exist.
    """
    if parameter.element_type not in _ELEMENT_TYPES:
        raise InternalError(
            f"unknown TMA element type code {parameter.element_type}", location=parameter.location
        )
    element = _ELEMENT_TYPES[parameter.element_type]

    def require(condition: bool, message: str, got: Any, expected: str) -> None:
        if not condition:
            raise InvalidValueError(
                f"a TMA copy needs a descriptor that the hardware does not have: {message}",
                got=got,
                expected=expected,
                location=parameter.location,
            )

    shape, strides, box = parameter.shape, parameter.strides, parameter.box
    rank = len(shape)
    require(1 <= rank <= MAX_RANK, "wrong number of dimensions", rank, f"1 to {MAX_RANK}")
    require(
        len(strides) == len(box) == rank,
        "shape, strides and box differ in length",
        f"shape {shape}, strides {strides}, box {box}",
        f"{rank} entries each",
    )
    require(strides[-1] == 1, "the last dimension is not contiguous", strides, "a last stride of 1")
    if element.packed > 1:
        parts = (shape[-1], box[-1], *strides[:-1])
        require(
            all(part % element.packed == 0 for part in parts),
            "elements below one byte must fill whole bytes",
            f"shape {shape}, strides {strides}, box {box}",
            f"last size, last box extent and outer strides divisible by {element.packed}",
        )
        shape = (*shape[:-1], shape[-1] // element.packed)
        strides = (*(stride // element.packed for stride in strides[:-1]), 1)
        box = (*box[:-1], box[-1] // element.packed)
    require(
        all(1 <= extent <= MAX_EXTENT for extent in shape),
        "a dimension is empty or too large",
        shape,
        "sizes from 1 to 2**32",
    )
    require(
        all(1 <= extent <= MAX_BOX_EXTENT for extent in box),
        "the tile is empty or too large",
        box,
        f"extents from 1 to {MAX_BOX_EXTENT}",
    )
    inner = box[-1] * element.bytes
    require(
        inner % 16 == 0,
        "rows of the tile are not whole 16-byte pieces",
        f"{inner} bytes per row",
        "a multiple of 16 bytes",
    )
    require(
        parameter.swizzle in _SWIZZLE_ENUM,
        "unknown swizzle",
        parameter.swizzle,
        "16 (none), 32, 64 or 128 bytes",
    )
    require(
        parameter.swizzle == 16 or inner <= parameter.swizzle,
        "rows of the tile are longer than the swizzle",
        f"{inner} bytes per row, swizzle {parameter.swizzle}",
        "rows no longer than the swizzle",
    )
    require(
        all(
            s * element.bytes % 16 == 0 and s * element.bytes < MAX_STRIDE_BYTES
            for s in strides[:-1]
        ),
        "rows of the array do not start at multiples of 16 bytes",
        f"strides of {tuple(s * element.bytes for s in strides[:-1])} bytes",
        "multiples of 16 bytes below 2**40",
    )
    return TensorMapEncoding(element.cuda, _SWIZZLE_ENUM[parameter.swizzle], shape, strides, box)
