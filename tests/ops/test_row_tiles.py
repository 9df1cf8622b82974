"""Norms and quotients of rows that begin within vectors, by tiles, against formulas in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norm_reference import norm_and_reference

import pallasite
from pallasite import ops
from pallasite_std.ops.rows import folding_tiles, norm_kernels, norms, quantize, tiles

pytestmark = pytest.mark.runs_kernels

MACHINE = 1, 227 * 1024
BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


@pytest.fixture
def by_tiles(monkeypatch):
    """Returns the tiles that were chosen."""
    found = []

    real = tiles.row_tile

    def recorded(*arguments):
        found.append(real(*arguments))
        return found[-1]

    monkeypatch.setattr(tiles, "row_tile", recorded)
    for module in (norms, quantize):
        monkeypatch.setattr(module, "machine", lambda: MACHINE)
    for kernel in (norm_kernels.forward, quantize._kernel):
        kernel.cache_clear()
    yield found
    norm_kernels.forward.cache_clear()
    quantize._kernel.cache_clear()


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "centered", "residual", "kind", "part"),
    [
        (41, 1467, BF16, False, False, None, 4),  # A row is left behind the last tile.
        (131, 157, BF16, True, True, None, 32),
        (40, 1001, BF16, False, True, np.int8, 4),  # Results that are narrower than vectors.
        (43, 2051, BF16, True, False, None, 2),
        (67, 598, F32, True, False, np.int8, 8),
    ],
)
def test_norms(rows, columns, dtype, centered, residual, kind, part, by_tiles):
    value, exact = norm_and_reference(
        rows, columns, dtype, centered=centered, residual=residual, quantize=kind
    )
    assert by_tiles[-1].part == part
    tolerance = 1e-6 if kind is None and dtype == F32 else 6e-3 if kind is None else 2e-2
    errors = np.linalg.norm(value - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert errors.max() < tolerance


@pytest.mark.parametrize(
    ("rows", "columns", "kind"), [(69, 301, jnp.float8_e4m3fn), (41, 2229, np.int8)]
)
def test_quantization(rows, columns, kind, by_tiles):
    x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, columns)), BF16)
    values, scales = ops.quantize(x, kind)
    assert by_tiles[-1] is not None
    exact = np.asarray(x, np.float64)
    found = np.asarray(values, np.float64) * np.asarray(scales, np.float64)[:, None]
    errors = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert errors.max() < 4e-2
    limit = 127.0 if kind == np.int8 else 448.0
    np.testing.assert_allclose(np.asarray(scales), abs(exact).max(1) / limit, rtol=1e-6)


def test_single_elements_are_converted_by_the_instruction():
    """Lanes that have an odd number of elements beside one another."""
    shape = jax.ShapeDtypeStruct((600, 1467), BF16)
    compiled = pallasite.compile(
        lambda x: ops.quantize(x, jnp.float8_e4m3fn), shape, target="sm_90a"
    )
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx
    wide = jax.ShapeDtypeStruct((600, 1467), jnp.float8_e5m2)
    scales = jax.ShapeDtypeStruct((600,), jnp.float32)
    compiled = pallasite.compile(ops.dequantize, wide, scales, target="sm_90a")
    assert "cvt.rn.f16x2.e5m2x2" in compiled.ptx


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "centered", "residual", "height", "part"),
    [
        (331, 157, BF16, True, False, 16, 8),  # Rows are left behind the last tile.
        (352, 501, BF16, False, True, 8, 4),
        (352, 504, BF16, True, False, 8, 4),  # Rows begin at whole vectors.
        (193, 233, np.dtype(np.float16), True, True, 16, 8),
    ],
)
def test_gradients(rows, columns, dtype, centered, residual, height, part, monkeypatch):
    """With sums over rows; some blocks have one tile more than others."""
    monkeypatch.setattr(folding_tiles, "_ENOUGH", 1)
    monkeypatch.setattr(norms, "machine", lambda: MACHINE)
    found = []

    def recorded(*arguments):
        found.append(folded_tile(*arguments))
        return found[-1]

    folded_tile = folding_tiles.folded_tile
    monkeypatch.setattr(norm_kernels, "folded_tile", recorded)
    norm_kernels.backward.cache_clear()
    draw = np.random.default_rng(columns)
    x, other, d_out, d_sum = (
        jnp.asarray(draw.normal(size=(rows, columns)) + shift, dtype) for shift in (1, 0, 0.5, 0)
    )
    weight, bias = (jnp.asarray(draw.normal(size=columns), dtype) for _ in range(2))
    given = [x, weight, bias] if centered else [x, weight]
    function = ops.layer_norm if centered else ops.rms_norm
    if residual:
        results = jax.vjp(lambda r, *a: function(*a, residual=r), other, *given)[1]((d_out, d_sum))
        results = results[1:]
    else:
        results = jax.vjp(function, *given)[1](d_out)
    norm_kernels.backward.cache_clear()
    assert (found[-1].height, found[-1].part) == (height, part)
    wide = np.asarray(x + other if residual else x, np.float64)
    g, w = np.asarray(d_out, np.float64), np.asarray(weight, np.float64)
    if centered:
        wide = wide - wide.mean(-1, keepdims=True)
    scale = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + (1e-5 if centered else 1e-6))
    value, along = wide * scale, g * w
    d_x = along - value * (along * value).mean(-1, keepdims=True)
    d_x = (d_x - along.mean(-1, keepdims=True) * centered) * scale
    d_x = d_x + np.asarray(d_sum, np.float64) * residual
    for one, exact in zip(results, (d_x, (g * value).sum(0), g.sum(0)), strict=False):
        assert np.linalg.norm(np.asarray(one, np.float64) - exact) < 6e-3 * np.linalg.norm(exact)
