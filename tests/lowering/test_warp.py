"""Warp-mapped regions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from kernels import array, compile_to_ptx, in_order, make
from pallasite import _jax
from pallasite.errors import InvalidTypeError, InvalidValueError
from pallasite.language.memory import SMEM
from pallasite.language.mesh import WarpMesh
from pallasite.language.params import CompilerParams
from pallasite_std.pipelines.helpers import warp_map


def per_warp(x, o):
    """Each warp writes one element of its own."""
    scale = x[0]

    def body(warp):
        o[warp] = x[warp] * scale

    warp_map(body)


def test_each_warp_runs_the_body():
    ptx = compile_to_ptx(make((4,))(per_warp), array(4))
    in_order(
        ptx,
        r"shfl\.sync\.idx",
        r"elect\.sync",
        r"bar\.sync",
        r"@%p\d+ bra",
        r"st\.global",
        r"bar\.sync",
    )


def test_without_barriers():
    params = CompilerParams(unsafe_no_auto_barriers=True)
    assert "bar.sync" not in compile_to_ptx(make((4,), compiler_params=params)(per_warp), array(4))


def test_branches_on_the_warp():
    @make((4,), scratch_types=[SMEM((4,), jnp.float32)])
    def kernel(x, o, s):
        def body(warp):
            @pl.when(warp == 2)
            def _():
                s[0] = x[1]

        warp_map(body)
        o[0] = s[0]

    in_order(
        compile_to_ptx(kernel, array(4)), r"setp\.(eq|ne)\.[bs]32\s+%p\d+, %r\d+, 2", r"st\.shared"
    )


def test_axis_index_outside_is_unknown():
    @make((4,))
    def kernel(x, o):
        names = []
        warp_map(lambda warp: names.append(warp))
        o[...] = x[...]

    compile_to_ptx(kernel, array(4))


def test_several_warpgroups():
    @make((8,), num_threads=2, thread_name="t")
    def kernel(x, o):
        thread = jax.lax.axis_index("t")

        def body(warp):
            o[thread * 4 + warp] = x[warp]

        warp_map(body)

    in_order(
        compile_to_ptx(kernel, array(8)), r"bar\.sync\s+%r\d+, 128", "st.global", r"bar\.sync\s+%r"
    )


def test_arrays_cannot_be_captured():
    @make((128,))
    def kernel(x, o):
        value = x[...]

        def body(warp):
            o[warp] = jnp.sum(value)

        warp_map(body)

    with pytest.raises(ValueError, match=r"a warp-mapped region captures an array"):
        compile_to_ptx(kernel, array(128))


def test_arrays_cannot_be_passed():
    @make((128,))
    def kernel(x, o):
        def body(value_ref):
            o[0] = value_ref[0]

        _jax.mpmd_map([(WarpMesh(axis_name="w"), body)], name="region")(x[...])

    with pytest.raises((InvalidTypeError, NotImplementedError, ValueError)):
        compile_to_ptx(kernel, array(128))


def test_arrays_cannot_be_accessed():
    @make((128,))
    def kernel(x, o):
        def body(warp):
            o[...] = x[...]

        warp_map(body)

    with pytest.raises(InvalidValueError, match="a single warp reads an array"):
        compile_to_ptx(kernel, array(128))


def test_regions_do_not_nest():
    @make((4,))
    def kernel(x, o):
        def inner(warp):
            o[warp] = x[warp]

        warp_map(lambda warp: warp_map(inner))

    with pytest.raises(InvalidValueError, match="inside another one"):
        compile_to_ptx(kernel, array(4))
