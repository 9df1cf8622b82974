"""Checked loads, loads and stores under a mask, state in registers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import array, compile_to_ptx, in_order, make
from pallasite import compile
from pallasite import gpu as plgpu
from pallasite._jax import masked_load, masked_store, masked_swap, run_state
from pallasite.errors import InvalidValueError, UnsupportedError
from pallasite.language.memory import SMEM
from pallasite.language.transforms import SwizzleTransform, TilingTransform, transpose_ref
from pallasite_std.primitives.arrays import load
from pallasite_std.primitives.layouts import Layout

SWIZZLED = (TilingTransform((8, 32)), SwizzleTransform(128))
TILES_OF_4_BITS = (TilingTransform((8, 256)), SwizzleTransform(128))


def loading(view, transforms=(), shape=(64, 64), **options):
    @make(shape, scratch_types=[SMEM((64, 64), jnp.float32, transforms=transforms)])
    def kernel(x, o, s):
        s[...] = x[...]
        o[...] = load(view(s), **options)

    return compile_to_ptx(kernel, array(64, 64))


def test_load_is_vectorised():
    in_order(loading(lambda s: s), r"ld\.shared\.v4\.b32")


def test_load_takes_index_and_layout():
    ptx = loading(lambda s: s, SWIZZLED, idx=..., layout=Layout.WGMMA)
    in_order(ptx, r"ld\.shared\.v2\.b32", r"st\.global\.v2\.b32")


def test_load_refuses_bank_conflicts(lane_semantics):
    def view(s):
        return transpose_ref(s, (1, 0))  # columns of an array with rows of 256 bytes

    with pytest.raises(InvalidValueError, match=r"bank conflicts(.|\n)*optimized=False") as error:
        loading(view, layout=Layout.WGMMA)
    assert "test_loads.py" in str(error.value)
    assert "WGMMA" in str(error.value)
    loading(view, layout=Layout.WGMMA, optimized=False)


def columns_of(transforms):
    """A kernel that reads columns of an array with rows of 256 bytes in a layout."""

    def body(x, o, s):
        s[...] = x[...]
        o[...] = load(transpose_ref(s, (1, 0)), layout=Layout.WGMMA)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[SMEM((64, 64), jnp.float32, transforms=transforms)],
    )


@pytest.mark.runs_kernels
@pytest.mark.parametrize("transforms", [(), SWIZZLED, (TilingTransform((8, 32)),)])
def test_bank_conflicts_are_avoided(transforms):
    """Inference chooses the layout of the memory; if it is said, another one of the registers."""
    x = jax.random.normal(jax.random.key(0), (64, 64))
    np.testing.assert_array_equal(columns_of(transforms)(x), x.T)


def test_a_load_that_would_be_refused_is_converted():
    """What the program says of both layouts is kept, at the price of a conversion."""
    report = compile(columns_of((TilingTransform((8, 32)),)), array(64, 64), target="sm_90a")
    assert report.layouts is not None
    (tile,) = report.layouts.shared
    assert tile.layout == "TilingTransform((8, 32))"
    (conversion,) = report.layouts.conversions
    assert conversion.target == "WGMMA"


def test_load_of_a_scalar():
    @make((128,))
    def kernel(x, o):
        o[...] = jnp.full((128,), load(x, 3))

    in_order(compile_to_ptx(kernel, array(128)), r"ld\.global\.nc\.b32\s+%r\d+, \[%rd\d+\+12\]")


# Masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool", "int64"])
def test_masked_load_and_store(x64, dtype):
    @make((256,), dtype)
    def kernel(x, o):
        mask = jnp.arange(256, dtype=jnp.int32) < 200
        value = masked_load(x, slice(None), mask=mask, other=jnp.ones((), dtype))
        masked_store(o, slice(None), value, mask=mask)

    ptx = compile_to_ptx(kernel, array(256, dtype=dtype))
    in_order(ptx, r"setp\.[lg]t\.[su]32\s+%p\d+, %r\d+, (200|199)", r"@%p\d+ bra", r"ld\.global\.")
    in_order(ptx, r"ld\.global\.", r"bra", r"st\.global\.")


def test_masked_store_of_vectors():
    """Neighbours that the mask lets through are stored at once, others one by one."""

    @make((1024,), jnp.bfloat16)
    def kernel(x, n, o):
        inside = jnp.arange(1024, dtype=jnp.int32) >= n[0]
        masked_store(o, slice(None), x[...], mask=inside)

    ptx = compile_to_ptx(kernel, array(1024, dtype=jnp.bfloat16), array(1, dtype=jnp.int32))
    in_order(ptx, r"ld\.global\.nc\.v4\.b32|ld\.global\.v4\.b32", r"bra", r"st\.global\.")
    assert ptx.count("st.global.v4.b32") == 1 and ptx.count("st.global.b16") == 8


def test_indices_of_own_elements():
    """Lanes that hold the indices of the elements that they want exchange none."""

    @make((1024,))
    def kernel(x, o):
        o[...] = x[jnp.arange(1024, dtype=jnp.int32) // 7]

    ptx = compile_to_ptx(kernel, array(147))
    assert "bar.sync" not in ptx and "st.shared" not in ptx
    assert ptx.count("ld.global.nc.b32") + ptx.count("ld.global.b32") == 8


def test_mask_of_one_scalar():
    @make((256,))
    def kernel(x, n, o):
        value = masked_load(x, slice(None), mask=n[0] > 0)
        masked_store(o, slice(None), value, mask=n[0] > 1)

    in_order(
        compile_to_ptx(kernel, array(256), array(1, dtype=jnp.int32)), "setp", "bra", "ld.global"
    )


def test_no_mask():
    @make((256,))
    def kernel(x, o):
        masked_store(o, slice(None), masked_load(x, slice(None)))

    in_order(compile_to_ptx(kernel, array(256)), r"ld\.global\.v2", "!bra", r"st\.global\.v2")


def test_masked_scalar_store_is_by_one_lane():
    @make((4,))
    def kernel(x, o):
        masked_store(o, 2, x[1], mask=x[0] > 0)

    in_order(compile_to_ptx(kernel, array(4)), "elect.sync", "and.pred|@%p", r"st\.global\.b32")


def test_swap_returns_old_values():
    @make((256,), input_output_aliases={0: 0})
    def kernel(x, y, o):
        mask = jnp.arange(256, dtype=jnp.int32) < 100
        old = masked_swap(o, slice(None), y[...], mask=mask)
        y[...] = old

    in_order(
        compile_to_ptx(kernel, array(256), array(256)), r"ld\.global", r"bar\.sync", r"st\.global"
    )


def test_mask_of_another_shape():
    @make((64, 64))
    def kernel(x, o):
        mask = jnp.arange(64, dtype=jnp.int32) < 10
        o[...] = masked_load(x, (slice(None), slice(None)), mask=mask)

    with pytest.raises(UnsupportedError, match=r"mask does not have the shape(.|\n)*broadcast_to"):
        compile_to_ptx(kernel, array(64, 64))


# State --------------------------------------------------------------------------------------------


def test_state_lives_in_registers():
    @make((128,))
    def kernel(x, o):
        def body(refs):
            a, b = refs
            a[...] = a[...] + b[...]

            def step(i, carry):
                b[...] = b[...] * 2.0 + a[...]
                return carry

            jax.lax.fori_loop(0, 3, step, 0)

        a, b = run_state(body)((x[...], x[...] * 2.0))
        o[...] = a + b

    ptx = compile_to_ptx(kernel, array(128))
    in_order(ptx, r"ld\.global", "!st\\.", r"st\.global", "!st\\.")


def test_state_returns_no_value():
    """What the function of a ``run_state`` returns would be lost: that is an error."""

    @make((128,))
    def kernel(x, o):
        o[...] = run_state(lambda ref: ref[...] + 1.0)(x[...])

    with pytest.raises(InvalidValueError, match="run_state calls returns a value") as info:
        compile_to_ptx(kernel, array(128))
    assert "pl.run_scoped, which returns it" in str(info.value)


def test_state_next_to_references():
    @make((128,))
    def kernel(x, o):
        def body(ref):
            ref[...] = ref[...] + x[...]
            o[...] = ref[...]

        run_state(body)(x[...])

    in_order(compile_to_ptx(kernel, array(128)), r"ld\.global", r"add\.rn\.f32", r"st\.global")


@pytest.mark.runs_kernels
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4])
@pytest.mark.parametrize("transforms", [(), TILES_OF_4_BITS])
def test_single_elements_of_4_bits(dtype, transforms):
    """From global memory, and from shared memory at places known and computed."""
    low = -8 if dtype == jnp.int4 else 0
    x = jnp.asarray(np.random.default_rng(0).integers(low, low + 16, (16, 512)).astype(dtype))
    places = [(0, 0), (3, 1), (7, 255), (9, 256), (15, 510), (15, 511), (4, 77)]

    @plgpu.kernel(
        out_type=jax.ShapeDtypeStruct((3, len(places)), jnp.int32),
        scratch_types=[plgpu.SMEM((16, 512), dtype, transforms=transforms), plgpu.Barrier()],
    )
    def kernel(x_ref, places_ref, o_ref, tile, loaded):
        plgpu.copy_gmem_to_smem(x_ref, tile, loaded)
        plgpu.barrier_wait(loaded)
        for number, (row, column) in enumerate(places):
            i, j = places_ref[number, 0], places_ref[number, 1]
            o_ref[0, number] = x_ref[i, j].astype(jnp.int32)
            o_ref[1, number] = tile[i, j].astype(jnp.int32)
            o_ref[2, number] = tile[row, column].astype(jnp.int32)

    result = np.asarray(kernel(x, jnp.asarray(places, jnp.int32)))
    expected = [int(x[place]) for place in places]
    np.testing.assert_array_equal(result, [expected] * 3)
