"""Functions in the bodies of ``pl.pallas_call``, which are traced twice, and operands of rank 0."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu

pytestmark = pytest.mark.runs_kernels

RANDOM = np.random.default_rng(0)
X = RANDOM.integers(0, 20, 90).astype(np.int32)
Y = RANDOM.normal(size=(21, 10)).astype(np.float32)
SEMANTICS = pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics))


def call(body, out, semantics=plgpu.LoweringSemantics.Warpgroup, order=None, **options):
    params = plgpu.CompilerParams(lowering_semantics=semantics, dimension_semantics=order)
    return pl.pallas_call(body, out_shape=out, compiler_params=params, **options)


def halvings(x):
    """How often each row is halved until its largest element is below 1."""
    row = lambda v: lax.while_loop(  # noqa: E731
        lambda c: jnp.abs(c[0]).max() > 0.2, lambda c: (c[0] / 2, c[1] + 1), (v, 0)
    )
    return jax.vmap(row)(x)[1]


FUNCTIONS = {
    "set": lambda x, y: jnp.zeros_like(y).at[::2].set(3),
    "add": lambda x, y: jnp.zeros(20, jnp.int32).at[x].add(x),
    "multiply": lambda x, y: jnp.ones(20, jnp.int32).at[x[:15]].multiply(3),
    "max": lambda x, y: jnp.zeros(20, jnp.int32).at[x].max(x * 2),
    "apply": lambda x, y: y.at[x[:9]].apply(jnp.sin),
    "segments": lambda x, y: jax.ops.segment_sum(y, x[:21], 20),
    "loops of rows": lambda x, y: halvings(y),
    "branches of rows": lambda x, y: jax.vmap(
        lambda v: lax.cond(v.sum() > 0, jnp.sin, lambda u: u * 2, v)
    )(y),
    "reduction": lambda x, y: lax.reduce(x, 0, lambda a, b: a ^ b, (0,))[None],
    "sort": lambda x, y: lax.sort((x, x[::-1]), num_keys=1)[1],
    "scan": lambda x, y: lax.scan(lambda c, r: (c + r, c.at[2].set(r[1])), y[0], y)[1],
    "gradient": lambda x, y: jax.grad(lambda u: (u[x[:7]] ** 2).sum())(y),
}


@SEMANTICS
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, semantics):
    function = FUNCTIONS[name]
    expected = jax.jit(function)(X, Y)

    def body(x_ref, y_ref, o_ref):
        o_ref[...] = function(x_ref[...], y_ref[...])

    out = jax.ShapeDtypeStruct(expected.shape, expected.dtype)
    np.testing.assert_allclose(call(body, out, semantics)(X, Y), expected, rtol=1e-6, atol=1e-6)


@SEMANTICS
@pytest.mark.parametrize("dtype", [np.float32, np.int8, bool, ml_dtypes.bfloat16])
def test_scalars(dtype, semantics):
    x = np.asarray(1, dtype)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    out = call(body, jax.ShapeDtypeStruct((), dtype), semantics)(x)
    assert out == x and out.shape == ()


@SEMANTICS
def test_blocks_of_rank_0(semantics):
    def total(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...].sum()

    rows = pl.BlockSpec((7, 10), lambda i: (i, 0))
    one = pl.BlockSpec((), lambda i: ())
    kernel = call(
        total,
        jax.ShapeDtypeStruct((), Y.dtype),
        semantics,
        ["sequential"],
        grid=(3,),
        in_specs=[rows],
        out_specs=one,
    )
    np.testing.assert_allclose(kernel(Y), Y.sum(), rtol=1e-5)

    def scaled(s_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] * s_ref[...]

    kernel = call(scaled, Y, semantics, grid=(3,), in_specs=[one, rows], out_specs=rows)
    factors = np.array([2, -1], np.float32)
    np.testing.assert_array_equal(kernel(factors[0], Y), Y * 2)
    np.testing.assert_array_equal(
        jax.vmap(kernel, (0, None))(factors, Y), Y * factors[:, None, None]
    )


@SEMANTICS
def test_blocks_in_global_memory(semantics):
    """One or all of the places along each dimension, which ``jax.vmap`` adds to."""

    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(2, 4)] * y_ref[...]

    whole = pl.BlockSpec(memory_space=plgpu.GMEM)
    one = pl.BlockSpec((None, 10), lambda i: (2 - i, 0), memory_space=plgpu.GMEM)
    rows = pl.BlockSpec((None, 4, 10), lambda i: (i, 0, 0), memory_space=plgpu.GMEM)
    out = jax.ShapeDtypeStruct((3, 4, 10), Y.dtype)
    kernel = call(body, out, semantics, grid=(3,), in_specs=[whole, one], out_specs=rows)
    expected = Y[2:6] * Y[2::-1, None]
    np.testing.assert_array_equal(kernel(Y, Y[:3]), expected)
    both = np.stack([Y, -2 * Y])
    np.testing.assert_array_equal(
        jax.vmap(kernel, (0, None))(both, Y[:3]), np.stack([expected, -2 * expected])
    )
    np.testing.assert_array_equal(
        jax.vmap(kernel, (None, 0), 1)(Y, both[:, :3]), np.stack([expected, -2 * expected], 1)
    )


def test_squeezed_dimensions_of_global_memory():
    """A dimension of one place is left out as well."""

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    spec = pl.BlockSpec((None, 21, 10), lambda: (0, 0, 0), memory_space=plgpu.GMEM)
    x = Y[None]
    kernel = call(body, x, in_specs=[spec], out_specs=spec)
    np.testing.assert_array_equal(kernel(x), x + 1)
