"""Values that optimization cannot look through: empty assembly that they pass through together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxlib.mlir import ir

from pallasite.plugin import UnsupportedError
from pallasite.plugin.ir import ops

_LETTERS = {16: "h", 32: "r", 64: "l"}

_MOST_TIED = 32
"""Registers that one piece of assembly passes through."""


def opaque(values: Sequence[ir.Value]) -> list[ir.Value]:
    """The same values, each in a register of its own.

    LLVM lets equal values share a register otherwise, until they are copied to where a loop or a
    branch wants them apart: once more at each of these.
    """
    words = [word for value in values for word in _words(value)]
    results: list[ir.Value] = []
    for start in range(0, len(words), _MOST_TIED):
        part = words[start : start + _MOST_TIED]
        outputs = ["=" + _LETTERS[word.type.width] for word in part]
        constraints = ",".join([*outputs, *map(str, range(len(part)))])
        made = ops.inline_assembly("", constraints, *part, results=[word.type for word in part])
        results += [made] if len(part) == 1 else made
    made_words = iter(results)
    return [_value(value.type, made_words) for value in values]


def _words(value: ir.Value) -> list[ir.Value]:
    """The bits of a value as integers that registers have the width of."""
    bits, length = bits_of(value.type), ops.vector_length(value)
    if bits in _LETTERS:
        return [ops.bitcast(value, ir.IntegerType.get_signless(bits))]
    if bits < min(_LETTERS):
        narrow = ops.bitcast(value, ir.IntegerType.get_signless(bits))
        wide = ir.IntegerType.get_signless(min(_LETTERS))
        return [ops.cast_integer(narrow, wide, signed=False)]
    if length > 1:
        half = length // 2
        low, high = (0, half), (half, length - half)
        return [one for at in (low, high) for one in _words(ops.slice_vector(value, *at))]
    raise UnsupportedError("a barrier to optimization around such a value", got=str(value.type))


def _value(type: ir.Type, words: Iterator[ir.Value]) -> ir.Value:
    """The value of a type that :func:`_words` took apart."""
    bits = bits_of(type)
    if bits in _LETTERS:
        return ops.bitcast(next(words), type)
    if bits < min(_LETTERS):
        return ops.bitcast(ops.cast_integer(next(words), ir.IntegerType.get_signless(bits)), type)
    vector = ir.VectorType(type)
    length, element = int(vector.shape[0]), vector.element_type
    lengths = (length // 2, length - length // 2)
    return ops.concatenate([_value(ops.vector_type(element, one), words) for one in lengths])


def bits_of(type: ir.Type) -> int:
    """Bits of a scalar or vector type."""
    if isinstance(type, ir.VectorType):
        return int(type.shape[0]) * bits_of(type.element_type)
    if isinstance(type, ir.IntegerType):
        return int(type.width)
    return int(ir.FloatType(type).width)
