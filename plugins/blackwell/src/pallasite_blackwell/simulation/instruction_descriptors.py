"""Instruction descriptors of tcgen05.mma: the operand of 32 bits (PTX ISA 9.7.16.4.2)."""

from __future__ import annotations

import dataclasses
import functools

F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}

INPUTS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": F8F6F4,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
"""Types of A and B by kind and their number in the descriptor."""

RESULTS = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}

DEPTHS = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
"""Extent along K of dense matrices."""

_BYTES = ("e4m3", "e5m2", "u8", "s8")

SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
"""Kinds whose operands have scale factors."""

_SCALE_TYPES = {
    "mxf8f6f4": {1: "ue8m0"},
    "mxf4": {1: "ue8m0"},
    "mxf4nvf4": {0: "ue4m3", 1: "ue8m0"},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """What the name of an instruction says that its descriptor depends on."""

    kind: str
    group: int
    sparse: bool
    stationary: bool
    target: str = "sm_100a"


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What a descriptor says.

    Attributes:
      m, n, k: extents, of both blocks together.
      a, b, d: types of the elements.
      negate: whether products are subtracted.
      k_major: for A and B, whether their rows lie along K.
      saturate: whether integers are limited to their range.
      selector: which half of the metadata of sparse matrices is used.
      scale: type of the scale factors, or ``""``.
      scale_ids: of A and B: the byte of the first scale factor.
    """

    m: int
    n: int
    k: int
    a: str
    b: str
    d: str
    negate: bool
    k_major: tuple[bool, bool]
    saturate: bool
    selector: int
    scale: str
    scale_ids: tuple[int, int]


class DescriptorError(ValueError):
    """A descriptor that has no meaning; ``expected`` says what would."""

    def __init__(self, message: str, got: object, expected: str):
        super().__init__(message)
        self.got = got
        self.expected = expected


@functools.lru_cache(maxsize=4096)
def decode(descriptor: int, variant: Variant) -> Shape:
    """What a descriptor says, checked.

    Raises:
      DescriptorError: it has no meaning for the instruction.
    """
    kind, scaled = variant.kind, variant.kind in SCALED
    fp4 = kind in ("mxf4", "mxf4nvf4")
    if bool(descriptor >> 2 & 1) != variant.sparse:
        raise DescriptorError(
            "the sparsity of the descriptor (bit 2) is not that of the instruction",
            descriptor >> 2 & 1,
            str(int(variant.sparse)),
        )
    a = _type(kind, "A", descriptor >> 7 & 7)
    b = _type(kind, "B", descriptor >> 10 & (3 if fp4 else 7))
    negate = bool((descriptor >> 13 ^ descriptor >> 14) & 1)
    k_major = (not descriptor >> 15 & 1, not descriptor >> 16 & 1)
    if not all(k_major) and (
        fp4
        or any(
            one in ("e2m1", "e2m3", "e3m2")
            for one, k in ((a, k_major[0]), (b, k_major[1]))
            if not k
        )
    ):
        raise DescriptorError(
            "elements of less than 8 bits lie along K", "a transposed matrix", "bits 15 and 16 of 0"
        )
    n = (descriptor >> 17 & 63) << 3
    k = DEPTHS[kind] * (1 + variant.sparse)
    scale, ids, selector = "", (0, 0), 0
    if scaled:
        m = (descriptor >> 27 & 3) << 7
        m |= (descriptor >> 24 & 7) << 4
        scales = _SCALE_TYPES[kind]
        if descriptor >> 23 & 1 not in scales:
            raise DescriptorError(
                "the kind has no such type of scale factors (bit 23)",
                descriptor >> 23 & 1,
                " or ".join(f"{number} for .{name}" for number, name in scales.items()),
            )
        scale = scales[descriptor >> 23 & 1]
        ids = (descriptor >> 29 & 3, descriptor >> 4 & 3)
        d = "f32"
        if fp4 and descriptor >> 31:
            if variant.sparse or not variant.target.startswith(("sm_103", "sm_110")):
                raise DescriptorError("the target has no K of 96 (bit 31)", 1, "0")
            k = 96
    else:
        m = (descriptor >> 24 & 31) << 4
        results = RESULTS[kind]
        if descriptor >> 4 & 3 not in results:
            raise DescriptorError(
                "the kind has no such type of D (bits 4 and 5)",
                descriptor >> 4 & 3,
                " or ".join(f"{number} for .{name}" for number, name in results.items()),
            )
        d = results[descriptor >> 4 & 3]
        selector = descriptor & 3
        if variant.sparse and selector and kind in ("f8f6f4", "i8"):
            raise DescriptorError("the kind has no sparsity selector (bits 0 and 1)", selector, "0")
        if kind == "i8" and descriptor >> 13 & 3:
            raise DescriptorError(
                "integers are not negated (bits 13 and 14)", descriptor >> 13 & 3, "0"
            )
        if a == "bf16" and d == "f16":
            raise DescriptorError("bf16 is added up in f32", "D of .f16", "D of .f32")
    _check_shape(m, n, variant)
    if not k_major[1] and b in _BYTES and n % (16 * variant.group):
        raise DescriptorError(
            "there is no such N for a transposed B of elements of 8 bits",
            n,
            f"a multiple of {16 * variant.group}",
        )
    return Shape(
        m,
        n,
        k,
        a,
        b,
        d,
        negate,
        k_major,
        bool(descriptor >> 3 & 1) and kind == "i8",
        selector,
        scale,
        ids,
    )


def _type(kind: str, name: str, number: int) -> str:
    found = INPUTS[kind].get(number)
    if found is None:
        listed = ", ".join(f"{code} for .{one}" for code, one in INPUTS[kind].items())
        raise DescriptorError(f"the kind has no such type of {name}", number, listed)
    return found


def _check_shape(m: int, n: int, variant: Variant) -> None:
    """PTX ISA 9.7.16.2.1: M, and the multiples of which N must be."""
    kind, scaled = variant.kind, variant.kind in SCALED
    sizes: tuple[int, ...]
    if variant.stationary:
        sizes, numbers = (32, 64, 128), [64, 128, 256][: 3 - variant.sparse]
    elif variant.group == 2:
        step = 32 if kind == "i8" else 16
        sizes = (256,) if scaled and variant.sparse else (128, 256)
        numbers = list(range(step, 257, step))
    else:
        sizes, numbers = (128,) if scaled else (64, 128), list(range(8, 257, 8))
        if kind == "i8":
            numbers = [8, 16, 24, *range(32, 257, 16)]
    if m not in sizes:
        raise DescriptorError("there is no such M", m, " or ".join(map(str, sizes)))
    if n not in numbers:
        raise DescriptorError("there is no such N", n, f"one of {', '.join(map(str, numbers))}")
