"""Norms and quotients of long rows that begin within vectors, in shared memory, against formulas
in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from norm_reference import norm_and_reference

from pallasite import ops
from pallasite_std.ops.rows import norm_body, norm_kernels, norms, quantize, shared

pytestmark = pytest.mark.runs_kernels

MACHINE = 1, 227 * 1024
BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


@pytest.fixture
def in_shared_memory(monkeypatch):
    """Returns what was made."""
    found = []
    for module, kernel in ((norm_kernels, norm_kernels.forward), (quantize, quantize._kernel)):
        real = module.shared_row_kernel

        def recorded(*arguments, real=real):
            found.append(real(*arguments))
            return found[-1]

        monkeypatch.setattr(module, "shared_row_kernel", recorded)
        monkeypatch.setattr(module, "suits_shared", lambda *arguments: True)
        monkeypatch.setattr(module, "suits_stream", lambda *arguments: False)
        monkeypatch.setattr(module, "tiled_row_kernel", lambda *arguments: None)
        kernel.cache_clear()
    monkeypatch.setattr(norm_kernels, "KEPT", False)
    monkeypatch.setattr(shared, "_WORD", 16)
    monkeypatch.setattr(shared, "_ENOUGH", 1)
    for module in (norms, quantize):
        monkeypatch.setattr(module, "machine", lambda: MACHINE)
    yield found
    norm_kernels.forward.cache_clear()
    quantize._kernel.cache_clear()


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "centered", "residual", "kind"),
    [
        (9, 9001, BF16, False, False, None),
        (8, 8195, BF16, True, True, None),  # Chunks but for three columns; the last row is whole.
        (11, 5122, BF16, True, True, np.int8),  # Results that begin elsewhere in vectors.
        (7, 6001, F32, True, False, None),
        (19, 3333, BF16, True, False, None),  # One warpgroup.
        (7, 12289, BF16, False, False, jnp.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("other", [False, True])
def test_norms(
    rows, columns, dtype, centered, residual, kind, other, in_shared_memory, monkeypatch
):
    """As chosen, and with all results in shared memory, too, and moments in one pass."""
    if other and kind is None and not centered:
        pytest.skip("the same")
    monkeypatch.setattr(shared, "STAGED", other)
    monkeypatch.setattr(norm_body, "ONE_PASS_NEAR", other)
    value, exact = norm_and_reference(
        rows, columns, dtype, centered=centered, residual=residual, quantize=kind
    )
    assert in_shared_memory[-1] is not None
    tolerance = (1e-6 if dtype == F32 else 6e-3) if kind is None else 4e-2
    errors = np.linalg.norm(value - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert errors.max() < tolerance
    worst = abs(value - exact).max() / abs(exact).max()
    assert worst < (1e-6 if dtype == F32 else 4e-3) if kind is None else worst < 4e-2


@pytest.mark.parametrize(
    ("rows", "columns", "kind"), [(7, 9005, jnp.float8_e5m2), (8, 7002, np.int8)]
)
def test_quantization(rows, columns, kind, in_shared_memory):
    x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, columns)), BF16)
    values, scales = ops.quantize(x, kind)
    assert in_shared_memory[-1] is not None
    exact = np.asarray(x, np.float64)
    found = np.asarray(values, np.float64) * np.asarray(scales, np.float64)[:, None]
    errors = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert errors.max() < 8e-2
    assert (abs(found - exact).max(1) < 0.13 * abs(exact).max(1)).all()


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "residual"),
    [(3, 33001, F32, False), (2, 40000, F32, True)],
)
@pytest.mark.parametrize("outlier", [0.0, 1e6])
def test_moments_in_one_pass(rows, columns, dtype, residual, outlier, monkeypatch):
    """Far from zero, with a first element that is far from all others."""
    for module, name, value in (
        (norm_body, "ONE_PASS", True),
        (norms, "machine", lambda: MACHINE),
    ):
        monkeypatch.setattr(module, name, value)
    norm_kernels.forward.cache_clear()
    draw = np.random.default_rng(columns)
    numbers = draw.normal(size=(rows, columns)) + 100
    numbers[0, 0] += outlier
    x, other = jnp.asarray(numbers, dtype), jnp.asarray(draw.normal(size=numbers.shape), dtype)
    weight, bias = (jnp.asarray(draw.normal(size=columns), F32) for _ in range(2))
    found = ops.layer_norm(x, weight, bias, residual=other if residual else None)
    norm_kernels.forward.cache_clear()
    wide = np.asarray(x + other if residual else x, np.float64)
    wide = wide - wide.mean(-1, keepdims=True)
    scale = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    w, b = (np.asarray(one, np.float64) for one in (weight, bias))
    exact = wide * scale * w + b
    value = np.asarray(found[0] if residual else found, np.float64)
    errors = np.linalg.norm(value - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert errors.max() < 1e-4
