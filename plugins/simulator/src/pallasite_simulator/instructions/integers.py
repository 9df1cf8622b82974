"""Integer arithmetic (PTX ISA 9.7.1). Results wrap around unless they are told to saturate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pallasite_simulator.binder import Binder
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.modifiers import OPTIONAL, choose, only_for, with_bits
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import TYPES, PtxType, Values

instructions = InstructionSet()

type Function = Callable[..., Values]

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
SIGNED = ("s16", "s32", "s64")
PACKED = ("u16x2", "s16x2")

_LOW_32 = 0xFFFFFFFF


# Functions of arrays ------------------------------------------------------------------------------


def halves(function: Function, kind: PtxType) -> Function:
    """Applies a function of 16-bit integers to both halves of packed 32-bit words."""
    dtype = np.dtype(np.int16 if kind.name == "s16x2" else np.uint16)

    def apply(*values: Values) -> Values:
        parts = [np.ascontiguousarray(one).view(dtype).reshape(-1, 2) for one in values]
        result = np.ascontiguousarray(function(*parts)).view(np.uint32)[:, 0]
        return result if any(one.ndim for one in values) else result[0]

    return apply


def clamp_s32(wide: Values) -> Values:
    """Saturates 64-bit integers to 32 bits."""
    return np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32)


def widening(kind: PtxType) -> Function:
    """The product of two numbers in twice their bits (at most 64)."""
    wide = with_bits(kind, 2 * kind.bits).dtype
    return lambda a, b: a.astype(wide) * b.astype(wide)


def high_half(kind: PtxType) -> Function:
    """The upper half of the product of two numbers."""
    if kind.bits < 64:
        product, bits, dtype = widening(kind), kind.bits, kind.dtype
        return lambda a, b: (product(a, b) >> bits).astype(dtype)
    if kind.kind == "unsigned":
        return high_half_64
    return _signed_high_half_64


def high_half_64(a: Values, b: Values) -> Values:
    """The upper 64 bits of the product of unsigned 64-bit numbers."""
    a_low, a_high = a & _LOW_32, a >> 32
    b_low, b_high = b & _LOW_32, b >> 32
    left, right = a_high * b_low, a_low * b_high
    middle = (a_low * b_low >> 32) + (left & _LOW_32) + (right & _LOW_32)
    return a_high * b_high + (left >> 32) + (right >> 32) + (middle >> 32)


def _signed_high_half_64(a: Values, b: Values) -> Values:
    # A negative a counts as a + 2**64 in the unsigned product, which adds b to its upper half.
    high = high_half_64(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
    return high - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)


def product(mode: str, kind: PtxType) -> Function:
    """The product that ``mul`` and ``mad`` name ``.lo``, ``.hi`` or ``.wide``."""
    if mode == "lo":
        return np.multiply
    return widening(kind) if mode == "wide" else high_half(kind)


def product_24(mode: str, kind: PtxType) -> Function:
    """Bits 31 to 0 (``.lo``) or 47 to 16 (``.hi``) of the product of two 24-bit numbers."""
    if kind.kind == "signed":

        def cut(a: Values) -> Values:
            return ((a << 8) >> 8).astype(np.int64)
    else:

        def cut(a: Values) -> Values:
            return (a & 0xFFFFFF).astype(np.uint64)

    shift, dtype = 16 if mode == "hi" else 0, kind.dtype
    return lambda a, b: (cut(a) * cut(b) >> shift).astype(dtype)


def quotient(a: Values, b: Values) -> Values:
    """``a / b`` towards zero; all ones where ``b`` is zero."""
    found = a // b
    if found.dtype.kind == "i":
        inexact = np.fmod(a, b) != 0
        found = found + (inexact & ((a < 0) != (b < 0))).astype(found.dtype)
    return _all_ones_by_zero(found, b)


def remainder(a: Values, b: Values) -> Values:
    """``a - a / b * b``, of the sign of ``a``; all ones where ``b`` is zero."""
    return _all_ones_by_zero(np.fmod(a, b), b)


def _all_ones_by_zero(found: Values, divisors: Values) -> Values:
    """PTX leaves division by zero open. GPUs (seen on an H200) give all ones as either result."""
    if divisors.ndim == 0 and divisors != 0:
        return found
    return np.where(divisors == 0, np.invert(np.zeros((), found.dtype)), found)


# The instructions ---------------------------------------------------------------------------------


def bind_add(instruction: Instruction, binder: Binder) -> Step:
    """Addition: PTX ISA 9.7.1.1, add."""
    return _bind_sum(binder, np.add, (*INTEGERS, *PACKED))


def bind_sub(instruction: Instruction, binder: Binder) -> Step:
    """Subtraction: PTX ISA 9.7.1.2, sub."""
    return _bind_sum(binder, np.subtract, INTEGERS)


def _bind_sum(binder: Binder, function: Any, types: tuple[str, ...]) -> Step:
    form = choose(binder, saturate=(OPTIONAL, "sat"), type=types)
    only_for(binder, form["saturate"], form["type"], "s32")
    kind = TYPES[form["type"]]
    if form["saturate"]:
        return binder.elementwise(
            lambda a, b: clamp_s32(function(a.astype(np.int64), b)), kind, kind, kind
        )
    if kind.kind == "packed":
        return binder.elementwise(halves(function, kind), kind, kind, kind)
    return binder.elementwise(function, kind, kind, kind)


def bind_mul(instruction: Instruction, binder: Binder) -> Step:
    """Multiplication: PTX ISA 9.7.1.3, mul."""
    form = choose(binder, mode=("lo", "hi", "wide"), type=INTEGERS)
    kind, result = _product_types(binder, form["mode"], form["type"])
    return binder.elementwise(product(form["mode"], kind), result, kind, kind)


def bind_mad(instruction: Instruction, binder: Binder) -> Step:
    """Multiplication and addition: PTX ISA 9.7.1.4, mad."""
    form = choose(binder, mode=("lo", "hi", "wide"), saturate=(OPTIONAL, "sat"), type=INTEGERS)
    _check_saturation(binder, form["mode"], form["saturate"], form["type"])
    kind, result = _product_types(binder, form["mode"], form["type"])
    return _bind_product_sum(binder, product(form["mode"], kind), form["saturate"], kind, result)


def _product_types(binder: Binder, mode: str, name: str) -> tuple[PtxType, PtxType]:
    """Types of the factors and of the result."""
    kind = TYPES[name]
    if mode != "wide":
        return kind, kind
    only_for(binder, mode, name, "u16", "s16", "u32", "s32")
    return kind, with_bits(kind, 2 * kind.bits)


def _check_saturation(binder: Binder, mode: str, saturate: str, name: str) -> None:
    if saturate and (mode, name) != ("hi", "s32"):
        raise binder.error(".sat is only for .hi.sat.s32")


def _bind_product_sum(
    binder: Binder, multiply: Function, saturate: str, kind: PtxType, result: PtxType
) -> Step:
    if saturate:
        return binder.elementwise(
            lambda a, b, c: clamp_s32(multiply(a, b).astype(np.int64) + c), kind, kind, kind, kind
        )
    return binder.elementwise(lambda a, b, c: multiply(a, b) + c, result, kind, kind, result)


@instructions.register("mul24")
def bind_mul24(instruction: Instruction, binder: Binder) -> Step:
    """Multiplication of the lower 24 bits of numbers: PTX ISA 9.7.1.5, mul24."""
    form = choose(binder, mode=("lo", "hi"), type=("u32", "s32"))
    kind = TYPES[form["type"]]
    return binder.elementwise(product_24(form["mode"], kind), kind, kind, kind)


@instructions.register("mad24")
def bind_mad24(instruction: Instruction, binder: Binder) -> Step:
    """Multiplication of the lower 24 bits of numbers, and addition: PTX ISA 9.7.1.6, mad24."""
    form = choose(binder, mode=("lo", "hi"), saturate=(OPTIONAL, "sat"), type=("u32", "s32"))
    _check_saturation(binder, form["mode"], form["saturate"], form["type"])
    kind = TYPES[form["type"]]
    return _bind_product_sum(binder, product_24(form["mode"], kind), form["saturate"], kind, kind)


@instructions.register("sad")
def bind_sad(instruction: Instruction, binder: Binder) -> Step:
    """Sum with an absolute difference: PTX ISA 9.7.1.7, sad."""
    kind = TYPES[choose(binder, type=INTEGERS)["type"]]
    return binder.elementwise(
        lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c, kind, kind, kind, kind
    )


def bind_div(instruction: Instruction, binder: Binder) -> Step:
    """Division, with the quotient cut towards zero: PTX ISA 9.7.1.8, div."""
    kind = TYPES[choose(binder, type=INTEGERS)["type"]]
    return binder.elementwise(quotient, kind, kind, kind)


def bind_rem(instruction: Instruction, binder: Binder) -> Step:
    """Remainder of a division: PTX ISA 9.7.1.9, rem."""
    kind = TYPES[choose(binder, type=INTEGERS)["type"]]
    return binder.elementwise(remainder, kind, kind, kind)


def bind_abs(instruction: Instruction, binder: Binder) -> Step:
    """Absolute value, that of the smallest number being itself: PTX ISA 9.7.1.10, abs."""
    kind = TYPES[choose(binder, type=SIGNED)["type"]]
    return binder.elementwise(np.abs, kind, kind)


def bind_neg(instruction: Instruction, binder: Binder) -> Step:
    """Negation: PTX ISA 9.7.1.11, neg."""
    kind = TYPES[choose(binder, type=SIGNED)["type"]]
    return binder.elementwise(np.negative, kind, kind)


def bind_min(instruction: Instruction, binder: Binder) -> Step:
    """Minimum: PTX ISA 9.7.1.12, min."""
    return _bind_extremum(binder, np.minimum)


def bind_max(instruction: Instruction, binder: Binder) -> Step:
    """Maximum: PTX ISA 9.7.1.13, max."""
    return _bind_extremum(binder, np.maximum)


def _bind_extremum(binder: Binder, function: Any) -> Step:
    """``.relu`` makes a negative result zero."""
    form = choose(binder, relu=(OPTIONAL, "relu"), type=(*INTEGERS, *PACKED))
    only_for(binder, form["relu"], form["type"], "s32", "s16x2")
    kind = TYPES[form["type"]]
    choice: Function = function
    if form["relu"]:

        def choice(a: Values, b: Values) -> Values:
            return np.maximum(function(a, b), 0)

    if kind.kind == "packed":
        choice = halves(choice, kind)
    return binder.elementwise(choice, kind, kind, kind)


# Dot products -------------------------------------------------------------------------------------


@instructions.register("dp4a")
def bind_dp4a(instruction: Instruction, binder: Binder) -> Step:
    """Dot product of four pairs of bytes, and addition: PTX ISA 9.7.1.23, dp4a."""
    first, second, result = _dot_types(binder, binder.instruction.modifiers)
    return _bind_dot(binder, [_part(first, n, 8) for n in range(4)], second, range(4), result)


@instructions.register("dp2a")
def bind_dp2a(instruction: Instruction, binder: Binder) -> Step:
    """Dot product of two 16-bit numbers with two bytes, and addition: PTX ISA 9.7.1.24, dp2a.

    ``.lo`` takes the lower two bytes of the second operand, ``.hi`` the upper two.
    """
    mode, *types = binder.instruction.modifiers or ("",)
    if mode not in ("lo", "hi"):
        raise binder.error("a modifier is missing", expected="one of .lo, .hi")
    first, second, result = _dot_types(binder, tuple(types))
    places = range(2) if mode == "lo" else range(2, 4)
    return _bind_dot(binder, [_part(first, n, 16) for n in range(2)], second, places, result)


def _dot_types(binder: Binder, types: tuple[str, ...]) -> tuple[PtxType, PtxType, PtxType]:
    """Types of the two factors and of the sum, which is signed if one of them is."""
    if len(types) != 2 or any(one not in ("u32", "s32") for one in types):
        raise binder.error("wrong types", expected="two of .u32, .s32")
    return TYPES[types[0]], TYPES[types[1]], TYPES["s32" if "s32" in types else "u32"]


def _part(kind: PtxType, number: int, bits: int) -> Function:
    """Field ``number`` of ``bits`` bits of a 32-bit number, extended to 32 bits by its sign."""
    left, right = 32 - bits * (number + 1), 32 - bits
    return lambda a: ((a << left) >> right).astype(np.uint32)


def _bind_dot(
    binder: Binder, fields: list[Function], second: PtxType, places: range, result: PtxType
) -> Step:
    first = TYPES[binder.types[0].name]
    pairs = list(zip(fields, [_part(second, place, 8) for place in places], strict=True))

    def dot(a: Values, b: Values, c: Values) -> Values:
        total = c
        for left, right in pairs:
            total = total + left(a) * right(b)
        return total.view(result.dtype)

    return binder.elementwise(dot, result, first, second, TYPES["u32"])
