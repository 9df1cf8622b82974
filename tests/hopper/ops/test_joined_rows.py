"""Products with a matrix of which several rows are read as one, since no row alone can be."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallasite import config
from pallasite_hopper.matrix.joined_rows import rows_together
from pallasite_hopper.ops.dense import run
from pallasite_hopper.ops.dense.config import MatmulConfig
from pallasite_hopper.ops.dense.cost import Sizes
from pallasite_hopper.ops.dense.joined_rows import (
    JoinedRowsConfig,
    build,
    joined_rows_config,
    joined_rows_configs,
)
from pallasite_hopper.ops.dense.split_columns import split_columns
from pallasite_hopper.ops.dense.unaligned import without_copies
from pallasite_std.api import Epilogue, MatmulProblem

pytestmark = pytest.mark.runs_kernels

BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
SWAPPED = functools.partial(
    MatmulConfig, swap=True, warpgroups=1, split="m", epilogue_n=8, stages=3
)


def problem(m, n, k, dtype=BFLOAT16, out_dtype=np.float32, *, ta=False):
    return MatmulProblem(
        m=m,
        n=n,
        k=k,
        dtype_a=dtype,
        dtype_b=dtype,
        out_dtype=np.dtype(out_dtype),
        accumulator=np.dtype(np.float32),
        transpose_a=ta,
        transpose_b=False,
    )


def operands(one):
    generator = np.random.default_rng(one.m + one.n)
    shapes = (one.k, one.m) if one.transpose_a else (one.m, one.k), (one.k, one.n)
    return [generator.standard_normal(s).astype(one.dtype_a) for s in shapes]


def expected(one, a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a.T if one.transpose_a else a) @ b


def error_of(result, wanted):
    result = np.asarray(result).astype(np.float64)
    assert result.shape == wanted.shape and np.isfinite(result).all()
    return np.linalg.norm(result - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("one", "chosen"),
    [
        (problem(3, 260, 134), SWAPPED(tile_m=64, tile_n=8, parts=2)),
        (problem(9, 301, 1039, ta=True), SWAPPED(tile_m=128, tile_n=16, parts=16)),
        (
            problem(17, 262, 523, FLOAT16),
            MatmulConfig(tile_m=64, tile_n=64, warpgroups=1, split="m", stages=2, parts=4),
        ),
    ],
    ids=str,
)
def test_two_four_and_eight_rows(one, chosen):
    """All places behind multiples of 16 bytes, rows that are left over, parts of different steps.

    What else the engine reads is not finite, and is no part of the result.
    """
    a, b = operands(one)
    wanted = expected(one, a, b)
    with config.scoped(sanitize=True):
        function = build(one, JoinedRowsConfig(chosen), Epilogue(), 132)
        result = np.asarray(function(jnp.asarray(a), jnp.asarray(b)))
        assert error_of(result, wanted) < 1e-6
        b[:, -1], b[5, 0] = np.inf, np.nan
        result = np.asarray(function(jnp.asarray(a), jnp.asarray(b)))
    assert not np.isfinite(result[:, [0, -1]]).any()
    assert error_of(result[:, 1:-1], wanted[:, 1:-1]) < 1e-6


def test_epilogue_and_batches():
    """Whoever maps it over several matrices gets another kernel, since these begin anywhere."""
    one = problem(2, 257, 141, out_dtype=BFLOAT16)
    a, b = operands(one)
    generator = np.random.default_rng(3)
    rows, bias = (generator.standard_normal(e).astype(np.float32) for e in (2, 257))
    residual = generator.standard_normal((2, 257)).astype(BFLOAT16)
    epilogue = Epilogue("vector", "scalar", bias=True, residual=True, activation=jax.nn.relu)
    chosen = JoinedRowsConfig(SWAPPED(tile_m=64, tile_n=8, parts=8))
    kernel = run._any_rows(one, chosen, epilogue)
    extras = rows, np.full(1, 0.5, np.float32), bias, residual
    wanted = np.maximum(expected(one, a, b) * rows[:, None] * 0.5 + bias, 0) + residual
    assert error_of(kernel(a, b, *extras), wanted) < 4e-3
    several = jax.vmap(kernel, (0, None, None, None, None, None))
    result = several(np.stack([a, -a]), b, *extras)
    assert error_of(result[0], wanted) < 4e-3
    other = np.maximum(-expected(one, a, b) * rows[:, None] * 0.5 + bias, 0) + residual
    assert error_of(result[1], other) < 4e-3


@pytest.mark.parametrize(("rows", "columns", "count"), [(5, 333, 8), (3, 2100, 4), (2, 4507, 2)])
def test_split_columns(rows, columns, count):
    """Several blocks of a row, columns that are left over, zeros at the end."""
    array = np.random.default_rng(columns).standard_normal((rows, columns)).astype(BFLOAT16)
    with config.scoped(sanitize=True):
        result = np.asarray(split_columns(jnp.asarray(array), count))
    each = columns // count
    wanted = array[:, : each * count].reshape(rows, each, count).transpose(2, 0, 1)
    assert result.shape == (count, rows, -(-each // 8) * 8)
    assert (result[:, :, :each] == wanted).all() and not result[:, :, each:].any()


def test_choice():
    """Few rows of large unaligned matrices; nothing where rows are aligned, lie along k, or where
    partial sums would be large."""
    for n, k in ((4099, 3001), (1002, 12000), (10003, 513)):
        sizes = Sizes(40, n, k, 2, 2)
        chosen, time = joined_rows_config(sizes)
        assert chosen.matmul.parts % rows_together(n, 2) == 0 and chosen.matmul.fits(2, 4)
        assert 2 * n * k / 5000 < time < 2 * n * k / 1000 + 10_000
        assert chosen == joined_rows_configs(sizes)[0]
    # Rows that are left over are no step of their own.
    for one in joined_rows_configs(Sizes(3, 4099, 8 * 128 + 5, 2, 2)):
        assert one.matmul.parts // 8 <= 128 // one.matmul.tile_k
    assert isinstance(without_copies(Sizes(40, 4099, 9001, 2, 2)), JoinedRowsConfig)
    assert not isinstance(without_copies(Sizes(4000, 4099, 901, 2, 2)), JoinedRowsConfig)
    for sizes in (
        Sizes(40, 4096, 3001, 2, 2),
        Sizes(40, 4099, 3001, 2, 2, transpose_b=True),
        Sizes(40, 4099, 100, 2, 2),
        Sizes(40, 99, 3001, 2, 2),
        Sizes(40, 4099, 3001, 1, 2),
    ):
        assert joined_rows_config(sizes) is None
    assert [rows_together(n, 2) for n in (1, 2, 4, 8, 12, 24)] == [8, 4, 2, 1, 2, 1]
