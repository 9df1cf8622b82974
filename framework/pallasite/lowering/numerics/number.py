"""Arithmetic on MLIR values with Python's operators.

A :class:`Number` wraps one scalar or vector value. Operations emit MLIR where they are written; a
Python number as the other operand becomes a constant. Integers are signless: comparisons and
shifts to the right by operators are the signed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf
from jaxlib.mlir.dialects import math as math_dialect

from pallasite.ir import ops

Operand = "Number | float | int"
_FLOAT = arith.CmpFPredicate
_INTEGER = arith.CmpIPredicate


def element_of(type: ir.Type) -> ir.Type:
    """The element type of a vector type, or the scalar type itself."""
    return type.element_type if isinstance(type, ir.VectorType) else type


def with_element(type: ir.Type, element: ir.Type) -> ir.Type:
    """A type of the shape of ``type`` with another element type."""
    return ir.VectorType.get(type.shape, element) if isinstance(type, ir.VectorType) else element


class Number:
    """A float or integer, scalar or vector, in registers."""

    __slots__ = ("is_float", "value")

    def __init__(self, value: ir.Value):
        self.value = value
        self.is_float = not isinstance(element_of(value.type), ir.IntegerType)

    @property
    def element(self) -> ir.Type:
        """Type of one element."""
        return element_of(self.value.type)

    @property
    def width(self) -> int:
        """Bits of one element."""
        return int(self.element.width)

    def constant(self, number: float | int) -> Number:
        """A constant of the same type."""
        return Number(ops.constant(number, self.value.type))

    def _operand(self, other: Any) -> ir.Value:
        return other.value if isinstance(other, Number) else ops.constant(other, self.value.type)

    def _binary(self, float_: Any, integer: Any, other: Any, reverse: bool = False) -> Number:
        operand = self._operand(other)
        operands = (operand, self.value) if reverse else (self.value, operand)
        return Number((float_ if self.is_float else integer)(*operands))

    def _compare(self, float_: Any, integer: Any, other: Any) -> Number:
        if self.is_float:
            return Number(arith.cmpf(float_, self.value, self._operand(other)))
        return Number(arith.cmpi(integer, self.value, self._operand(other)))

    def __add__(self, other: Any) -> Number:
        return self._binary(arith.addf, arith.addi, other)

    def __sub__(self, other: Any) -> Number:
        return self._binary(arith.subf, arith.subi, other)

    def __mul__(self, other: Any) -> Number:
        return self._binary(arith.mulf, arith.muli, other)

    def __truediv__(self, other: Any) -> Number:
        return self._binary(arith.divf, None, other)

    def __rsub__(self, other: Any) -> Number:
        return self._binary(arith.subf, arith.subi, other, reverse=True)

    def __rtruediv__(self, other: Any) -> Number:
        return self._binary(arith.divf, None, other, reverse=True)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Number:
        return Number(arith.negf(self.value)) if self.is_float else 0 - self

    def __and__(self, other: Any) -> Number:
        return Number(arith.andi(self.value, self._operand(other)))

    def __or__(self, other: Any) -> Number:
        return Number(arith.ori(self.value, self._operand(other)))

    def __xor__(self, other: Any) -> Number:
        return Number(arith.xori(self.value, self._operand(other)))

    def __invert__(self) -> Number:
        return self ^ -1

    def __lshift__(self, other: Any) -> Number:
        return Number(arith.shli(self.value, self._operand(other)))

    def __rshift__(self, other: Any) -> Number:
        return Number(arith.shrsi(self.value, self._operand(other)))

    def shift_right_logical(self, other: Any) -> Number:
        """Shifts zeros in from the left."""
        return Number(arith.shrui(self.value, self._operand(other)))

    def __lt__(self, other: Any) -> Number:
        return self._compare(_FLOAT.OLT, _INTEGER.slt, other)

    def __le__(self, other: Any) -> Number:
        return self._compare(_FLOAT.OLE, _INTEGER.sle, other)

    def __gt__(self, other: Any) -> Number:
        return self._compare(_FLOAT.OGT, _INTEGER.sgt, other)

    def __ge__(self, other: Any) -> Number:
        return self._compare(_FLOAT.OGE, _INTEGER.sge, other)

    def equals(self, other: Any) -> Number:
        """Whether the operands are equal (ordered)."""
        return self._compare(_FLOAT.OEQ, _INTEGER.eq, other)

    def differs(self, other: Any) -> Number:
        """Whether the operands differ, or are unordered."""
        return self._compare(_FLOAT.UNE, _INTEGER.ne, other)

    def is_nan(self) -> Number:
        """Whether a float is not a number."""
        return self._compare(_FLOAT.UNO, None, self)

    def bits(self) -> Number:
        """The bits of a float, as an integer of its width."""
        integer = ir.IntegerType.get_signless(self.width)
        return Number(ops.bitcast(self.value, with_element(self.value.type, integer)))

    def as_float(self, text: str) -> Number:
        """The bits as a float type of the same width, given as ``"f32"``."""
        return Number(ops.bitcast(self.value, self._like(text)))

    def _like(self, text: str) -> ir.Type:
        return with_element(self.value.type, ir.Type.parse(text))

    def to_float(self, text: str) -> Number:
        """Converts a float or signed integer to a float type, rounded to nearest even."""
        target = self._like(text)
        if target == self.value.type:
            return self
        if not self.is_float:
            return Number(arith.sitofp(target, self.value))
        if ir.Type.parse(text).width > self.width:
            return Number(arith.extf(target, self.value))
        return Number(arith.truncf(target, self.value))

    def to_integer(self, text: str) -> Number:
        """Truncates a float that fits, or resizes a signed integer."""
        target = self._like(text)
        if target == self.value.type:
            return self
        if self.is_float:
            return Number(arith.fptosi(target, self.value))
        if ir.Type.parse(text).width > self.width:
            return Number(arith.extsi(target, self.value))
        return Number(arith.trunci(target, self.value))


def fma(x: Number, y: Any, z: Any) -> Number:
    """``x * y + z`` with one rounding."""
    return Number(math_dialect.fma(x.value, x._operand(y), x._operand(z)))


def select(condition: Number, yes: Any, no: Any) -> Number:
    """``yes`` where the condition holds, else ``no``; one of them must be a :class:`Number`."""
    like = yes if isinstance(yes, Number) else no
    return Number(arith.select(condition.value, like._operand(yes), like._operand(no)))


def minimum(x: Number, y: Any) -> Number:
    """The smaller float; the other one if one is not a number."""
    return Number(arith.minnumf(x.value, x._operand(y)))


def maximum(x: Number, y: Any) -> Number:
    """The larger float; the other one if one is not a number."""
    return Number(arith.maxnumf(x.value, x._operand(y)))


def _unary(function: Callable[..., ir.Value]) -> Callable[[Number], Number]:
    return lambda x: Number(function(x.value))


absolute = _unary(math_dialect.absf)
round_even = _unary(math_dialect.roundeven)
round_away = _unary(math_dialect.round)
truncate = _unary(math_dialect.trunc)
floor = _unary(math_dialect.floor)
ceil = _unary(math_dialect.ceil)
square_root = _unary(math_dialect.sqrt)


def copy_sign(x: Number, y: Any) -> Number:
    """The magnitude of ``x`` with the sign of ``y``."""
    return Number(math_dialect.copysign(x.value, x._operand(y)))


def polynomial(x: Number, coefficients: Sequence[float]) -> Number:
    """Horner's scheme with fused steps; coefficients from the highest power down."""
    result = x.constant(coefficients[0])
    for coefficient in coefficients[1:]:
        result = fma(result, x, coefficient)
    return result


def any_of(condition: Number) -> ir.Value:
    """Whether a condition holds for any element, as a scalar ``i1``."""
    result = ops.extract(condition.value, 0)
    for position in range(1, ops.vector_length(condition.value)):
        result = arith.ori(result, ops.extract(condition.value, position))
    return result


def branch(
    condition: ir.Value,
    yes: Callable[[], Sequence[Number]],
    no: Callable[[], Sequence[Number]],
    like: Sequence[Number],
) -> list[Number]:
    """Computes one of two alternatives, whose results have the types of ``like``."""
    operation = scf.IfOp(condition, [one.value.type for one in like], has_else=True)
    for block, alternative in ((operation.then_block, yes), (operation.else_block, no)):
        with ir.InsertionPoint(block):
            scf.yield_([one.value for one in alternative()])
    return [Number(result) for result in operation.results]


def each(function: Callable[..., Number], *operands: Number) -> Number:
    """Applies a function of scalars to corresponding elements."""
    length = ops.vector_length(operands[0].value)
    results = [
        function(*[Number(ops.extract(one.value, position)) for one in operands]).value
        for position in range(length)
    ]
    return Number(ops.from_elements(results))
