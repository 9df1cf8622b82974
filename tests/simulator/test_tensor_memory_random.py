"""Random moves and products in tensor memory, by seed, against a model that goes from cell to cell.

python tests/simulator/test_tensor_memory_random.py FIRST_SEED COUNT
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest
from tensor_programs import k_major, matrix_descriptor, product, run_on_tensor_memory

COLUMNS = 128
"""Columns that are used."""

EACH = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
"""Registers of a thread for ``.x1``."""


def cell(shape, thread, register, split):
    """The lane and the column of a register: PTX ISA 9.7.16.2.3.1, figure by figure."""
    quad, place = divmod(thread, 4)
    if shape == "32x32b":
        return thread, register
    if shape == "16x32bx2":
        return thread % 16, register + split * (thread >= 16)
    if shape == "16x64b":
        # Of a quad, the first and third thread have a row of the upper half, the others below.
        return quad + 8 * (place % 2), place // 2 + 2 * register
    words = {"16x128b": 1, "16x256b": 2}[shape]
    block, rest = divmod(register, 2 * words)
    half, word = divmod(rest, words)
    return quad + 8 * half, 4 * words * block + words * place + word


class Move:
    """A load or a store of random shape, of a number of registers. Stores go to different cells."""

    def __init__(self, generator, registers, *, apart):
        shapes = [one for one, each in EACH.items() if not registers % each]
        self.shape = str(generator.choice(shapes))
        self.registers = registers
        self.half = bool(generator.integers(2))
        self.split = 0
        if self.shape == "16x32bx2":
            least = registers * (1 + self.half) if apart else 1
            self.split = least + int(generator.integers(0, 17))
        self.lane = 0 if self.shape == "32x32b" else int(generator.choice([0, 16]))
        extent = 1 + max(
            self.cell(thread, register)[1] for thread in range(32) for register in range(registers)
        )
        self.column = int(generator.integers(0, COLUMNS - extent - self.half + 1))

    def cell(self, thread, register):
        lane, column = cell(self.shape, thread, register, 0)
        column *= 1 + self.half
        if self.shape == "16x32bx2":
            column += self.split * (thread >= 16)
        return lane, column

    def code(self, kind):
        count = self.registers // EACH[self.shape]
        pack = {"ld": ".pack::16b", "st": ".unpack::16b"}[kind] * self.half
        name = f"tcgen05.{kind}.sync.aligned.{self.shape}.x{count}{pack}.b32"
        given = "{" + ", ".join(f"%v{number}" for number in range(self.registers)) + "}"
        place = f"[%r5+{(self.lane << 16) + self.column}]"
        split = f", {self.split}" if self.split else ""
        operands = f"{given}, {place}{split}" if kind == "ld" else f"{place}{split}, {given}"
        return f"{name} {operands};\ntcgen05.wait::{kind}.sync.aligned;\n"

    def places(self):
        """For each warp, thread and register, its cell."""
        for warp in range(4):
            for thread in range(32):
                for register in range(self.registers):
                    lane, column = self.cell(thread, register)
                    row = 32 * warp + self.lane + lane
                    yield (32 * warp + thread, register), (row, self.column + column)


def check_moves(seed):
    """Loads and stores in turn, so that each shows where the other's registers come from."""
    generator = np.random.default_rng(seed)
    before = generator.integers(0, 2**32, (128, 256), np.uint32)
    expected, code = before.copy(), ""
    for _ in range(2):
        registers = int(2 ** generator.integers(0, 5))
        load, store = (Move(generator, registers, apart=one) for one in (False, True))
        code += load.code("ld") + store.code("st")
        held = np.zeros((128, registers), np.uint32)
        for register, (row, column) in load.places():
            value = expected[row, column]
            if load.half:
                value = value & 0xFFFF | (expected[row, column + 1] & 0xFFFF) << np.uint32(16)
            held[register] = value
        for register, (row, column) in store.places():
            value = held[register]
            if store.half:
                expected[row, column + 1] = value >> np.uint32(16)
                value = value & 0xFFFF
            expected[row, column] = value
    after = run_on_tensor_memory(code, np.zeros(16, np.uint8), before, used=COLUMNS)
    np.testing.assert_array_equal(after[:, :COLUMNS], expected[:, :COLUMNS], err_msg=code)


TYPES = {
    "f16": [(np.float16, 0), (ml_dtypes.bfloat16, 1)],
    "tf32": [(np.float32, 2)],
    "f8f6f4": [(ml_dtypes.float8_e4m3fn, 0), (ml_dtypes.float8_e5m2, 1)],
    "i8": [(np.uint8, 0), (np.int8, 1)],
}


def check_product(seed):
    """A product of random kind, types and extents; with lanes that are not written, and more."""
    generator = np.random.default_rng(seed)
    kind = str(generator.choice(list(TYPES)))
    (first, code_a), (second, code_b) = (
        TYPES[kind][one] for one in generator.integers(0, len(TYPES[kind]), 2)
    )
    m = int(generator.choice([64, 128]))
    n = 16 * int(generator.integers(1, 5)) * (2 if kind == "i8" else 1)
    k = 32 // np.dtype(first).itemsize
    integers = kind == "i8"

    def matrix(rows, dtype):
        if integers:
            return generator.integers(0, 256, (rows, k), np.uint8).view(dtype)
        return generator.standard_normal((rows, k)).astype(np.float32).astype(dtype)

    a, b = matrix(m, first), matrix(n, second)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    if kind == "tf32":
        cut = [(one.view(np.uint32) & 0xFFFFE000).view(np.float32) for one in (a, b)]
        wide_a, wide_b = (one.astype(np.float64) for one in cut)
    single = integers or np.dtype(first).itemsize == 4 or np.dtype(first) == ml_dtypes.bfloat16
    single |= np.dtype(second) == ml_dtypes.bfloat16 or bool(generator.integers(2))
    number = 2 if integers else int(single)
    negated = not integers and bool(generator.integers(2))
    keep, column = bool(generator.integers(2)), int(generator.integers(0, COLUMNS - n + 1))
    masks = generator.integers(0, 2**32, 4, np.uint32) * generator.integers(0, 2, 4, np.uint32)
    before = generator.standard_normal((128, 256)).astype(np.float32).view(np.uint32)
    if integers:
        before = generator.integers(-(2**20), 2**20, (128, 256)).astype(np.int32).view(np.uint32)
    elif not single:
        halves = generator.standard_normal((128, 256)).astype(np.float16)
        before = halves.view(np.uint16).astype(np.uint32)
    descriptor = m >> 4 << 24 | n >> 3 << 17 | code_b << 10 | code_a << 7 | number << 4
    names = ["%r14", "%r15", "%r16", "%r17"]
    after = product(
        f"tcgen05.mma.cta_group::1.kind::{kind}", a, b, descriptor | negated << 13, before,
        extra=f"%r10, {{{', '.join(names)}}}, %p5", keep=keep, d=column, used=COLUMNS,
        before="".join(f"mov.b32 {one}, {mask};\n" for one, mask in zip(names, masks, strict=True)),
    )  # fmt: skip
    result = np.int32 if integers else np.float32

    def values(words):
        if integers or single:
            return words.view(result).astype(np.float64)
        return words.astype(np.uint16).view(np.float16).astype(np.float64)

    expected = values(before)
    sums = wide_a @ wide_b.T * (-1 if negated else 1)
    for row in range(m):
        lane = row if m == 128 else 32 * (row // 16) + row % 16
        if not int(masks[lane // 32]) >> lane % 32 & 1:
            held = expected[lane, column : column + n] if keep else 0
            expected[lane, column : column + n] = held + sums[row]
    tolerance = 0.0 if integers else 1e-4 if single else 1e-2
    found = values(after)[:, :COLUMNS]
    np.testing.assert_allclose(
        found, expected[:, :COLUMNS], rtol=tolerance, atol=tolerance, err_msg=kind
    )


COPIES = {
    "128x256b": (128, 2, lambda row: [row]),
    "128x128b": (128, 1, lambda row: [row]),
    "4x256b": (4, 2, lambda row: [32 * row]),
    "32x128b.warpx4": (32, 1, lambda row: [row, row + 32, row + 64, row + 96]),
    "64x128b.warpx2::02_13": (64, 1, lambda row: [row, row + 64]),
    "64x128b.warpx2::01_23": (64, 1, lambda row: [row % 32 + row // 32 * 64 + x for x in (0, 32)]),
}  # fmt: skip


def check_copies(seed):
    """Copies one after the other, from rows that are further apart."""
    generator = np.random.default_rng(seed)
    before = generator.integers(0, 2**32, (128, 256), np.uint32)
    expected, code, data, start = before.copy(), "", [], 0
    for _ in range(2):
        shape = str(generator.choice(list(COPIES)))
        rows, chunks, lanes = COPIES[shape]
        column = int(generator.integers(0, COLUMNS - 4 * chunks + 1))
        given = generator.integers(0, 256, (max(rows, 8), 16 * chunks), np.uint8)
        held = k_major(given)
        # Rows of eight are further apart than they need to be.
        gap = 128 * int(generator.integers(0, 3))
        groups = held.reshape(-1, 128 * chunks)
        data.append(np.pad(groups, ((0, 0), (0, gap))).reshape(-1))
        code += matrix_descriptor(start, 128, 128 * chunks + gap)
        code += f"add.u32 %r12, %r5, {column};\n@%p3 tcgen05.cp.cta_group::1.{shape} [%r12], %a;\n"
        start += len(data[-1])
        for row in range(rows):
            for lane in lanes(row):
                expected[lane, column : column + 4 * chunks] = given[row].view(np.uint32)
    after = run_on_tensor_memory(code, np.concatenate(data), before, used=COLUMNS)
    np.testing.assert_array_equal(after[:, :COLUMNS], expected[:, :COLUMNS], err_msg=code)


NARROW = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 8, 0),
    "e5m2": (ml_dtypes.float8_e5m2, 8, 1),
    "e2m3": (ml_dtypes.float6_e2m3fn, 6, 3),
    "e3m2": (ml_dtypes.float6_e3m2fn, 6, 4),
    "e2m1": (ml_dtypes.float4_e2m1fn, 4, 5),
}
"""Types of elements: what NumPy has, bits, and the number in descriptors."""

SCALED = (
    ("mxf8f6f4.block_scale", 32, ("ue8m0",), tuple(NARROW)),
    ("mxf4.block_scale.scale_vec::2X", 32, ("ue8m0",), ("e2m1",)),
    ("mxf4nvf4.block_scale.block32", 32, ("ue8m0",), ("e2m1",)),
    ("mxf4nvf4.block_scale.scale_vec::4X", 16, ("ue8m0", "ue4m3"), ("e2m1",)),
)
"""Kinds, elements for a scale factor, types of scale factors and of elements."""


def narrow_rows(generator, rows, k, name, padded):
    """Rows of random numbers: their values, and the bytes of each row."""
    dtype, bits, _ = NARROW[name]
    codes = generator.integers(0, 1 << bits, (rows, k), np.uint8)
    codes = np.where(np.isfinite(codes.view(dtype).astype(np.float64)), codes, 0).astype(np.uint8)
    places = np.arange(bits, dtype=np.uint8)
    stream = (codes[..., None] >> places & 1).reshape(rows, k // 16, 16 * bits)
    held = np.packbits(stream, axis=-1, bitorder="little")
    if padded:  # 16 elements have 16 bytes.
        held = np.pad(held, ((0, 0), (0, 0), (0, 16 - held.shape[-1])), constant_values=0xA5)
    return codes.view(dtype).astype(np.float64), held.reshape(rows, -1)


def check_scaled_product(seed):
    """A product with scale factors, at random places in tensor memory."""
    generator = np.random.default_rng(seed)
    kind, block, kinds_of_factors, names = SCALED[generator.integers(len(SCALED))]
    (first, second), padded = generator.choice(names, 2), kind.startswith("mxf8")
    k, n = 32 if padded else 64, 8 * int(generator.integers(1, 9))
    a, bytes_a = narrow_rows(generator, 128, k, first, padded)
    b, bytes_b = narrow_rows(generator, n, k, second, padded)
    count = k // block
    ids = [int(one) * count for one in generator.integers(0, 4 // count, 2)]
    d, at_a, at_b = (0, 64, 68) if generator.integers(2) else (16, 0, 4)
    before = generator.standard_normal((128, 256)).astype(np.float32).view(np.uint32)
    factor_kind = str(generator.choice(kinds_of_factors))
    scales = []
    for rows, place, number in ((128, at_a, ids[0]), (n, at_b, ids[1])):
        low, high = (124, 131) if factor_kind == "ue8m0" else (0x28, 0x48)
        factors = generator.integers(low, high, (rows, count), np.uint8)
        cells = before.view(np.uint8).reshape(128, 256, 4)
        for row, one in np.ndindex(factors.shape):
            # Four times: in each quarter of the lanes.
            cells[row % 32 :: 32, place + row // 32, number + one] = factors[row, one]
        if factor_kind == "ue8m0":
            wide = np.ldexp(1.0, factors.astype(np.int64) - 127)
        else:
            wide = factors.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        scales.append(np.repeat(wide, block, axis=1))
    code_a, code_b = (NARROW[one][2] if padded else 1 for one in (first, second))
    word = 1 << 27 | n >> 3 << 17 | code_b << 10 | code_a << 7
    word |= int(factor_kind == "ue8m0") << 23 | ids[0] << 29 | ids[1] << 4
    after = product(
        f"tcgen05.mma.cta_group::1.kind::{kind}", bytes_a, bytes_b, word, before,
        extra="%r10, [%r14], [%r15], %p5", d=d, used=COLUMNS,
        before=f"add.u32 %r14, %r5, {at_a}; add.u32 %r15, %r5, {at_b};\n",
    ).view(np.float32)  # fmt: skip
    expected = before.view(np.float32)[:, d : d + n] + (a * scales[0]) @ (b * scales[1]).T
    np.testing.assert_allclose(after[:, d : d + n], expected, rtol=1e-5, atol=1e-4, err_msg=kind)


def check_weight_stationary(seed):
    """A product whose D lies in four, two or one parts beside each other, with columns of B that
    are taken for zeros."""
    generator = np.random.default_rng(seed)
    kind = str(generator.choice(list(TYPES)))
    (first, code_a), (second, code_b) = (
        TYPES[kind][one] for one in generator.integers(0, len(TYPES[kind]), 2)
    )
    m = int(generator.choice([32, 64, 128]))
    parts = 128 // m
    n = int(generator.choice([64, 128, 256][: 2 + (parts > 1)]))
    k, integers = 32 // np.dtype(first).itemsize, kind == "i8"
    if integers:
        a, b = (
            generator.integers(0, 256, (rows, k), np.uint8).view(dtype)
            for rows, dtype in ((m, first), (n, second))
        )
        before = generator.integers(-(2**20), 2**20, (128, 256)).astype(np.int32)
    else:
        a, b = (
            generator.integers(-8, 9, (rows, k)).astype(np.float32).astype(dtype)
            for rows, dtype in ((m, first), (n, second))
        )
        before = generator.integers(-99, 99, (128, 256)).astype(np.float32)
    keep, masked = bool(generator.integers(2)), bool(generator.integers(2))
    each = n // parts
    column = int(generator.integers(0, COLUMNS - each + 1))
    # One more of each: columns that are not zero, then those that are, from the first of a part.
    nonzero, zero = (int(one) for one in generator.integers(0, 7, 2))
    word = 1 << 39 | zero << 40 | nonzero << 48
    buffer, use = generator.integers(0, 4), generator.choice(["fill", "use", "lastuse", "discard"])
    after = product(
        f"tcgen05.mma.ws.cta_group::1.kind::{kind}.collector::b{buffer}::{use}", a, b,
        m >> 4 << 24 | n >> 3 << 17 | code_b << 10 | code_a << 7 | (2 if integers else 1) << 4,
        before.view(np.uint32), keep=keep, d=column, used=COLUMNS,
        extra="%r10, %p5" + ", %rd9" * masked, before=f"mov.u64 %rd9, {word};\n",
    ).view(before.dtype)  # fmt: skip
    made = a.astype(np.float64) @ b.astype(np.float64).T
    if masked:
        number = np.arange(each) % (nonzero + zero + 2)
        made.reshape(m, parts, each)[:, :, number > nonzero] = 0
    expected = before.astype(np.float64)
    for part in range(parts):
        place = slice(part * m, part * m + m), slice(column, column + each)
        sums = made[:, part * each : (part + 1) * each]
        expected[place] = sums + (expected[place] if keep else 0)
    np.testing.assert_array_equal(after[:, :COLUMNS], expected[:, :COLUMNS], err_msg=kind)


CHECKS = (
    check_moves,
    check_product,
    check_copies,
    check_scaled_product,
    check_weight_stationary,
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("check", CHECKS)
def test_random(check, seed):
    check(seed)


if __name__ == "__main__":
    for seed in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
        for check in CHECKS:
            try:
                check(seed)
            except Exception:
                print(f"{check.__name__}({seed})")
                raise
