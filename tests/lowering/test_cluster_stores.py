"""Asynchronous stores to other blocks, and griddepcontrol."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from kernels import array, compile_to_ptx, in_order, make
from pallasite.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from pallasite.language.memory import SMEM
from pallasite.language.transforms import SwizzleTransform, TilingTransform
from pallasite_std.barriers.types import Barrier, ClusterBarrier
from pallasite_std.primitives.barriers import (
    barrier_wait,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
)
from pallasite_std.primitives.copies import async_store_smem
from pallasite_std.primitives.layouts import Layout, layout_cast

TRANSFORMS = (TilingTransform((8, 32)), SwizzleTransform(128))


def storing(shape, dtype, *, transforms=(), layout=None, barrier=None, cluster=(2,), **options):
    @make(
        shape,
        dtype,
        cluster=cluster,
        cluster_names=("c",),
        scratch_types=[SMEM(shape, dtype, transforms=transforms), barrier or Barrier()],
    )
    def kernel(x, o, s, b):
        value = x[...] if layout is None else layout_cast(x[...], layout)
        index = 1 - jax.lax.axis_index("c")
        async_store_smem(value, s, b, cluster_idx=index, cluster_dim="c", **options)
        barrier_wait(b)
        o[...] = s[...]

    return compile_to_ptx(kernel, array(*shape, dtype=dtype))


def test_store_of_vectors():
    ptx = storing((64, 64), jnp.float32)
    in_order(
        ptx,
        r"mapa\.shared::cluster\.u32",
        r"mbarrier\.expect_tx\.relaxed\.cluster\.shared::cluster\.b64 \[%r\d+\], %r",
        r"mbarrier\.arrive\.release\.cluster\.shared::cluster\.b64 _, \[%r\d+\], 128;",
        r"st\.async\.weak\.shared::cluster\.mbarrier::complete_tx::bytes\.v4\.b32",
        r"mbarrier\.try_wait",
        r"barrier\.cluster\.arrive",
    )
    assert ptx.count("st.async") == 64 * 64 // 128 // 4
    assert "16384" in ptx


def test_arrivals_that_order_nothing_else():
    ptx = storing((64, 64), jnp.float32, relaxed=True)
    in_order(
        ptx,
        r"mbarrier\.expect_tx\.relaxed\.cluster\.shared::cluster\.b64 \[%r\d+\], %r",
        r"mbarrier\.arrive\.relaxed\.cluster\.shared::cluster\.b64 _, \[%r\d+\], 128;",
        r"st\.async\.weak\.shared::cluster",
    )
    assert "mbarrier.arrive.release.cluster" not in ptx


@pytest.mark.parametrize(
    ("shape", "dtype", "form"),
    [
        ((128,), "int32", ""),
        ((256,), "float32", r"\.v2"),
        ((256,), "float16", ""),
        ((512,), "float16", r"\.v2"),
    ],
)
def test_widths(shape, dtype, form):
    in_order(storing(shape, dtype), rf"complete_tx::bytes{form}\.b32 \[")


def test_swizzled_layout():
    ptx = storing((64, 64), jnp.float32, transforms=TRANSFORMS, layout=Layout.WGMMA)
    assert ptx.count("st.async") == 16


def test_replicated_elements_once():
    ptx = storing((64,), jnp.float32)
    assert ptx.count("st.async") == 1
    in_order(ptx, r"setp\.[lg]t\.[us]32\s+%p\d+, %r\d+, [12]", "st.async")


@pytest.mark.parametrize(
    ("operation", "dtype", "form"),
    [
        ("add", "int32", r"add\.s32"),
        ("max", "uint32", r"max\.u32"),
        ("xor", "int32", r"xor\.b32"),
        ("add", "uint64", r"add\.u64"),
    ],
)
def test_reductions(x64, operation, dtype, form):
    ptx = storing((256,), dtype, atomic=operation)
    in_order(
        ptx, rf"red\.async\.relaxed\.cluster\.shared::cluster\.mbarrier::complete_tx::bytes\.{form}"
    )


def test_missing_forms():
    with pytest.raises(UnsupportedError, match="asynchronous add of float32") as error:
        storing((256,), "float32", atomic="add")
    assert "test_cluster_stores.py" in str(error.value)
    with pytest.raises(UnsupportedError, match="store of 1 bytes at a time"):
        storing((128,), "int8")


def test_bank_conflicts(lane_semantics):
    with pytest.raises(InvalidValueError, match="the store has bank conflicts"):
        storing((64, 64), jnp.float32, layout=Layout.WGMMA)
    storing((64, 64), jnp.float32, layout=Layout.WGMMA, optimized=False)


def test_bank_conflicts_are_avoided():
    """Inference lays the memory out so that there are none, or converts the array before."""
    stored = storing((64, 64), jnp.float32, layout=Layout.WGMMA)
    assert stored.count("st.async") == 64 * 64 // 128 // 2  # In vectors of two, as it is.
    rows = (TilingTransform((8, 64)),)
    converted = storing((64, 64), jnp.float32, transforms=rows, layout=Layout.WGMMA)
    assert converted.count("st.async") == 64 * 64 // 128 // 4  # In vectors of four.


def test_barriers_that_cannot_count_bytes():
    with pytest.raises(InvalidTypeError, match="cluster barrier"):
        storing((128,), jnp.float32, barrier=ClusterBarrier(collective_axes=("c",)))


def test_unknown_axis():
    @make((128,), scratch_types=[SMEM((128,), jnp.float32), Barrier()])
    def kernel(x, o, s, b):
        async_store_smem(x[...], s, b, cluster_idx=jnp.int32(0), cluster_dim="c")
        o[...] = s[...]

    with pytest.raises(InvalidValueError, match="'c' is not a cluster axis"):
        compile_to_ptx(kernel, array(128))


def test_griddepcontrol():
    @make((128,))
    def kernel(x, o):
        griddepcontrol_wait()
        o[...] = x[...]
        griddepcontrol_launch_dependents()

    in_order(
        compile_to_ptx(kernel, array(128)),
        r"griddepcontrol\.wait;",
        r"ld\.global",
        r"st\.global",
        r"griddepcontrol\.launch_dependents;",
    )
