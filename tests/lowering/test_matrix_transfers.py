"""Transposed loads and stores of narrow elements, by ldmatrix and stmatrix."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallasite
from pallasite import gpu as plgpu

pytestmark = [pytest.mark.runs_kernels, pytest.mark.usefixtures("semantics")]

SHAPE = (64, 128)
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
DTYPES = (jnp.bfloat16, jnp.float16, jnp.int16, jnp.uint16)


def values(dtype, shape=SHAPE):
    rng = np.random.default_rng(7)
    return jnp.asarray(rng.integers(-100, 100, shape).astype(dtype))


def turned(dtype, *, loads, transforms=SWIZZLED, shape=SHAPE):
    """A kernel that transposes an array where it loads it, or where it stores it."""
    scratch = plgpu.SMEM(shape if loads else shape[::-1], dtype, transforms=transforms)

    @plgpu.kernel(out_type=jax.ShapeDtypeStruct(shape[::-1], dtype), scratch_types=[scratch])
    def kernel(x_ref, o_ref, tile):
        view = plgpu.transpose_ref(tile, (1, 0))
        if loads:
            tile[...] = x_ref[...]
            o_ref[...] = plgpu.load(view, (), layout=plgpu.Layout.WGMMA)
        else:
            view[...] = plgpu.load(x_ref, (), layout=plgpu.Layout.WGMMA)
            o_ref[...] = tile[...]

    return kernel


def instructions(kernel, *args, target="sm_90"):
    ptx = pallasite.compile(kernel, *args, target=target).ptx
    return re.findall(r"(?:ld|st)matrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.shared\.b16", ptx)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.sampled(alone=("loads",))
def test_transposed_words(dtype, loads):
    kernel = turned(dtype, loads=loads)
    x = values(dtype)
    np.testing.assert_array_equal(kernel(x), x.T)
    # 64 x 128 elements of 16 bits are 128 matrices, a quarter of which each warp moves.
    assert instructions(kernel, x) == [("4", ".trans")] * 8


@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("shape", [(64, 64), (128, 64), (64, 192)])
@pytest.mark.sampled
def test_shapes_and_swizzles(loads, swizzle, shape):
    shape = shape[::-1] if loads else shape
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    kernel = turned(jnp.float16, loads=loads, transforms=transforms, shape=shape)
    x = values(jnp.float16, shape)
    np.testing.assert_array_equal(kernel(x), x.T)
    assert set(instructions(kernel, x)) == {("4", ".trans")}


def test_parts_of_an_array():
    """The part begins at a place that the kernel computes."""

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((2, 64, 64), jnp.bfloat16),
        scratch_types=[plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=SWIZZLED)],
    )
    def kernel(x_ref, o_ref, tiles):
        def step(i, _):
            tiles[i] = x_ref[i]
            part = plgpu.transpose_ref(tiles.at[i], (1, 0))
            o_ref[i] = plgpu.load(part, (), layout=plgpu.Layout.WGMMA)

        jax.lax.fori_loop(0, 2, step, None)

    x = values(jnp.bfloat16, (2, 64, 64))
    np.testing.assert_array_equal(kernel(x), np.swapaxes(x, 1, 2))
    assert set(instructions(kernel, x)) == {("4", ".trans")}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_what_matrices_do_not_fit(dtype):
    transforms = (
        plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)),
        plgpu.SwizzleTransform(128),
    )
    kernel = turned(dtype, loads=False, transforms=transforms, shape=(128, 128))
    x = values(dtype, (128, 128))
    np.testing.assert_array_equal(kernel(x), x.T)
    assert instructions(kernel, x) == []


def test_words_without_conflicts_are_stored_as_words():
    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16),
        scratch_types=[plgpu.SMEM(SHAPE, jnp.bfloat16, transforms=SWIZZLED)],
    )
    def kernel(x_ref, o_ref, tile):
        tile[...] = plgpu.load(x_ref, (), layout=plgpu.Layout.WGMMA)
        o_ref[...] = tile[...]

    x = values(jnp.bfloat16)
    np.testing.assert_array_equal(kernel(x), x)
    assert instructions(kernel, x) == []
