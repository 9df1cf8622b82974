"""Python operators over MLIR values, so that a formula reads like one.

:class:`Real` wraps a float value, :class:`Word` an integer value and :class:`Mask` a truth value;
each holds a scalar or a vector. Python numbers become constants of the other operand's type.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallasite.plugin.ir import ops, parse_type, vector_type


def _made(name: str, *operands: ir.Value) -> ir.Value:
    """The result of a new operation, of its first operand's type: three times as fast as the
    generated builders."""
    made: ir.Value = ir.Operation.create(name, [operands[0].type], operands).result
    return made


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
      name: the MLIR type.
      bits: width of the whole number.
      fraction: stored bits of the significand.
      bias: what is added to the exponent.
    """

    name: str
    bits: int
    fraction: int
    bias: int

    @property
    def precision(self) -> int:
        """Bits of the significand, the hidden one included."""
        return self.fraction + 1

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number that is not a denormal."""
        return float(2.0 ** (1 - self.bias))

    @property
    def infinity_bits(self) -> int:
        """The representation of positive infinity."""
        return (2 * self.bias + 1) << self.fraction

    @property
    def sign_bit(self) -> int:
        """The representation of negative zero."""
        return 1 << (self.bits - 1)


F16 = Format("f16", 16, 10, 15)
BF16 = Format("bf16", 16, 7, 127)
F32 = Format("f32", 32, 23, 127)
F64 = Format("f64", 64, 52, 1023)
_FORMATS = {one.name: one for one in (F16, BF16, F32, F64)}

_FLOAT_PREDICATES = arith.CmpFPredicate
_INTEGER_PREDICATES = arith.CmpIPredicate

type Number = int | float


def element(type: ir.Type) -> ir.Type:
    """The element type of a vector, or the scalar type itself."""
    return type.element_type if isinstance(type, ir.VectorType) else type


@functools.cache
def _format_of(name: str) -> Format:
    return _FORMATS[name]


@dataclasses.dataclass(frozen=True, slots=True)
class Mask:
    """A truth value, ``i1``."""

    value: ir.Value

    def __and__(self, other: Mask) -> Mask:
        return Mask(_made("arith.andi", self.value, other.value))

    def __or__(self, other: Mask) -> Mask:
        return Mask(_made("arith.ori", self.value, other.value))

    def __xor__(self, other: Mask) -> Mask:
        return Mask(_made("arith.xori", self.value, other.value))

    def __invert__(self) -> Mask:
        return Mask(_made("arith.xori", self.value, ops.constant(1, self.value.type)))

    def choose[T: (Real, Word)](self, yes: T, no: T | Number) -> T:
        """``yes`` where true, else ``no``."""
        return type(yes)(arith.select(self.value, yes.value, yes.lift(no)))


@dataclasses.dataclass(frozen=True, slots=True)
class Word:
    """An integer; comparisons, shifts to the right and division are signed unless named so."""

    value: ir.Value

    @property
    def width(self) -> int:
        """Bits of one element."""
        return int(element(self.value.type).width)

    def lift(self, other: Word | Number) -> ir.Value:
        """The MLIR value of an operand; a number becomes a constant of this type."""
        return other.value if isinstance(other, Word) else ops.constant(other, self.value.type)

    def constant(self, number: int) -> Word:
        """A constant of this type."""
        return Word(ops.constant(number, self.value.type))

    def __add__(self, other: Word | int) -> Word:
        return Word(_made("arith.addi", self.value, self.lift(other)))

    def __sub__(self, other: Word | int) -> Word:
        return Word(_made("arith.subi", self.value, self.lift(other)))

    def __rsub__(self, other: int) -> Word:
        return Word(_made("arith.subi", self.lift(other), self.value))

    def __mul__(self, other: Word | int) -> Word:
        return Word(_made("arith.muli", self.value, self.lift(other)))

    def __and__(self, other: Word | int) -> Word:
        return Word(_made("arith.andi", self.value, self.lift(other)))

    def __or__(self, other: Word | int) -> Word:
        return Word(_made("arith.ori", self.value, self.lift(other)))

    def __xor__(self, other: Word | int) -> Word:
        return Word(_made("arith.xori", self.value, self.lift(other)))

    def __lshift__(self, other: Word | int) -> Word:
        return Word(_made("arith.shli", self.value, self.lift(other)))

    def __rshift__(self, other: Word | int) -> Word:
        return Word(_made("arith.shrsi", self.value, self.lift(other)))

    def shift_logical(self, other: Word | int) -> Word:
        """Shift to the right that brings in zeros."""
        return Word(_made("arith.shrui", self.value, self.lift(other)))

    def divide_unsigned(self, other: Word | int) -> Word:
        """Unsigned quotient."""
        return Word(_made("arith.divui", self.value, self.lift(other)))

    def compare(self, predicate: str, other: Word | int) -> Mask:
        """Comparison by MLIR's name of the predicate, such as ``"ult"``."""
        kind = getattr(_INTEGER_PREDICATES, predicate)
        return Mask(arith.cmpi(kind, self.value, self.lift(other)))

    def equals(self, other: Word | int) -> Mask:
        """``self == other``."""
        return self.compare("eq", other)

    def differs(self, other: Word | int) -> Mask:
        """``self != other``."""
        return self.compare("ne", other)

    def __lt__(self, other: Word | int) -> Mask:
        return self.compare("slt", other)

    def __gt__(self, other: Word | int) -> Mask:
        return self.compare("sgt", other)

    def real(self) -> Real:
        """The float with this representation (16 bits become f16)."""
        name = f"f{self.width}"
        return Real(arith.bitcast(_like(self.value, name), self.value))

    def to_real(self, format: Format) -> Real:
        """Conversion of a signed integer."""
        return Real(arith.sitofp(_like(self.value, format.name), self.value))

    def extend(self, width: int) -> Word:
        """Sign extension."""
        return Word(arith.extsi(_like(self.value, f"i{width}"), self.value))

    def extend_unsigned(self, width: int) -> Word:
        """Zero extension."""
        return Word(arith.extui(_like(self.value, f"i{width}"), self.value))

    def truncate(self, width: int) -> Word:
        """The low bits."""
        return Word(arith.trunci(_like(self.value, f"i{width}"), self.value))


@dataclasses.dataclass(frozen=True, slots=True)
class Real:
    """A floating-point number; comparisons are false for NaN."""

    value: ir.Value

    @property
    def format(self) -> Format:
        """The format of one element."""
        return _format_of(str(element(self.value.type)))

    @property
    def is_double(self) -> bool:
        """Whether this is f64."""
        return self.format is F64

    def lift(self, other: Real | Number) -> ir.Value:
        """The MLIR value of an operand; a number becomes a constant of this type."""
        return other.value if isinstance(other, Real) else ops.constant(other, self.value.type)

    def constant(self, number: Number) -> Real:
        """A constant of this type."""
        return Real(ops.constant(number, self.value.type))

    def __add__(self, other: Real | Number) -> Real:
        return Real(_made("arith.addf", self.value, self.lift(other)))

    def __radd__(self, other: Number) -> Real:
        return Real(_made("arith.addf", self.lift(other), self.value))

    def __sub__(self, other: Real | Number) -> Real:
        return Real(_made("arith.subf", self.value, self.lift(other)))

    def __rsub__(self, other: Number) -> Real:
        return Real(_made("arith.subf", self.lift(other), self.value))

    def __mul__(self, other: Real | Number) -> Real:
        return Real(_made("arith.mulf", self.value, self.lift(other)))

    def __rmul__(self, other: Number) -> Real:
        return Real(_made("arith.mulf", self.lift(other), self.value))

    def __truediv__(self, other: Real | Number) -> Real:
        return Real(_made("arith.divf", self.value, self.lift(other)))

    def __rtruediv__(self, other: Number) -> Real:
        return Real(_made("arith.divf", self.lift(other), self.value))

    def __neg__(self) -> Real:
        return Real(_made("arith.negf", self.value))

    def __abs__(self) -> Real:
        return Real(_made("math.absf", self.value))

    def times_plus(self, factor: Real | Number, addend: Real | Number) -> Real:
        """``self * factor + addend`` with one rounding."""
        return Real(_made("math.fma", self.value, self.lift(factor), self.lift(addend)))

    def compare(self, predicate: str, other: Real | Number) -> Mask:
        """Comparison by MLIR's name of the predicate, such as ``"ULT"``."""
        kind = getattr(_FLOAT_PREDICATES, predicate)
        return Mask(arith.cmpf(kind, self.value, self.lift(other)))

    def equals(self, other: Real | Number) -> Mask:
        """``self == other``."""
        return self.compare("OEQ", other)

    def differs(self, other: Real | Number) -> Mask:
        """``self != other``; true if either is NaN."""
        return self.compare("UNE", other)

    def __lt__(self, other: Real | Number) -> Mask:
        return self.compare("OLT", other)

    def __le__(self, other: Real | Number) -> Mask:
        return self.compare("OLE", other)

    def __gt__(self, other: Real | Number) -> Mask:
        return self.compare("OGT", other)

    def __ge__(self, other: Real | Number) -> Mask:
        return self.compare("OGE", other)

    def is_nan(self) -> Mask:
        """Whether this is not a number."""
        return self.compare("UNO", self)

    def at_most(self, bound: Number) -> Real:
        """The smaller of this and a bound; NaN stays."""
        return Real(_made("arith.minimumf", self.value, self.lift(bound)))

    def at_least(self, bound: Number) -> Real:
        """The larger of this and a bound; NaN stays."""
        return Real(_made("arith.maximumf", self.value, self.lift(bound)))

    def with_sign_of(self, other: Real) -> Real:
        """The magnitude of this with the sign of the other."""
        return Real(_made("math.copysign", self.value, other.value))

    def sqrt(self) -> Real:
        """The correctly rounded square root."""
        return Real(_made("math.sqrt", self.value))

    def round_even(self) -> Real:
        """The nearest integer; of two, the even one."""
        return Real(_made("math.roundeven", self.value))

    def trunc(self) -> Real:
        """The integer next to this in the direction of zero."""
        return Real(_made("math.trunc", self.value))

    def floor(self) -> Real:
        """The largest integer that is not above this."""
        return Real(_made("math.floor", self.value))

    def ceil(self) -> Real:
        """The smallest integer that is not below this."""
        return Real(_made("math.ceil", self.value))

    def bits(self) -> Word:
        """The representation as an integer."""
        return Word(arith.bitcast(_like(self.value, f"i{self.format.bits}"), self.value))

    def sign_set(self) -> Mask:
        """Whether the sign bit is set, for zeros and NaN too."""
        return self.bits() < 0

    def to_word(self, width: int) -> Word:
        """Conversion to a signed integer, for numbers that are known to fit."""
        return Word(arith.fptosi(_like(self.value, f"i{width}"), self.value))

    def extend(self, format: Format) -> Real:
        """The same number in a wider format."""
        if self.format is format:
            return self
        pairs = _is_vector(self.value) and length(self.value) % 2 == 0
        if PAIRS and pairs and (self.format.name, format.name) == ("bf16", "f32"):
            return Real(_extended_pairs(self.value))
        return Real(arith.extf(_like(self.value, format.name), self.value))

    def truncate(self, format: Format) -> Real:
        """The nearest number of a narrower format."""
        if self.format is format:
            return self
        result = _like(self.value, format.name)
        name = _OF_TWO_WORDS.get(format.name)
        if name is not None and (words := _two_words(self.value)) is not None:
            return Real(ops.intrinsic(result, name, words[1], words[0]))
        return Real(arith.truncf(result, self.value))


PAIRS = False
"""Whether a word of two bf16 is extended by one instruction for each, not taken apart first."""


def _extended_pairs(value: ir.Value) -> ir.Value:
    """A vector of an even number of bf16 as f32: one half of a word is shifted, one masked."""
    words = vector.bitcast(vector_type(parse_type("i32"), length(value) // 2), value)

    def constant(number: int) -> ir.Value:
        one = ir.IntegerAttr.get(parse_type("i32"), number)
        return arith.constant(words.type, ir.DenseElementsAttr.get_splat(words.type, one))

    halves = arith.shli(words, constant(16)), arith.andi(words, constant(-(1 << 16)))
    return vector.interleave(*(arith.bitcast(_like(one, "f32"), one) for one in halves))


_OF_TWO_WORDS = {"f16": "llvm.nvvm.ff2f16x2.rn", "bf16": "llvm.nvvm.ff2bf16x2.rn"}
"""Conversions of two f32 to a pair of a narrower format; the second operand is the low half."""


def _two_words(value: ir.Value) -> list[ir.Value] | None:
    """The two f32 of a vector, if both are words that one instruction has loaded.

    LLVM would put them into one register of 64 bits, only to take it apart for the conversion.
    """
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "vector.from_elements":
        return None
    parts = list(owner.operands)
    if len(parts) != 2 or not isinstance(parts[0].type, ir.F32Type):
        return None
    return parts if all(map(_is_loaded_word, parts)) else None


def _is_loaded_word(value: ir.Value) -> bool:
    source = value.owner
    if not isinstance(source, ir.Block) and source.name == "llvm.bitcast":
        source = source.operands[0].owner
    return not isinstance(source, ir.Block) and source.name == "llvm.extractvalue"


def _like(value: ir.Value, name: str) -> ir.Type:
    return vector_type(parse_type(name), length(value)) if _is_vector(value) else parse_type(name)


def _is_vector(value: ir.Value) -> bool:
    return isinstance(value.type, ir.VectorType)


def length(value: ir.Value) -> int:
    """Number of elements; 1 for a scalar."""
    return ops.vector_length(value)


def type_like(value: ir.Value, name: str) -> ir.Type:
    """The type of as many elements as a value has, of the element type that is named."""
    return _like(value, name)


def polynomial(x: Real, coefficients: Sequence[float]) -> Real:
    """``c[0] + c[1] x + c[2] x^2 + ...`` by Horner's rule with fused multiply-add."""
    result = x.constant(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result.times_plus(x, coefficient)
    return result


def power_of_two(exponent: Word, format: Format) -> Real:
    """``2**exponent`` for an exponent in the range of normal numbers (32 or 64-bit integer)."""
    if exponent.width < format.bits:
        exponent = exponent.extend(format.bits)
    return ((exponent + format.bias) << format.fraction).real()


def split(number: Fraction, format: Format, parts: int, head_bits: int = 0) -> tuple[float, ...]:
    """A number as an unevaluated sum of floats of a format, largest first.

    ``head_bits`` limits the significands of all parts but the last, so that products with small
    integers are exact.
    """
    result = []
    for index in range(parts):
        if head_bits and index < parts - 1:
            scale = Fraction(2) ** (head_bits - 1 - _exponent(number))
            part = float(Fraction(round(number * scale)) / scale)
        elif format is F32:
            part = float(np.float32(float(number)))
        else:
            part = float(number)
        result.append(part)
        number -= Fraction(part)
    return tuple(result)


def _exponent(number: Fraction) -> int:
    return int(np.floor(np.log2(abs(float(number)))))


def map_elements(function: Callable[..., Any], *values: ir.Value) -> ir.Value:
    """Applies a function of scalars to corresponding elements."""
    if not _is_vector(values[0]):
        return function(*values)
    count = length(values[0])
    columns = [_elements(value, count) for value in values]
    results = [function(*row) for row in zip(*columns, strict=True)]
    if count > 1:
        return ops.from_elements(results)
    return vector.from_elements(ir.VectorType.get((1,), results[0].type), results)


def _elements(value: ir.Value, count: int) -> list[ir.Value]:
    """The elements of a vector; a constant with equal elements is one scalar constant."""
    owner = value.owner
    name = "" if isinstance(owner, ir.Block) else owner.name
    if name == "vector.from_elements":
        return list(owner.operands)
    if name == "arith.constant":
        attribute = ir.DenseElementsAttr(owner.attributes["value"])
        if attribute.is_splat:
            return [arith.constant(value.type.element_type, attribute.get_splat_value())] * count
    return [ops.extract(value, index) for index in range(count)]
