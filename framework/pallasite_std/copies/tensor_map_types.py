"""What the TMA engine knows: element types, reductions, limits; and the records of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pallasite.plugin import InvalidValueError

MAXIMUM_RANK = 5
MAXIMUM_BOX = 256
MAXIMUM_EXTENT = 1 << 32
MAXIMUM_STRIDE_BYTES = 1 << 40
STRIDE_ALIGNMENT = 16
SHARED_ALIGNMENT = 128
MAXIMUM_ISSUES = 256

ELEMENT_CODES: Mapping[str, int] = {
    **dict.fromkeys(("int2", "uint2"), 8),
    **dict.fromkeys(("int4", "uint4", "float4_e2m1fn"), 0),
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e4m3b11fnuz"), 1),
    **dict.fromkeys(("int16", "uint16"), 2),
    **dict.fromkeys(("int32", "uint32"), 3),
    **dict.fromkeys(("int64", "uint64", "float64"), 4),
    "float16": 5,
    "float32": 6,
    "bfloat16": 7,
}
"""Code of the tensor map's element type by dtype name; signed minima and maxima use others."""

_WIDE = ("int32", "uint32", "int64", "uint64")
REDUCTIONS: Mapping[str, tuple[str, ...]] = {
    "add": ("float16", "bfloat16", "float32", *_WIDE),
    **dict.fromkeys(("min", "max"), ("float16", "bfloat16")),
    **dict.fromkeys(("umin", "umax", "smin", "smax"), _WIDE),
    **dict.fromkeys(("inc", "dec"), ("int32", "uint32")),
    **dict.fromkeys(("and", "or", "xor"), _WIDE),
}
"""Reductions of stores and the dtypes that they take."""


def reduction_operator(reduction: str, dtype: str) -> str:
    """The instruction's operator for a reduction: ``smax`` -> ``max``.

    Raises:
      InvalidValueError: the engine has no such reduction, or not for this dtype.
    """
    if dtype not in REDUCTIONS.get(reduction, ()):
        supported = [name for name, dtypes in REDUCTIONS.items() if dtype in dtypes]
        raise InvalidValueError(
            f"TMA has no reduction {reduction!r} for {dtype}",
            expected=f"one of {', '.join(supported)}" if supported else "no reduction",
        )
    return reduction[1:] if reduction[1:] in ("min", "max") else reduction


def element_code(dtype: str, reduction: str | None = None) -> int:
    """The code of :data:`ELEMENT_CODES`, where a signed minimum or maximum makes a difference.

    Raises:
      InvalidValueError: TMA does not transfer this dtype, or does not reduce it so.
    """
    if dtype not in ELEMENT_CODES:
        raise InvalidValueError(
            f"TMA cannot transfer elements of type {dtype}",
            expected=f"one of {', '.join(ELEMENT_CODES)}",
        )
    if reduction is not None:
        reduction_operator(reduction, dtype)
        if reduction in ("smin", "smax"):
            return 9 if dtype.endswith("32") else 10
    return ELEMENT_CODES[dtype]


@dataclasses.dataclass(frozen=True)
class WindowDimension:
    """The part of one dimension of global memory that is copied.

    Attributes:
      start: first index; None if it is only known when the program runs.
      size: number of indices; may reach over the end of the array.
      squeezed: the dimension (of size 1) does not exist in shared memory.
      multiple_of: what a dynamic start is known to be a multiple of; None means that it may be
        assumed to be aligned to the tiles of the shared memory.
    """

    start: int | None
    size: int
    squeezed: bool = False
    multiple_of: int | None = None

    def aligned(self, to: int) -> bool:
        """True if the start is (or may be assumed to be) a multiple of ``to``."""
        if self.start is not None:
            return self.start % to == 0
        return self.multiple_of is None or self.multiple_of % to == 0


@dataclasses.dataclass(frozen=True)
class CoordinateTerm:
    """``(start of window dimension // divisor) * scale``, for a dynamic start."""

    dim: int
    divisor: int = 1
    scale: int = 1


@dataclasses.dataclass(frozen=True)
class Coordinate:
    """A coordinate of the box in the tensor map: a constant plus terms in the dynamic starts."""

    constant: int = 0
    terms: tuple[CoordinateTerm, ...] = ()

    def value(self, starts: Sequence[int]) -> int:
        """The coordinate when every start of the window is known."""
        return self.constant + sum(starts[t.dim] // t.divisor * t.scale for t in self.terms)


@dataclasses.dataclass(frozen=True)
class BlockTerm:
    """How a block's number moves its share: ``p = (block // divisor) % modulus`` places.

    Attributes:
      tensor_dim: the coordinate that grows by ``p * coordinate_step``.
      shared_stride: elements by which the address in shared memory grows, times ``p``.
    """

    tensor_dim: int
    divisor: int
    modulus: int
    coordinate_step: int
    shared_stride: int

    def place(self, block: int) -> int:
        """How many places the share of a block is moved."""
        return block // self.divisor % self.modulus


@dataclasses.dataclass(frozen=True)
class Issue:
    """One copy instruction: what it adds to each coordinate and, in elements, in shared memory."""

    coordinates: tuple[int, ...]
    shared_offset: int


@dataclasses.dataclass(frozen=True)
class TensorMapPlan:
    """A tensor map and the instructions that copy a window with it.

    All tuples run from the major to the minor dimension; hardware wants them reversed.

    Attributes:
      code: element type (:data:`ELEMENT_CODES`).
      element_bits: bits of one element.
      shape: extents of the tensor, in elements.
      strides: in elements; the last is 1.
      box: extents of what one instruction copies.
      swizzle: in bytes; 16 means none.
      coordinates: where the window starts.
      issues: the instructions; more than one if the hardware cannot do it in one.
      block_terms: how the share of each of ``blocks`` collective blocks is found.
      blocks: number of blocks that share the window.
    """

    code: int
    element_bits: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    coordinates: tuple[Coordinate, ...]
    issues: tuple[Issue, ...]
    block_terms: tuple[BlockTerm, ...] = ()
    blocks: int = 1

    @property
    def rank(self) -> int:
        """Number of dimensions of the tensor map, 1 to 5."""
        return len(self.shape)

    @property
    def issue_bytes(self) -> int:
        """Bytes that one instruction writes, out-of-bounds fill included."""
        elements = 1
        for extent in self.box:
            elements *= extent
        return elements * self.element_bits // 8

    @property
    def expected_bytes(self) -> int:
        """Bytes that arrive in one block's shared memory, from all issues of all blocks."""
        return self.issue_bytes * len(self.issues) * self.blocks

    def packed(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """(shape, strides in bytes without the innermost, box), in units the driver understands.

        Elements of less than a byte are counted in bytes.
        """
        per_byte = 8 // self.element_bits if self.element_bits < 8 else 1
        return (
            (*self.shape[:-1], self.shape[-1] // per_byte),
            tuple(s * self.element_bits // 8 for s in self.strides[:-1]),
            (*self.box[:-1], self.box[-1] // per_byte),
        )
