"""What the tensor core multiplies: element types, kinds of instructions, instruction descriptors.

PTX ISA, "Instruction descriptor" of ``tcgen05.mma``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from pallasite.plugin.language import checks

OPERAND_BYTES = 32
"""Of a row of an operand, along k, that one instruction reads."""

_CODES = {
    "float16": 0,
    "bfloat16": 1,
    "float32": 2,
    "float8_e4m3fn": 0,
    "float8_e5m2": 1,
    "uint8": 0,
    "int8": 1,
    "float4_e2m1fn": 1,
}

_ACCUMULATOR_CODES = {"float16": 0, "float32": 1, "int32": 2}

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_INTEGERS = ("int8", "uint8")

_ACCUMULATORS = {
    "f16": ("float32",),
    "tf32": ("float32",),
    "f8f6f4": ("float32", "float16"),
    "i8": ("int32",),
    "mxf8f6f4": ("float32",),
    "mxf4nvf4": ("float32",),
}

_SCALE_CODES = {"float8_e4m3fn": 0, "float8_e8m0fnu": 1}


def operand_bits(dtype: Any) -> int:
    """Bits of an element of an operand."""
    name = np.dtype(dtype).name
    return 4 if name == "float4_e2m1fn" else 8 * np.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Product:
    """The types of a product.

    Attributes:
      kind: of the instruction.
      a, b, accumulator: names of dtypes.
      sparse: whether half of a's elements are zeros that are not stored.
      scale: the dtype of block scales, or None.
      block: how many elements along k one scale is for; 0 without scales.
    """

    kind: str
    a: str
    b: str
    accumulator: str
    sparse: bool = False
    scale: str | None = None
    block: int = 0

    @property
    def bits(self) -> int:
        """Of an element of the operands."""
        return 4 if self.a == "float4_e2m1fn" else 8 * np.dtype(_dtype(self.a)).itemsize

    @property
    def depth_of_a(self) -> int:
        """Elements of a row of a that one instruction reads."""
        return OPERAND_BYTES * 8 // self.bits

    @property
    def depth(self) -> int:
        """Elements along k that one instruction multiplies."""
        return self.depth_of_a * (2 if self.sparse else 1)

    @property
    def sparse_group(self) -> int:
        """Of how many elements along k half are zeros."""
        return 8 if self.bits == 4 else 4

    @property
    def metadata_columns(self) -> int:
        """Columns of sparse metadata that one instruction reads."""
        return self.depth // self.sparse_group * 2 // 16

    @property
    def scales_per_step(self) -> int:
        """Scales along k that one instruction reads: 1, 2 or 4."""
        return self.depth // self.block if self.block else 0

    @property
    def qualifiers(self) -> str:
        """The instruction's name behind the group of blocks."""
        if self.scale is None:
            return f"kind::{self.kind}"
        return f"kind::{self.kind}.block_scale.scale_vec::{self.scales_per_step}X"

    def word(
        self,
        rows: int,
        columns: int,
        *,
        transposed_a: bool,
        transposed_b: bool,
        selector: int = 0,
        scale_id: int = 0,
    ) -> int:
        """The instruction descriptor.

        Args:
          rows, columns: of the instruction, for both blocks if it is one of a pair.
          transposed_a, transposed_b: whether elements along m or n are contiguous.
          selector: which half of two columns of sparse metadata it reads.
          scale_id: the first scale in a cell that it reads.
        """
        word = int(self.sparse) << 2
        word |= _CODES[self.a] << 7 | _CODES[self.b] << 10
        word |= int(transposed_a) << 15 | int(transposed_b) << 16
        word |= columns >> 3 << 17
        if self.scale is None:
            word |= selector
            word |= _ACCUMULATOR_CODES[self.accumulator] << 4
            return word | rows >> 4 << 24
        word |= scale_id << 4 | scale_id << 29
        word |= _SCALE_CODES[self.scale] << 23
        return word | rows >> 7 << 27


def _dtype(name: str) -> Any:
    return getattr(ml_dtypes, name, None) or np.dtype(name)


def product_of(
    a: Any,
    b: Any,
    accumulator: Any,
    *,
    sparse: bool = False,
    scale: Any = None,
    block: int = 0,
) -> Product:
    """The types of a product.

    Args:
      a, b, accumulator: dtypes.
      sparse: whether a is sparse.
      scale: the dtype of scales, or None.
      block: elements along k for each scale, among those that a sparse operand lacks.

    Raises:
      InvalidTypeError: the tensor core does not multiply these.
    """
    names = np.dtype(a).name, np.dtype(b).name
    kind = _kind(names, scaled=scale is not None)
    if kind is None:
        raise checks.type_error(
            "the tensor core does not multiply these dtypes" + (" with scales" if scale else ""),
            got=f"a: {names[0]}, b: {names[1]}",
            expected="8-bit floats with float8_e8m0fnu scales, or float4_e2m1fn"
            if scale is not None
            else "two of float16, bfloat16 or float32 (as tf32), 8-bit floats, which may differ, or"
            " 8-bit integers, which may differ",
            hint="float4_e2m1fn needs a_scale= and b_scale="
            if "float4_e2m1fn" in names and scale is None
            else None,
        )
    allowed = _ACCUMULATORS[kind]
    if kind == "f16" and names[0] == "float16":
        allowed = ("float32", "float16")
    if np.dtype(accumulator).name not in allowed:
        raise checks.type_error(
            f"products of {names[0]} and {names[1]} are not accumulated in"
            f" {np.dtype(accumulator).name}",
            expected=" or ".join(allowed),
        )
    if sparse and kind == "tf32":
        raise checks.type_error(
            "sparse operands of float32", expected="elements of 16, 8 or 4 bits"
        )
    scale_name = None
    if scale is not None:
        scale_name = np.dtype(scale).name
        base = block // 2 if sparse else block
        _check_scales(kind, scale_name, base, block)
    return Product(kind, *names, np.dtype(accumulator).name, sparse, scale_name, block)


def _kind(names: tuple[str, str], *, scaled: bool) -> str | None:
    if scaled:
        if all(name in _FLOAT8 for name in names):
            return "mxf8f6f4"
        return "mxf4nvf4" if names == ("float4_e2m1fn", "float4_e2m1fn") else None
    if all(name in _FLOAT8 for name in names):
        return "f8f6f4"
    if all(name in _INTEGERS for name in names):
        return "i8"
    if names[0] == names[1]:
        return {"float16": "f16", "bfloat16": "f16", "float32": "tf32"}.get(names[0])
    return None


def _check_scales(kind: str, scale: str, base: int, block: int) -> None:
    """Which scales a kind takes: their dtype, and for how many elements each is."""
    allowed: dict[str, tuple[int, ...]]
    if kind == "mxf8f6f4":
        allowed = {"float8_e8m0fnu": (32,)}
    else:
        allowed = {"float8_e4m3fn": (16,), "float8_e8m0fnu": (16, 32)}
    if scale not in allowed:
        raise checks.type_error(
            f"scales of {scale} for products of kind {kind}", expected=" or ".join(allowed)
        )
    if base not in allowed[scale]:
        factor = block // base if base else 1
        sizes = " or ".join(str(size * factor) for size in allowed[scale])
        raise checks.value_error(
            "a scale is for another number of elements along k",
            got=f"blocks of {block} elements",
            expected=f"blocks of {sizes} with scales of {scale}",
        )
