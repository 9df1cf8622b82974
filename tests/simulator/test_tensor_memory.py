"""Instructions on tensor memory that no foreign program has: numbers against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from simulator_support import module, run_ptx
from tensor_programs import k_major, matrix_descriptor, product, run_on_tensor_memory

from pallasite_blackwell.simulation.zero_columns import zero_columns
from pallasite_simulator import launch
from pallasite_simulator.engine.tensor_map import TensorMap
from pallasite_simulator.errors import PtxError, SimulationError
from pallasite_simulator.launch import Descriptor, Pointer
from pallasite_simulator.programs import load
from pallasite_simulator.sanitizer import GROUPS, LaunchState


def filled(seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, (128, 256), np.uint32)


def sums(seed=0):
    """Float32 in all of tensor memory."""
    return np.random.default_rng(seed).standard_normal((128, 256)).astype(np.float32)


def elements(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def descriptor(m, n, a=0, b=0, d=1, more=0):
    return m >> 4 << 24 | n >> 3 << 17 | b << 10 | a << 7 | d << 4 | more


COPIES = {
    "128x256b": (128, 2, lambda row: [row]),
    "128x128b": (128, 1, lambda row: [row]),
    "4x256b": (4, 2, lambda row: [32 * row]),
    "32x128b.warpx4": (32, 1, lambda row: [row + 32 * one for one in range(4)]),
    "64x128b.warpx2::02_13": (64, 1, lambda row: [row, row + 64]),
    "64x128b.warpx2::01_23": (
        64, 1, lambda row: [64 * (row // 32) + row % 32 + one for one in (0, 32)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", COPIES)
@pytest.mark.parametrize("form", ["", ".b8x16.b6x16_p32", ".b8x16.b4x16_p64"])
def test_copies(shape, form):
    rows, chunks, lanes = COPIES[shape]
    source = np.random.default_rng(1).integers(0, 256, (max(rows, 8), 16 * chunks), np.uint8)
    code = matrix_descriptor(0, 128, 128 * chunks) + (
        f"add.u32 %r12, %r5, 8;\n@%p3 tcgen05.cp.cta_group::1.{shape}{form} [%r12], %a;\n"
    )
    before = filled()
    after = run_on_tensor_memory(code, k_major(source), before)
    expected = before.copy()
    for row in range(rows):
        pieces = []
        for piece in source[row].reshape(-1, 16):
            number = int.from_bytes(piece.tobytes(), "little")
            bits = {"": 8, ".b8x16.b6x16_p32": 6, ".b8x16.b4x16_p64": 4}[form]
            each = [number >> bits * one & (1 << bits) - 1 for one in range(16)]
            pieces += [one << 2 for one in each] if bits == 4 else each
        words = np.array(pieces, np.uint8).view(np.uint32)
        for lane in lanes(row):
            expected[lane, 8 : 8 + len(words)] = words
    np.testing.assert_array_equal(after, expected)


def test_shift():
    code = "add.u32 %r12, %r5, 0x200010;\n@%p3 tcgen05.shift.cta_group::1.down [%r12];\n"
    before = filled(2)
    expected = before.copy()
    expected[32:63, 16:24] = before[33:64, 16:24]
    np.testing.assert_array_equal(run_on_tensor_memory(code, np.zeros(16), before), expected)


def test_disabled_lanes():
    a, b = elements((128, 16), np.float16, 3), elements((64, 16), np.float16, 4)
    held = sums(5)
    after = product(
        "tcgen05.mma.cta_group::1.kind::f16", a, b, descriptor(128, 64), held.view(np.uint32),
        extra="%r10, {%r13, %r14, %r14, %r13}, %p5",
        before="mov.u32 %r13, 0x80000001; mov.u32 %r14, 0;\n",
    ).view(np.float32)  # fmt: skip
    expected = held.copy()
    on = ~np.isin(np.arange(128), [0, 31, 96, 127])
    added = held[:, :64] + a.astype(np.float32) @ b.astype(np.float32).T
    expected[on, :64] = added[on]
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shift", [0, 3, 15])
def test_scaled_input(shift):
    a, b = elements((128, 8), np.float32, 6), elements((32, 8), np.float32, 7)
    held = sums(8)
    after = product(
        "tcgen05.mma.cta_group::1.kind::tf32", a, b, descriptor(128, 32, 2, 2),
        held.view(np.uint32), extra=f"%r10, %p5, {shift}",
    ).view(np.float32)  # fmt: skip
    cut = [(one.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for one in (a, b)]
    expected = held[:, :32] / 2.0**shift + cut[0] @ cut[1].T
    np.testing.assert_allclose(after[:, :32], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("m", "parts"), [(128, 1), (64, 2), (32, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_weight_stationary(m, parts, masked):
    a, b = elements((m, 16), ml_dtypes.bfloat16, 9), elements((64, 16), ml_dtypes.bfloat16, 10)
    held = sums(11)
    mask = 1 << 39 | 0 << 40 | 2 << 48 | 1 << 32
    after = product(
        "tcgen05.mma.ws.cta_group::1.kind::f16.collector::b2::lastuse", a, b,
        descriptor(m, 64, 1, 1), held.view(np.uint32),
        extra="%r10, %p5" + ", %rd9" * masked, before=f"mov.u64 %rd9, {mask};\n",
    ).view(np.float32)  # fmt: skip
    right = b.astype(np.float32)
    if masked:
        # Of the first part the first column is zero, then three are not, and so on.
        each = np.arange(64 // parts)
        zero = [each % 4 == 0] + [each % 4 == 3] * (parts - 1)
        right[np.concatenate(zero)] = 0
    made = a.astype(np.float32) @ right.T
    expected = held.copy()
    for part in range(parts):
        columns = slice(0, 64 // parts)
        rows = slice(part * m, part * m + m)
        expected[rows, columns] += made[:, part * (64 // parts) : (part + 1) * (64 // parts)]
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-5)


def mask_of(starts, first, skip, use):
    """The descriptor of a zero-column mask; the last one of starts and first is that of mask0."""
    word = 1 << 39 | skip << 40 | use << 48
    for number, (start, one) in enumerate(zip(reversed(starts), reversed(first), strict=True)):
        word |= start << 8 * number | one << 32 + number
    return word


@pytest.mark.parametrize(
    ("m", "starts", "first", "masks"),
    [
        (128, [0], [0], ["11100001110000"]),
        (64, [0, 0], [0, 1], ["11100001110000111", "000011100001110000"]),
        (32, [1, 2, 1, 0], [0, 0, 1, 1],
         ["00001110000111", "0000111000011", "111000011100", "1110000111000"]),
    ],
)  # fmt: skip
def test_examples_of_zero_columns(m, starts, first, masks):
    """Those of the PTX ISA; the first column is the last digit."""
    found = zero_columns(mask_of(starts, first, 2, 3), m, 128).reshape(len(masks), -1)
    for part, text in zip(found, masks, strict=True):
        assert "".join(str(int(one)) for one in part[: len(text)])[::-1] == text
    with pytest.raises(ValueError, match="first span"):
        zero_columns(mask_of([4], [0], 2, 3), 128, 128)


@pytest.mark.parametrize(("m", "shift", "most"), [(128, 31, 3), (64, 8, 1), (32, 16, 3)])
def test_shifted_columns(m, shift, most):
    a, b = elements((m, 16), np.float16, 9), elements((96, 16), np.float16, 10)
    held = np.zeros((128, 256), np.float32)

    def run(shift):
        return product(
            "tcgen05.mma.ws.cta_group::1.kind::f16", a, b, descriptor(m, 64, 0, 0) | most << 30,
            held.view(np.uint32), extra="%r10, %p5, %rd9", before=f"mov.u64 %rd9, {shift << 56};",
        ).view(np.float32)  # fmt: skip

    made = a.astype(np.float32) @ b.astype(np.float32)[shift : shift + 64].T
    parts = np.split(made, 128 // m, axis=1)
    np.testing.assert_allclose(run(shift)[:, : 64 * m // 128], np.concatenate(parts), rtol=1e-5)
    with pytest.raises(SimulationError, match="shifts the columns of B by more"):
        run({3: 33, 1: 9}[most])


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("kind_a", "kind_b"), [(0, 0), (1, 0), (0, 1)])
def test_integers(saturate, kind_a, kind_b):
    generator = np.random.default_rng(12)
    types = {0: np.uint8, 1: np.int8}
    a = generator.integers(0, 256, (128, 32), np.uint8).view(types[kind_a])
    b = generator.integers(0, 256, (32, 32), np.uint8).view(types[kind_b])
    held = generator.integers(-(2**31), 2**31, (128, 256)).astype(np.int32)
    held[:, ::2] = np.where(held[:, ::2] < 0, -(2**31) + 5, 2**31 - 5)
    number = descriptor(128, 32, kind_a, kind_b, 2, saturate << 3)
    after = product(
        "tcgen05.mma.cta_group::1.kind::i8", a, b, number, held.view(np.uint32)
    ).view(np.int32)  # fmt: skip
    total = held[:, :32].astype(np.int64) + a.astype(np.int64) @ b.astype(np.int64).T
    if saturate:
        total = total.clip(-(2**31), 2**31 - 1)
    np.testing.assert_array_equal(after[:, :32], total.astype(np.int32))


def test_negated():
    a, b = elements((64, 16), np.float16, 13), elements((24, 16), np.float16, 14)
    after = product(
        "tcgen05.mma.cta_group::1.kind::f16", a, b, descriptor(64, 24, more=1 << 14),
        filled(15), keep=False,
    ).view(np.float32)  # fmt: skip
    expected = -(a.astype(np.float32) @ b.astype(np.float32).T)
    lanes = [32 * (row // 16) + row % 16 for row in range(64)]
    np.testing.assert_allclose(after[lanes, :24], expected, rtol=1e-5, atol=1e-6)


def test_sparse_tf32():
    k = 16
    stored, b = elements((128, k // 2), np.float32, 16), elements((32, k), np.float32, 17)
    which = np.random.default_rng(18).integers(0, 2, (128, k // 2))
    held = filled(19)
    held[:, 200:202] = 0
    codes = np.where(which, 0b1110, 0b0100).astype(np.uint32)
    for row in range(128):
        for group in range(k // 2):
            lane = 16 * (row // 16) + 8 * (group // 4) + row % 8
            held[lane, 201] |= codes[row, group] << 4 * (4 * (row // 8 % 2) + group % 4)
    after = product(
        "tcgen05.mma.sp.cta_group::1.kind::tf32", stored, b,
        descriptor(128, 32, 2, 2, more=1 << 2 | 1), held, keep=False,
        extra="[%r13], %r10, %p5", before="add.u32 %r13, %r5, 200;\n",
    ).view(np.float32)  # fmt: skip
    cut = [
        (x.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for x in (stored, b)
    ]
    full = np.zeros((128, k))
    np.put_along_axis(full, np.arange(k // 2) * 2 + which, cut[0], axis=1)
    np.testing.assert_allclose(after[:, :32], full @ cut[1].T, rtol=1e-5, atol=1e-5)


def test_sparse_with_zeros_against_infinity():
    stored, b = np.ones((128, 16), np.float16), np.ones((16, 32), np.float16)
    b[:, 1] = np.inf
    held = filled(20)
    held[:, 200:202] = 0x88888888
    after = product(
        "tcgen05.mma.sp.cta_group::1.kind::f16", stored, b,
        descriptor(128, 16, more=1 << 2), held, keep=False,
        extra="[%r13], %r10, %p5", before="add.u32 %r13, %r5, 200;\n",
    ).view(np.float32)  # fmt: skip
    np.testing.assert_array_equal(after[:, :16], np.full((128, 16), 16.0))


def test_elements_of_6_bits():
    generator = np.random.default_rng(21)
    codes_a = generator.integers(0, 64, (128, 32), np.uint8)
    codes_b = generator.integers(0, 64, (16, 32), np.uint8)

    def padded(codes):
        words = codes.reshape(len(codes), -1, 4).astype(np.uint32)
        word = words[..., 0] | words[..., 1] << 6 | words[..., 2] << 12 | words[..., 3] << 18
        three = np.ascontiguousarray(word)[..., None].view(np.uint8)[..., :3]
        pieces = three.reshape(len(codes), -1, 12)
        noise = generator.integers(0, 256, (*pieces.shape[:2], 4), np.uint8)
        return np.concatenate([pieces, noise], axis=2).reshape(len(codes), -1)

    after = product(
        "tcgen05.mma.cta_group::1.kind::f8f6f4", padded(codes_a), padded(codes_b),
        descriptor(128, 16, 3, 4), filled(22), keep=False,
    ).view(np.float32)  # fmt: skip
    a = codes_a.view(ml_dtypes.float6_e2m3fn).astype(np.float32)
    b = codes_b.view(ml_dtypes.float6_e3m2fn).astype(np.float32)
    np.testing.assert_allclose(after[:, :16], a @ b.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("operation", ["min", "max"])
@pytest.mark.parametrize("more", ["", ".abs", ".abs.NaN"])
def test_reducing_loads(operation, more):
    body = f"""
.reg .b32 %r<8>, %v<8>; .reg .b64 %rd<8>; .reg .pred %p<4>; .shared .align 4 .b32 place;
mov.u32 %r0, %tid.x;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 32;
ld.shared.b32 %r1, [place];
ld.param.u64 %rd0, [x]; ld.param.u64 %rd1, [y];
mul.wide.u32 %rd2, %r0, 16; add.u64 %rd0, %rd0, %rd2;
ld.global.v4.b32 {{%v0,%v1,%v2,%v3}}, [%rd0];
tcgen05.st.sync.aligned.32x32b.x4.b32 [%r1], {{%v0,%v1,%v2,%v3}};
tcgen05.wait::st.sync.aligned;
tcgen05.ld.red.sync.aligned.32x32b.x4.{operation}{more}.f32 {{%v4,%v5,%v6,%v7}}, %r2, [%r1];
tcgen05.wait::ld.sync.aligned;
mul.wide.u32 %rd3, %r0, 4; add.u64 %rd1, %rd1, %rd3;
st.global.b32 [%rd1], %r2;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;
"""
    x = np.random.default_rng(23).standard_normal((32, 4)).astype(np.float32)
    x[3, 1] = np.nan
    y = np.zeros(32, np.float32)
    run_ptx(module(body, [".u64 x", ".u64 y"], target="sm_103a"), x, y, block=32)
    values = np.abs(x) if more else x
    reduce = getattr(np, {"min": "fmin", "max": "fmax"}[operation]).reduce
    expected = reduce(values, axis=1)
    if more.endswith("NaN"):
        expected[3] = np.nan
    np.testing.assert_array_equal(y, expected)


ALLOCATION = """
.reg .b32 %r<8>; .reg .pred %p<4>; .shared .align 4 .b32 place[2];
mov.u32 %r0, %tid.x;
setp.lt.u32 %p0, %r0, 32;
mov.u32 %r2, place;
@!%p0 add.u32 %r2, %r2, 4;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 512;
ld.shared.b32 %r1, [%r2];
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512;
"""


def test_allocation_waits_for_columns():
    run_ptx(module(ALLOCATION, target="sm_100a"), block=64)


def test_allocation_that_is_never_possible():
    once = ALLOCATION.replace("tcgen05.dealloc", "@%p0 bra END; bra.uni END; tcgen05.dealloc")
    with pytest.raises(SimulationError, match="columns of tensor memory to be released"):
        run_ptx(module(once + "END:", target="sm_100a"), block=64)


SHARING = """
.reg .b32 %r<8>; .reg .b64 %rd<4>; .reg .pred %p<4>; .shared .align 4 .b32 place[2];
mov.u32 %r0, %ctaid.x;
ld.param.u64 %rd0, [out];
mul.wide.u32 %rd1, %r0, 4;
add.u64 %rd1, %rd0, %rd1;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], COLUMNS;
ld.shared.b32 %r1, [place];
mov.u32 %r2, %tid.x;
setp.eq.u32 %p1, %r2, 0;
@%p1 st.release.gpu.global.b32 [%rd1], %r1;
MORE
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, COLUMNS;
"""

OTHER = """
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
OTHER:
ld.acquire.gpu.global.b32 %r3, [%rd0+4];
setp.eq.u32 %p0, %r3, 0xFFFFFFFF;
@%p0 bra OTHER;
READY:
"""
"""Block 0 waits for block 1."""


def shared_multiprocessors(columns, count, more="", blocks=3, **options):
    ptx = module(
        SHARING.replace("COLUMNS", str(columns)).replace("MORE", more), [".u64 out"],
        target="sm_100a",
    )  # fmt: skip
    out = np.full(blocks, 0xFFFFFFFF, np.uint32)
    run_ptx(ptx, out, grid=blocks, block=32, multiprocessors=count, **options)
    return out.tolist()


def test_blocks_of_a_multiprocessor_share_its_columns():
    assert shared_multiprocessors(128, 3) == [0, 0, 0]
    assert shared_multiprocessors(128, 1) == [0, 128, 256]
    assert shared_multiprocessors(128, 2) == [0, 0, 128]
    assert shared_multiprocessors(512, 1) == [0, 0, 0]
    assert shared_multiprocessors(256, 2, OTHER) == [0, 0, 256]
    assert shared_multiprocessors(512, 2, OTHER, blocks=2) == [0, 0]
    with pytest.raises(SimulationError, match=r"others by block \(0, 0, 0\) on its multip"):
        shared_multiprocessors(512, 1, OTHER, blocks=2)
    # Block 1 begins when block 0 ends, because of their shared memory.
    with pytest.raises(SimulationError, match="an earlier block of the multiprocessor to end"):
        shared_multiprocessors(128, 1, OTHER, blocks=2, shared=200 * 1024)
    assert shared_multiprocessors(128, 1, shared=200 * 1024) == [0, 0, 0]


def test_waves_share_columns(monkeypatch):
    """Also of blocks that the simulator does not run together."""
    monkeypatch.setattr(launch, "LANES_AT_ONCE", 32)
    assert shared_multiprocessors(128, 1, OTHER) == [0, 128, 128]
    assert shared_multiprocessors(512, 2, OTHER) == [0, 0, 0]
    with pytest.raises(SimulationError, match="others by block"):
        shared_multiprocessors(512, 1, OTHER)


WRONG = {
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r1+32];": "not allocated",
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [0x400000];": "cannot reach",
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 64;": "not allocated like this",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 48;": "cannot be allocated",
    "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [place], 32;": "another group",
    "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
    " tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 32;": "given up the right",
    "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd0, %rd0, 0x08100014, 0;": "sparsity",
    "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd0, %rd0, 0x08100030, 0;": "no such type of D",
    "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd0, %rd0, 0x07100010, 0;": "no such M",
    "tcgen05.cp.cta_group::1.128x128b [%r1], %rd0;": "beyond the block's shared memory",
    "tcgen05.cp.cta_group::1.128x128b [%r1+0x100000], %rd1;": "lanes that tensor memory",
    "tcgen05.shift.cta_group::1.down [%r1+0x100000];": "multiple of 32",
    "tcgen05.mma.cta_group::1.kind::f16 [%r1+0x50000], %rd0, %rd0, 0x08080010, 0;":
        "D in lanes where it cannot begin",
    "tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r1+0x100000], %rd0, 0x04080010, 0;":
        "A in lanes where it cannot begin",
    "tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], [%r1], %rd0, 0x04080010, 0;": ".ashift",
    "tcgen05.mma.cta_group::1.kind::f8f6f4 [%r1], %rd0, %rd0, 0x08070010, 0;":
        "transposed B of elements of 8 bits",
    "tcgen05.mma.cta_group::1.kind::tf32 [%r1], %rd0, %rd0, 0x08090910, 0;":
        "a transposed B with a swizzle for other elements",
    "tcgen05.mma.sp.cta_group::1.kind::f8f6f4 [%r1], %rd0, %rd0, [%r1], 0x08080015, 0;":
        "no sparsity selector",
    "tcgen05.mma.ws.sp.cta_group::1.kind::f16 [%r1], %rd0, %rd0, [%r1], 0x08400014, 0;":
        "no such N",
    "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X"
    " [%r1], %rd0, %rd0, 0x28880480, [%r1], [%r1], 0;": "other bytes of the scale factors of A",
}  # fmt: skip


@pytest.mark.parametrize("code", WRONG)
def test_errors(code):
    body = f"""
.reg .b32 %r<8>; .reg .b64 %rd<4>; .reg .pred %p<4>;
.shared .align 4 .b32 place; .shared .align 16 .b8 data[4096];
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 32;
ld.shared.b32 %r1, [place];
mov.u32 %r4, data; shr.u32 %r4, %r4, 4; mov.u32 %r5, 0x4008; mov.b64 %rd1, {{%r4, %r5}};
mov.u64 %rd0, 0x0000400000000000;
{code}
"""
    with pytest.raises(SimulationError) as error:
        run_ptx(module(body, target="sm_100a"), block=32)
    assert WRONG[code] in str(error.value)


FORMS = {
    "tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r0}, [%r1];": "no such number",
    "tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {%r0,%r2}, %r3, [%r1];": "on this target",
    "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale"
    " [%r1], %rd0, %rd0, %r2, [%r1], [%r1], %p0;": "no such size of blocks",
    "tcgen05.mma.ws.cta_group::2.kind::f16 [%r1], %rd0, %rd0, %r2, %p0;": "for one block",
    "tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], %rd0, %rd0, %r2, %p0;": "A in tensor memory",
    "tcgen05.cp.cta_group::1.32x128b [%r1], %rd0;": "no such copy",
    "tcgen05.fence::thread_sync;": "does not know",
}  # fmt: skip


@pytest.mark.parametrize("code", FORMS)
def test_unknown_forms(code):
    body = f".reg .b32 %r<8>; .reg .b64 %rd<4>; .reg .pred %p<4>;\n{code}"
    with pytest.raises(PtxError, match=FORMS[code]):
        load(module(body, target="sm_100a"))


def test_targets():
    code = ".reg .b32 %r<4>;\ntcgen05.wait::ld.sync.aligned;"
    for target in ("sm_90a", "sm_120a"):
        with pytest.raises(PtxError, match="does not exist on this target"):
            load(module(code, target=target))
    product_of_integers = (
        ".reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .pred %p<4>;\n"
        "tcgen05.mma.cta_group::1.kind::i8 [%r1], %rd0, %rd0, %r2, %p0;"
    )
    load(module(product_of_integers, target="sm_100a"))
    with pytest.raises(PtxError, match="does not exist on this target"):
        load(module(product_of_integers, target="sm_103a"))


OVERWRITTEN = """
tcgen05.ld.sync.aligned.32x32b.x4.b32 {%v8,%v9,%v10,%v11}, [%r5];
WAIT_HERE
bar.sync 0;
@%p3 tcgen05.cp.cta_group::1.128x128b [%r5], %a;
"""


@pytest.mark.parametrize("waits", [False, True])
def test_load_that_is_overwritten(waits):
    code = OVERWRITTEN.replace("WAIT_HERE", "tcgen05.wait::ld.sync.aligned;" * waits)
    state = LaunchState(GROUPS)
    run = lambda: run_on_tensor_memory(  # noqa: E731
        matrix_descriptor(0, 128, 128) + code, np.zeros(2048, np.uint8), filled(), sanitizer=state
    )
    if waits:
        run()
        return
    with pytest.raises(SimulationError) as error:
        run()
    assert "a tcgen05.ld of the warp begun by thread 0" in str(error.value)
    assert "plgpu.wait_load_tmem()" in str(error.value)


@pytest.mark.parametrize("ordered", [False, True])
def test_race_of_a_store_and_a_copy(ordered):
    """The copy is not waited for before the warps store to where it goes."""
    wait = """
@%p3 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];
EARLY:
mbarrier.try_wait.parity.shared.b64 %p6, [done], 0;
@!%p6 bra EARLY;
"""
    code = (
        matrix_descriptor(0, 128, 128)
        + "@%p3 tcgen05.cp.cta_group::1.128x128b [%r5], %a;\n"
        + wait * ordered
        + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r0};\ntcgen05.wait::st.sync.aligned;\n"
    )
    state = LaunchState(GROUPS)
    run = lambda: run_on_tensor_memory(  # noqa: E731
        code, np.zeros(2048, np.uint8), filled(), sanitizer=state, phase=int(ordered)
    )
    if ordered:
        run()
        return
    with pytest.raises(SimulationError, match="in tensor memory"):
        run()


@pytest.mark.parametrize(
    ("code", "bits", "padded", "swizzle"),
    [(13, 4, 8, 0), (14, 4, 16, 0), (14, 4, 16, 3), (15, 6, 16, 0), (15, 6, 16, 3)],
)
def test_copies_of_narrow_elements(code, bits, padded, swizzle):
    rows, row_bytes = 16, 256 * bits // 8
    source = np.random.default_rng(24).integers(0, 256, (rows, row_bytes), np.uint8)
    moved = 8 * 128 // 16 * padded
    body = f"""
.reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .pred %p<4>;
.shared .align 8 .b64 done;
mov.u32 %r0, %tid.x;
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [done], 1;
bar.sync 0;
mov.u32 %r1, data;
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [done], {moved};
@%p0 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
    [%r1], [map_, {{128, 4}}], [done];
WAIT:
mbarrier.try_wait.parity.shared.b64 %p1, [done], 0;
@!%p1 bra WAIT;
ld.param.u64 %rd1, [out];
mul.lo.u32 %r2, %r0, 4;
LOOP:
add.u32 %r3, %r1, %r2;
ld.shared.b32 %r4, [%r3];
cvt.u64.u32 %rd2, %r2;
add.u64 %rd3, %rd1, %rd2;
st.global.b32 [%rd3], %r4;
add.u32 %r2, %r2, 128;
setp.lt.u32 %p2, %r2, {moved};
@%p2 bra LOOP;
"""
    ptx = module(
        body, [".align 64 .b8 map_[128]", ".u64 out"], target="sm_100a",
        variables=".shared .align 1024 .b8 data[1024];\n",
    )  # fmt: skip
    out = np.zeros(moved, np.uint8)

    def encode(address):
        return TensorMap(
            address, code, (256, rows), (row_bytes,), (128, 8), swizzle=swizzle
        ).encode()

    array = Pointer(source, "source", writable=False)
    run_ptx(ptx, Descriptor(0, encode), out, block=32, arrays=[array])
    half = row_bytes // 2
    expected = np.zeros((8, 8, padded), np.uint8)
    expected[..., : bits * 2] = source[4:12, half:].reshape(8, 8, bits * 2)
    expected = expected.reshape(-1)
    if swizzle:
        places = np.arange(moved)
        swizzled = places ^ ((places >> 7 & 7) << 4)
        expected = expected[swizzled]
    np.testing.assert_array_equal(out, expected)
