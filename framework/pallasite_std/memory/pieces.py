"""Parts of vectors, as words of registers: how the elements at the end of an array are moved."""

from __future__ import annotations

from collections.abc import Sequence

from jaxlib.mlir import ir

from pallasite.plugin.ir import ops
from pallasite.plugin.layouts import Source
from pallasite.plugin.lowering import gather

_WORD, _HALF = 4, 2
"""Bytes of a register, and of half of one."""


def _integer(size: int) -> ir.Type:
    return ir.IntegerType.get_signless(8 * size)


def piece_type(size: int) -> ir.Type:
    """The type in which so many bytes (a power of two) are loaded."""
    if size <= _WORD:
        return _integer(size)
    return ir.VectorType.get((size // _WORD,), _integer(_WORD))


def from_pieces(pieces: Sequence[tuple[ir.Value, int]], whole: ir.Value) -> ir.Value:
    """A vector that begins with pieces of memory; bytes behind them are undefined, or another's.

    Args:
      pieces: values of :func:`piece_type`, with their bytes, in the order of memory; each at a
        multiple of its size.
      whole: the other vector, of the result's type.
    """
    vector = ir.VectorType(whole.type)
    total = vector.shape[0] * vector.element_type.width // 8
    word = min(_WORD, total)
    others = ops.bitcast(whole, ir.VectorType.get((total // word,), _integer(word)))
    half = _integer(_HALF)
    words: list[ir.Value] = []
    start = 0
    for piece, size in pieces:
        if size >= word:
            count = size // word
            words += [ops.extract(piece, n) for n in range(count)] if size > word else [piece]
        elif start % word == 0:
            words.append(ops.cast_integer(piece, _integer(word), signed=False))
        elif word == _WORD and start % word == _HALF:
            parts = [ops.cast_integer(words[-1], half), ops.cast_integer(piece, half, signed=False)]
            words[-1] = ops.bitcast(ops.from_elements(parts), _integer(word))
        else:
            part = ops.cast_integer(piece, _integer(word), signed=False)
            part = ops.multiply(part, 1 << 8 * (start % word))
            words[-1] = ops.arith.ori(words[-1], part)
        start += size
    words += [ops.extract(others, n) for n in range(len(words), total // word)]
    return ops.bitcast(ops.from_elements(words), vector)


def piece_of(
    registers: Sequence[ir.Value],
    parts: Sequence[Source],
    element_bits: int,
    in_branch: bool = False,
) -> ir.Value:
    """The value that stores elements of registers, as an integer if it is less than a word.

    Args:
      registers: of an array.
      parts: the elements.
      element_bits: bits of each.
      in_branch: whether the registers were made before a branch, which pairs of bytes would come
        to as two values, and be put together and taken apart.
    """
    (register, first), size = parts[0], len(parts) * element_bits // 8
    value = registers[register]
    total = ops.vector_length(value) * element_bits // 8
    start = first * element_bits // 8
    run = [(register, first + n) for n in range(len(parts))]
    # LLVM takes vectors of 16-bit elements apart in fewer instructions than words.
    several = len(parts) > 1 or element_bits != 8 * _HALF
    if 0 < size < _WORD <= total and list(parts) == run and start % _HALF == 0 and several:
        halves = ops.bitcast(value, ir.VectorType.get((total // _HALF,), _integer(_HALF)))
        return ops.cast_integer(ops.extract(halves, start // _HALF), _integer(size))
    if in_branch and size == 1 and total == _HALF:
        both = ops.divide_unsigned(ops.bitcast(value, _integer(_HALF)), 1 << 8 * start)
        return ops.cast_integer(both, _integer(1))
    return gather(registers, [list(parts)])[0]
