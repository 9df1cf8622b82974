"""Numbers as tensor cores take them: element formats, products and accumulation.

Products are computed in single precision from elements that single precision holds exactly, and
summed in the order that BLAS chooses; the sum is added to the accumulator once, with one rounding
to the accumulator's type. Hardware sums the products of one instruction in fixed point and cuts low
bits off, in ways that PTX leaves open (9.7.14.5.14 and 9.7.15.5.2, "Precision and rounding"), so
floating-point results differ in their last bits. Integer results are exact.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from pallasite_simulator.engine.lanes import Lanes
from pallasite_simulator.errors import SimulationError
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
def _table(name: str) -> Array:
    """Values of all bit patterns of a float type of up to 16 bits."""
    if name == "f16":
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[name]
    found: Array = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    return found


@functools.cache
def _parts(name: str) -> Array:
    """For each value of a byte, the values of the elements that it holds."""
    held = np.arange(256, dtype=np.uint8)[:, None]
    if name == "b1":
        return (held >> np.arange(8, dtype=np.uint8) & 1).astype(np.float32)
    nibbles = (held >> np.array([0, 4], np.uint8) & 15).astype(np.float32)
    return nibbles - 16 * (nibbles > 7) if name == "s4" else nibbles


def _from_table(name: str, dtype: Any) -> Decode:
    return lambda words: np.take(_table(name), words.view(dtype), mode="clip")


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
        Format("f16", 16, _from_table("f16", np.uint16)),
        Format("bf16", 16, _from_bf16),
        Format("tf32", 32, _from_tf32),
        Format("e4m3", 8, _from_table("e4m3", np.uint8)),
        Format("e5m2", 8, _from_table("e5m2", np.uint8)),
        Format("s8", 8, _from_integers(np.int8)),
        Format("u8", 8, _from_integers(np.uint8)),
        Format("s4", 4, _from_parts("s4")),
        Format("u4", 4, _from_parts("u4")),
        Format("b1", 1, _from_parts("b1")),
        Format("f64", 64, lambda words: words.view(np.float64)),
    )
}
"""All formats by name."""


def multiply(a: Array, b: Array) -> Array:
    """Products of many pairs of matrices.

    Args:
      a: of shape (..., M, K), in single precision.
      b: of shape (..., N, K): the second matrix by columns.

    Returns:
      An array of shape (..., M, N), in single precision.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        found: Array = np.matmul(a, b.swapaxes(-1, -2))
    return found


def count_bits(a: Array, b: Array, operation: str) -> Array:
    """As :func:`multiply`, of bits: how many are set in ``and`` or ``xor`` of rows of ``a`` and
    columns of ``b``."""
    both = multiply(a, b)
    if operation == "and":
        return both
    found: Array = a.sum(-1)[..., :, None] + b.sum(-1)[..., None, :] - 2 * both
    return found


def accumulate(held: Array, products: Array, saturate: bool = False) -> Array:
    """Adds products to accumulators.

    Args:
      held: accumulators, as float16, float32 or int32.
      products: sums of products in single precision, of the same shape.
      saturate: whether integers that overflow become the largest or smallest; else they wrap.

    Returns:
      A new array of the accumulators' dtype.
    """
    if held.dtype == np.int32:
        if not saturate:
            return held + products.astype(np.int32)
        bounds = np.iinfo(np.int32)
        total = held.astype(np.int64) + products.astype(np.int64)
        return total.clip(bounds.min, bounds.max).astype(np.int32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        found: Array = (held + products).astype(held.dtype, copy=False)
    return found


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
