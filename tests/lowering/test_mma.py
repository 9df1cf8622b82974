"""Warp-level MMA: ``plgpu.mma``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import array, compile_to_ptx, make
from pallasite import gpu as plgpu
from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError

M_WARPS = (1, 2, 4)
TYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
MIXED = (("float8_e4m3fn", "float8_e5m2"), ("int8", "uint8"), ("uint8", "int8"))


def operand(shape, dtype, seed):
    generator = np.random.default_rng(seed)
    if np.issubdtype(np.dtype(dtype), np.integer):
        limits = np.iinfo(dtype)
        return jnp.asarray(generator.integers(limits.min, limits.max + 1, shape).astype(dtype))
    return jnp.asarray(generator.standard_normal(shape, np.float32).astype(dtype))


def product(acc, a, b, explicit=None):
    """acc + a @ b by a kernel; with ``explicit`` m_warps, all layouts are said."""
    layouts = [None] * 3
    if explicit:
        layouts = [
            layout(a.dtype, m_warps=explicit)
            for layout in (plgpu.Layout.MMA_ACC, plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS)
        ]

    def body(acc_ref, a_ref, b_ref, out_ref):
        values = [
            plgpu.load(ref, layout=layout, optimized=False)
            for ref, layout in zip((acc_ref, a_ref, b_ref), layouts, strict=True)
        ]
        out_ref[...] = plgpu.mma(*values)

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(acc.shape, acc.dtype))(acc, a, b)


def reference(acc, a, b):
    exact = np.int64 if np.issubdtype(acc.dtype, np.integer) else np.float64
    return np.asarray(acc, exact) + np.asarray(a, exact) @ np.asarray(b, exact)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("m_warps", M_WARPS)
@pytest.mark.parametrize("dtype", TYPES)
def test_numbers(dtype, m_warps):
    """Two tiles in each direction, for each way of spreading the warps."""
    k = 64 // np.dtype(jnp.dtype(dtype)).itemsize
    m, n = 32 * m_warps, 16 * (4 // m_warps)
    a, b = operand((m, k), dtype, 0), operand((k, n), dtype, 1)
    acc = operand((m, n), "int16" if "int" in dtype else "float32", 2)
    acc = acc.astype(jnp.int32 if "int" in dtype else jnp.float32)
    result = product(acc, a, b, m_warps)
    if "int" in dtype:
        np.testing.assert_array_equal(result, reference(acc, a, b))
    else:
        if dtype == "float32":  # The instruction reads 10 bits of the mantissa.
            a, b = as_tf32(a), as_tf32(b)
        np.testing.assert_allclose(result, reference(acc, a, b), rtol=1e-5, atol=1e-4)


def as_tf32(array):
    """Without the 13 bits of the mantissa that tf32 lacks."""
    return (np.asarray(array).view(np.uint32) & ~np.uint32((1 << 13) - 1)).view(np.float32)


@pytest.mark.runs_kernels
@pytest.mark.parametrize(("left", "right"), MIXED)
def test_two_dtypes(left, right):
    """8-bit operands of two kinds meet in one instruction."""
    a, b = operand((64, 32), left, 0), operand((32, 8), right, 1)
    acc = jnp.zeros((64, 8), jnp.int32 if "int" in left else jnp.float32)
    np.testing.assert_allclose(product(acc, a, b), reference(acc, a, b), rtol=1e-5, atol=1e-4)


@pytest.mark.runs_kernels
@pytest.mark.runs_kernels
@pytest.mark.parametrize("n", [17, 65])
def test_products_of_which_some_lanes_store(n):
    """All lanes take part in each, though only some have columns of the last one."""
    a, b = operand((64, 16), "bfloat16", 0), operand((16, n), "bfloat16", 1)

    def body(a_ref, b_ref, out_ref):
        out_ref[...] = jnp.matmul(a_ref[...], b_ref[...], preferred_element_type=jnp.float32)

    result = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, n), jnp.float32))(a, b)
    np.testing.assert_allclose(result, reference(np.float32(0), a, b), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 8), (32, 16), (16, 32), (128, 24)])
def test_layouts_are_found(shape):
    """Without a word about layouts, and with an accumulator that is zero."""
    (m, n), k = shape, 32
    a, b = operand((m, k), "float16", 3), operand((k, n), "float16", 4)
    acc = operand((m, n), "float32", 5)
    np.testing.assert_allclose(product(acc, a, b), reference(acc, a, b), rtol=1e-5, atol=1e-4)

    def body(a_ref, b_ref, out_ref):
        out_ref[...] = plgpu.mma(jnp.zeros((m, n), jnp.float32), a_ref[...], b_ref[...])

    result = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((m, n), jnp.float32))(a, b)
    np.testing.assert_allclose(result, reference(acc * 0, a, b), rtol=1e-5, atol=1e-4)


@pytest.mark.runs_kernels
def test_in_a_loop_with_shared_memory():
    """The accumulator is carried through a loop over K, and the operands lie in shared memory."""
    m, n, k, steps = 64, 16, 16, 3
    a, b = operand((m, steps * k), "bfloat16", 6), operand((steps * k, n), "bfloat16", 7)

    def body(a_ref, b_ref, out_ref, a_smem, b_smem):
        a_smem[...] = a_ref[...]
        b_smem[...] = b_ref[...]
        plgpu.commit_smem()
        layouts = plgpu.Layout

        def step(i, acc):
            left = plgpu.load(
                a_smem.at[:, pl_ds(i * k, k)],
                layout=layouts.MMA_LHS(jnp.bfloat16),
                optimized=False,
            )
            right = plgpu.load(
                b_smem.at[pl_ds(i * k, k), :],
                layout=layouts.MMA_RHS(jnp.bfloat16),
                optimized=False,
            )
            return plgpu.mma(acc, left, right)

        start = plgpu.layout_cast(jnp.zeros((m, n), jnp.float32), layouts.MMA_ACC(jnp.bfloat16))
        out_ref[...] = jax.lax.fori_loop(0, steps, step, start)

    pl_ds = jax.experimental.pallas.ds
    result = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
        scratch_types=[plgpu.SMEM(a.shape, a.dtype), plgpu.SMEM(b.shape, b.dtype)],
    )(a, b)
    np.testing.assert_allclose(result, reference(jnp.zeros((m, n)), a, b), rtol=1e-5, atol=1e-4)


def test_instructions():
    """One instruction for each tile of each warp."""

    @make((64, 16), jnp.float32)
    def kernel(a, b, out):
        out[...] = plgpu.mma(jnp.zeros((64, 16), jnp.float32), a[...], b[...])

    ptx = compile_to_ptx(kernel, array(64, 32, dtype=jnp.float16), array(32, 16, dtype=jnp.float16))
    assert ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") == 4


def refuse(error, message, acc, a, b):
    @make(acc.shape, acc.dtype)
    def kernel(acc_ref, a_ref, b_ref, out_ref):
        out_ref[...] = plgpu.mma(acc_ref[...], a_ref[...], b_ref[...])

    with pytest.raises(error, match=message):
        compile_to_ptx(kernel, acc, a, b)


def test_refusals():
    """What cannot be multiplied is said at the user's line."""
    f16, f32 = jnp.float16, jnp.float32
    acc, a, b = array(64, 8, dtype=f32), array(64, 16, dtype=f16), array(16, 8, dtype=f16)
    refuse(InvalidValueError, "do not fit together", acc, a, array(32, 8, dtype=f16))
    refuse(InvalidTypeError, "different dtypes", acc, a, array(16, 8, dtype=jnp.bfloat16))
    refuse(InvalidTypeError, "wrong dtype", array(64, 8, dtype=f16), a, b)
    i16 = jnp.int16
    refuse(
        InvalidTypeError,
        "there is no mma",
        acc,
        array(64, 16, dtype=i16),
        array(16, 8, dtype=i16),
    )
    refuse(
        InvalidValueError,
        "no multiple of 32 bytes",
        acc,
        array(64, 8, dtype=f16),
        array(8, 8, dtype=f16),
    )
    refuse(
        InvalidValueError,
        "cannot share",
        array(48, 8),
        array(48, 16, dtype=f16),
        b,
    )

    @make((64, 8), f32)
    def with_reference(a_ref, b_ref, out_ref):
        out_ref[...] = plgpu.mma(jnp.zeros((64, 8), f32), a_ref, b_ref[...])

    with pytest.raises(InvalidTypeError, match="a is not an array"):
        compile_to_ptx(with_reference, a, b)

    @make((64, 8), f32)
    def per_warp(a_ref, b_ref, out_ref):
        left, right = a_ref[...], b_ref[...]

        @plgpu.warp_map
        def _(warp):
            plgpu.mma(jnp.zeros((64, 8), f32), left, right)

    with pytest.raises(UnsupportedError, match="mma in code that runs per warp"):
        compile_to_ptx(per_warp, a, b)


@pytest.mark.runs_kernels
def test_operand_in_another_layout(semantics):
    """It is refused in lane semantics; inference converts it."""

    def body(a_ref, b_ref, out_ref):
        left = plgpu.layout_cast(a_ref[...], plgpu.Layout.WG_STRIDED((64, 16), vec_size=8))
        out_ref[...] = plgpu.mma(jnp.zeros((64, 8), jnp.float32), left, b_ref[...])

    a, b = operand((64, 16), "float16", 0), operand((16, 8), "float16", 1)
    kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((64, 8), jnp.float32))
    if semantics is plgpu.LoweringSemantics.Warpgroup:
        expected = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        np.testing.assert_allclose(kernel(a, b), expected, rtol=1e-5, atol=1e-5)
        return
    with pytest.raises(InvalidValueError, match="a is distributed over the lanes"):
        kernel(a, b)
