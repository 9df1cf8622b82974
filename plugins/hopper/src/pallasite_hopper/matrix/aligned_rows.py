"""Loads of parts of matrices by aligned vectors, whatever the rows begin at.

Where rows are no multiples of 16 bytes apart, each begins at another place behind a multiple of
them. What is summed up over rows need not be shifted: lanes load the vectors at multiples of 16
bytes that hold a row, and keep the sums of rows that begin equally far behind them apart from
others, until they are added up, shifted then.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import AbstractValue, InferenceContext
from pallasite.plugin.ir import ops, types
from pallasite.plugin.language import GMEM
from pallasite.plugin.layouts import LANES, WARPS, RegisterLayout, strided
from pallasite.plugin.lowering import RegisterArray, RuleContext, Value, resolve
from pallasite_std.api import MemoryReference, arguments

rules = RuleSet()
_ALL = (Semantics.LANE,)

VECTOR = 16
"""Bytes of what is loaded."""


@dataclasses.dataclass(frozen=True)
class VectorWindow:
    """Which part of a matrix is loaded, but for where it begins.

    Attributes:
      rows, columns: of the matrix.
      shape: of the part: one vector for each of the 128 lanes, in rows that are powers of two.
      size: bytes of an element.
    """

    rows: int
    columns: int
    shape: tuple[int, int]
    size: int

    @property
    def pitch(self) -> int:
        """Bytes from row to row."""
        return self.columns * self.size

    @property
    def elements(self) -> int:
        """Of a vector."""
        return VECTOR // self.size

    @property
    def layout(self) -> RegisterLayout:
        """Of the elements."""
        return strided(self.shape, self.elements)


# The primitives as kernels call them --------------------------------------------------------------

load_row_vectors_p = _jax.Primitive("load_row_vectors")


@_jax.abstract_eval(load_row_vectors_p)
def _load_abstract_eval(*avals: Any, args_tree: Any, window: VectorWindow, dtype: Any) -> Any:
    effects = arguments.reference_effects(args_tree, len(avals), read=(0,))
    return _jax.ShapedArray(window.shape, dtype), effects


arguments.no_discharge(load_row_vectors_p)

elements_behind_p = _jax.Primitive("elements_behind")


@_jax.abstract_eval(elements_behind_p)
def _behind_abstract_eval(*avals: Any, args_tree: Any) -> Any:
    del avals, args_tree
    return _jax.ShapedArray((), jnp.int32), set()


arguments.no_discharge(elements_behind_p)


def load_row_vectors(ref: Any, window: VectorWindow, row: Any, column: Any) -> Any:
    """A part of a matrix, each row of it moved to where a multiple of 16 bytes is.

    Element (i, j) is that of row ``row + i`` and column ``column + j - p``, where the matrix' row
    begins p elements behind a multiple of 16 bytes. What is not in the row is undefined, but for
    rows beyond the last one, which are zero. So are the elements of the matrix that follow the last
    multiple of 16 bytes in it.

    Args:
      ref: the whole matrix in global memory, that the kernel does not write.
      window: which part.
      row, column: where it begins; the column at a multiple of a vector.

    PTX ISA: ``ld.global.v4``.
    """
    whole = arguments.reference(ref, "ref", GMEM)
    row, column = jnp.asarray(row, jnp.int32), jnp.asarray(column, jnp.int32)
    dtype = np.dtype(arguments.dtype_of(whole))
    return arguments.bind(load_row_vectors_p, whole, row, column, window=window, dtype=dtype)


def elements_behind(ref: Any) -> Any:
    """How many elements behind a multiple of 16 bytes a matrix in global memory begins (int32)."""
    return arguments.bind(elements_behind_p, arguments.reference(ref, "ref", GMEM))


# Layouts ------------------------------------------------------------------------------------------


@rules.inference(load_row_vectors_p)
def _infer_load(
    ctx: InferenceContext,
    *operands: AbstractValue,
    args_tree: Any,
    window: VectorWindow,
    dtype: Any,
) -> AbstractValue:
    result = ctx.result()
    ctx.makes(result, window.layout, "vectors of rows are loaded so", pinned=True)
    return result


@rules.inference(elements_behind_p)
def _infer_behind(ctx: InferenceContext, *operands: AbstractValue, args_tree: Any) -> AbstractValue:
    return ctx.result()


# Code ---------------------------------------------------------------------------------------------


@rules.lowering(load_row_vectors_p, *_ALL)
def _load(
    ctx: RuleContext, *operands: Value, args_tree: Any, window: VectorWindow, dtype: Any
) -> RegisterArray:
    reference, row, column = args_tree.unflatten(operands)
    memory = resolve(ctx, reference)
    thread = ops.add(ops.multiply(ctx.launch.warp_id, LANES), ctx.launch.lane_id)
    vectors = window.shape[1] // window.elements
    begin = llvm.ptrtoint(ops.i64(), memory.address())
    registers = []
    for number in range(window.layout.registers):
        below = number * LANES * WARPS // vectors
        own_row = ops.add(ops.add(row.scalar, ops.divide_unsigned(thread, vectors)), below)
        own = ops.multiply(ops.remainder_unsigned(thread, vectors), window.elements)
        own = ops.multiply(ops.add(own, column.scalar), window.size)
        distance = ops.multiply(ops.cast_integer(own_row, ops.i64()), window.pitch)
        first = ops.add(begin, distance)
        address = ops.add(ops.bitwise_and(first, -VECTOR), ops.cast_integer(own, ops.i64()))
        # From where the row begins, and to where the matrix ends.
        behind = ops.cast_integer(ops.arith.subi(address, first), ops.i32())
        end = ops.add(begin, ops.i64_constant(window.rows * window.pitch - VECTOR))
        there = ops.arith.andi(
            ops.compare("slt", own_row, window.rows), ops.compare("slt", behind, window.pitch)
        )
        inside = ops.arith.cmpi(ops.arith.CmpIPredicate.sle, address, end)
        there = ops.cast_integer(ops.arith.andi(there, inside), ops.i32(), signed=False)
        text = (
            "{ .reg .pred p; setp.ne.b32 p, $5, 0; "
            "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
            "@p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }"
        )
        words = ops.inline_assembly(
            text, "=&r,=&r,=&r,=&r,l,r", address, there, results=[ops.i32()] * 4
        )
        vector = ir.VectorType.get((window.elements,), types.element_type(dtype))
        registers.append(ops.bitcast(ops.from_elements(list(words)), vector))
    return RegisterArray(tuple(registers), window.layout, np.dtype(dtype))


@rules.lowering(elements_behind_p, *_ALL)
def _behind(ctx: RuleContext, *operands: Value, args_tree: Any) -> RegisterArray:
    (reference,) = args_tree.unflatten(operands)
    memory: MemoryReference = resolve(ctx, reference)
    low = ops.cast_integer(llvm.ptrtoint(ops.i64(), memory.address()), ops.i32())
    behind = ops.divide_unsigned(ops.bitwise_and(low, VECTOR - 1), memory.element_bits // 8)
    return RegisterArray.splat(behind, np.dtype(np.int32))
