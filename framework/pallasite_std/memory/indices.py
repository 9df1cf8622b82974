"""Indices of the widths that programs use, in the 32 bits of addresses."""

from __future__ import annotations

import numpy as np
from jaxlib.mlir import ir

from pallasite.plugin.ir import ops
from pallasite_std.math.table import BINARY


def narrow_index(index: ir.Value, signed: bool) -> ir.Value:
    """An index (an integer of any width) as i32.

    One that i32 cannot hold becomes -1 or the largest, so it stays outside of every array on the
    same side.
    """
    bits = ir.IntegerType(index.type).width
    if bits + (not signed) > 32:
        dtype = np.dtype(f"{'' if signed else 'u'}int{bits}")
        largest = ops.constant((1 << 31) - 1, index.type)
        index = BINARY["min"](index, largest, dtype, False)
        if signed:
            index = BINARY["max"](index, ops.constant(-1, index.type), dtype, False)
    return ops.cast_integer(index, ops.i32(), signed=signed)


def clamped_index(index: ir.Value, signed: bool, most: int) -> ir.Value:
    """An index (an integer of any width) as i32, moved into 0 to ``most``."""
    index = narrow_index(index, signed)
    index = BINARY["max"](index, ops.i32_constant(0), np.dtype(np.int32), False)
    return BINARY["min"](index, ops.i32_constant(most), np.dtype(np.int32), False)
