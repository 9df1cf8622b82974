"""Which dtypes the tensor cores multiply, and how deep one instruction is."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from pallasite.plugin.language import checks

DEPTH_BYTES = 32
"""Of a row of A or a column of B that one instruction reads."""

_PTX = {
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.float16): "f16",
    np.dtype(np.float32): "tf32",
    np.dtype(ml_dtypes.float8_e4m3fn): "e4m3",
    np.dtype(ml_dtypes.float8_e5m2): "e5m2",
    np.dtype(np.int8): "s8",
    np.dtype(np.uint8): "u8",
}

_FAMILIES = (("e4m3", "e5m2"), ("s8", "u8"))
"""Types of operands that may be multiplied."""

_ACCUMULATORS = {
    "bf16": ("f32",),
    "f16": ("f32", "f16"),
    "tf32": ("f32",),
    "e4m3": ("f32", "f16"),
    "e5m2": ("f32", "f16"),
    "s8": ("s32",),
    "u8": ("s32",),
}

_ACCUMULATOR_NAMES = {"float32": "f32", "float16": "f16", "int32": "s32"}


def ptx_type(dtype: Any) -> str:
    """The name of an operand's type in the instruction.

    Raises:
      InvalidValueError: a dtype that the tensor cores do not multiply.
    """
    name = _PTX.get(np.dtype(dtype))
    if name is None:
        raise checks.value_error(
            "the tensor cores do not multiply this dtype",
            got=np.dtype(dtype),
            expected=", ".join(str(known) for known in _PTX),
        )
    return name


def accumulator_type(dtype: Any) -> str:
    """The name of an accumulator's type in the instruction."""
    return _ACCUMULATOR_NAMES[np.dtype(dtype).name]


def depth_of(dtype: Any) -> int:
    """The depth of one instruction, in elements."""
    return DEPTH_BYTES // int(np.dtype(dtype).itemsize)


def check_dtypes(a: Any, b: Any, accumulator: Any) -> None:
    """Raises InvalidValueError for dtypes that no instruction combines."""
    left, right = ptx_type(a), ptx_type(b)
    if left != right and not any(left in family and right in family for family in _FAMILIES):
        raise checks.value_error(
            "a and b have dtypes that are not multiplied with each other",
            got=f"a: {np.dtype(a)}, b: {np.dtype(b)}",
            expected="the same dtype (or two kinds of 8-bit float, or int8 and uint8)",
            hint="convert one of them in registers; a may stay there",
        )
    if _ACCUMULATOR_NAMES.get(np.dtype(accumulator).name) not in _ACCUMULATORS[left]:
        names = {short: long for long, short in _ACCUMULATOR_NAMES.items()}
        raise checks.value_error(
            f"products of {np.dtype(a)} are not accumulated in {np.dtype(accumulator)}",
            got=f"an accumulator of dtype {np.dtype(accumulator)}",
            expected=" or ".join(names[one] for one in _ACCUMULATORS[left]),
        )


def column_counts(accumulator: str) -> tuple[int, ...]:
    """How many columns one instruction may have, largest first (PTX ISA, wgmma shapes)."""
    counts = range(256, 0, -8)
    if accumulator == "s32":
        return tuple(n for n in counts if n % 16 == 0 or n in (8, 24))
    return tuple(counts)
