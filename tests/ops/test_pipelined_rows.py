"""Gradients of normalisations by rows in a software pipeline, against formulas in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norm_reference import norm_and_reference

import pallasite
from pallasite import ops
from pallasite_std.ops.rows import norm_beside, norm_body, norm_kernels, norms, pipelines
from pallasite_std.ops.rows.pipelines import gradient_pipeline

pytestmark = pytest.mark.runs_kernels

SHARED_MEMORY = 227 * 1024
BF16 = np.dtype(jnp.bfloat16)


def gradients(x, weight, d_out, d_sum):
    """By the sum that is normalised, weight and bias, of a layer norm."""
    x, weight, d_out = (np.asarray(one, np.float64) for one in (x, weight, d_out))
    x = x - x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    value, g = x * scale, d_out * weight
    d_x = g - g.mean(-1, keepdims=True) - value * (g * value).mean(-1, keepdims=True)
    return d_x * scale + np.asarray(d_sum, np.float64), (d_out * value).sum(0), d_out.sum(0)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "multiprocessors", "residual"),
    [
        (50, 1536, BF16, 1, False),  # Three blocks for each multiprocessor, two rows at a time.
        (35, 3000, BF16, 1, True),  # Warpgroups with different parts, an odd number of rows.
        (17, 5120, BF16, 1, False),  # A warpgroup for each 1024 columns, which hold the weight.
        (9, 8192, BF16, 1, False),  # One row at a time.
        (17, 16384, np.dtype(np.float32), 2, False),  # Two blocks of a cluster share a row.
        (8, 33000, BF16, 4, False),  # Four blocks share a row.
        (67, 1557, BF16, 1, True),  # Rows begin anywhere in vectors, the last one ends in one.
        (19, 14001, BF16, 2, False),  # By columns, two blocks share a row.
        (67, 3002, np.dtype(np.float32), 1, False),  # They begin at two places of vectors.
    ],
)
@pytest.mark.parametrize("by_columns", [False, True])
def test_gradients(rows, columns, dtype, multiprocessors, residual, by_columns, monkeypatch):
    if by_columns and columns * dtype.itemsize % 16 == 0:
        pytest.skip("the same")
    if not by_columns and columns == 14001:
        pytest.skip("too few rows")
    monkeypatch.setattr(pipelines, "MORE_BY_COLUMNS", by_columns)
    machine = multiprocessors, SHARED_MEMORY
    monkeypatch.setattr(pipelines, "BY_COLUMNS", by_columns)
    monkeypatch.setattr(norm_kernels, "KEPT", False)
    monkeypatch.setattr(norm_beside, "MOST_BYTES", 0)
    monkeypatch.setattr(norms, "machine", lambda: machine)
    norm_kernels.backward.cache_clear()
    dtypes = [dtype] * (2 + residual)
    assert gradient_pipeline(rows, columns, dtypes, dtype.itemsize, 2, *machine) is not None
    draw = np.random.default_rng(columns)
    x, other, d_out, d_sum = (
        jnp.asarray(draw.normal(size=(rows, columns)) + shift, dtype) for shift in (1, 0, 0.5, 0)
    )
    weight, bias = (jnp.asarray(draw.normal(size=columns), dtype) for _ in range(2))
    if residual:
        _, back = jax.vjp(lambda *a: ops.layer_norm(*a[:3], residual=a[3]), x, weight, bias, other)
        *found, d_other = back((d_out, d_sum))
        np.testing.assert_array_equal(np.asarray(d_other), np.asarray(found[0]))
        wanted = gradients(np.asarray(x + other), weight, d_out, d_sum)
    else:
        _, back = jax.vjp(ops.layer_norm, x, weight, bias)
        found, wanted = back(d_out), gradients(x, weight, d_out, 0)
    norm_kernels.backward.cache_clear()
    # The sum of x and the residual is rounded as well.
    tolerance = 2e-5 if dtype.itemsize == 4 else 6e-3
    for one, exact in zip(found, wanted, strict=True):
        error = np.linalg.norm(np.asarray(one, np.float64) - exact) / np.linalg.norm(exact)
        assert error < tolerance


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "multiprocessors", "blocks", "groups"),
    [
        (7, 2199, BF16, 4, 1, 4),  # Two rows at a time, once each; the last one is there twice.
        (11, 3002, np.dtype(np.float32), 4, 1, 3),  # Two turns of fewer blocks.
        (3, 12001, BF16, 16, 4, 3),  # More blocks share a row than its length needs.
    ],
)
def test_gradients_of_few_rows(rows, columns, dtype, multiprocessors, blocks, groups, monkeypatch):
    machine = multiprocessors, SHARED_MEMORY
    monkeypatch.setattr(norm_kernels, "KEPT", False)
    monkeypatch.setattr(norms, "machine", lambda: machine)
    norm = norm_body.Norm(True, 1e-5, 0.0, True, True, False, dtype, None, dtype.itemsize)
    pipeline = norm_kernels._pipeline(norm, rows, columns, dtype, *machine)
    assert pipeline is not None and pipeline.blocks == blocks
    assert pipeline.groups(multiprocessors, rows) == groups
    draw = np.random.default_rng(columns)
    x, d_out = (jnp.asarray(draw.normal(size=(rows, columns)) + 0.5, dtype) for _ in range(2))
    weight, bias = (jnp.asarray(draw.normal(size=columns), dtype) for _ in range(2))
    found = jax.vjp(ops.layer_norm, x, weight, bias)[1](d_out)
    tolerance = 2e-5 if dtype.itemsize == 4 else 6e-3
    for one, exact in zip(found, gradients(x, weight, d_out, 0), strict=True):
        error = np.linalg.norm(np.asarray(one, np.float64) - exact) / np.linalg.norm(exact)
        assert error < tolerance


def test_few_rows_that_registers_hold():
    """They have no pipeline: with clusters, those of 372 rows took 20 us, and XLA's 9."""
    for rows, columns in ((372, 2816), (256, 4096), (744, 2816)):
        norm = norm_body.Norm(True, 1e-5, 0.0, True, True, False, BF16)
        assert norm_kernels._pipeline(norm, rows, columns, BF16, 132, SHARED_MEMORY) is None


def test_gradients_of_the_widest_rows(monkeypatch):
    """The weight takes what rows of 64 KiB leave of shared memory; there is one sum."""
    rows, columns, machine = 8, 32000, (2, SHARED_MEMORY)
    monkeypatch.setattr(norms, "machine", lambda: machine)
    norm_kernels.backward.cache_clear()
    assert gradient_pipeline(rows, columns, [BF16] * 2, 2, 1, *machine) is not None
    other = gradient_pipeline(rows, columns, [BF16] * 2, 4, 1, 8, SHARED_MEMORY)
    assert other is None or other.blocks > 2
    draw = np.random.default_rng(3)
    x, d_out = (jnp.asarray(draw.normal(size=(rows, columns)), BF16) for _ in range(2))
    weight = jnp.asarray(draw.normal(size=columns), BF16)
    found = jax.vjp(ops.rms_norm, x, weight)[1](d_out)
    norm_kernels.backward.cache_clear()
    wide, g, w = (np.asarray(one, np.float64) for one in (x, d_out, weight))
    scale = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    value = wide * scale
    d_x = (g * w - value * (g * w * value).mean(-1, keepdims=True)) * scale
    for one, exact in zip(found, (d_x, (g * value).sum(0)), strict=True):
        error = np.linalg.norm(np.asarray(one, np.float64) - exact) / np.linalg.norm(exact)
        assert error < 6e-3


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "centered", "residual", "quantize"),
    [
        (67, 3073, BF16, False, True, np.int8),
        (65, 3081, BF16, True, False, None),  # Two reductions, one after the other.
        (67, 3083, BF16, True, True, np.int8),  # Three of them.
        (33, 8201, np.dtype(np.float32), True, False, None),
    ],
)
def test_forward_of_rows_within_vectors(
    rows, columns, dtype, centered, residual, quantize, monkeypatch
):
    machine = 1, SHARED_MEMORY
    monkeypatch.setattr(norms, "machine", lambda: machine)
    found = []

    def recorded(*arguments, **options):
        found.append(gradient_pipeline(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(pipelines, "gradient_pipeline", recorded)
    monkeypatch.setattr(norm_kernels, "tiled_row_kernel", lambda *arguments: None)
    monkeypatch.setattr(norm_kernels, "suits_pipeline", lambda *arguments: True)
    norm_kernels.forward.cache_clear()
    value, exact = norm_and_reference(
        rows, columns, dtype, centered=centered, residual=residual, quantize=quantize
    )
    norm_kernels.forward.cache_clear()
    assert found[-1] is not None and found[-1].unaligned
    tolerance = 6e-3 if quantize is None else 2e-2
    assert np.linalg.norm(value - exact) / np.linalg.norm(exact) < tolerance


@pytest.mark.parametrize(
    ("itemsizes", "sums", "depth"),
    [((2, 2), 2, 1), ((2, 2), 1, 1), ((4, 4), 2, 1), ((2, 4), 2, 1), ((2, 2, 2), 2, 1)]
    + [((2,), 0, 2), ((4,), 0, 1), ((2, 2), 0, 3)],
)
def test_pipelines_fit(itemsizes, sums, depth):
    """Whatever the width, stages and registers suffice, and every column has a warpgroup."""
    dtypes = [np.dtype(f"f{size}") for size in itemsizes]
    for columns in range(8, 140_000, 249):
        found = gradient_pipeline(1 << 13, columns, dtypes, 4, sums, 132, SHARED_MEMORY, depth)
        if found is None:
            continue
        assert 0 < found.last <= found.chunk and found.parts <= 64 and found.threads <= 8
        assert (found.parts - 1) * found.chunk + found.last == found.padded >= columns
        assert found.stages >= depth + 2 and found.groups(132) % found.period == 0
        stage = found.chunk * found.threads * found.together * sum(itemsizes)
        weight = 0 if found.held else 4 * found.chunk * found.threads
        assert found.resident * (found.stages * stage + weight) <= SHARED_MEMORY


@pytest.mark.parametrize(
    ("columns", "dtype", "residual"),
    [(28232, BF16, False), (8680, None, True), (7204, None, False)],
)
def test_kernels_fit(columns, dtype, residual):
    """Where stages and the weight leave hardly anything of shared memory."""
    dtype, f32 = dtype or np.dtype(np.float32), jnp.float32
    norm = norm_body.Norm(True, 1e-5, 0.0, True, True, residual, dtype)
    kernel = norm_kernels.backward(norm, 3000, columns, dtype, 132, SHARED_MEMORY)
    shapes = (
        [((3000, columns), dtype)] * (2 + residual) + [((3000,), f32)] * 2 + [((columns,), f32)]
    )
    compiled = pallasite.compile(
        kernel, *(jax.ShapeDtypeStruct(*one) for one in shapes), target="sm_90a"
    )
    assert 100_000 < compiled.resources.shared_memory_bytes <= SHARED_MEMORY


@pytest.mark.parametrize(("columns", "forward"), [(28233, False), (15001, True)])
def test_kernels_of_rows_within_vectors_fit(columns, forward):
    """Weights that do not begin at whole vectors take no more shared memory than others."""
    norm = norm_body.Norm(True, 1e-5, 0.0, True, True, False, BF16, weight_size=2)
    machine, f32 = (132, SHARED_MEMORY), jnp.float32
    matrix, vector = ((3000, columns), BF16), ((columns,), BF16)
    if forward:
        kernel = norm_kernels.forward(norm, 3000, columns, BF16, False, *machine)
        shapes = [matrix, vector, vector]
    else:
        kernel = norm_kernels.backward(norm, 3000, columns, BF16, *machine)
        shapes = [matrix, matrix, ((3000,), f32), ((3000,), f32), vector]
    compiled = pallasite.compile(
        kernel, *(jax.ShapeDtypeStruct(*one) for one in shapes), target="sm_90a"
    )
    assert 100_000 < compiled.resources.shared_memory_bytes <= SHARED_MEMORY


def test_wide_weights_of_rows_within_vectors_fit():
    """Weights of 32 bits beside rows of 16 are exchanged by lanes, in shared memory."""
    norm = norm_body.Norm(True, 1e-5, 0.0, True, True, True, BF16, np.dtype(np.int8))
    kernel = norm_kernels.forward(norm, 700, 12786, BF16, False, 132, SHARED_MEMORY)
    shapes = [((700, 12786), BF16)] * 2 + [((12786,), jnp.float32)] * 2
    compiled = pallasite.compile(
        kernel, *(jax.ShapeDtypeStruct(*one) for one in shapes), target="sm_90a"
    )
    assert 100_000 < compiled.resources.shared_memory_bytes <= SHARED_MEMORY


@pytest.mark.parametrize(
    ("rows", "columns", "residual"),
    [
        (67, 3081, True),  # Samples of both matrices are read a step before.
        (67, 9777, False),  # One row at a time, the last warpgroup's end is another row's.
        (67, 5001, False),  # By columns.
    ],
)
def test_moments_at_once(rows, columns, residual, monkeypatch):
    monkeypatch.setattr(norms, "machine", lambda: (1, SHARED_MEMORY))
    monkeypatch.setattr(norm_kernels, "tiled_row_kernel", lambda *arguments: None)
    monkeypatch.setattr(norm_kernels, "suits_pipeline", lambda *arguments: True)
    norm_kernels.forward.cache_clear()
    value, exact = norm_and_reference(
        rows, columns, BF16, centered=True, residual=residual, quantize=None
    )
    norm_kernels.forward.cache_clear()
    assert np.linalg.norm(value - exact) / np.linalg.norm(exact) < 6e-3


def test_moments_at_once_of_outliers(monkeypatch):
    """An outlier among the samples is all that the variance consists of."""
    monkeypatch.setattr(norms, "machine", lambda: (1, SHARED_MEMORY))
    norm_kernels.forward.cache_clear()
    columns = 8201
    draw = np.random.default_rng(5)
    x = draw.normal(size=(33, columns)) + 30
    x[0, 0], x[1, columns - 1], x[2, 7], x[3, :] = 1e5, -3e4, 1e6, 2.5
    x = jnp.asarray(x, BF16)
    found = np.asarray(ops.layer_norm(x), np.float64)
    norm_kernels.forward.cache_clear()
    wide = np.asarray(x, np.float64)
    apart = wide - wide.mean(-1, keepdims=True)
    exact = apart / np.sqrt((apart * apart).mean(-1, keepdims=True) + 1e-5)
    errors = np.linalg.norm(found - exact, axis=-1)
    assert (errors <= 6e-3 * np.linalg.norm(exact, axis=-1)).all()
