"""Norms and quotients of long rows that begin within vectors, streamed to registers, against
formulas in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from norm_reference import norm_and_reference

from pallasite import ops
from pallasite_std.ops.rows import norm_kernels, norms, quantize, streamed

pytestmark = pytest.mark.runs_kernels

MACHINE = 1, 227 * 1024
BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


@pytest.fixture
def streams(monkeypatch):
    """Returns what was chosen."""
    found, real = [], streamed.row_stream

    def recorded(*arguments):
        found.append(real(*arguments))
        return found[-1]

    monkeypatch.setattr(norm_kernels, "KEPT", False)
    monkeypatch.setattr(streamed, "_ENOUGH", 1)
    monkeypatch.setattr(streamed, "_LEAST", 4608)
    for module, kernel in ((norms, norm_kernels.forward), (quantize, quantize._kernel)):
        monkeypatch.setattr(module, "machine", lambda: MACHINE)
        kernel.cache_clear()
    for module in (norm_kernels, quantize):
        monkeypatch.setattr(module, "row_stream", recorded)
        monkeypatch.setattr(module, "suits_stream", lambda *arguments: True)
    yield found
    norm_kernels.forward.cache_clear()
    quantize._kernel.cache_clear()


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "centered", "residual", "kind", "threads", "kept"),
    [
        (33, 2501, BF16, True, False, None, 2, 2),
        (17, 9001, BF16, False, False, None, 4, 1),
        (16, 8195, BF16, True, True, None, 4, 2),  # The last row is whole vectors.
        (5, 24578, BF16, True, False, None, 8, 2),  # Of even widths there are fewer beginnings.
        (7, 10001, F32, True, False, None, 8, 2),
        (5, 14001, BF16, True, True, np.int8, 8, 2),
        (3, 37001, BF16, False, False, jnp.float8_e4m3fn, 5, 1),
        (3, 32776, BF16, True, False, None, 6, 1),  # Rows begin at whole vectors.
        (3, 38001, BF16, True, False, None, 5, 0),  # Weights are read again for each row.
    ],
)
def test_norms(rows, columns, dtype, centered, residual, kind, threads, kept, streams):
    value, exact = norm_and_reference(
        rows, columns, dtype, centered=centered, residual=residual, quantize=kind
    )
    assert (streams[-1].pipeline.threads, streams[-1].kept) == (threads, kept)
    tolerance = (1e-6 if dtype == F32 else 6e-3) if kind is None else 4e-2
    errors = np.linalg.norm(value - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert errors.max() < tolerance
    worst = abs(value - exact).max() / abs(exact).max()
    assert worst < (1e-6 if dtype == F32 else 4e-3) if kind is None else worst < 4e-2


@pytest.mark.parametrize(
    ("rows", "columns", "kind"), [(17, 9005, jnp.float8_e5m2), (5, 21002, np.int8)]
)
def test_quantization(rows, columns, kind, streams):
    x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, columns)), BF16)
    values, scales = ops.quantize(x, kind)
    assert streams[-1] is not None
    exact = np.asarray(x, np.float64)
    found = np.asarray(values, np.float64) * np.asarray(scales, np.float64)[:, None]
    errors = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert errors.max() < 8e-2
    assert (abs(found - exact).max(1) < 0.13 * abs(exact).max(1)).all()


def test_streams_fit():
    """Whatever the width, shared memory and registers suffice, and every column has a warpgroup."""
    for columns in range(2305, 60_000, 251):
        for dtypes, vectors in (([BF16], [2, 2]), ([BF16, BF16], [4]), ([F32], [4])):
            found = streamed.row_stream(1 << 15, columns, dtypes, vectors, 132, MACHINE[1])
            if found is None:
                continue
            one = found.pipeline
            assert one.stages >= 2 and 0 < one.last <= one.chunk
            assert (one.threads - 1) * one.chunk + one.last == columns
            stage = one.threads * one.fetched * sum(dtype.itemsize for dtype in dtypes)
            weights = sum(vectors[: found.kept]) * columns
            assert one.resident * (one.stages * stage + weights + 1024) <= MACHINE[1]
