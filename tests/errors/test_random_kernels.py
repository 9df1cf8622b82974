"""Random small kernels: each gives PTX that assembles, or an error at a line of the kernel."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from refusals import make

import pallasite
from pallasite import gpu as plgpu
from pallasite.codegen.assembler import assemble
from pallasite.codegen.tools import find_tool
from pallasite.errors import InternalError, PallasiteError

DTYPES = (
    *(jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.int8, jnp.uint16, jnp.bool_),
    *(jnp.float8_e4m3fn, jnp.int4, jnp.uint4, jnp.complex64),
)
EXTENTS = (1, 2, 3, 5, 7, 8, 16, 31, 32, 64, 96, 128, 256)
LAYOUTS = (
    *(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_UPCAST_2X, plgpu.Layout.WGMMA_TRANSPOSED),
    *(plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.TCGEN05),
)
shapes = st.lists(st.sampled_from(EXTENTS), min_size=1, max_size=3).filter(
    lambda shape: math.prod(shape) <= 2**14
)


@st.composite
def steps(draw, depth=4):
    """A list of functions of one array, to be applied one after the other."""
    return [draw(step()) for _ in range(draw(st.integers(0, depth)))]


def _cast(dtype, x):
    return x.astype(dtype)


def _layout(layout, x):
    return plgpu.layout_cast(x, layout)


def _strided(vector, x):
    return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED(x.shape, vector))


def _splat(x):
    return plgpu.layout_cast(x, plgpu.Layout.WG_SPLAT(x.shape))


def _slice(start, size, axis, x):
    return lax.slice_in_dim(x, start, start + size, axis=axis % x.ndim)


def _reduce(name, axis, x):
    return getattr(jnp, name)(x, axis=axis % x.ndim)


def _reshape(new, x):
    return x.reshape(*new, -1)


def _transpose(x):
    return x.T


def _expand(extent, axis, x):
    axis %= x.ndim + 1
    shape = (*x.shape[:axis], extent, *x.shape[axis:])
    return jnp.broadcast_to(jnp.expand_dims(x, axis), shape)


def _double(name, x):
    return getattr(jnp, name)(x, x)


def _with_iota(axis, x):
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis % x.ndim) > 2, x, x[:1])


def _concatenate(axis, x):
    return jnp.concatenate([x, x], axis=axis % x.ndim)


def _loop(inner, x):
    def body(_, carry):
        for function in inner:
            carry = function(carry)
        return carry

    return lax.fori_loop(0, 3, body, x)


def _branch(inner, x):
    def changed(value):
        for function in inner:
            value = function(value)
        return value

    return lax.cond(x.ravel()[0] > 0 if x.size == 1 else True, changed, lambda value: value, x)


def _exp(x):
    return jnp.exp(x)


def _negative(x):
    return -x


def step():
    """One random function of an array."""
    part = functools.partial
    axis = st.integers(0, 2)
    simple = [
        st.builds(part, st.just(_cast), st.sampled_from(DTYPES)),
        st.builds(part, st.just(_layout), st.sampled_from(LAYOUTS)),
        st.builds(part, st.just(_strided), st.sampled_from((1, 2, 4, 3, 16))),
        st.sampled_from((_splat, _transpose, _exp, _negative)),
        st.builds(part, st.just(_slice), st.integers(0, 70), st.sampled_from(EXTENTS), axis),
        st.builds(part, st.just(_reduce), st.sampled_from(("sum", "max", "any", "argmax")), axis),
        st.builds(part, st.just(_reshape), shapes.map(lambda shape: tuple(shape[:2]))),
        st.builds(part, st.just(_expand), st.sampled_from(EXTENTS[:9]), axis),
        st.builds(part, st.just(_double), st.sampled_from(("add", "multiply", "maximum", "equal"))),
        st.builds(part, st.just(_with_iota), axis),
        st.builds(part, st.just(_concatenate), axis),
    ]
    inner = st.lists(st.one_of(simple), max_size=2)
    return st.one_of(
        *simple,
        st.builds(part, st.just(_loop), inner),
        st.builds(part, st.just(_branch), inner),
    )


def compiled(functions, shape, dtype, shared):
    """The kernel that applies functions to its input, or None if that makes no sense in JAX."""

    def apply(x):
        for function in functions:
            x = function(x)
        return x

    try:
        result = jax.eval_shape(apply, jax.ShapeDtypeStruct(shape, dtype))
    except PallasiteError:
        raise
    except (TypeError, ValueError, IndexError, NotImplementedError, ZeroDivisionError):
        return None
    if not 0 < result.size <= 2**15:
        return None
    scratch = [plgpu.SMEM(shape, dtype), plgpu.SMEM(result.shape, result.dtype)]

    @make(result.shape, result.dtype, scratch_types=scratch)
    def kernel(x_ref, o_ref, before, after):
        x = x_ref[...]
        if shared:
            before[...] = x
            after[...] = apply(before[...])
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(after, o_ref)
            plgpu.wait_smem_to_gmem(0)
        else:
            o_ref[...] = apply(x)

    return pallasite.compile(kernel, jax.ShapeDtypeStruct(shape, dtype), target="sm_90a")


def _check(make_kernel, number):
    """An error is at a line of this file; of the kernels, those with number 0 are assembled."""
    try:
        kernel = make_kernel()
    except PallasiteError as error:
        assert not isinstance(error, InternalError), str(error)
        assert error.location is not None
        assert error.location.file == __file__
        return
    if kernel is not None and number == 0 and find_tool("ptxas").path is not None:
        assemble(kernel.ptx, kernel.name)


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(steps(), shapes, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 9))
def test_ptx_or_an_error(functions, shape, dtype, shared, number):
    _check(lambda: compiled(functions, tuple(shape), dtype, shared), number)


TRANSFORMS = (
    *((), (), (), ()),
    (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)),
    (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)),
    (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128)),
    (plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32)),
    (plgpu.TilingTransform((4, 16)),),
    (plgpu.TilingTransform((16,)),),
)
BOXES = (8, 16, 32, 64, 64, 64, 128, 256, 300, 3)
windows = st.tuples(
    st.sampled_from((0, 0, 1, 8, 64)), st.sampled_from(BOXES), st.sampled_from((0, 0, 1, 8, 64))
)


def copied(dimensions, dtype, transforms, blocks, view):
    """A kernel that copies a window in and out, and reads it in between."""
    shape = tuple(start + size + rest for start, size, rest in dimensions)
    box = tuple(size for _, size, _ in dimensions)
    cluster = dict(cluster=(blocks,), cluster_names=("pair",)) if blocks > 1 else {}
    scratch = [plgpu.SMEM(box, dtype, transforms=transforms), plgpu.Barrier(num_barriers=2)]

    @make(shape, dtype, scratch_types=scratch, **cluster)
    def kernel(x_ref, o_ref, tile, barriers):
        window = tuple(pl.ds(start, size) for start, size, _ in dimensions)
        source, target = x_ref.at[window], tile
        if view == "transposed":
            target = plgpu.transpose_ref(target, tuple(reversed(range(len(box)))))
        if view == "first":
            source, target = source.at[0], target.at[0]
        if view == "half":
            half = pl.ds(0, max(1, box[0] // 2))
            source, target = source.at[half], target.at[half]
        axes = "pair" if blocks > 1 else None
        plgpu.copy_gmem_to_smem(source, target, barriers.at[1], collective_axes=axes)
        plgpu.barrier_wait(barriers.at[1])
        value = target[...]
        target[...] = value + value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(target, o_ref.at[window])
        plgpu.wait_smem_to_gmem(0)

    return pallasite.compile(kernel, jax.ShapeDtypeStruct(shape, dtype), target="sm_90a")


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(
    st.lists(windows, min_size=1, max_size=3),
    st.sampled_from(DTYPES),
    st.sampled_from(TRANSFORMS),
    st.sampled_from((1, 1, 2, 4)),
    st.sampled_from(("whole", "transposed", "first", "half")),
    st.integers(0, 9),
)
def test_copies_or_an_error(dimensions, dtype, transforms, blocks, view, number):
    _check(lambda: copied(dimensions, dtype, transforms, blocks, view), number)
