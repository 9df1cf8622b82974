"""Programs with ``wgmma.mma_async`` and what they must compute, element by element.

Layouts are written down here from the PTX ISA once more, one element at a time, and share nothing
with the simulator.
"""

from __future__ import annotations

import dataclasses
import functools

import ml_dtypes
import numpy as np
from simulator_support import body_ptx

DTYPES = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "tf32": np.dtype(np.float32),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
    "b1": np.dtype(np.uint8),  # eight elements
}
DEPTH = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32, "b1": 256}
RESULTS = {"f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "s32": np.dtype(np.int32)}
SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}
"""Bytes of a swizzle to the code in descriptors."""


# Layouts ------------------------------------------------------------------------------------------


def accumulator_position(thread: int, element: int) -> tuple[int, int]:
    """Row and column of element ``element`` of D in a thread of the warpgroup."""
    warp, lane = divmod(thread, 32)
    row = 16 * warp + lane // 4 + (8 if element % 4 >= 2 else 0)
    column = 8 * (element // 4) + lane % 4 * 2 + element % 2
    return row, column


def multiplicand_position(thread: int, element: int, width: int) -> tuple[int, int]:
    """Row and column of element ``element`` of A in registers; ``width`` elements to a register."""
    warp, lane = divmod(thread, 32)
    register, inside = divmod(element, width)
    row = 16 * warp + lane // 4 + (8 if register % 2 else 0)
    column = lane % 4 * width + inside + (4 * width if register >= 2 else 0)
    return row, column


def swizzled(address: int, swizzle: int) -> int:
    """CuTe's ``Swizzle<B, 4, 3>`` with 2**B chunks of 16 bytes."""
    if not swizzle:
        return address
    return address ^ ((address >> 7) % (swizzle // 16)) << 4


def k_major_offset(row: int, byte: int, swizzle: int, leading: int, stride: int) -> int:
    """``((8,m),(T,2k)):((..T,SBO),(1,T or LBO))`` in bytes; ``byte`` counts along K."""
    if not swizzle:
        return row % 8 * 16 + row // 8 * stride + byte % 16 + byte // 16 * leading
    return row % 8 * swizzle + row // 8 * stride + byte


def mn_major_offset(row: int, k: int, swizzle: int, leading: int, stride: int) -> int:
    """``((T,s,m),(8,k))`` in bytes, for elements of two bytes; ``row`` counts along M or N."""
    chunk, inside = divmod(row, 8)
    if not swizzle:
        return inside * 2 + chunk * stride + k % 8 * 16 + k // 8 * leading
    wide = swizzle // 16
    return (
        inside * 2 + chunk % wide * 16 + chunk // wide * leading + k % 8 * swizzle + k // 8 * stride
    )


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A or B in shared memory.

    Attributes:
      swizzle: 0, 32, 64 or 128 bytes.
      transposed: whether M or N is the dimension that lies side by side.
      leading, stride: byte offsets.
      start: where the matrix begins, relative to the beginning of dynamic shared memory.
      advance: added to the start address, but not to where the swizzled bytes are laid out: bytes
        along K that earlier instructions have read.
      base: base offset.
    """

    swizzle: int
    transposed: bool
    leading: int
    stride: int
    start: int
    advance: int = 0
    base: int = 0

    def descriptor(self) -> int:
        """Without the address of dynamic shared memory."""
        assert (self.start + self.advance) % 16 == 0
        return (
            (self.start + self.advance) >> 4
            | (self.leading >> 4) << 16
            | (self.stride >> 4) << 32
            | self.base << 49
            | SWIZZLES[self.swizzle] << 62
        )

    def place(self, row: int, byte: int) -> int:
        """Where a byte (along K) of a row is; for transposed matrices, ``byte`` is 2 * k."""
        if self.transposed:
            offset = mn_major_offset(row, byte // 2, self.swizzle, self.leading, self.stride)
            offset += byte % 2
        else:
            offset = k_major_offset(row, byte, self.swizzle, self.leading, self.stride)
        address = self.start + self.advance + offset
        # The pattern begins at multiples of its size, or ``base`` times 128 bytes behind them.
        return swizzled(address - 128 * self.base, self.swizzle) + 128 * self.base


def store(image: np.ndarray, matrix: Matrix, values: np.ndarray) -> None:
    """Puts a matrix (rows along M or N) into an image of shared memory."""
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    places = np.array(
        [[matrix.place(row, byte) for byte in range(rows.shape[1])] for row in range(len(rows))]
    )
    assert len(np.unique(places)) == places.size
    image[places] = rows


# Values -------------------------------------------------------------------------------------------


def random_values(random: np.random.Generator, kind: str, rows: int) -> np.ndarray:
    """Elements of A or B, as they are stored; ``b1`` in bytes of eight."""
    depth = DEPTH[kind]
    if kind == "b1":
        return random.integers(0, 256, (rows, depth // 8), np.uint8)
    dtype = DTYPES[kind]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return random.integers(info.min, info.max + 1, (rows, depth)).astype(dtype)
    return random.standard_normal((rows, depth)).astype(dtype)


def widened(values: np.ndarray, kind: str) -> np.ndarray:
    """Elements in double precision."""
    if kind == "b1":
        return np.unpackbits(values, axis=1, bitorder="little").astype(np.float64)
    if kind == "tf32":
        values = (values.view(np.uint32) & 0xFFFFE000).view(np.float32)
    return values.astype(np.float64)


# Programs -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Program:
    """PTX and the arrays that it takes: images of shared memory, words of each thread, results."""

    ptx: str
    arrays: list[np.ndarray]
    block: int
    shared: int
    grid: int = 1


PROLOGUE = """
    .reg .b32 %s<8>; .reg .b64 %g<8>; .reg .pred %more, %yes, %no;
    .reg .b32 %base; .reg .b64 %base64, %words, %results;
    mov.u32 %base, dynamic;
    mov.u32 %s0, %tid.x;
    shl.b32 %s0, %s0, 4;
    mov.u32 %s1, %ntid.x;
    shl.b32 %s1, %s1, 4;
    mov.u32 %s2, %ctaid.x;
    mul.wide.u32 %g0, %s2, {size};
    add.s64 %g0, %g0, %array0;
$copy:
    setp.lt.u32 %more, %s0, {size};
    @!%more bra $copied;
    cvt.u64.u32 %g1, %s0;
    add.s64 %g1, %g1, %g0;
    ld.global.v4.b32 {{%s4, %s5, %s6, %s7}}, [%g1];
    add.u32 %s3, %base, %s0;
    st.shared.v4.b32 [%s3], {{%s4, %s5, %s6, %s7}};
    add.u32 %s0, %s0, %s1;
    bra.uni $copy;
$copied:
    fence.proxy.async;
    bar.sync 0;
    setp.eq.u32 %yes, 0, 0;
    setp.ne.u32 %no, 0, 0;
    shr.u32 %s0, %base, 4;
    cvt.u64.u32 %base64, %s0;
    mul.wide.u32 %words, %thread, {inputs};
    add.s64 %words, %words, %array1;
    mul.wide.u32 %results, %thread, {outputs};
    add.s64 %results, %results, %array2;
"""


def listed(prefix: str, count: int) -> str:
    """``{%d0, %d1}``."""
    return "{" + ", ".join(f"%{prefix}{number}" for number in range(count)) + "}"


def descriptor_code(name: str, matrix: Matrix) -> list[str]:
    return [
        f".reg .b64 %{name};",
        f"add.s64 %{name}, %base64, {matrix.descriptor():#x};",
    ]


def load_words(prefix: str, count: int, first: int, kind: str = "b32") -> list[str]:
    """Declares registers and loads them from the thread's words."""
    return [
        f".reg .{kind} %{prefix}<{count}>;",
        *[f"ld.global.b32 %{prefix}{n}, [%words+{4 * (first + n)}];" for n in range(count)],
    ]


def store_words(prefix: str, count: int, first: int) -> list[str]:
    return [f"st.global.b32 [%results+{4 * (first + n)}], %{prefix}{n};" for n in range(count)]


WAIT = ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]


def program(
    code: list[str],
    images: np.ndarray,
    words: np.ndarray,
    outputs: int,
    block: int = 128,
    directives: str = "",
) -> Program:
    """A kernel around code; ``images`` has a row for each block, ``words`` for each thread."""
    size = images.shape[1]
    text = PROLOGUE.format(size=size, inputs=4 * words.shape[1], outputs=4 * outputs)
    ptx = body_ptx(text + "\n".join(code), 3, shared=size, directives=directives)
    results = np.full((len(words), outputs), 0xCDCDCDCD, np.uint32)
    return Program(ptx, [images, words, results], block, size, len(images))


@functools.cache
def accumulator_places(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns, by thread and element."""
    places = np.array(
        [[accumulator_position(thread, i) for i in range(n // 2)] for thread in range(128)]
    )
    return places[..., 0], places[..., 1]


@functools.cache
def multiplicand_places(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns, by thread and element."""
    places = np.array(
        [[multiplicand_position(t, i, width) for i in range(4 * width)] for t in range(128)]
    )
    return places[..., 0], places[..., 1]


def accumulator_words(values: np.ndarray) -> np.ndarray:
    """Registers of the threads of a warpgroup, from a 64xN array of f16, f32 or s32."""
    rows, columns = accumulator_places(values.shape[1])
    return np.ascontiguousarray(values[rows, columns]).view(np.uint32)


def accumulator_values(words: np.ndarray, kind: str) -> np.ndarray:
    """The 64xN array, from registers of the threads of a warpgroup."""
    elements = np.ascontiguousarray(words).view(RESULTS[kind])
    rows, columns = accumulator_places(elements.shape[1] * 2)
    values = np.zeros((64, elements.shape[1] * 2), elements.dtype)
    values[rows, columns] = elements
    return values


def multiplicand_words(values: np.ndarray, kind: str) -> np.ndarray:
    """Registers of the threads of a warpgroup, from the 64 rows of A."""
    if kind == "b1":
        bits = np.unpackbits(values, axis=1, bitorder="little")
        rows, columns = multiplicand_places(32)
        return np.packbits(bits[rows, columns], axis=1, bitorder="little").view(np.uint32)
    rows, columns = multiplicand_places(4 // values.itemsize)
    return np.ascontiguousarray(values[rows, columns]).view(np.uint32)
