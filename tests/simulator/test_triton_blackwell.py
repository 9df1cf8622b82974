"""PTX that Triton wrote for Blackwell runs and gives right numbers."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import triton_blackwell_kernels as kernels
import triton_kernels
from simulator_support import run_ptx

from pallasite_simulator.launch import Pointer
from pallasite_simulator.sanitizer import GROUPS, LaunchState

TYPES = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp32": np.float32,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
}


def compiled(kernel, signature, **options):
    return triton_kernels.compiled(kernel, signature, capability=100, **options)


def run(kernel, grid, *arguments, sanitized=False):
    scratch = kernel.scratch * math.prod(grid)
    more = [Pointer(np.zeros(scratch, np.uint8), "scratch") if scratch else None, None]
    return run_ptx(
        kernel.ptx,
        *arguments,
        *more,
        grid=grid,
        block=kernel.threads,
        shared=kernel.shared,
        name=kernel.name,
        sanitizer=LaunchState(GROUPS) if sanitized else None,
    )


def random(shape, dtype, seed, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def poisoned(shape, dtype):
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return np.full(size, 0xCD, np.uint8).view(dtype).reshape(shape)


def wide(array):
    return np.asarray(array).astype(np.float64)


def assert_near(actual, expected, tolerance):
    error = np.linalg.norm(wide(actual) - expected) / np.linalg.norm(expected)
    assert error < tolerance


MATMULS = [
    ("matmul", "fp16", (128, 128, 64), 4, 3),
    ("matmul", "bf16", (128, 64, 64), 4, 3),
    ("matmul", "fp16", (64, 128, 64), 4, 1),
    ("matmul", "bf16", (128, 256, 32), 8, 2),
    ("matmul", "fp32", (128, 64, 32), 4, 2),
    ("matmul_transposed", "fp16", (128, 128, 32), 8, 3),
    ("matmul_transposed", "fp8e4nv", (128, 128, 64), 4, 3),
    ("matmul_transposed", "fp8e5", (64, 64, 128), 4, 2),
    ("descriptor_matmul", "bf16", (128, 128, 64), 4, 3),
    ("descriptor_matmul", "fp16", (64, 64, 64), 4, 2),
    ("descriptor_matmul", "fp16", (256, 128, 64), 8, 2),
]


@pytest.mark.parametrize(("kind", "name", "tile", "warps", "stages"), MATMULS)
def test_matmul(kind, name, tile, warps, stages):
    result = "fp32" if name.startswith("fp8") or name == "fp32" else name
    tile_m, tile_n, tile_k = tile
    kernel = compiled(
        getattr(triton_kernels, kind),
        f"*{name} *{name} *{result} i32 i32 i32",
        warps=warps,
        stages=stages,
        divisible="m n k",
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
    )
    assert "tcgen05.mma" in kernel.ptx
    m, n, k = 2 * tile_m, tile_n, 3 * tile_k
    a = random((m, k), TYPES[name], 1)
    b = random((n, k) if kind == "matmul_transposed" else (k, n), TYPES[name], 2)
    c = poisoned((m, n), TYPES[result])
    run(kernel, (2, 1, 1), a, b, c, np.int32(m), np.int32(n), np.int32(k))
    right = wide(b).T if kind == "matmul_transposed" else wide(b)
    assert_near(c, wide(a) @ right, 2e-2 if result == "bf16" else 2e-3)


def test_sums_in_half_precision():
    kernel = compiled(
        kernels.matmul_f16_sums,
        "*fp16 *fp16 *fp16 i32 i32 i32",
        divisible="m n k",
        TILE_M=128,
        TILE_N=64,
        TILE_K=64,
    )
    assert "tcgen05.mma" in kernel.ptx
    a, b = random((128, 128), np.float16, 3), random((128, 64), np.float16, 4)
    c = poisoned((128, 64), np.float16)
    run(kernel, (1, 1, 1), a, b, c, np.int32(128), np.int32(64), np.int32(128))
    assert_near(c, wide(a) @ wide(b), 2e-3)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("size", [64, 128])
def test_operand_from_registers(name, size):
    kernel = compiled(
        kernels.two_products, f"*{name} *{name} *{name} *fp32 i32", SIZE=size, DEPTH=64
    )
    a, b = random((128, 64), TYPES[name], 5), random((64, 256), TYPES[name], 6, 0.1)
    c, d = random((256, 64), TYPES[name], 7), poisoned((128, 64), np.float32)
    run(kernel, (1, 1, 1), a, b, c, d, np.int32(256), sanitized=True)
    middle = np.maximum(wide(a) @ wide(b), 0).astype(np.float32).astype(TYPES[name])
    assert_near(d, wide(middle) @ wide(c), 1e-2 if name == "bf16" else 2e-3)


@pytest.mark.parametrize(
    ("causal", "depth", "columns", "warps", "specialized"),
    [
        (False, 64, 64, 4, False),
        (True, 64, 128, 4, False),
        (False, 128, 64, 8, False),
        (True, 128, 128, 8, False),
        (False, 64, 128, 4, True),
    ],
)
def test_attention(causal, depth, columns, warps, specialized):
    kernel = compiled(
        kernels.attention,
        "*fp16 *fp16 *fp16 *fp32 i32 fp32",
        warps=warps,
        stages=2,
        CAUSAL=causal,
        ROWS=128,
        COLUMNS=columns,
        DEPTH=depth,
        SPECIALIZED=specialized,
    )
    assert "tcgen05.mma" in kernel.ptx
    length = 256
    q, k, v = (random((length, depth), np.float16, seed) for seed in (8, 9, 10))
    o = poisoned((length, depth), np.float32)
    scale = math.log2(math.e) / math.sqrt(depth)
    run(kernel, (2, 1, 1), q, k, v, o, np.int32(length), np.float32(scale))
    score = wide(q) @ wide(k).T / math.sqrt(depth)
    if causal:
        score = np.where(np.tri(length, dtype=bool), score, -np.inf)
    share = np.exp(score - score.max(1, keepdims=True))
    assert_near(o, share / share.sum(1, keepdims=True) @ wide(v), 2e-3)


@pytest.mark.parametrize(
    ("name", "tile"),
    [("fp16", (128, 128, 64)), ("bf16", (128, 64, 64)), ("fp8e4nv", (128, 128, 128))],
)
@pytest.mark.parametrize("kind", ["specialized_matmul", "persistent_matmul"])
def test_warp_specialization(kind, name, tile):
    result = "fp16" if name.startswith("fp8") else name
    tile_m, tile_n, tile_k = tile
    blocks = {"BLOCKS": 2} if kind == "persistent_matmul" else {}
    kernel = compiled(
        getattr(kernels, kind),
        f"*{name} *{name} *{result} i32 i32 i32",
        divisible="m n k",
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
        **blocks,
    )
    m, n, k = 2 * tile_m, 2 * tile_n, 2 * tile_k
    a, b = random((m, k), TYPES[name], 11), random((n, k), TYPES[name], 12)
    c = poisoned((m, n), TYPES[result])
    run(kernel, (2, 1, 1) if blocks else (2, 2, 1), a, b, c, *map(np.int32, (m, n, k)))
    assert_near(c, wide(a) @ wide(b).T, 2e-2 if result == "bf16" else 2e-3)


def narrow(rows, k, kind, seed):
    """Elements: their bytes, and their values."""
    generator = np.random.default_rng(seed)
    if kind == "e2m1":
        codes = generator.integers(0, 16, (rows, k), np.uint8)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        return codes[:, ::2] | codes[:, 1::2] << 4, values
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kind]
    held = generator.standard_normal((rows, k)).astype(dtype)
    return held, held.astype(np.float64)


@pytest.mark.parametrize(
    ("a_kind", "b_kind", "tile", "block"),
    [
        ("e4m3", "e4m3", (128, 128, 128), 32),
        ("e5m2", "e4m3", (128, 64, 128), 32),
        ("e4m3", "e5m2", (128, 256, 64), 32),
        ("e2m1", "e2m1", (128, 128, 128), 32),
        ("e2m1", "e2m1", (128, 64, 256), 32),
        ("e2m1", "e2m1", (128, 128, 128), 16),
        ("e4m3", "e2m1", (128, 128, 128), 32),
        ("e2m1", "e5m2", (128, 128, 128), 32),
    ],
)
def test_scaled_products(a_kind, b_kind, tile, block):
    names = {"e4m3": "fp8e4nv", "e5m2": "fp8e5", "e2m1": "u8"}
    scale = "fp8e4nv" if block == 16 else "u8"
    m, n, tile_k = tile
    kernel = compiled(
        kernels.scaled_matmul,
        f"*{names[a_kind]} *{scale} *{names[b_kind]} *{scale} *fp32 i32 i32",
        A=a_kind,
        B=b_kind,
        TILE_M=m,
        TILE_N=n,
        TILE_K=tile_k,
        BLOCK=block,
        A_PACK=1 + (a_kind == "e2m1"),
        B_PACK=1 + (b_kind == "e2m1"),
    )
    assert "block_scale" in kernel.ptx
    k = 2 * tile_k
    (a, wide_a), (b, wide_b) = narrow(m, k, a_kind, 13), narrow(n, k, b_kind, 14)
    generator = np.random.default_rng(15)
    if block == 16:
        scales = [generator.uniform(0.5, 2, (r, k // 16)).astype(TYPES["fp8e4nv"]) for r in (m, n)]
        factors = [wide(one) for one in scales]
    else:
        scales = [generator.integers(120, 134, (r, k // 32), np.uint8) for r in (m, n)]
        factors = [np.exp2(one.astype(np.float64) - 127) for one in scales]
    c = poisoned((m, n), np.float32)
    run(kernel, (1, 1, 1), a, scales[0], b, scales[1], c, np.int32(n), np.int32(k))
    left, right = (np.repeat(one, block, axis=1) for one in factors)
    assert_near(c, (wide_a * left) @ (wide_b * right).T, 1e-5)


VARIANTS = ["32x32b", "16x64b", "16x128b", "16x256b", "32x32b_splitn"]


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [
        *zip(VARIANTS, VARIANTS[1:] + VARIANTS[:1], strict=True),
        *zip(VARIANTS, VARIANTS[2:], strict=False),
    ],
)
def test_shapes_of_loads_and_stores(stored, loaded):
    warps = 8 if "splitn" in stored + loaded else 4
    through(128, 64, warps, stored, loaded, np.float32)


@pytest.mark.parametrize("variant", ["32x32b", "16x64b", "16x128b", "16x256b"])
@pytest.mark.parametrize("name", ["fp16", "fp32"])
def test_64_rows(variant, name):
    ptx = through(64, 64, 4, variant, "32x32b" if variant == "16x256b" else variant, TYPES[name])
    shape = "16x32bx2" if variant == "32x32b" else variant
    assert f"tcgen05.st.sync.aligned.{shape}" in ptx


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("variant", ["32x32b", "16x128b"])
def test_half_precision_in_tensor_memory(variant, stride):
    through(128, 64, 4, variant, "32x32b", np.float16, stride)


def through(rows, columns, warps, stored, loaded, dtype, stride=1):
    name = {np.float32: "fp32", np.float16: "fp16"}[dtype]
    kernel = compiled(
        kernels.through_tensor_memory,
        f"*{name} *{name}",
        warps=warps,
        ROWS=rows,
        COLUMNS=columns,
        WARPS=warps,
        STORED=stored,
        LOADED=loaded,
        STRIDE=stride,
    )
    x, y = random((rows, columns), dtype, 16), poisoned((rows, columns), dtype)
    run(kernel, (1, 1, 1), x, y)
    np.testing.assert_array_equal(x, y)
    return kernel.ptx


@pytest.mark.parametrize(
    ("m", "n", "k", "name", "swizzle", "across", "inside", "variant"),
    [
        (128, 64, 64, "fp16", 128, (False, False), False, "32x32b"),
        (128, 64, 64, "fp16", 128, (True, True), False, "16x256b"),
        (128, 64, 64, "bf16", 64, (False, True), False, "16x128b"),
        (128, 32, 32, "fp16", 32, (True, False), False, "16x64b"),
        (64, 64, 64, "fp16", 128, (False, True), False, "32x32b"),
        (64, 64, 64, "bf16", 64, (True, False), False, "16x256b"),
        (128, 64, 128, "fp8e5", 128, (False, False), False, "32x32b"),
        (128, 32, 64, "fp32", 128, (False, False), False, "32x32b"),
        (128, 64, 64, "fp16", 128, (False, True), True, "32x32b"),
        (128, 64, 64, "bf16", 32, (False, False), True, "32x32b"),
    ],
)
def test_operands(m, n, k, name, swizzle, across, inside, variant):
    kernel = compiled(
        kernels.product,
        f"*{name} *{name} *fp32 *fp32",
        M=m,
        N=n,
        K=k,
        SWIZZLE=swizzle,
        A_ACROSS=across[0],
        B_ACROSS=across[1],
        IN_TENSOR_MEMORY=inside,
        VARIANT=variant,
    )
    a, b = random((m, k), TYPES[name], 17), random((k, n), TYPES[name], 18)
    c, d = random((m, n), np.float32, 19), poisoned((m, n), np.float32)
    run(kernel, (1, 1, 1), a, b, c, d, sanitized=True)
    assert_near(d, wide(a) @ wide(b) + wide(c), 1e-3 if name == "fp32" else 1e-5)


@pytest.mark.parametrize(("columns", "swizzle"), [(32, 128), (64, 128), (16, 64), (8, 32)])
def test_copies_to_tensor_memory(columns, swizzle):
    kernel = compiled(kernels.copied, "*fp32 *fp32", COLUMNS=columns, SWIZZLE=swizzle)
    assert "tcgen05.cp" in kernel.ptx
    x, y = random((128, columns), np.float32, 20), poisoned((128, columns), np.float32)
    run(kernel, (1, 1, 1), x, y, sanitized=True)
    np.testing.assert_array_equal(x, y)
