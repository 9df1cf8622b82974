"""Copies of matrices to longer rows, which begin at multiples of 16 bytes.

What the copy engine is to read has rows that are such multiples apart. Lanes load the vectors that
hold 16 bytes of a row, wherever it begins, shift them together and store one.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallasite.plugin import RuleSet, Semantics
from pallasite.plugin import jax_internals as _jax
from pallasite.plugin.inference import AbstractValue, InferenceContext
from pallasite.plugin.ir import ops
from pallasite.plugin.language import GMEM
from pallasite.plugin.layouts import LANES, WARPS
from pallasite.plugin.lowering import RuleContext, Value, resolve
from pallasite_hopper.matrix.aligned_rows import VECTOR, VectorWindow
from pallasite_std.api import arguments

rules = RuleSet()

_WORD, _WORDS = 4, 4
"""Bytes of a word, and words of a vector."""

copy_to_longer_rows_p = _jax.Primitive("copy_to_longer_rows")
copy_to_longer_rows_p.multiple_results = True


@_jax.abstract_eval(copy_to_longer_rows_p)
def _abstract_eval(*avals: Any, args_tree: Any, window: VectorWindow, count: int) -> Any:
    del window, count
    return (), arguments.reference_effects(args_tree, len(avals), read=(0,), written=(1,))


arguments.no_discharge(copy_to_longer_rows_p)


def copy_to_longer_rows(
    ref: Any, out: Any, window: VectorWindow, row: Any, column: Any, count: int
) -> None:
    """Copies parts of a matrix of 8- or 16-bit elements, one below the other, to one with longer
    rows.

    Args:
      ref: the whole matrix in global memory.
      out: the other one, of rows that are multiples of 16 bytes, and less than 16 bytes longer;
        what they have more becomes zero.
      window: which part is copied first.
      row, column: where it begins; the column at a multiple of a vector.
      count: of parts.

    PTX ISA: ``ld.global.v4``, ``st.global.v4``.
    """
    whole = arguments.reference(ref, "ref", GMEM)
    target = arguments.reference(out, "out", GMEM)
    row, column = jnp.asarray(row, jnp.int32), jnp.asarray(column, jnp.int32)
    arguments.bind(copy_to_longer_rows_p, whole, target, row, column, window=window, count=count)


@rules.inference(copy_to_longer_rows_p)
def _infer(
    ctx: InferenceContext,
    *operands: AbstractValue,
    args_tree: Any,
    window: VectorWindow,
    count: int,
) -> None:
    """Nothing is in registers."""


@rules.lowering(copy_to_longer_rows_p, Semantics.LANE)
def _lower(
    ctx: RuleContext, *operands: Value, args_tree: Any, window: VectorWindow, count: int
) -> tuple[()]:
    reference, out, row, column = args_tree.unflatten(operands)
    begin = llvm.ptrtoint(ops.i64(), resolve(ctx, reference).address())
    target = llvm.ptrtoint(ops.i64(), resolve(ctx, out).address())
    thread = ops.add(ops.multiply(ctx.launch.warp_id, LANES), ctx.launch.lane_id)
    vectors = window.shape[1] // window.elements
    step = LANES * WARPS // vectors
    own_row = ops.add(row.scalar, ops.divide_unsigned(thread, vectors))
    own = ops.multiply(ops.remainder_unsigned(thread, vectors), window.elements)
    byte = ops.multiply(ops.add(own, column.scalar), window.size)
    end = ops.add(begin, ops.i64_constant(window.rows * window.pitch))
    pitch = -(-window.pitch // VECTOR) * VECTOR
    in_row = ops.compare("slt", byte, window.pitch)
    left = ops.arith.subi(ops.i32_constant(window.pitch), byte)
    loaded = []
    for number in range(count):
        this = ops.add(own_row, number * step)
        there = ops.arith.andi(in_row, ops.compare("slt", this, window.rows))
        wide = ops.cast_integer(this, ops.i64())
        address = ops.add(begin, ops.multiply(wide, window.pitch))
        address = ops.add(address, ops.cast_integer(byte, ops.i64()))
        behind = ops.bitwise_and(ops.cast_integer(address, ops.i32()), VECTOR - 1)
        first = ops.bitwise_and(address, -VECTOR)
        # The second one only if the row goes on there.
        over = ops.arith.subi(ops.i32_constant(VECTOR), behind)
        further = ops.arith.andi(
            ops.compare("ne", behind, 0), ops.arith.cmpi(ops.arith.CmpIPredicate.slt, over, left)
        )
        words = _load(first, end, there, window.size)
        following = ops.add(first, VECTOR)
        words += _load(following, end, ops.arith.andi(there, further), window.size)
        loaded.append((wide, there, behind, words))
    for wide, there, behind, words in loaded:
        address = ops.add(target, ops.multiply(wide, pitch))
        address = ops.add(address, ops.cast_integer(byte, ops.i64()))
        values = [_only(word, left, place) for place, word in enumerate(_shifted(words, behind))]
        predicate = ops.cast_integer(there, ops.i32(), signed=False)
        ops.inline_assembly(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.global.v4.b32 [$0], {$2, $3, $4, $5}; }",
            "l,r,r,r,r,r,~{memory}",
            address,
            predicate,
            *values,
        )
    return ()


def _load(address: ir.Value, end: ir.Value, there: ir.Value, size: int) -> list[ir.Value]:
    """The words of a vector, as far as it is before the end; zeros if it is not there."""
    left = ops.arith.subi(end, address)
    limit = ops.arith.minsi(ops.arith.maxsi(left, ops.i64_constant(0)), ops.i64_constant(VECTOR))
    limit = ops.cast_integer(limit, ops.i32())
    limit = ops.arith.select(there, limit, ops.i32_constant(0))
    names = "{$0, $1, $2, $3}"
    text = (
        "{ .reg .pred p, q, r; .reg .b32 t; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        f"setp.eq.s32 p, $5, {VECTOR}; @p ld.global.v4.b32 {names}, [$4]; "
        # A vector that ends behind the matrix, element by element.
        "setp.gt.s32 q, $5, 0; setp.ne.and.s32 q, $5, 16, q; @!q bra DONE${:uid}; "
    )
    for at in range(0, VECTOR, size):
        place, bits = at // _WORD, at % _WORD * 8
        text += (
            f"mov.b32 t, 0; setp.gt.s32 r, $5, {at}; @r ld.global.u{8 * size} t, [$4+{at}]; "
            f"shl.b32 t, t, {bits}; or.b32 ${place}, ${place}, t; "
        )
    text += "DONE${:uid}: }"
    loaded = ops.inline_assembly(
        text, "=&r,=&r,=&r,=&r,l,r", address, limit, results=[ops.i32()] * _WORDS
    )
    return list(loaded)


def _shifted(words: list[ir.Value], behind: ir.Value) -> list[ir.Value]:
    """A vector that begins so many bytes behind where two others do."""
    for words_behind in (2, 1):
        moved = ops.bitwise_and(behind, words_behind * _WORD)
        moved = ops.compare("ne", moved, 0)
        words = [
            ops.arith.select(moved, after, word)
            for word, after in zip(words, words[words_behind:], strict=False)
        ]
    bits = ops.multiply(ops.bitwise_and(behind, _WORD - 1), 8)
    return [
        _assembly("shf.r.wrap.b32 $0, $1, $2, $3;", low, high, bits)
        for low, high in zip(words, words[1:], strict=False)
    ]


def _only(word: ir.Value, left: ir.Value, place: int) -> ir.Value:
    """A word of a vector whose row has so many bytes left, without what follows."""
    own = ops.arith.subi(left, ops.i32_constant(place * _WORD))
    own = ops.arith.minsi(ops.arith.maxsi(own, ops.i32_constant(0)), ops.i32_constant(_WORD))
    bits = ops.multiply(ops.arith.subi(ops.i32_constant(_WORD), own), 8)
    mask = _assembly("shr.u32 $0, $1, $2;", ops.i32_constant(-1), bits)
    return ops.bitwise_and(word, mask)


def _assembly(text: str, *operands: ir.Value) -> ir.Value:
    constraints = "=r" + ",r" * len(operands)
    value: ir.Value = ops.inline_assembly(
        text, constraints, *operands, results=[ops.i32()], side_effects=False
    )
    return value
