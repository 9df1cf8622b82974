"""Kernels of various kinds, and how to get their specs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallasite import gpu as plgpu
from pallasite.runtime.api import _kernels

F32 = jnp.float32


def shape(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


def specs(fn, *args):
    """The kernels that a function calls."""
    return [spec for spec, _ in _kernels(jax.jit(fn).trace(*args).jaxpr, {})]


def scaled(factor=2.0, name="scaled", grid=1, params=None, aliases=None):
    """``o = factor * x`` for 128 elements."""

    def body(x, o):
        o[...] = (x[...] * factor).astype(o.dtype)

    body.__name__ = name
    return lambda x: plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(grid,),
        grid_names=("g",),
        compiler_params=params or plgpu.CompilerParams(),
        input_output_aliases=aliases,
    )(x)


def softmax():
    """A softmax over the rows of (64, 128), one block for each row, with helper functions."""

    @plgpu.kernel(out_type=shape(64, 128), grid=(64,), grid_names=("row",))
    def rows(x, o):
        row = jax.lax.axis_index("row")
        e = jnp.exp(x[row] - jnp.max(x[row]))
        o[row] = jax.nn.silu(e / jnp.sum(e))

    return rows


def copy_kernel(arrivals=1):
    """GMEM to SMEM and back by TMA."""

    @plgpu.kernel(
        out_type=shape(128, 128),
        scratch_types=[
            plgpu.SMEM((128, 128), F32),
            plgpu.Barrier(num_arrivals=arrivals),
        ],
    )
    def copy(x, o, buffer, barrier):
        plgpu.copy_gmem_to_smem(x, buffer, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(buffer, o)
        plgpu.wait_smem_to_gmem(0)

    return copy


def pipelined():
    """A pipeline of tiles."""

    @plgpu.kernel(out_type=shape(256, 256))
    def double(x, o):
        def body(_, xs, os):
            os[...] = xs[...] * 2

        spec = plgpu.BlockSpec((64, 64), lambda i, j: (i, j))
        plgpu.emit_pipeline(
            body, grid=(4, 4), in_specs=[spec], out_specs=[spec], max_concurrent_steps=2
        )(x, o)

    return double


def by_pallas_call():
    """``pl.pallas_call`` with our compiler parameters."""

    def body(x, o):
        o[...] = x[...] + 1

    spec = pl.BlockSpec((128, 128), lambda i, j: (i, j))
    return pl.pallas_call(
        body,
        out_shape=shape(256, 256),
        grid=(2, 2),
        in_specs=[spec],
        out_specs=spec,
        compiler_params=plgpu.CompilerParams(),
    )


def conditional():
    """Control flow and a message."""

    @plgpu.kernel(out_type=shape(128), grid=(2,), grid_names=("g",))
    def half(x, o):
        i = jax.lax.axis_index("g")

        @pl.when(i == 0)
        def _():
            o[...] = jax.lax.fori_loop(0, 4, lambda _, c: c * 2, x[...])

        jax.debug.print("block {}", i)

    return half


CASES = {
    "scaled": (scaled, (shape(128),)),
    "softmax": (softmax, (shape(64, 128),)),
    "copy": (copy_kernel, (shape(128, 128),)),
    "pipelined": (pipelined, (shape(256, 256),)),
    "pallas_call": (by_pallas_call, (shape(256, 256),)),
    "conditional": (conditional, (shape(128),)),
    "vmap": (lambda: jax.vmap(jax.vmap(conditional())), (shape(2, 3, 128),)),
}
