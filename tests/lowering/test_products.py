"""Products of matrices of odd shapes in registers: transposed operands, and zeros behind them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallasite
from pallasite import gpu as plgpu

SEMANTICS = [plgpu.LoweringSemantics.Lane, plgpu.LoweringSemantics.Warpgroup]


def dot(a: Any, b: Any) -> Any:
    """The product of integers, which is exact."""
    return jnp.dot(a, b, preferred_element_type=jnp.int32)


def in_loop(x: Any, y: Any) -> Any:
    """Products of what a loop carries, transposed in it."""

    def step(n: Any, carry: Any) -> Any:
        total, left = carry
        left = jnp.clip(dot(left, left.T), -9, 9).astype(jnp.int8) + n.astype(jnp.int8)
        return total + dot(left.T, left), left

    left = (x @ x.T) % 5
    return lax.fori_loop(0, 3, step, (jnp.zeros(left.shape, jnp.int32), left))[0]


BODIES: dict[str, Callable[[Any, Any], Any]] = {
    "right transposed": lambda x, y: dot(x, y.T),
    "left transposed": lambda x, y: dot(x.T, x + x),
    "both transposed": lambda x, y: dot(y.T, x[:3].T),
    "with itself": lambda x, y: dot(x, x.T),
    "with itself, left transposed": lambda x, y: dot(x.T, x),
    "twice the same": lambda x, y: dot(x[:, :5], x[:5, :5]),
    "transposed array is used again": lambda x, y: dot(x, x.T) + dot(x.T[:5].T, x.T[:5]),
    "transposed array is stored": lambda x, y: dot(x, x.T)[:5] + x.T[:5].astype(jnp.int32),
    "vector": lambda x, y: dot(x, x.T[:, 0]),
    "batches": lambda x, y: jnp.einsum(
        "ijk,lki->ijl", x.reshape(1, *x.shape), x.T[None].T, preferred_element_type=jnp.int32
    ),
    "in a loop": in_loop,
}


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("shape", [(17, 9), (63, 13), (5, 31), (16, 32)], ids=str)
@pytest.mark.parametrize("name", list(BODIES))
@pytest.mark.sampled(alone=("semantics",))
def test_products(name: str, shape: tuple[int, int], semantics: Any) -> None:
    body = BODIES[name]
    random = np.random.default_rng(len(name))
    x, y = (random.integers(-9, 9, shape).astype(np.int8) for _ in range(2))
    if name == "both transposed":
        y = random.integers(-9, 9, (shape[1], 4)).astype(np.int8)
    want = np.asarray(jax.jit(body)(x, y))

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(want.shape, want.dtype),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    def kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        out_ref[...] = body(x_ref[...], y_ref[...])

    with pallasite.config.scoped(sanitize=True):
        np.testing.assert_array_equal(kernel(x, y), want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("semantics", SEMANTICS)
def test_vectors_of_columns_stay_whole(dtype: Any, semantics: Any) -> None:
    """Transposed fragments change their layout by way of columns that lie one behind the other."""
    x = np.random.default_rng(0).integers(-99, 99, (64, 16)).astype(dtype)
    right = plgpu.Layout.MMA_RHS(dtype, m_warps=4)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((16, 64), dtype),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    def kernel(x_ref: Any, out_ref: Any) -> None:
        fragments = plgpu.layout_cast(x_ref[...] + x_ref[...], plgpu.Layout.WGMMA)
        out_ref[...] = plgpu.layout_cast(fragments.T, right)

    np.testing.assert_array_equal(kernel(x), (x + x).T)
    ptx = pallasite.compile(kernel, x, target="sm_90a").ptx
    assert "st.shared.b32" in ptx
    assert not re.search(r"(ld|st)\.shared\.b16", ptx)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((129, 8), np.int8), ((129, 16), np.float16), ((129, 3, 8), np.int16)]
)
def test_rows_that_threads_run_across(shape: tuple[int, ...], dtype: Any, semantics: Any) -> None:
    """Vectors of columns become a row, which memory that has columns together cannot take."""
    x = np.random.default_rng(0).integers(-99, 99, shape).astype(dtype)

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(shape[::-1], dtype),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
    )
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...].T

    with pallasite.config.scoped(sanitize=True):
        np.testing.assert_array_equal(kernel(x), x.T)
