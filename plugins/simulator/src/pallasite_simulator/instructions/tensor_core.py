"""Numbers as tensor cores take them: element formats, sums, accumulators.

Products are computed in single precision from elements that single precision holds exactly, and
summed in single precision; the sum is added to the accumulator once. Hardware sums the products of
one instruction in fixed point and cuts low bits off, in ways that PTX leaves open (9.7.14.5.14 and
9.7.15.5.2, "Precision and rounding"), so floating-point results differ in their last bits. Integer
results are exact.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.errors import SimulationError
from pallasite_simulator.instructions import float_formats
from pallasite_simulator.instructions.compiled import elementwise, integer
from pallasite_simulator.instructions.float_arithmetic import arithmetic
from pallasite_simulator.instructions.rounding import from_f64, to_f64, widen
from pallasite_simulator.ptx.syntax import Instruction
from pallasite_simulator.types import Array

type Decode = Callable[[Array], Array]

TF32_MASK = np.uint32(0xFFFFE000)
"""PTX ISA 9.7.15.5.2: the lower 13 bits of ``.tf32`` data are ignored."""

COUNTER = "tensor operations"
"""The counter of a wave that has the additions and multiplications of tensor cores."""


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A type of matrix elements.

    Attributes:
      name: in PTX.
      bits: of an element.
      decode: from an array of words, in the last dimension of which elements are packed from low
        bits to high bits, to the elements in single precision (``.f64`` elements stay as they are).
    """

    name: str
    bits: int
    decode: Decode


@functools.cache
def _widening(form: float_formats.Format) -> Callable[[Array], Array]:
    def emit(builder: Any, bits: Any) -> Any:
        return widen(builder, builder.zext(bits, integer(32)), form, float_formats.F32)

    return elementwise(emit, [form.bits], 32)


@functools.cache
def _parts(name: str) -> Array:
    """For each value of a byte, the values of the elements that it holds."""
    held = np.arange(256, dtype=np.uint8)[:, None]
    if name == "b1":
        return (held >> np.arange(8, dtype=np.uint8) & 1).astype(np.float32)
    nibbles = (held >> np.array([0, 4], np.uint8) & 15).astype(np.float32)
    return nibbles - np.float32(16) * (nibbles > 7) if name == "s4" else nibbles


def _from_float(form: float_formats.Format, dtype: Any) -> Decode:
    def decode(words: Array) -> Array:
        held = words.view(dtype)
        return _widening(form)(held.reshape(-1)).view(np.float32).reshape(held.shape)

    return decode


def _from_parts(name: str) -> Decode:
    def decode(words: Array) -> Array:
        held = words.view(np.uint8)
        found: Array = np.take(_parts(name), held, axis=0, mode="clip")
        return found.reshape(*held.shape[:-1], -1)

    return decode


def _from_bf16(words: Array) -> Array:
    wide = words.view(np.uint16).astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _from_tf32(words: Array) -> Array:
    return (words.view(np.uint32) & TF32_MASK).view(np.float32)


def _from_integers(dtype: Any) -> Decode:
    return lambda words: words.view(dtype).astype(np.float32)


FORMATS = {
    one.name: one
    for one in (
        Format("f16", 16, _from_float(float_formats.F16, np.uint16)),
        Format("bf16", 16, _from_bf16),
        Format("tf32", 32, _from_tf32),
        Format("e4m3", 8, _from_float(float_formats.E4M3, np.uint8)),
        Format("e5m2", 8, _from_float(float_formats.E5M2, np.uint8)),
        Format("s8", 8, _from_integers(np.int8)),
        Format("u8", 8, _from_integers(np.uint8)),
        Format("s4", 4, _from_parts("s4")),
        Format("u4", 4, _from_parts("u4")),
        Format("b1", 1, _from_parts("b1")),
        Format("f64", 64, lambda words: words.view(np.float64)),
    )
}
"""All formats by name."""


def along_k(elements: Array) -> Array:
    """The first matrix, from shape (..., M, K), as products take it: (..., K, M), contiguous."""
    return np.ascontiguousarray(elements.swapaxes(-1, -2))


def count_differences(a: Array, b: Array) -> tuple[Array, Array]:
    """Matrices whose product counts the bits in which rows of ``a`` and of ``b`` differ.

    Both are of shape (..., rows, K), of zeros and ones; K of the results is twice as much.
    """
    return np.concatenate([a, 1 - a], axis=-1), np.concatenate([1 - b, b], axis=-1)


def multiply_f64(held: Array, a: Array, b: Array, rounding: str) -> Array:
    """Products of ``.f64``, added to ``held`` one after the other along K, each time with one
    rounding.

    Args:
      held: of shape (..., M, N).
      a: of shape (..., M, K).
      b: of shape (..., K, N).
      rounding: ``"rn"``, ``"rz"``, ``"rm"`` or ``"rp"``.
    """
    fma = arithmetic("fma", "f64", rounding)
    result = held.reshape(-1)
    for k in range(a.shape[-1]):
        left = np.broadcast_to(a[..., k, None], held.shape).reshape(-1)
        right = np.broadcast_to(b[..., k, None, :], held.shape).reshape(-1)
        result = fma(left, right, result).view(np.float64)
    return result.reshape(held.shape)


@functools.cache
def _adding_to_f16() -> Callable[[Array, Array], Array]:
    def emit(builder: Any, held: Any, summed: Any) -> Any:
        exact = builder.fadd(
            to_f64(builder, held, float_formats.F16), to_f64(builder, summed, float_formats.F32)
        )
        return from_f64(builder, exact, float_formats.F16)

    return elementwise(emit, [16, 32], 16)


def add_to_f16(held: Array, sums: Array) -> Array:
    """Accumulators of ``.f16`` plus sums of products (float32, of the same shape); a new array."""
    shape = held.shape
    found = _adding_to_f16()(held.reshape(-1), sums.reshape(-1))
    return found.view(np.float16).reshape(shape)


def add_saturating(held: Array, sums: Array) -> Array:
    """Accumulators of ``.s32`` plus sums of products (int32), limited to what int32 holds."""
    bounds = np.iinfo(np.int32)
    total = held.astype(np.int64) + sums
    return total.clip(bounds.min, bounds.max).astype(np.int32)


def check_whole_warps(lanes: Lanes, instruction: Instruction) -> None:
    """Raises :class:`SimulationError` unless all threads of the warps are there: those that have
    ended, or that a block does not have, cannot take part."""
    if lanes.whole_warps:
        return
    first = int(lanes.warps[0])
    for warp in lanes.warps:
        if np.count_nonzero(lanes.numbers // 32 == warp) < 32:
            first = int(warp)
            break
    lane = int(lanes.numbers[lanes.numbers // 32 == first][0])
    raise SimulationError(
        f"all 32 threads of a warp must execute this instruction, in: {instruction.text}",
        got=f"{np.count_nonzero(lanes.numbers // 32 == first)} threads of the warp of"
        f" {lanes.wave.thread_name(lane)}",
        location=instruction.location,
    )
