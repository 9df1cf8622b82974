"""What the program says of layouts is obeyed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallasite
from pallasite import gpu as plgpu
from pallasite.layouts import named, row_major, strided
from pallasite.lowering.recording import recording

PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
M, N, K = 64, 128, 64
OUT = jax.ShapeDtypeStruct((M, N), jnp.float32)


def tiles(rows: int, columns: int, swizzle: int | None = None) -> tuple:
    tiling = plgpu.TilingTransform((rows, columns))
    return (tiling,) if swizzle is None else (tiling, plgpu.SwizzleTransform(swizzle))


def operands(seed: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 2)
    return (
        jax.random.normal(keys[0], (M, K), jnp.bfloat16),
        jax.random.normal(keys[1], (K, N), jnp.bfloat16),
    )


def layouts_of(function, *args):
    with recording() as kernels:
        pallasite.compile(function, *args, target="sm_90a")
    (layouts,) = kernels
    return layouts


def placed(layouts, name: str) -> set:
    """The layouts of the views of an allocation that are of its whole shape."""
    return {
        view.layout
        for view, uses in layouts.shared.items()
        for use in uses
        if use.name == name and len(view.layout.shape) == 2
    }


def product(transforms_a, transforms_b):
    def body(a_ref, b_ref, out, a, b):
        a[...] = a_ref[...]
        b[...] = b_ref[...]

        def scope(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        out[...] = pl.run_scoped(scope, plgpu.ACC((M, N), jnp.float32))

    scratch = [
        plgpu.SMEM((M, K), jnp.bfloat16, transforms=transforms_a),
        plgpu.SMEM((K, N), jnp.bfloat16, transforms=transforms_b),
    ]
    return plgpu.kernel(body, out_type=OUT, scratch_types=scratch, compiler_params=PARAMS)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_transforms_of_operands(swizzle):
    """Also where inference would choose a wider swizzle; the other operand is left to it."""
    function = product(tiles(8, swizzle // 2, swizzle), ())
    a, b = operands(swizzle)
    layouts = layouts_of(function, a, b)
    width = swizzle // 2
    declared = row_major((M // 8, K // width, 8, width), 16).untile((8, width))
    assert placed(layouts, "a") == {declared.with_swizzle(swizzle)}
    inferred = row_major((K // 8, N // 64, 8, 64), 16).untile((8, 64)).with_swizzle(128)
    assert placed(layouts, "b") == {inferred}
    first, second = layouts.report.shared
    assert first.layout == f"TilingTransform((8, {width})), SwizzleTransform({swizzle})"
    assert (first.shape, first.why[0].text) == ((M, K), "the program declares it")
    assert second.layout == "TilingTransform((8, 64)), SwizzleTransform(128)"
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(np.asarray(function(a, b)), want, rtol=1e-3, atol=1e-3)


def test_transforms_without_matrix_products():
    """Nothing but the program wants such tiles."""

    def body(x_ref, out, tile):
        tile[...] = x_ref[...]
        out[...] = tile[...].T

    scratch = [plgpu.SMEM((64, 64), jnp.float32, transforms=tiles(16, 8))]
    one = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    function = plgpu.kernel(body, out_type=one, scratch_types=scratch, compiler_params=PARAMS)
    layouts = layouts_of(function, one)
    assert placed(layouts, "tile") == {row_major((4, 8, 16, 8), 32).untile((16, 8))}
    assert layouts.report.shared[0].layout == "TilingTransform((16, 8))"
    x = jax.random.normal(jax.random.key(3), (64, 64), jnp.float32)
    np.testing.assert_array_equal(np.asarray(function(x)), np.asarray(x).T)


def test_members_of_unions():
    """Each member of a union has a layout of its own."""

    def body(a_ref, b_ref, out, union):
        b, plain = union

        def scope(a, acc):
            a[...] = a_ref[...]
            b[...] = b_ref[...]
            plgpu.wgmma(acc, a, b)
            plgpu.wgmma_wait(0)
            return acc[...]

        y = pl.run_scoped(scope, plgpu.SMEM((M, K), jnp.bfloat16), plgpu.ACC((M, N), jnp.float32))
        plain[...] = y[:, :32]
        out[...] = y
        out[:, 32:64] = plain[...]

    union = plgpu.RefUnion(
        plgpu.SMEM((K, N), jnp.bfloat16, transforms=tiles(8, 32, 64)),
        plgpu.SMEM((M, 32), jnp.float32),
    )
    function = plgpu.kernel(body, out_type=OUT, scratch_types=[union], compiler_params=PARAMS)
    a, b = operands(9)
    report = pallasite.compile(function, a, b, target="sm_90a").layouts
    found = {(one.dtype, one.shape): one.layout for one in report.shared}
    assert found["bfloat16", (K, N)] == "TilingTransform((8, 32)), SwizzleTransform(64)"
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    want[:, 32:64] = want[:, :32]
    np.testing.assert_allclose(np.asarray(function(a, b)), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("cast", "layout"),
    [
        (plgpu.Layout.WGMMA, named.resolve("WGMMA", (), {}, (64, 64), 32)),
        (plgpu.Layout.WGMMA_TRANSPOSED, named.resolve("WGMMA_TRANSPOSED", (), {}, (64, 64), 32)),
        (plgpu.Layout.WG_STRIDED((64, 64), 2), strided((64, 64), 2)),
    ],
)
def test_layout_casts(cast, layout):
    """The result of a cast has the layout that the program names."""

    def body(x_ref, out):
        out[...] = plgpu.layout_cast(x_ref[...] + 1, cast)

    one = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    function = plgpu.kernel(body, out_type=one, compiler_params=PARAMS)
    layouts = layouts_of(function, one)
    made = {use.primitive for use in layouts.registers[layout]}
    assert "layout_cast" in made
    x = jax.random.normal(jax.random.key(4), (64, 64), jnp.float32)
    np.testing.assert_array_equal(np.asarray(function(x)), np.asarray(x) + 1)
