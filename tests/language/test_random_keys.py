"""Arrays of random keys as operands and results of kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite.errors import InvalidTypeError

pytestmark = pytest.mark.runs_kernels

KEY = jax.random.key(7)
KEYS = jax.random.split(jax.random.key(8), 4)
Semantics = plgpu.LoweringSemantics
bits = functools.partial(jax.random.bits, shape=(40,), dtype=jnp.uint32)


def equal(one, other):
    assert one.dtype == other.dtype
    if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = map(jax.random.key_data, (one, other))
    np.testing.assert_array_equal(one, other)


def draws(key_ref, out_ref):
    out_ref[...] = bits(key_ref[...])


def splits(key_ref, out_ref):
    out_ref[...] = jax.random.split(key_ref[...], 3)


def kernel(body, out_type, **options):
    return plgpu.kernel(body, out_type=out_type, **options)


DRAWN = jax.ShapeDtypeStruct((40,), jnp.uint32)
SPLIT = jax.ShapeDtypeStruct((3,), KEY.dtype)


@pytest.mark.parametrize("semantics", [Semantics.Lane, Semantics.Warpgroup])
def test_a_key_and_keys(semantics):
    params = plgpu.CompilerParams(lowering_semantics=semantics)
    equal(kernel(draws, DRAWN, compiler_params=params)(KEY), bits(KEY))
    equal(jax.jit(kernel(splits, SPLIT, compiler_params=params))(KEY), jax.random.split(KEY, 3))


def test_clone():
    def body(key_ref, out_ref):
        out_ref[...] = bits(jax.random.clone(key_ref[...]))

    equal(kernel(body, DRAWN)(KEY), bits(KEY))


def test_a_program_for_each_key():
    """Keys in a grid, through shared memory, one to each result."""

    def body(keys_ref, out_ref, next_ref, scratch_ref):
        scratch_ref[...] = keys_ref[...]
        i = lax.axis_index("i")
        out_ref[i] = bits(scratch_ref[i])
        next_ref[i] = jax.random.fold_in(scratch_ref[i], i)

    called = kernel(
        body,
        (jax.ShapeDtypeStruct((4, 40), jnp.uint32), jax.ShapeDtypeStruct((4,), KEYS.dtype)),
        grid=(4,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((4,), KEYS.dtype)],
    )
    found, following = called(KEYS)
    equal(found, jax.vmap(bits)(KEYS))
    equal(following, jax.vmap(jax.random.fold_in)(KEYS, jnp.arange(4)))


def test_vmap():
    equal(jax.vmap(kernel(draws, DRAWN))(KEYS), jax.vmap(bits)(KEYS))
    twice = jax.vmap(jax.vmap(kernel(splits, SPLIT)))(KEYS.reshape(2, 2))
    equal(twice, jax.vmap(jax.vmap(lambda key: jax.random.split(key, 3)))(KEYS.reshape(2, 2)))
    called = pl.pallas_call(draws, out_shape=DRAWN, compiler_params=plgpu.CompilerParams())
    equal(jax.vmap(called)(KEYS), jax.vmap(bits)(KEYS))


@pytest.mark.parametrize("jit", [False, True])
def test_captured_key(jit):
    def program(key):
        def body(out_ref):
            out_ref[...] = bits(key)

        return kernel(body, DRAWN)()

    equal((jax.jit(program) if jit else program)(KEY), bits(KEY))


def test_blocks_of_keys():
    def body(key_ref, out_ref, next_ref):
        out_ref[...] = bits(key_ref[0])[None]
        next_ref[...] = jax.random.split(key_ref[0], 2)[None]

    called = pl.pallas_call(
        body,
        grid=(4,),
        in_specs=[pl.BlockSpec((1,), lambda i: (3 - i,))],
        out_specs=[pl.BlockSpec((1, 40), lambda i: (i, 0)), pl.BlockSpec((1, 2), lambda i: (i, 0))],
        out_shape=[
            jax.ShapeDtypeStruct((4, 40), jnp.uint32),
            jax.ShapeDtypeStruct((4, 2), KEYS.dtype),
        ],
        compiler_params=plgpu.CompilerParams(),
    )
    found, following = called(KEYS)
    equal(found, jax.vmap(bits)(KEYS)[::-1])
    equal(following, jax.vmap(lambda key: jax.random.split(key, 2))(KEYS[::-1]))


def test_other_generators():
    other = jax.random.key(3, impl="rbg")
    with pytest.raises(InvalidTypeError, match=r"operand 0 of kernel draws .*\n.*key<rbg>") as e:
        kernel(draws, DRAWN)(other)
    assert "threefry2x32" in str(e.value)
    with pytest.raises(InvalidTypeError, match="output 0 of kernel splits"):
        kernel(splits, jax.ShapeDtypeStruct((3,), other.dtype))(KEY)
