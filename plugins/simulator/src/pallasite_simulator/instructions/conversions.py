"""Conversion of numbers (PTX ISA 9.7.9.21 and 9.7.9.22): cvt and cvt.pack."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from pallasite_simulator.instruction_set import InstructionSet
from pallasite_simulator.instructions.conversion_modifiers import Modifiers, read_modifiers
from pallasite_simulator.instructions.float_arithmetic import Function
from pallasite_simulator.instructions.float_conversions import (
    between_formats,
    from_integer,
    to_integer,
    to_integral,
)
from pallasite_simulator.instructions.float_formats import FORMATS
from pallasite_simulator.instructions.packed_conversions import (
    pack,
    pack_scales,
    repack,
    repack_scales,
    unpack_scales,
)
from pallasite_simulator.ptx.syntax import Immediate
from pallasite_simulator.types import TYPES, PtxType, Values

if TYPE_CHECKING:
    from pallasite_simulator.binder import Binder
    from pallasite_simulator.instruction_set import Step
    from pallasite_simulator.ptx.syntax import Instruction

instructions = InstructionSet()

S32 = TYPES["s32"]


@instructions.register("cvt")
def bind_cvt(instruction: Instruction, binder: Binder) -> Step:
    """Conversion between integers and floating-point numbers of any size: PTX ISA 9.7.9.21, cvt."""
    types = binder.types
    if len(types) != 2:
        raise binder.error("cvt needs the type of its result and that of its operand")
    target, source = types
    if binder.instruction.has("rs"):
        raise binder.error("the simulator has no stochastic rounding (.rs)")
    modifiers = read_modifiers(binder, target, source)
    if target.kind == "packed" or source.kind == "packed":
        function, count = _packed(target.name, source.name, modifiers)
    else:
        function, count = _single(target, source, modifiers), 1
    binder.expect_operands(1 + count)
    sources = [_operand_type(binder, 1 + number, source) for number in range(count)]
    return binder.elementwise(function, _bits(target), *sources)


def _bits(kind: PtxType) -> PtxType:
    """The type under which a register that may be wider than the value is used."""
    return kind if kind.integer else TYPES[f"b{kind.bits}"]


def _operand_type(binder: Binder, number: int, kind: PtxType) -> PtxType:
    return kind if isinstance(binder.operand(number), Immediate) else _bits(kind)


def _single(target: PtxType, source: PtxType, modifiers: Modifiers) -> Function:
    """A conversion of one number."""
    rounding, flags = modifiers
    to, of = FORMATS.get(target.name), FORMATS.get(source.name)
    signed = target.kind == "signed"
    if to is not None and of is not None:
        if rounding.endswith("i"):
            return to_integral(to, rounding, flags)
        return between_formats(of, to, rounding or "rn", flags)
    if to is not None:
        return from_integer(source.bits, source.kind == "signed", to, rounding, flags)
    if of is not None:
        function = to_integer(of, target.bits, signed, rounding, "ftz" in flags)
        # Signed results are extended by their sign into wider registers.
        return (lambda values: function(values).view(target.dtype)) if signed else function
    if "sat" in flags:
        return functools.partial(_saturate, target, source)
    dtype = target.dtype
    return lambda values: values.astype(dtype)


def _saturate(target: PtxType, source: PtxType, values: Values) -> Values:
    """Integers clamped to the range of another integer type."""
    to, of = np.iinfo(target.dtype), np.iinfo(source.dtype)
    low, high = max(int(to.min), int(of.min)), min(int(to.max), int(of.max))
    kind = source.dtype.type
    return np.minimum(np.maximum(values, kind(low)), kind(high)).astype(target.dtype)


def _packed(target: str, source: str, modifiers: Modifiers) -> tuple[Function, int]:
    """A conversion to or from a packed type, and how many operands it has."""
    rounding, flags = modifiers
    if target == "ue8m0x2":
        finite = "satfinite" in flags
        if source == "f32":
            return pack_scales(rounding, finite), 2
        return repack_scales(rounding, finite), 1
    if source == "ue8m0x2":
        return unpack_scales(), 1
    to = FORMATS[target.removesuffix("x2")]
    if source == "f32":
        return pack(to, rounding, flags), 2
    return repack(FORMATS[source.removesuffix("x2")], to, flags), 1


_PACK_TYPES = {"u16": 16, "s16": 16, "u8": 8, "s8": 8, "u4": 4, "s4": 4, "u2": 2, "s2": 2}


@instructions.register("cvt.pack")
def bind_cvt_pack(instruction: Instruction, binder: Binder) -> Step:
    """Two integers clamped to a narrow type and packed: PTX ISA 9.7.9.22, cvt.pack.

    The second operand becomes the lowest part of the result, above it comes the first one; below
    16 bits, a third operand fills the bits above.
    """
    wanted, *rest = [one for one in instruction.modifiers if one not in ("pack", "sat")] or [""]
    bits = _PACK_TYPES.get(wanted)
    expected = ["s32"] if bits == 16 else ["s32", "b32"]
    if bits is None or rest != expected or instruction.modifiers[:2] != ("pack", "sat"):
        raise binder.error(
            "malformed cvt.pack",
            expected="cvt.pack.sat.<type>.s32, and .b32 for types of less than 16 bits",
        )
    signed = wanted.startswith("s")
    low = np.int32(-(1 << (bits - 1)) if signed else 0)
    high = np.int32((1 << (bits - signed)) - 1)
    mask, shift = np.uint32((1 << bits) - 1), np.uint32(bits)

    def clamp(values: Values) -> Values:
        return np.minimum(np.maximum(values, low), high).view(np.uint32) & mask

    def pair(a: Values, b: Values) -> Values:
        return clamp(a) << shift | clamp(b)

    u32 = TYPES["u32"]
    if bits == 16:
        return binder.elementwise(pair, u32, S32, S32)
    above = np.uint32(2 * bits)
    return binder.elementwise(lambda a, b, c: pair(a, b) | c << above, u32, S32, S32, u32)
