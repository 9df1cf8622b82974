"""PTX that Triton wrote runs and gives right numbers."""

from __future__ import annotations

import math
import pathlib

import ml_dtypes
import numpy as np
import pytest
import recorded_ptx
import triton_kernels
from simulator_support import run_ptx

from pallasite_simulator.launch import Pointer


def run(kernel, grid, *arguments):
    scratch = kernel.scratch * math.prod(grid if isinstance(grid, tuple) else (grid,))
    more = [Pointer(np.zeros(scratch, np.uint8), "scratch") if scratch else None, None]
    return run_ptx(
        kernel.ptx,
        *arguments,
        *more,
        grid=grid,
        block=kernel.threads,
        shared=kernel.shared,
        name=kernel.name,
    )


def random(shape, dtype, seed, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def poisoned(shape, dtype):
    return (
        np.full(math.prod(shape) * np.dtype(dtype).itemsize, 0xCD, np.uint8)
        .view(dtype)
        .reshape(shape)
    )


def wide(array):
    return np.asarray(array).astype(np.float64)


def test_element_wise():
    kernel = triton_kernels.compiled(triton_kernels.gelu, "*fp32 *fp32 i32", BLOCK=512)
    x, y = random(5000, np.float32, 1, 2), poisoned((5000,), np.float32)
    run(kernel, 10, x, y, np.int32(5000))
    v = wide(x)
    expected = v / (1 + np.exp(-2 * 0.7978845608 * (v + 0.044715 * v**3)))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [1024, 1000, 777])
def test_softmax(columns):
    kernel = triton_kernels.compiled(triton_kernels.softmax, "*fp16 *fp16 i32", BLOCK=1024)
    x, y = random((17, columns), np.float16, 2), poisoned((17, columns), np.float16)
    run(kernel, 17, x, y, np.int32(columns))
    e = np.exp(wide(x) - wide(x).max(axis=1, keepdims=True))
    np.testing.assert_allclose(wide(y), e / e.sum(axis=1, keepdims=True), rtol=2e-3, atol=1e-6)


def test_layer_norm():
    kernel = triton_kernels.compiled(
        triton_kernels.layer_norm, "*fp16 *fp16 *fp16 *fp16 i32 fp32", BLOCK=1024
    )
    x, y = random((9, 900), np.float16, 3), poisoned((9, 900), np.float16)
    weight, bias = random(900, np.float16, 4), random(900, np.float16, 5)
    run(kernel, 9, x, weight, bias, y, np.int32(900), np.float32(1e-5))
    v = wide(x)
    v = v - v.mean(axis=1, keepdims=True)
    v = v / np.sqrt((v**2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(wide(y), v * wide(weight) + wide(bias), rtol=5e-3, atol=5e-3)


def test_atomics():
    kernel = triton_kernels.compiled(triton_kernels.histogram, "*i32 *i32 *i32 i32", BLOCK=512)
    x = np.random.default_rng(6).integers(0, 100_000, 3000, np.int32)
    counts, largest = np.zeros(64, np.int32), np.zeros(1, np.int32)
    run(kernel, 6, x, counts, largest, np.int32(3000))
    np.testing.assert_array_equal(counts, np.bincount(x % 64, minlength=64))
    assert largest[0] == x.max()


def test_scan():
    kernel = triton_kernels.compiled(triton_kernels.scan, "*fp32 *fp32 i32", BLOCK=512)
    x, y = random((5, 500), np.float32, 7), poisoned((5, 500), np.float32)
    run(kernel, 5, x, y, np.int32(500))
    np.testing.assert_allclose(y, np.cumsum(wide(x), axis=1), rtol=1e-5, atol=1e-4)


MATRICES = {
    "fp16": (np.float16, np.float16, 2e-3),
    "bf16": (ml_dtypes.bfloat16, ml_dtypes.bfloat16, 2e-2),
    "fp8e4nv": (ml_dtypes.float8_e4m3fn, np.float32, 1e-2),
}


@pytest.mark.parametrize("divisible", ["", "m n k"])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["matmul", "descriptor_matmul"])
def test_matmul(kind, name, divisible):
    dtype, result, tolerance = MATRICES[name]
    kernel = triton_kernels.compiled(
        getattr(triton_kernels, kind),
        f"*{name} *{name} *{name} i32 i32 i32",
        divisible=divisible,
        TILE_M=128,
        TILE_N=128,
        TILE_K=64,
    )
    assert "wgmma.mma_async" in kernel.ptx
    m, n, k = 256, 128, 256
    a, b = random((m, k), dtype, 8), random((k, n), dtype, 9)
    c = poisoned((m, n), result)
    run(kernel, (m // 128, n // 128, 1), a, b, c, np.int32(m), np.int32(n), np.int32(k))
    expected = wide(a) @ wide(b)
    assert np.linalg.norm(wide(c) - expected) / np.linalg.norm(expected) < tolerance


def test_matmul_of_8_bit_floats():
    dtype, result, tolerance = MATRICES["fp8e4nv"]
    kernel = triton_kernels.compiled(
        triton_kernels.matmul_transposed,
        "*fp8e4nv *fp8e4nv *fp32 i32 i32 i32",
        TILE_M=128,
        TILE_N=128,
        TILE_K=64,
    )
    assert "wgmma.mma_async" in kernel.ptx and "e4m3" in kernel.ptx
    m, n, k = 128, 256, 192
    a, b = random((m, k), dtype, 10), random((n, k), dtype, 11)
    c = poisoned((m, n), result)
    run(kernel, (1, 2, 1), a, b, c, np.int32(m), np.int32(n), np.int32(k))
    expected = wide(a) @ wide(b).T
    assert np.linalg.norm(wide(c) - expected) / np.linalg.norm(expected) < tolerance


def test_what_is_recorded_is_of_these_kernels():
    """It is found by what the compiler gets, and anything else is compiled."""
    assert recorded_ptx.recorded(("another", "kernel"), lambda: "compiled") == "compiled"
    here = str(pathlib.Path(__file__).parent)
    text = f'.file 1 "{here}/kernel.cu"'
    stored = recorded_ptx.without_places(text)
    assert here not in stored and recorded_ptx.with_places(stored) == text
