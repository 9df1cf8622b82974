"""Loads of parts of matrices whose rows begin at any multiple of an element.

The copy engine, and vectors, want rows that are multiples of 16 bytes apart. Here lanes load the
aligned words that hold a row's elements, and shift them together once they have arrived: two
primitives, so that other work can go on between. A row of the part takes consecutive lanes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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

WORD = 4
"""Bytes of what is loaded at least."""

LEAST_PITCH = 8
"""Bytes of the rows of arrays at least."""

_THREADS = LANES * WARPS


@dataclasses.dataclass(frozen=True)
class RowWindow:
    """Which part of a matrix is loaded, but for where it begins.

    Attributes:
      rows, columns: of the matrix.
      shape: of the part; rows that are powers of two of words.
      size: bytes of an element.
      exact: whether elements beyond the end of a row are zero. Those of rows beyond the last one
        are in any case.
    """

    rows: int
    columns: int
    shape: tuple[int, int]
    size: int
    exact: bool

    @property
    def pitch(self) -> int:
        """Bytes from row to row."""
        return self.columns * self.size

    @property
    def shifted(self) -> bool:
        """Whether rows do not all begin at words."""
        return self.pitch % WORD != 0

    @property
    def row_words(self) -> int:
        """Words of a row of the part."""
        return self.shape[1] * self.size // WORD

    @property
    def words(self) -> int:
        """Words of each load, as many as rows are aligned to, if all lanes have some."""
        count = self.shape[0] * self.row_words
        fitting = (n for n in (4, 2) if count % (n * _THREADS) == 0 and self.row_words % n == 0)
        return next((n for n in fitting if self.pitch % (n * WORD) == 0), 1)

    @property
    def row_step(self) -> int:
        """Rows from one of a lane's registers to the next."""
        return _THREADS * self.words // self.row_words

    @property
    def loaded(self) -> RegisterLayout:
        """Of the words."""
        return strided((self.shape[0], self.row_words), self.words)

    @property
    def result(self) -> RegisterLayout:
        """Of the elements."""
        return strided(self.shape, self.words * WORD // self.size)


# The primitives as kernels call them --------------------------------------------------------------

load_row_words_p = _jax.Primitive("load_row_words")
load_row_words_p.multiple_results = True


@_jax.abstract_eval(load_row_words_p)
def _load_abstract_eval(*avals: Any, args_tree: Any, window: RowWindow) -> Any:
    words = _jax.ShapedArray((window.shape[0], window.row_words), jnp.uint32)
    count = 2 if window.shifted else 1
    return [words] * count, arguments.reference_effects(args_tree, len(avals), read=(0,))


arguments.no_discharge(load_row_words_p)

rows_of_words_p = _jax.Primitive("rows_of_words")


@_jax.abstract_eval(rows_of_words_p)
def _rows_abstract_eval(*avals: Any, args_tree: Any, window: RowWindow, dtype: Any) -> Any:
    del avals, args_tree
    return _jax.ShapedArray(window.shape, dtype), set()


arguments.no_discharge(rows_of_words_p)


def load_row_words(ref: Any, window: RowWindow, row: Any, column: Any) -> list[Any]:
    """The words that hold a part of a matrix; see :func:`rows_of_words`.

    Where rows do not all begin at words, these are two arrays: that of the words in which vectors
    of elements begin, and that of those behind them.

    Args:
      ref: the whole matrix in global memory, that the kernel does not write.
      window: which part.
      row, column: where it begins; the column at a multiple of a word.

    PTX ISA: ``ld.global``.
    """
    whole = arguments.reference(ref, "ref", GMEM)
    row, column = jnp.asarray(row, jnp.int32), jnp.asarray(column, jnp.int32)
    return list(arguments.bind(load_row_words_p, whole, row, column, window=window))


def rows_of_words(words: Sequence[Any], ref: Any, window: RowWindow, row: Any, column: Any) -> Any:
    """The elements, from what :func:`load_row_words` has loaded with the same arguments."""
    whole = arguments.reference(ref, "ref", GMEM)
    row, column = jnp.asarray(row, jnp.int32), jnp.asarray(column, jnp.int32)
    dtype = np.dtype(arguments.dtype_of(whole))
    return arguments.bind(
        rows_of_words_p, list(words), whole, row, column, window=window, dtype=dtype
    )


# Layouts ------------------------------------------------------------------------------------------


@rules.inference(load_row_words_p)
def _infer_load(
    ctx: InferenceContext, *operands: AbstractValue, args_tree: Any, window: RowWindow
) -> list[AbstractValue]:
    results = [ctx.result(aval) for aval in ctx.avals_out]
    for result in results:
        ctx.makes(result, window.loaded, "rows of words are loaded so", pinned=True)
    return results


@rules.inference(rows_of_words_p)
def _infer_rows(
    ctx: InferenceContext, *operands: AbstractValue, args_tree: Any, window: RowWindow, dtype: Any
) -> AbstractValue:
    for position, words in enumerate(operands[: 1 + window.shifted]):
        ctx.needs(position, words, window.loaded, "rows of words are loaded so", pinned=True)
    result = ctx.result()
    ctx.makes(result, window.result, "it is made of words", pinned=True)
    return result


# Code ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LanePlace:
    """Where a lane's first vector lies.

    Attributes:
      row: of the matrix.
      behind: bytes from where the row begins.
      begin: bytes from a word to where the matrix begins; a number if it is known.
      shift: bytes from a word to the elements.
    """

    row: ir.Value
    behind: ir.Value
    begin: ir.Value | int
    shift: ir.Value


def place_of_lane(
    ctx: RuleContext, memory: MemoryReference, window: RowWindow, row: Any, column: Any
) -> LanePlace:
    """Where a lane's first vector of a part lies."""
    launch = ctx.launch
    thread = ops.add(ops.multiply(launch.warp_id, LANES), launch.lane_id)
    vectors = window.row_words // window.words
    own = ops.multiply(ops.remainder_unsigned(thread, vectors), window.words * WORD)
    own_row = ops.add(row.scalar, ops.divide_unsigned(thread, vectors))
    behind = ops.add(own, ops.multiply(column.scalar, window.size))
    begin: ir.Value | int = memory.offset * window.size % WORD
    dynamic = memory.dynamic_offset()
    if dynamic is not None:
        low = ops.multiply(ops.cast_integer(dynamic, ops.i32()), window.size)
        begin = ops.bitwise_and(ops.add(low, begin), WORD - 1)
    shift = ops.add(ops.add(ops.multiply(own_row, window.pitch), behind), begin)
    return LanePlace(own_row, behind, begin, ops.bitwise_and(shift, WORD - 1))


def address_of_lane(memory: MemoryReference, window: RowWindow, place: LanePlace) -> ir.Value:
    """Of the word that holds a lane's first elements (i64)."""
    address = llvm.ptrtoint(ops.i64(), memory.address())
    row = ops.multiply(ops.cast_integer(place.row, ops.i64()), window.pitch)
    address = ops.add(ops.add(address, row), ops.cast_integer(place.behind, ops.i64()))
    return ops.bitwise_and(address, -WORD) if window.shifted else address


def _last_word(
    ctx: RuleContext, memory: MemoryReference, window: RowWindow, begin: ir.Value | int
) -> ir.Value | None:
    """The word at the end of the matrix that is not whole, loaded element by element; None if it
    is known to be whole."""
    size, total = window.size, window.rows * window.pitch
    if not window.shifted or (isinstance(begin, int) and (begin + total) % WORD == 0):
        return None
    kind = ir.IntegerType.get_signless(8 * size)

    def build() -> ir.Value:
        pointer, over = memory.address(), ops.add(ops.i32_constant(total % WORD), begin)
        over = ops.bitwise_and(over, WORD - 1)
        wide = ops.cast_integer(over, ops.i64())
        word = ops.i32_constant(0)
        for place in range(WORD // size - 1):
            # Where there are no elements, the matrix' last one is loaded.
            there = ops.compare("sgt", over, place * size)
            behind = ops.arith.subi(ops.i64_constant(total + place * size), wide)
            behind = ops.arith.select(there, behind, ops.i64_constant(total - size))
            at = ops.byte_pointer(pointer, behind)
            value = ops.cast_integer(ops.load(kind, at, alignment=size), ops.i32(), signed=False)
            value = ops.multiply(value, 1 << (8 * size * place))
            value = ops.arith.select(there, value, ops.i32_constant(0))
            word = ops.add(word, value)
        return word

    if isinstance(begin, int) and not memory.dynamic:
        return ctx.launch.emit_once(f"last_word.{memory.pointer}.{memory.offset}.{total}", build)
    return build()


@rules.lowering(load_row_words_p, *_ALL)
def _load(
    ctx: RuleContext, *operands: Value, args_tree: Any, window: RowWindow
) -> list[RegisterArray]:
    reference, row, column = args_tree.unflatten(operands)
    memory = resolve(ctx, reference)
    place = place_of_lane(ctx, memory, window, row, column)
    pitch, rows = window.pitch, window.rows
    address = address_of_lane(memory, window, place)
    in_row = ops.compare("slt", place.behind, pitch)
    # The end of a lane's first word in the last row, from where that begins.
    offset = ops.bitwise_and(
        ops.add(ops.i32_constant((rows - 1) * pitch % WORD), place.begin), WORD - 1
    )
    first = ops.bitwise_and(ops.add(offset, place.behind), -WORD)
    first = ops.arith.subi(ops.add(first, WORD), offset)
    distance = ops.arith.subi(ops.i32_constant(rows - 1), place.row)
    word = _last_word(ctx, memory, window, place.begin)
    results = []
    for which in range(2 if window.shifted else 1):
        used, end = in_row, ops.add(first, which * WORD)
        if which:
            used = ops.arith.andi(used, ops.compare("ne", place.shift, 0))
        # Rows below this limit are loaded: all, but the last one if its word is not inside.
        limit, tail = ops.add(distance, 1), None
        if window.shifted:
            whole = ops.compare("sle", end, pitch)
            limit = ops.arith.select(whole, limit, distance)
        if word is not None:
            inside = ops.arith.andi(used, ops.compare("slt", end, pitch + WORD))
            inside = ops.arith.andi(inside, ops.compare("sgt", end, pitch))
            tail = ops.arith.select(inside, word, ops.i32_constant(0))
        limit = ops.arith.select(used, limit, ops.i32_constant(-1))
        registers = []
        for number in range(window.loaded.registers):
            below = number * window.row_step
            otherwise = ops.i32_constant(0)
            if tail is not None:
                here = ops.compare("eq", distance, below)
                otherwise = ops.arith.select(here, tail, otherwise)
            there = below * pitch + which * WORD
            registers.append(_load_words(address, there, limit, below, otherwise, window))
        results.append(RegisterArray(tuple(registers), window.loaded, np.dtype(np.uint32)))
    return results


FARTHEST = 1 << 23
"""Bytes, less than which an instruction can add to an address."""


def _load_words(
    address: ir.Value,
    there: int,
    limit: ir.Value,
    below: int,
    otherwise: ir.Value,
    window: RowWindow,
) -> ir.Value:
    """A vector of words ``there`` bytes behind an address, if ``below`` is below the limit.

    Not ``ld.global.nc``, which ptxas moves in front of fences, that would wait for it.
    """
    words = window.words
    names = [f"${place}" for place in range(words)]
    at, bound, default = (f"${words + place}" for place in range(3))
    kind = {1: "b32", 2: "v2.b32", 4: "v4.b32"}[words]
    target = names[0] if words == 1 else "{" + ", ".join(names) + "}"
    if there >= FARTHEST:
        address, there = ops.add(address, there), 0
    text = (
        f"{{ .reg .pred p; setp.gt.s32 p, {bound}, {below}; "
        + " ".join(f"mov.b32 {name}, {default};" for name in names)
        + f" @p ld.global.{kind} {target}, [{at}+{there}]; }}"
    )
    loaded = ops.inline_assembly(
        text, "=&r," * words + "l,r,r", address, limit, otherwise, results=[ops.i32()] * words
    )
    return loaded if words == 1 else ops.from_elements(list(loaded))


@rules.lowering(rows_of_words_p, *_ALL)
def _rows(
    ctx: RuleContext, *operands: Value, args_tree: Any, window: RowWindow, dtype: Any
) -> RegisterArray:
    arrays, reference, row, column = args_tree.unflatten(operands)
    place = place_of_lane(ctx, resolve(ctx, reference, pointer=False), window, row, column)
    vector = ir.VectorType.get((window.words * WORD // window.size,), types.element_type(dtype))
    shift, mask = ops.multiply(place.shift, 8), None
    if window.exact and window.pitch % WORD:
        left = ops.arith.subi(ops.i32_constant(window.pitch), place.behind)
        left = ops.arith.minsi(ops.arith.maxsi(left, ops.i32_constant(0)), ops.i32_constant(WORD))
        bits = ops.multiply(ops.arith.subi(ops.i32_constant(WORD), left), 8)
        mask = _assembly("shr.u32 $0, $1, $2;", ops.i32_constant(-1), bits)
    registers = []
    for number in range(window.loaded.registers):
        value = arrays[0].registers[number]
        if window.shifted:
            high = arrays[1].registers[number]
            value = _assembly("shf.r.wrap.b32 $0, $1, $2, $3;", value, high, shift)
        if mask is not None:
            value = ops.bitwise_and(value, mask)
        registers.append(ops.bitcast(value, vector))
    return RegisterArray(tuple(registers), window.result, np.dtype(dtype))


def _assembly(text: str, *operands: ir.Value) -> ir.Value:
    """An instruction that makes a word of words; by 32 bits, shifts leave nothing."""
    constraints = "=r" + ",r" * len(operands)
    value: ir.Value = ops.inline_assembly(
        text, constraints, *operands, results=[ops.i32()], side_effects=False
    )
    return value
