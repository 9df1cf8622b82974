"""``pl.kernel`` and ``pl.core_map`` over ``plgpu.Mesh``."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.errors import InvalidTypeError

X = np.random.default_rng(0).standard_normal(256).astype(np.float32)
MESH = plgpu.Mesh(grid=(2,), grid_names=("block",))


def core_map(*args, **kwargs):
    """JAX warns that it is deprecated, which is no subject of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pl.core_map(*args, **kwargs)


@jax.jit
def doubled(x):
    x_ref = jax.new_ref(x, memory_space=plgpu.GMEM)
    out_ref = jax.new_ref(jnp.full(256, jnp.nan), memory_space=plgpu.GMEM)

    @core_map(MESH, compiler_params=plgpu.CompilerParams(approx_math=True))
    def _():
        part = pl.ds(jax.lax.axis_index("block") * 128, 128)
        x_ref[part] = x_ref[part] * 2
        out_ref[part] = x_ref[part] + 1

    return x_ref[...], out_ref[...]


@pytest.mark.runs_kernels
def test_core_map():
    """The body reads and writes references of the function around."""
    changed, out = doubled(X)
    np.testing.assert_array_equal(changed, X * 2)
    np.testing.assert_array_equal(out, X * 2 + 1)


def test_core_map_compiles():
    """For a target, without running it; parameters reach the compiler, and the name the PTX."""
    compiled = pallasite.compile(doubled, X, target="sm_100a")
    assert ".target sm_100a" in compiled.ptx
    assert compiled.launch.grid == (2, 1, 1)


@pytest.mark.runs_kernels
@pytest.mark.parametrize("threads", [None, 2])
def test_kernel_with_scratch(threads):
    """Operands, results and scratch memory, which the threads of a block share."""
    mesh = MESH.replace(num_threads=threads, thread_name="wg") if threads else MESH
    share = 128 // (threads or 1)

    def body(x_ref, out_ref, scratch_ref, barrier):
        block = jax.lax.axis_index("block") * 128
        thread = jax.lax.axis_index("wg") if threads else 0
        scratch_ref[pl.ds(thread * share, share)] = x_ref[pl.ds(block + thread * share, share)]
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        other = (threads - 1 - thread if threads else 0) * share
        out_ref[pl.ds(block + other, share)] = scratch_ref[pl.ds(other, share)] + 1

    kernel = pl.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((256,), jnp.float32),
        mesh=mesh,
        scratch_types=[plgpu.SMEM((128,), jnp.float32), plgpu.Barrier(num_arrivals=threads or 1)],
    )
    np.testing.assert_array_equal(jax.jit(kernel)(X), X + 1)


def test_parameters_of_another_backend():
    """They are refused by name."""

    @jax.jit
    def fn(x):
        ref = jax.new_ref(x, memory_space=plgpu.GMEM)

        @core_map(MESH, compiler_params=object())
        def _():
            ref[0] = 1.0

        return ref[...]

    with pytest.raises(
        InvalidTypeError, match="compiler_params of a kernel over a GPU mesh"
    ) as info:
        fn(X)
    assert "pallasite.gpu.CompilerParams" in str(info.value)
