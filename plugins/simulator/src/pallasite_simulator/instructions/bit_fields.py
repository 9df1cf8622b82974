"""Integer arithmetic on bits and fields of bits (PTX ISA 9.7.1.14 to 9.7.1.22)."""

from __future__ import annotations

import numpy as np

from pallasite_simulator.binder import U32, Binder
from pallasite_simulator.instruction_set import InstructionSet, Step
from pallasite_simulator.instructions.modifiers import OPTIONAL, choose
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import STORAGE, TYPES, Values

instructions = InstructionSet()

NOT_FOUND = np.uint32(0xFFFFFFFF)

ALL_ONES: dict[int, Values] = {32: np.uint32(2**32 - 1), 64: np.uint64(2**64 - 1)}

_SWAPS = {
    32: (0x55555555, 0x33333333, 0x0F0F0F0F, 0x00FF00FF),
    64: (
        0x5555555555555555,
        0x3333333333333333,
        0x0F0F0F0F0F0F0F0F,
        0x00FF00FF00FF00FF,
        0x0000FFFF0000FFFF,
    ),
}


def bit_length(values: Values, bits: int) -> Values:
    """How many bits unsigned numbers need: 0 for 0 (uint32)."""
    shift = 1
    while shift < bits:
        values = values | values >> shift
        shift *= 2
    return np.bitwise_count(values).astype(np.uint32)


def reverse(values: Values, bits: int) -> Values:
    """Unsigned numbers with their bits in reverse order."""
    for number, mask in enumerate(_SWAPS[bits]):
        shift = 1 << number
        values = (values & mask) << shift | values >> shift & mask
    return values << bits // 2 | values >> bits // 2


def shift_amount(amounts: Values, bits: int) -> Values:
    """Amounts of shifts of ``bits``-bit numbers: of their dtype, and at most ``bits``."""
    return np.minimum(amounts, bits).astype(STORAGE[bits])


def field_amount(amounts: Values, bits: int) -> Values:
    """Places or lengths of fields of ``bits``-bit numbers: of their dtype, and at most ``bits``.

    PTX leaves amounts above 255 open. GPUs (seen on an H200) take their lower 8 bits for 32-bit
    numbers, and all of them for 64-bit numbers.
    """
    return shift_amount(amounts & 0xFF if bits == 32 else amounts, bits)


@instructions.register("popc")
def bind_popc(instruction: Instruction, binder: Binder) -> Step:
    """Number of bits that are set: PTX ISA 9.7.1.14, popc."""
    kind = TYPES[choose(binder, type=("b32", "b64"))["type"]]
    return binder.elementwise(lambda a: np.bitwise_count(a).astype(np.uint32), U32, kind)


@instructions.register("clz")
def bind_clz(instruction: Instruction, binder: Binder) -> Step:
    """Number of zeros above the highest bit that is set: PTX ISA 9.7.1.15, clz."""
    kind = TYPES[choose(binder, type=("b32", "b64"))["type"]]
    bits = np.uint32(kind.bits)
    return binder.elementwise(lambda a: bits - bit_length(a, kind.bits), U32, kind)


@instructions.register("bfind")
def bind_bfind(instruction: Instruction, binder: Binder) -> Step:
    """Place of the highest bit that is not the sign's: PTX ISA 9.7.1.16, bfind.

    All ones if there is none; ``.shiftamt`` gives the amount by which to shift it to the top.
    """
    form = choose(binder, result=(OPTIONAL, "shiftamt"), type=("u32", "u64", "s32", "s64"))
    kind = TYPES[form["type"]]
    bits, storage, top = kind.bits, kind.storage, np.uint32(kind.bits - 1)

    def find(a: Values) -> Values:
        if kind.kind == "signed":
            a = (a ^ (a >> bits - 1)).view(storage)
        return bit_length(a, bits) - np.uint32(1)

    def find_shift(a: Values) -> Values:
        place = find(a)
        return np.where(place == NOT_FOUND, place, top - place)

    return binder.elementwise(find_shift if form["result"] else find, U32, kind)


@instructions.register("fns")
def bind_fns(instruction: Instruction, binder: Binder) -> Step:
    """Place of the n-th set bit from a place on: PTX ISA 9.7.1.17, fns.

    A negative n counts downwards; with 0 the bit at the place itself is meant. All ones if there is
    none.
    """
    choose(binder, type=("b32",))
    return binder.elementwise(nth_set_bit, U32, U32, U32, TYPES["s32"])


def nth_set_bit(mask: Values, base: Values, offset: Values) -> Values:
    """As ``fns`` for 32-bit numbers."""
    down = offset < 0
    # Counting downwards is counting upwards in reversed bits.
    mask = np.where(down, reverse(mask, 32), mask)
    start = np.where(down, np.uint32(31) - base, base)
    wanted = np.abs(offset.astype(np.int64))
    # An offset of 0 looks at one bit only.
    field = np.where(wanted == 0, np.uint32(1), ALL_ONES[32])
    left = mask & field << np.minimum(start, 32)
    wanted = np.maximum(wanted, 1)
    found = np.bitwise_count(left) >= wanted
    place = np.zeros_like(left)
    for step in (16, 8, 4, 2, 1):
        below = np.bitwise_count(left & (1 << step) - 1)
        beyond = wanted > below
        wanted = np.where(beyond, wanted - below, wanted)
        left = np.where(beyond, left >> step, left)
        place = place + beyond * np.uint32(step)
    return np.where(found, np.where(down, np.uint32(31) - place, place), NOT_FOUND)


@instructions.register("brev")
def bind_brev(instruction: Instruction, binder: Binder) -> Step:
    """Bits in reverse order: PTX ISA 9.7.1.18, brev."""
    kind = TYPES[choose(binder, type=("b32", "b64"))["type"]]
    return binder.elementwise(lambda a: reverse(a, kind.bits), kind, kind)


@instructions.register("bfe")
def bind_bfe(instruction: Instruction, binder: Binder) -> Step:
    """Field of bits: PTX ISA 9.7.1.19, bfe.

    Signed fields are extended by their highest bit, or by the number's if they go beyond it.
    """
    kind = TYPES[choose(binder, type=("u32", "u64", "s32", "s64"))["type"]]
    bits, dtype = kind.bits, kind.dtype

    def extract(a: Values, place: Values, length: Values) -> Values:
        shifted = a >> field_amount(place, bits).astype(dtype)
        unused = bits - field_amount(length, bits).astype(dtype)
        # A field without bits is shifted out in the first step.
        return shifted << unused >> unused

    return binder.elementwise(extract, kind, kind, U32, U32)


@instructions.register("bfi")
def bind_bfi(instruction: Instruction, binder: Binder) -> Step:
    """A number with a field of bits put into it: PTX ISA 9.7.1.20, bfi."""
    kind = TYPES[choose(binder, type=("b32", "b64"))["type"]]
    bits = kind.bits

    def insert(a: Values, b: Values, place: Values, length: Values) -> Values:
        place = field_amount(place, bits)
        field = ones(field_amount(length, bits), bits) << place
        return b & ~field | a << place & field

    return binder.elementwise(insert, kind, kind, kind, U32, U32)


def ones(count: Values, bits: int) -> Values:
    """Numbers of ``bits`` bits of which the lower ``count`` are set; ``count`` has their dtype."""
    return ~(ALL_ONES[bits] << count)


@instructions.register("szext")
def bind_szext(instruction: Instruction, binder: Binder) -> Step:
    """The lower bits of a number, extended by sign or zeros: PTX ISA 9.7.1.21, szext.

    Of the number of bits, ``.wrap`` takes the lower 5 bits; with ``.clamp`` 32 and more are all.
    """
    form = choose(binder, mode=("clamp", "wrap"), type=("u32", "s32"))
    kind = TYPES[form["type"]]

    def extend(a: Values, count: Values) -> Values:
        kept = np.minimum(count, 32) if form["mode"] == "clamp" else count & 31
        unused = (32 - kept).astype(kind.dtype)
        return a << unused >> unused

    return binder.elementwise(extend, kind, kind, U32)


@instructions.register("bmsk")
def bind_bmsk(instruction: Instruction, binder: Binder) -> Step:
    """A mask with a field of ones, given its place and length: PTX ISA 9.7.1.22, bmsk.

    ``.wrap`` takes the lower 5 bits of both; with ``.clamp`` 32 and more are beyond the top.
    """
    form = choose(binder, mode=("clamp", "wrap"), type=("b32",))

    def mask(place: Values, length: Values) -> Values:
        if form["mode"] == "wrap":
            place, length = place & 31, length & 31
        return ones(np.minimum(length, 32), 32) << np.minimum(place, 32)

    return binder.elementwise(mask, U32, U32, U32)
