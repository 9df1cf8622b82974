"""Conversions between two numbers and one register that holds both in a narrow format: functions
for PTX ISA 9.7.9.21, cvt.

The functions return compiled functions of arrays of bits (:func:`compiled.elementwise`).
"""

from __future__ import annotations

import functools
from typing import Any

from pallasite_simulator.instructions import compiled
from pallasite_simulator.instructions.compiled import integer
from pallasite_simulator.instructions.float_arithmetic import Function
from pallasite_simulator.instructions.float_conversions import NONE
from pallasite_simulator.instructions.float_formats import BF16, F32, Format
from pallasite_simulator.instructions.rounding import (
    constant,
    is_nan,
    magnitude,
    narrow,
    rectified,
    widen,
)


def element_bits(form: Format) -> int:
    """How many bits a number has in a packed register: 6-bit ones have a byte each."""
    return 8 if form.bits == 6 else form.bits


def _halves(builder: Any, packed: Any, width: int) -> list[Any]:
    """The upper and the lower element, as 32-bit integers."""
    packed = builder.zext(packed, integer(32)) if packed.type.width < 32 else packed
    upper = builder.lshr(packed, constant(packed, width))
    return [builder.and_(one, constant(one, (1 << width) - 1)) for one in (upper, packed)]


def _joined(builder: Any, elements: list[Any], width: int) -> Any:
    """The upper and the lower element in one integer of twice their size."""
    upper, lower = elements
    both = builder.or_(builder.shl(upper, constant(upper, width)), lower)
    size = integer(2 * width)
    return both if both.type == size else builder.trunc(both, size)


def _narrow(builder: Any, bits: Any, target: Format, mode: str, flags: frozenset[str]) -> Any:
    """An f32 number in a narrow format; in 32 bits."""
    if "relu" in flags:
        bits = rectified(builder, bits, F32)
    return narrow(builder, bits, F32, target, mode, finite="satfinite" in flags)


@functools.cache
def pack(target: Format, mode: str, flags: frozenset[str] = NONE) -> Function:
    """Two f32 numbers, the upper one first, in one register.

    Args:
      target: f16, bf16, e4m3, e5m2, e2m3, e3m2 or e2m1.
      mode: ``"rn"`` or ``"rz"``.
      flags: of ``"relu"`` and ``"satfinite"``.
    """
    width = element_bits(target)

    def emit(builder: Any, upper: Any, lower: Any) -> Any:
        both = [_narrow(builder, one, target, mode, flags) for one in (upper, lower)]
        return _joined(builder, both, width)

    return compiled.elementwise(emit, [32, 32], 2 * width)


@functools.cache
def repack(source: Format, target: Format, flags: frozenset[str] = NONE) -> Function:
    """Two numbers of one register in another format, rounded to the nearest.

    Args:
      source, target: of f16, bf16, e4m3, e5m2, e2m3, e3m2 and e2m1.
      flags: of ``"relu"`` and ``"satfinite"``.
    """
    width, narrower = element_bits(source), element_bits(target)

    def emit(builder: Any, packed: Any) -> Any:
        numbers = []
        for half in _halves(builder, packed, width):
            # The two upper bits of the byte of a 6-bit number mean nothing.
            bits = builder.and_(half, constant(half, (1 << source.bits) - 1))
            wide = widen(builder, bits, source, F32)
            numbers.append(_narrow(builder, wide, target, "rn", flags))
        return _joined(builder, numbers, narrower)

    return compiled.elementwise(emit, [2 * width], 2 * narrower)


# Scales: ue8m0 is the exponent field of f32 without a sign; 255 is NaN ----------------------------


def _scale(builder: Any, bits: Any, mode: str, finite: bool) -> Any:
    """The power of two below (``rz``) or above (``rp``) the magnitude of an f32 number."""
    absolute = magnitude(builder, bits, F32)
    field = builder.lshr(absolute, constant(bits, F32.mantissa))
    if mode == "rp":
        # Zero stands for 2**-127, in the middle of the subnormal numbers.
        above = builder.icmp_unsigned(">", absolute, constant(bits, F32.smallest_normal >> 1))
        below = builder.icmp_unsigned("<", absolute, constant(bits, F32.infinity))
        rest = builder.and_(absolute, constant(bits, F32.smallest_normal - 1))
        inexact = builder.icmp_unsigned("!=", rest, constant(bits, 0))
        up = builder.and_(inexact, builder.and_(above, below))
        field = builder.add(field, builder.zext(up, bits.type))
    if not finite:
        return field
    too_large = builder.icmp_unsigned(">", field, constant(bits, 254))
    field = builder.select(too_large, constant(bits, 254), field)
    return builder.select(is_nan(builder, bits, F32), constant(bits, 255), field)


@functools.cache
def pack_scales(mode: str, finite: bool) -> Function:
    """Two f32 numbers, the upper one first, as ``ue8m0x2``.

    Args:
      mode: ``"rz"`` or ``"rp"``.
      finite: whether numbers that are too large become the largest power (``.satfinite``).
    """

    def emit(builder: Any, upper: Any, lower: Any) -> Any:
        both = [_scale(builder, one, mode, finite) for one in (upper, lower)]
        return _joined(builder, both, 8)

    return compiled.elementwise(emit, [32, 32], 16)


@functools.cache
def repack_scales(mode: str, finite: bool) -> Function:
    """The two numbers of a ``bf16x2`` as ``ue8m0x2``; arguments as for :func:`pack_scales`."""

    def emit(builder: Any, packed: Any) -> Any:
        halves = _halves(builder, packed, 16)
        wide = [builder.shl(one, constant(one, 16)) for one in halves]
        return _joined(builder, [_scale(builder, one, mode, finite) for one in wide], 8)

    return compiled.elementwise(emit, [32], 16)


@functools.cache
def unpack_scales() -> Function:
    """A ``ue8m0x2`` as ``bf16x2``."""

    def emit(builder: Any, packed: Any) -> Any:
        numbers = []
        for field in _halves(builder, packed, 8):
            bits = builder.shl(field, constant(field, BF16.mantissa))
            smallest = builder.icmp_unsigned("==", field, constant(field, 0))
            bits = builder.select(smallest, constant(bits, BF16.smallest_normal >> 1), bits)
            nan = builder.icmp_unsigned("==", field, constant(field, 255))
            numbers.append(builder.select(nan, constant(bits, BF16.nan), bits))
        return _joined(builder, numbers, 16)

    return compiled.elementwise(emit, [16], 32)
