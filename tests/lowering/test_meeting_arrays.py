"""Arrays of different element types that meet: their loads choose one layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from kernels import array, compile_kernel, compile_to_ptx, make
from pallasite_std.primitives.arrays import load

pytestmark = pytest.mark.usefixtures("semantics")


def doubled_often(x):
    return lax.fori_loop(0, 3, lambda _, carry: carry * 2, x)


def doubled_while(x):
    condition, step = lambda c: c[0] < 9, lambda c: (c[0] * 2, c[1] * 2)
    return lax.while_loop(condition, step, (pl.program_id(0) + 1, x))[1]


def doubled_sometimes(x):
    return lax.cond(pl.program_id(0) == 0, lambda: x * 2, lambda: x)


KEEPING = {
    "convert": lambda x: x,
    "clip": lambda x: jnp.clip(x, 0, 1),
    "clamp": lambda x: lax.clamp(jnp.bfloat16(0), x, jnp.bfloat16(1)),
    "where": lambda x: jnp.where(x > 0, x, 0),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "power": lambda x: x**3,
    "round": jnp.round,
    "bitcast": lambda x: lax.bitcast_convert_type(x, jnp.int16),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "optimization_barrier": lax.optimization_barrier,
    "fori_loop": doubled_often,
    "while_loop": doubled_while,
    "cond": doubled_sometimes,
    "nested": jax.jit(lambda x: jnp.where(x > 0, jax.jit(doubled_often)(x), 0)),
}


@pytest.mark.parametrize("name", KEEPING)
def test_narrow_array_meets_wide_one(name):
    @make((1024,), grid=(2,), grid_names=("i",))
    def kernel(x, y, o):
        o[...] = KEEPING[name](x[...]).astype(jnp.float32) + y[...]

    ptx = compile_to_ptx(kernel, array(1024, dtype=jnp.bfloat16), array(1024))
    assert ptx.count("ld.global") == 4
    assert ptx.count("ld.global.v4.b32") == 2


def test_loads_inside_of_loops_and_branches():
    @make((1024,), grid=(2,), grid_names=("i",))
    def kernel(x, y, o):
        def step(_, carry):
            return carry + lax.cond(pl.program_id(0) == 0, lambda: load(y), lambda: y[...] * 2)

        o[...] = lax.fori_loop(0, 3, step, x[...].astype(jnp.float32))

    ptx = compile_to_ptx(kernel, array(1024, dtype=jnp.bfloat16), array(1024))
    assert "ld.global.v4.b32" in ptx


def test_accesses_are_not_narrower_than_needed():
    @make((1024,), jnp.bfloat16)
    def kernel(x, y, o):
        o[...] = doubled_often(x[...]) + jnp.where(y[...] > 0, y[...], 0)

    inputs = [array(1024, dtype=jnp.bfloat16)] * 2
    assert "ld.global.v4.b32" in compile_to_ptx(kernel, *inputs)


@pytest.mark.parametrize("shape", [(64, 64), (512,), (96,), (7, 96)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int8])
def test_iota_meets_an_array(shape, dtype):
    @make(shape, dtype)
    def kernel(x, o):
        last = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        o[...] = jnp.where(last >= lax.broadcasted_iota(jnp.int32, shape, 0), x[...], 0)

    compile_to_ptx(kernel, array(*shape, dtype=dtype))


@pytest.mark.parametrize("shape", [(64, 64), (8, 1024), (7, 96), (3, 5), (4, 16, 32)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.sampled
def test_rows_and_columns_stretch(shape, dtype, axis):
    @make(shape)
    def kernel(x, y, o):
        axes = [i for i in range(len(shape)) if i != axis % len(shape)]
        o[...] = x[...].astype(jnp.float32) * jnp.expand_dims(y[...], axes)

    compile_to_ptx(kernel, array(*shape, dtype=dtype), array(shape[axis]))


def test_outer_product():
    @make((64, 32))
    def kernel(x, y, o):
        o[...] = x[...][:, None] * y[...][None, :]

    compile_to_ptx(kernel, array(64), array(32))


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int8, jnp.float8_e5m2, jnp.int16, jnp.float32])
def test_optimization_does_not_look_through_a_barrier(dtype):
    @make((4,), dtype)
    def kernel(x, o):
        o[0] = lax.optimization_barrier(x[0])

    assert "asm" in compile_kernel(kernel, array(4, dtype=dtype)).llvm
