"""Arrays that the bodies of kernels capture: tables of their own, and of functions of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.scipy.special import ndtri, spence

from pallasite import UnsupportedError
from pallasite import gpu as plgpu

pytestmark = pytest.mark.runs_kernels

X = np.linspace(0.01, 0.99, 200, dtype=np.float32)
KEY = jax.random.key(3)


def applied(function, semantics=plgpu.LoweringSemantics.Warpgroup, **options):
    """A kernel that applies a function to its operand."""

    def body(x_ref, o_ref):
        o_ref[...] = function(x_ref[...])

    params = plgpu.CompilerParams(lowering_semantics=semantics)
    out = jax.ShapeDtypeStruct(X.shape, X.dtype)
    return plgpu.kernel(body, out_type=out, compiler_params=params, **options)


BYTES = np.arange(24, dtype=np.int8).reshape(4, 6)
HALVES = np.arange(8).astype(ml_dtypes.bfloat16)
JITTED = {
    "spence": spence,
    "polynomials": lambda v: jnp.polysub(v[:5], v[:9]),
    "bytes": jax.jit(lambda v: v[:4, None] * BYTES),
    "halves": jax.jit(lambda v: v[:8] * HALVES),
    "bool": jax.jit(lambda v: jnp.where(np.arange(5) % 2 == 0, v[:5], 0)),
    "alike": jax.jit(lambda v: v[:5] * np.full(5, 2, np.float32)),
    "loop": lambda v: lax.fori_loop(
        0, 3, lambda i, c: jax.jit(lambda c: c * np.arange(5, dtype=np.float32))(c), v[:5]
    ),
    "rows": lambda v: jax.vmap(jax.jit(lambda u: u * np.arange(8, dtype=np.float32)))(
        v.reshape(25, 8)
    ),
}
"""Functions that hold small arrays where they are jitted."""

FUNCTIONS = {
    "bool": lambda v: jnp.where(np.arange(200) % 3 == 0, v, -v),
    "bfloat16": lambda v: v + np.arange(200).astype(jnp.bfloat16).astype(jnp.float32),
    "matrix": lambda v: v + jnp.asarray(np.arange(200).reshape(40, 5))[:, ::-1].reshape(200),
    "lookup": lambda v: jnp.asarray(np.arange(9) ** 2)[(v * 9).astype(jnp.int32)] * v,
    "loop": lambda v: lax.fori_loop(0, 3, lambda i, u: u * np.arange(200, dtype=np.float32), v),
    "polynomial": lambda v: jnp.polyval(np.array([1, 2, 3], np.float32), v),
    "histogram": lambda v: jnp.histogram(v, bins=8, range=(0, 1))[0][jnp.arange(200) % 8] * v,
    "interp": lambda v: jnp.interp(v, np.array([0, 0.5, 1]), np.array([1, 3, 2])),
    "ndtri": lambda v: jax.grad(lambda u: ndtri(u).sum())(v),
    "binomial": lambda v: jax.random.binomial(KEY, 10, v),
}


@pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tables(name, semantics):
    function = FUNCTIONS[name]
    expected = jax.jit(function)(X).astype(X.dtype)
    np.testing.assert_allclose(applied(function, semantics)(X), expected, rtol=2e-6)


@pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))
@pytest.mark.parametrize("name", JITTED)
@pytest.mark.parametrize("front_end", ["kernel", "pallas_call"])
def test_tables_of_jitted_functions(name, semantics, front_end):
    function = JITTED[name]
    expected = jax.jit(function)(X)

    def body(x_ref, o_ref):
        o_ref[...] = function(x_ref[...])

    params = plgpu.CompilerParams(lowering_semantics=semantics)
    out = jax.ShapeDtypeStruct(expected.shape, expected.dtype)
    if front_end == "kernel":
        kernel = plgpu.kernel(body, out_type=out, compiler_params=params)
    else:
        kernel = pl.pallas_call(body, out_shape=out, compiler_params=params)
    np.testing.assert_allclose(kernel(X), expected, rtol=2e-6)


def test_threads_and_blocks():
    table = np.arange(100, dtype=np.float32)

    def body(x_ref, o_ref):
        part = pl.ds(lax.axis_index("thread") * 100, 100)
        o_ref[lax.axis_index("block"), part] = x_ref[part] * table

    out = jax.ShapeDtypeStruct((3, 200), X.dtype)
    kernel = plgpu.kernel(
        body, out_type=out, grid=(3,), grid_names=("block",), num_threads=2, thread_name="thread"
    )
    np.testing.assert_array_equal(kernel(X), np.tile(X * np.tile(table, 2), (3, 1)))


def test_tables_that_transformations_trace():
    """Values of a transformation are captured as well as known ones."""

    def scaled(table):
        return applied(lambda v: v * table)(X)

    tables = np.arange(600, dtype=np.float32).reshape(3, 200)
    np.testing.assert_array_equal(jax.jit(scaled)(tables[1]), X * tables[1])
    np.testing.assert_array_equal(jax.vmap(scaled)(tables), X * tables)
    np.testing.assert_array_equal(lax.map(scaled, tables, batch_size=2), X * tables)


def test_tables_that_change_between_calls():
    table = np.ones(200, np.float32)
    kernel = applied(lambda v: v + table)
    np.testing.assert_array_equal(kernel(X), X + 1)
    table[7:] = 5
    np.testing.assert_array_equal(kernel(X), X + table)


def test_pallas_call_of_a_jitted_function_with_a_table():
    table = np.arange(200, dtype=np.float32)

    def body(x_ref, o_ref):
        o_ref[...] = jax.jit(lambda v: v + table)(x_ref[...])

    kernel = pl.pallas_call(body, out_shape=X, compiler_params=plgpu.CompilerParams())
    with pytest.raises(UnsupportedError, match="captures an array") as caught:
        kernel(X)
    assert "float32[200]" in str(caught.value)
