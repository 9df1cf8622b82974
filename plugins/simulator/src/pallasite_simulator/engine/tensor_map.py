"""Tensor maps: what the 128 bytes hold that describe a tensor in global memory to bulk copies.

The layout of the bytes is the simulator's own: PTX leaves it open, and programs only copy them, or
change them by ``tensormap.replace``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from pallasite.plugin import InvalidValueError

if TYPE_CHECKING:
    from pallasite.plugin.lowering import TensorMapParameter

BYTES = 128
MAX_RANK = 5
MAX_BOX = 256
MAX_SIZE = 1 << 32
MAX_STRIDE = 1 << 40
MAX_ELEMENT_STRIDE = 8

GROUP = 16
"""Elements of less than a byte come in groups of so many."""

PADDED_BOX = 128
"""Extent of boxes of such elements that are padded in shared memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class ElementType:
    """An element type of tensor maps.

    Attributes:
      code: its number in ``CUtensorMapDataType``.
      name: as in PTX.
      dtype: how elements are computed with.
      flush: whether reductions take subnormal numbers for zeros.
      round_tf32: whether loads round elements to tf32.
      group_bytes: of 16 elements in global memory, if these have less than a byte each.
      padded_bytes: of 16 such elements in shared memory.
    """

    code: int
    name: str
    dtype: np.dtype[Any]
    flush: bool = False
    round_tf32: bool = False
    group_bytes: int = 0
    padded_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Of an element."""
        return self.dtype.itemsize

    @property
    def floating(self) -> bool:
        """Whether out-of-bounds elements may be NaN."""
        return self.name.startswith(("f", "bf", "tf"))


def _element(code: int, name: str, dtype: Any, **options: Any) -> ElementType:
    return ElementType(code, name, np.dtype(dtype), **options)


ELEMENT_TYPES: dict[int, ElementType] = {
    one.code: one
    for one in (
        _element(0, "u8", np.uint8),
        _element(1, "u16", np.uint16),
        _element(2, "u32", np.uint32),
        _element(3, "s32", np.int32),
        _element(4, "u64", np.uint64),
        _element(5, "s64", np.int64),
        _element(6, "f16", np.float16),
        _element(7, "f32", np.float32),
        _element(8, "f64", np.float64),
        _element(9, "bf16", ml_dtypes.bfloat16),
        _element(10, "f32.ftz", np.float32, flush=True),
        _element(11, "tf32", np.float32, round_tf32=True),
        _element(12, "tf32.ftz", np.float32, flush=True, round_tf32=True),
    )
}
"""By number in ``CUtensorMapDataType``."""

NARROW_TYPES: dict[int, ElementType] = {
    one.code: one
    for one in (
        _element(13, "b4x16", np.uint8, group_bytes=8, padded_bytes=8),
        _element(14, "b4x16_p64", np.uint8, group_bytes=8, padded_bytes=16),
        _element(15, "b6x16_p32", np.uint8, group_bytes=12, padded_bytes=16),
    )
}
"""Those of elements of less than a byte, which later targets than sm_90 have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Swizzle:
    """How bits of shared addresses are changed (PTX ISA 5.5.7).

    The bits of the address from bit 7 on are XORed to ``bits`` bits from bit ``shift`` on.

    Attributes:
      name: for messages.
      span: bytes within which data move; rows of a box are as far apart.
      shift, bits: which bits of the address change.
      flip: whether the halves of 16 bytes are swapped in every other line of 128 bytes.
    """

    name: str
    span: int
    shift: int
    bits: int
    flip: bool = False

    @property
    def period(self) -> int:
        """After how many bytes the pattern repeats."""
        return 128 << max(self.bits, 1)

    def apply(self, addresses: Any) -> Any:
        """Where the bytes at addresses, or offsets that are congruent to them, really are."""
        lines = addresses >> 7
        result = addresses ^ ((lines & ((1 << self.bits) - 1)) << self.shift)
        return result ^ ((lines & 1) << 3) if self.flip else result


SWIZZLES: dict[int, Swizzle] = {
    1: Swizzle("32 bytes", 32, 4, 1),
    2: Swizzle("64 bytes", 64, 4, 2),
    3: Swizzle("128 bytes", 128, 4, 3),
    4: Swizzle("128 bytes in pieces of 32", 128, 5, 2),
    5: Swizzle("128 bytes in pieces of 32, halves of 16 swapped", 128, 5, 2, flip=True),
    6: Swizzle("128 bytes in pieces of 64", 128, 6, 1),
}
"""By number in ``CUtensorMapSwizzle``; 0 is none."""

PTX_ELEMENT_TYPES: dict[int, int] = {**{n: n for n in range(16)}, 8: 10, 9: 8, 10: 9}
"""Numbers of element types in ``tensormap.replace`` (PTX ISA 9.7.9.28) to those above."""

WIDEST_SWIZZLE = 3
"""The swizzle of 128 bytes, which comes in several atomicities: 0 is that of 16 bytes, and others
are added to it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """Where a field is in the bytes of a tensor map.

    Attributes:
      offset: of its first element.
      size: bytes of an element.
      count: how many elements there are.
    """

    offset: int
    size: int
    count: int = 1


FIELDS: dict[str, Field] = {
    "global_address": Field(0, 8),
    "elemtype": Field(8, 1),
    "rank": Field(9, 1),
    "interleave_layout": Field(10, 1),
    "swizzle_mode": Field(11, 1),
    "swizzle_atomicity": Field(12, 1),
    "fill_mode": Field(13, 1),
    "global_dim": Field(16, 8, 5),
    "global_stride": Field(56, 8, 4),
    "box_dim": Field(88, 2, 5),
    "element_stride": Field(98, 1, 5),
}
"""By name in ``tensormap.replace``."""

_FORMAT = struct.Struct("<Q6B2x5Q4Q5H5B")


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory, and the box of it that one copy moves.

    Dimensions are minor to major, as in PTX. It may hold values that no copy accepts, as programs
    change its fields one by one: :meth:`check` looks at all of them.

    Attributes:
      address: of the tensor in global memory.
      element_type: number in ``CUtensorMapDataType``.
      sizes: of the tensor, in elements.
      strides: of all dimensions but the first, in bytes.
      box: extents of a box, in elements of the tensor.
      element_strides: of elements that are copied: every such element of the box.
      interleave: 0 for none; others are not simulated.
      swizzle: number in ``CUtensorMapSwizzle``.
      nan_fill: whether elements beyond the tensor's bounds are NaN, not zero.
    """

    address: int
    element_type: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    interleave: int = 0
    swizzle: int = 0
    nan_fill: bool = False

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.sizes))

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)

    @property
    def element(self) -> ElementType:
        """The element type."""
        found = ELEMENT_TYPES.get(self.element_type)
        return NARROW_TYPES[self.element_type] if found is None else found

    @functools.cached_property
    def extents(self) -> tuple[int, ...]:
        """How many elements of each dimension a copy moves. Element strides of the first dimension
        do not matter."""
        strides = (1, *self.element_strides[1:])
        return tuple(-(-b // s) for b, s in zip(self.box, strides, strict=True))

    @functools.cached_property
    def box_bytes(self) -> int:
        """Bytes that a copy moves, out of bounds or not."""
        count = math.prod(self.extents)
        if self.element.group_bytes:
            return count // GROUP * self.element.padded_bytes
        return count * self.element.bytes

    @classmethod
    def from_parameter(cls, parameter: TensorMapParameter, address: int) -> TensorMap:
        """The tensor map of a kernel parameter, for an array at an address.

        Raises:
          InvalidValueError: the driver would refuse it.
        """
        # This imports JAX, which processes that only run blocks do not need.
        from pallasite_std.api import encode as check_parameter

        units = check_parameter(parameter)
        size = ELEMENT_TYPES[units.element_type].bytes
        return cls(
            address=address,
            element_type=units.element_type,
            sizes=units.shape[::-1],
            strides=tuple(stride * size for stride in units.strides[-2::-1]),
            box=units.box[::-1],
            swizzle=units.swizzle,
        )

    def encode(self) -> bytes:
        """Its 128 bytes."""
        missing = MAX_RANK - self.rank

        def padded(values: tuple[int, ...]) -> tuple[int, ...]:
            return values + (0,) * missing

        flags = (
            self.element_type,
            self.rank - 1,
            self.interleave,
            min(self.swizzle, WIDEST_SWIZZLE),
            max(self.swizzle - WIDEST_SWIZZLE, 0),
            self.nan_fill,
        )
        packed = _FORMAT.pack(
            self.address,
            *flags,
            *padded(self.sizes),
            *padded(self.strides),
            *padded(self.box),
            *padded(self.element_strides),
        )
        return packed.ljust(BYTES, b"\0")

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def decode(contents: bytes) -> TensorMap:
        """The tensor map of 128 bytes.

        Raises:
          InvalidValueError: no copy could use it.
        """
        fields = _FORMAT.unpack_from(contents)
        address, element_type, last, interleave, mode, atomicity, fill = fields[:7]
        rank = last + 1
        require(rank <= MAX_RANK, "wrong number of dimensions", rank, f"1 to {MAX_RANK}")
        require(
            mode <= WIDEST_SWIZZLE and (not atomicity or mode == WIDEST_SWIZZLE),
            "unknown swizzle",
            f"mode {mode}, atomicity {atomicity}",
            f"a mode up to {WIDEST_SWIZZLE}; an atomicity other than 0 only with that",
        )
        found = TensorMap(
            address=address,
            element_type=element_type,
            sizes=fields[7 : 7 + rank],
            strides=fields[12 : 12 + rank - 1],
            box=fields[16 : 16 + rank],
            element_strides=fields[21 : 21 + rank],
            interleave=interleave,
            swizzle=mode + atomicity,
            nan_fill=bool(fill),
        )
        found.check()
        return found

    def check(self) -> None:
        """Checks all fields against the hardware's limits.

        Raises:
          InvalidValueError: the driver would refuse it.
        """
        require(
            self.element_type in ELEMENT_TYPES or self.element_type in NARROW_TYPES,
            "unknown element type",
            self.element_type,
            f"a number below {len(ELEMENT_TYPES) + len(NARROW_TYPES)}",
        )
        require(not self.interleave, "interleaved layouts are not simulated", self.interleave, "0")
        require(
            not self.swizzle or self.swizzle in SWIZZLES,
            "unknown swizzle",
            self.swizzle,
            f"0 to {max(SWIZZLES)}",
        )
        require(
            all(1 <= size <= MAX_SIZE for size in self.sizes),
            "a dimension is empty or too large",
            self.sizes,
            "sizes from 1 to 2**32",
        )
        require(
            all(1 <= extent <= MAX_BOX for extent in self.box),
            "the box is empty or too large",
            self.box,
            f"extents from 1 to {MAX_BOX}",
        )
        require(
            all(1 <= stride <= MAX_ELEMENT_STRIDE for stride in self.element_strides),
            "wrong element strides",
            self.element_strides,
            f"1 to {MAX_ELEMENT_STRIDE}",
        )
        require(
            all(stride % 16 == 0 and stride < MAX_STRIDE for stride in self.strides),
            "rows of the tensor do not start at multiples of 16 bytes",
            f"strides of {self.strides} bytes",
            "multiples of 16 bytes below 2**40",
        )
        require(
            self.address % 16 == 0,
            "the tensor does not start at a multiple of 16 bytes",
            hex(self.address),
            "an aligned address",
        )
        inner = self.box[0] * self.element.bytes
        if self.element.group_bytes:
            inner = self.box[0] // GROUP * self.element.padded_bytes
            padded = self.element.padded_bytes > self.element.group_bytes
            unit = PADDED_BOX if padded else GROUP
            require(
                self.sizes[0] % unit == 0
                and self.box[0] % unit == 0
                and (not padded or self.box[0] == PADDED_BOX)
                and set(self.element_strides) == {1},
                f"elements of type {self.element.name} are moved in groups",
                f"sizes {self.sizes}, box {self.box}",
                f"multiples of {unit} elements along the first dimension"
                + f", of which a box has {PADDED_BOX}" * padded,
            )
        require(
            inner % 16 == 0,
            "rows of the box are not whole 16-byte pieces",
            f"{inner} bytes per row",
            "a multiple of 16 bytes",
        )
        if self.swizzle:
            span = SWIZZLES[self.swizzle].span
            require(
                inner <= span,
                "rows of the box are longer than the swizzle",
                f"{inner} bytes per row, swizzle of {span}",
                "rows no longer than the swizzle",
            )
        require(
            not self.nan_fill or self.element.floating,
            "only elements of floating-point types can be filled with NaN",
            self.element.name,
            "a floating-point type",
        )


def require(condition: bool, message: str, got: object, expected: str) -> None:
    """Raises :class:`InvalidValueError` about a tensor map unless a condition is true."""
    if not condition:
        raise InvalidValueError(f"wrong tensor map: {message}", got=got, expected=expected)
