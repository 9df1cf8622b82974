"""Norms whose rows registers keep, and gradients of small ones, against formulas in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norm_reference import norm_and_reference

from pallasite import ops
from pallasite_std.ops.rows import kept, norm_beside, norm_kernels, norms, tiling
from pallasite_std.ops.rows.kept import Kept, kept_plan, lane_elements
from pallasite_std.ops.rows.tiling import LANES

pytestmark = pytest.mark.runs_kernels

MACHINE = 2, 226 * 1024
BF16, F16, F32 = (np.dtype(one) for one in (jnp.bfloat16, np.float16, np.float32))


def check_gradients(rows, columns, dtype, *, centered, residual, weight_dtype=None):
    """By x, weight and bias, of a layer norm (``centered``) or RMSNorm."""
    draw = np.random.default_rng(columns)
    x, other, d_out, d_sum = (
        jnp.asarray(draw.normal(size=(rows, columns)) + shift, dtype) for shift in (1, 0, 0.5, 0)
    )
    weight, bias = (jnp.asarray(draw.normal(size=columns), weight_dtype or dtype) for _ in "wb")
    given = [x, weight, bias] if centered else [x, weight]
    function = ops.layer_norm if centered else ops.rms_norm
    if residual:
        back = jax.vjp(lambda r, *a: function(*a, residual=r), other, *given)[1]
        results = back((d_out, d_sum))[1:]
    else:
        results = jax.vjp(function, *given)[1](d_out)
    assert [one.dtype for one in results] == [one.dtype for one in given]
    wide = np.asarray(x + other if residual else x, np.float64)
    g, w = np.asarray(d_out, np.float64), np.asarray(weight, np.float64)
    wide = wide - wide.mean(-1, keepdims=True) * centered
    scale = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + (1e-5 if centered else 1e-6))
    value, along = wide * scale, g * w
    d_x = along - value * (along * value).mean(-1, keepdims=True)
    d_x = (d_x - along.mean(-1, keepdims=True) * centered) * scale
    d_x = d_x + np.asarray(d_sum, np.float64) * residual
    for one, exact in zip(results, (d_x, (g * value).sum(0), g.sum(0)), strict=False):
        tolerance = 2e-5 if dtype.itemsize == one.dtype.itemsize == 4 else 6e-3
        error = np.linalg.norm(np.asarray(one, np.float64) - exact) / np.linalg.norm(exact)
        assert error < tolerance


@pytest.fixture
def kept_so(monkeypatch):
    """Makes gradients keep rows as a plan says."""

    def use(plan):
        monkeypatch.setattr(norm_beside, "MOST_BYTES", 0)
        monkeypatch.setattr(norms, "machine", lambda: MACHINE)
        monkeypatch.setattr(norm_kernels, "folded_tile", lambda *given: None)
        monkeypatch.setattr(norm_kernels, "_kept", lambda *given: plan)
        norm_kernels.backward.cache_clear()

    yield use
    norm_kernels.backward.cache_clear()


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "plan", "centered", "residual"),
    [
        (37, 801, BF16, Kept(1, 801, 3, 2), True, False),  # The last row ends within a vector.
        (40, 801, BF16, Kept(1, 801, 2, 2), False, True),  # The last one ends at its end.
        (21, 1147, BF16, Kept(2, 640, 3, 2), True, True),
        (13, 1147, F32, Kept(2, 640, 2, 1), True, False),
        (13, 1147, F16, Kept(3, 384, 4, 1, kept=False, held=False), True, False),
        (29, 1112, BF16, Kept(2, 560, 3, 2, kept=False), True, False),  # Whole vectors.
        (29, 1112, F32, Kept(1, 1112, 3, 2), False, False),
        (5, 1112, BF16, Kept(3, 376, 4, 1, held=False), True, False),  # Fewer than stages.
        (3, 1030, BF16, Kept(1, 1030, 2, 2), True, False),  # Fewer than blocks.
    ],
)
def test_gradients(rows, columns, dtype, plan, centered, residual, kept_so):
    kept_so(plan)
    check_gradients(rows, columns, dtype, centered=centered, residual=residual)


@pytest.mark.parametrize(
    ("rows", "columns", "weight_dtype"), [(19, 3011, None), (9, 5003, np.float32)]
)
def test_chosen_plans(rows, columns, weight_dtype, monkeypatch):
    """By few rows, which have several warpgroups each."""
    monkeypatch.setattr(norm_beside, "MOST_BYTES", 0)
    monkeypatch.setattr(norms, "machine", lambda: MACHINE)
    found = []

    def recorded(*given, **options):
        found.append(kept_plan(*given, **options))
        return found[-1]

    monkeypatch.setattr(norm_kernels, "kept_plan", recorded)
    norm_kernels.backward.cache_clear()
    check_gradients(rows, columns, BF16, centered=True, residual=False, weight_dtype=weight_dtype)
    norm_kernels.backward.cache_clear()
    assert found[-1] is not None and found[-1].threads > 1


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "residual", "kind", "threads"),
    [
        (33, 2683, BF16, False, None, 1),
        (17, 24601, F16, False, None, 3),
        (19, 2501, BF16, True, None, 1),
        (17, 9777, BF16, False, np.int8, 1),
    ],
)
def test_forward(rows, columns, dtype, residual, kind, threads, monkeypatch):
    """Rows that begin within vectors."""
    monkeypatch.setattr(norms, "machine", lambda: MACHINE)
    monkeypatch.setattr(kept, "BUSY_ROWS", 1)
    monkeypatch.setattr(tiling, "RAGGED", False)
    found = []

    def recorded(*given, **options):
        found.append(kept_plan(*given, **options))
        return found[-1]

    monkeypatch.setattr(norm_kernels, "kept_plan", recorded)
    norm_kernels.forward.cache_clear()
    value, exact = norm_and_reference(
        rows, columns, dtype, centered=kind is None, residual=residual, quantize=kind
    )
    norm_kernels.forward.cache_clear()
    assert found[-1] is not None and found[-1].threads == threads
    errors = np.linalg.norm(value - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert errors.max() < (6e-3 if kind is None else 4e-2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sums", [0, 1, 2])
def test_plans(size, sums):
    """Registers and shared memory suffice for all blocks, and each warpgroup has columns."""
    dtypes = [np.dtype(f"f{size}")] * 2
    for columns in range(520, 40_000, 97):
        for rows in (3, 300, 100_000):
            plan = kept_plan(rows, columns, dtypes, [size], sums, 132, MACHINE[1])
            if plan is None:
                continue
            registers = 512 // (plan.threads * plan.resident)
            elements = lane_elements(columns, plan.threads, 16 // size)
            arrays = sums + plan.held + 2 * plan.kept
            assert arrays * elements + 30 <= registers
            assert plan.resident * plan.stages * 2 * size * columns <= MACHINE[1]
            assert plan.resident * plan.threads <= 16 and plan.stages >= 2
            assert 0 < columns - (plan.threads - 1) * plan.chunk <= elements * LANES


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "centered", "residual", "weight_dtype"),
    [
        (45, 2051, BF16, True, False, None),  # The last rows are of two groups.
        (32, 2048, F32, True, True, None),
        (70, 2816, BF16, False, False, None),
        (101, 2100, F16, True, False, np.float32),
        (133, 2055, F32, False, True, jnp.bfloat16),
        (300, 2049, BF16, True, False, None),  # More rows than are loaded at a time.
    ],
)
def test_small_matrices(rows, columns, dtype, centered, residual, weight_dtype, monkeypatch):
    """Blocks with rows are beside blocks with columns."""
    found = []

    def recorded(*given):
        found.append(suits_beside(*given))
        return found[-1]

    suits_beside = norm_beside.suits_beside
    monkeypatch.setattr(norm_beside, "suits_beside", recorded)
    check_gradients(
        rows, columns, dtype, centered=centered, residual=residual, weight_dtype=weight_dtype
    )
    assert found == [True]
