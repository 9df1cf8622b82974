"""Products of many small matrices, added to registers in the order of matrix fragments.

One compiled function multiplies the tiles of all warps or warpgroups. A tile has ``M = 16 * w``
rows (or 8) for ``w`` warps, and as many columns as is wanted, in groups of eight. Of each eight
columns ``8 * j + 2 * t + e``, the lanes ``4 * g + t`` of a warp hold the rows ``g`` and ``g + 8``
of its part of the tile, in register ``4 * j + 2 * h + e`` (``h`` is 1 for the row ``g + 8``).

Sums are formed in single precision, along K from the beginning to the end, and then added to the
register.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from pallasite_simulator.instructions.compiled import compile_loop, integer, intrinsic
from pallasite_simulator.types import Array

_FLOAT, _INDEX, _WORD, _BYTE = ir.FloatType(), integer(64), integer(32), integer(8)

_NAN = 0x7FFFFFFF
"""The NaN that tensor cores return."""

EFFORT = 2
"""Of the code generator: the inner loop is worth it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """What one compiled function does.

    Attributes:
      warps: of a tile.
      halves: 2 if a warp has 16 rows, 1 if it has 8.
      depth: extent along K.
      by_rows: whether the second matrix is given by rows (of K), else by columns.
      pairs: whether both ``e`` are in one register, so that lanes have two neighbouring values.
      integers: whether results are int32, else float32.
    """

    warps: int
    halves: int
    depth: int
    by_rows: bool
    pairs: bool
    integers: bool

    @property
    def rows(self) -> int:
        """Rows of a warp."""
        return 8 * self.halves


def add_products(
    a: Array,
    b: Array,
    registers: Array,
    starts: Array,
    keep: Array,
    *,
    warps: int = 1,
    by_rows: bool = False,
    pairs: bool = False,
) -> None:
    """Adds the products of tiles to registers.

    Args:
      a: of shape (tiles, K, M), in single precision, contiguous.
      b: of shape (tiles, N, K), or (tiles, K, N) if ``by_rows``; likewise.
      registers: float32 or int32 of shape (registers, lanes), or (registers, 2 * lanes) if
        ``pairs``; its rows are contiguous. For int32, sums must be less than 2**24, and results
        wrap.
      starts: for each tile, its first lane (int64).
      keep: for each tile, whether to add to what is there, or else to replace it (uint8).
      warps: of each tile.
      by_rows, pairs: see above and :class:`Kind`.
    """
    tiles, depth, rows = a.shape
    columns = b.shape[2 if by_rows else 1]
    kind = Kind(warps, rows // (8 * warps), depth, by_rows, pairs, registers.dtype == np.int32)
    arrays = (registers, starts, keep, a, b)
    assert registers.strides[1] == 4 and all(one.flags.c_contiguous for one in arrays[1:])
    assert a.dtype == b.dtype == np.float32
    pitch = registers.strides[0] // 4
    _function(kind)(*[one.ctypes.data for one in arrays], pitch, tiles, columns)


@functools.cache
def _function(kind: Kind) -> Callable[..., None]:
    module = ir.Module("products")
    pointer = _BYTE.as_pointer()
    kinds = [pointer] * 5 + [_INDEX] * 3
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), "loop")
    _Products(kind, function).emit()
    signature = [ctypes.c_size_t] * 5 + [ctypes.c_int64] * 3
    return ctypes.CFUNCTYPE(None, *signature)(compile_loop(str(module), EFFORT))


class _Products:
    """Emits the code of one function."""

    def __init__(self, kind: Kind, function: Any):
        self._kind = kind
        self._function = function
        self._builder = ir.IRBuilder(function.append_basic_block("entry"))
        self._element = _WORD if kind.integers else _FLOAT
        self._column = ir.VectorType(_FLOAT, kind.rows)
        types = (self._element, _INDEX, _BYTE, _FLOAT, _FLOAT)
        pointers = [
            self._builder.bitcast(argument, type_.as_pointer())
            for argument, type_ in zip(function.args[:5], types, strict=True)
        ]
        self._registers, self._starts, self._keep, self._a, self._b = pointers
        self._pitch, self._tiles, self._columns = function.args[5:]

    def emit(self) -> None:
        """Emits everything."""
        kind, builder = self._kind, self._builder
        size_a = _index(kind.depth * kind.rows * kind.warps)
        with self._loop(self._tiles) as tile:
            a = builder.gep(self._a, [builder.mul(tile, size_a)])
            size_b = builder.mul(self._columns, _index(kind.depth))
            b = builder.gep(self._b, [builder.mul(tile, size_b)])
            start = builder.load(builder.gep(self._starts, [tile]))
            if kind.pairs:
                start = builder.mul(start, _index(2))
            target = builder.gep(self._registers, [start])
            flag = builder.load(builder.gep(self._keep, [tile]))
            keep = builder.icmp_unsigned("!=", flag, ir.Constant(_BYTE, 0))
            groups = builder.udiv(self._columns, _index(8))
            with self._loop(groups) as group, self._loop(_index(kind.warps)) as warp:
                rows = builder.gep(a, [builder.mul(warp, _index(kind.rows))])
                steps = 1 if kind.pairs else 2
                for e in range(steps):
                    sums = self._sums(rows, b, group, range(e, 8, steps))
                    self._add(sums, target, group, warp, e, keep)
        builder.ret_void()

    @contextlib.contextmanager
    def _loop(self, count: Any) -> Iterator[Any]:
        """Code that is executed ``count`` times, at least once."""
        builder, before = self._builder, self._builder.block
        body = self._function.append_basic_block("body")
        builder.branch(body)
        builder.position_at_end(body)
        index = builder.phi(_INDEX)
        index.add_incoming(_index(0), before)
        yield index
        following = builder.add(index, _index(1))
        index.add_incoming(following, builder.block)
        end = self._function.append_basic_block("end")
        builder.cbranch(builder.icmp_unsigned("<", following, count), body, end)
        builder.position_at_end(end)

    def _sums(self, a: Any, b: Any, group: Any, columns: Sequence[int]) -> list[Any]:
        """Sums along K of some columns of a group, for all rows of a warp."""
        kind, builder = self._kind, self._builder
        first = builder.mul(group, _index(8))
        before = builder.block
        body = self._function.append_basic_block("along")
        end = self._function.append_basic_block("summed")
        builder.branch(body)
        builder.position_at_end(body)
        k = builder.phi(_INDEX)
        k.add_incoming(_index(0), before)
        held = [builder.phi(self._column) for _ in columns]
        step = builder.mul(k, _index(kind.rows * kind.warps))
        pointer = builder.bitcast(builder.gep(a, [step]), self._column.as_pointer())
        rows = builder.load(pointer, align=4)
        sums = []
        for column, so_far in zip(columns, held, strict=True):
            number = builder.add(first, _index(column))
            if kind.by_rows:
                place = builder.add(builder.mul(k, self._columns), number)
            else:
                place = builder.add(builder.mul(number, _index(kind.depth)), k)
            value = self._splat(builder.load(builder.gep(b, [place])))
            # The products are exact, so it does not matter whether this is fused.
            name = f"llvm.fmuladd.v{kind.rows}f32"
            total = intrinsic(builder, name, self._column, rows, value, so_far)
            so_far.add_incoming(ir.Constant(self._column, None), before)
            so_far.add_incoming(total, body)
            sums.append(total)
        following = builder.add(k, _index(1))
        k.add_incoming(following, body)
        builder.cbranch(builder.icmp_unsigned("<", following, _index(kind.depth)), body, end)
        builder.position_at_end(end)
        return sums

    def _splat(self, value: Any) -> Any:
        builder, count = self._builder, self._kind.rows
        nothing = ir.Constant(self._column, ir.Undefined)
        one = builder.insert_element(nothing, value, ir.Constant(_WORD, 0))
        return builder.shuffle_vector(one, nothing, _mask([0] * count))

    def _add(self, sums: list[Any], target: Any, group: Any, warp: Any, e: int, keep: Any) -> None:
        """Adds sums of columns to the registers that they belong to."""
        kind, builder = self._kind, self._builder
        width = 8 * len(sums)
        vector = ir.VectorType(self._element, width)
        each = kind.halves if kind.pairs else 2 * kind.halves
        for half in range(kind.halves):
            values = self._interleaved(sums, half)
            register = builder.add(
                builder.mul(group, _index(each)), _index(half if kind.pairs else 2 * half + e)
            )
            place = builder.add(
                builder.mul(register, self._pitch), builder.mul(warp, _index(width))
            )
            pointer = builder.bitcast(builder.gep(target, [place]), vector.as_pointer())
            held = builder.load(pointer, align=4)
            if kind.integers:
                values = builder.fptosi(values, vector)
                total = builder.select(keep, builder.add(held, values), values)
            else:
                total = builder.select(keep, builder.fadd(held, values), values)
                total = self._canonical(total, width)
            builder.store(total, pointer, align=4)

    def _canonical(self, values: Any, width: int) -> Any:
        builder = self._builder
        bits = ir.VectorType(_WORD, width)
        nan = builder.bitcast(ir.Constant(bits, [_NAN] * width), values.type)
        return builder.select(builder.fcmp_unordered("uno", values, values), nan, values)

    def _interleaved(self, sums: list[Any], half: int) -> Any:
        """For each of eight rows, the sums of all columns side by side."""
        builder, rows = self._builder, self._kind.rows
        start = [8 * half + g for g in range(8)]
        level, width = sums, 1
        while len(level) > 1:
            first = start if width == 1 else [width * g for g in range(8)]
            second = rows if width == 1 else 8 * width
            order = [
                place + offset + one
                for place in first
                for offset in (0, second)
                for one in range(width)
            ]
            level = [
                builder.shuffle_vector(x, y, _mask(order))
                for x, y in zip(level[::2], level[1::2], strict=True)
            ]
            width *= 2
        return level[0]


def _index(value: int) -> Any:
    return ir.Constant(_INDEX, value)


def _mask(order: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(_WORD, len(order)), list(order))
