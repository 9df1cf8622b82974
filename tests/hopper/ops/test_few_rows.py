"""Products of few rows whose matrix is loaded by aligned vectors, wherever its rows begin."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallasite import config
from pallasite_hopper.ops.dense.cost import Sizes
from pallasite_hopper.ops.dense.few_rows import FewRowsConfig, build
from pallasite_hopper.ops.dense.few_rows_choice import candidates, few_rows_config
from pallasite_std.api import Epilogue, MatmulProblem

pytestmark = pytest.mark.runs_kernels

BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
Config = functools.partial(FewRowsConfig, warpgroups=1)


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


def operands(one, batch=()):
    generator = np.random.default_rng(one.m + one.n)
    shapes = (one.k, one.m) if one.transpose_a else (one.m, one.k), (one.k, one.n)
    return [generator.standard_normal((*batch, *s)).astype(one.dtype_a) for s in shapes]


def expected(one, a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a.swapaxes(-1, -2) if one.transpose_a else a) @ b


def error_of(result, wanted):
    result = np.asarray(result).astype(np.float64)
    assert result.shape == wanted.shape and np.isfinite(result).all()
    return np.linalg.norm(result - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("one", "chosen"),
    [
        (problem(1, 333, 101), Config(columns=128, warpgroups=2)),
        (problem(2, 75, 150), Config(columns=32, warpgroups=2, fold=True)),
        (problem(1, 68, 90, FLOAT16), Config(columns=64, warpgroups=3, split_k=2, fold=True)),
        (problem(1, 128, 40), Config(columns=32)),  # Aligned rows, and fewer than are loaded.
        (problem(1, 9, 1001, ta=True), Config(columns=32, warpgroups=3, split_k=2)),
        (problem(1, 126, 130, FLOAT16, FLOAT16), Config(columns=64, warpgroups=2)),
        (problem(2, 77, 203), Config(columns=64, warpgroups=2, split_k=2)),
        (problem(4, 130, 515, FLOAT16), Config(columns=32, split_k=8, together=2)),
    ],
    ids=str,
)
def test_any_rows(one, chosen):
    """Rows that begin at any element, ends of the matrix behind the last vector of it."""
    a, b = operands(one)
    with config.scoped(sanitize=True):
        result = build(one, chosen, Epilogue())(jnp.asarray(a), jnp.asarray(b))
    assert result.dtype == one.out_dtype
    assert error_of(result, expected(one, a, b)) <= (5e-4 if one.out_dtype == FLOAT16 else 1e-6)


def test_epilogue():
    one = problem(2, 75, 67, out_dtype=BFLOAT16)
    a, b = operands(one)
    generator = np.random.default_rng(3)
    rows, bias = (generator.standard_normal(e).astype(np.float32) for e in (2, 75))
    residual = generator.standard_normal((2, 75)).astype(BFLOAT16)
    epilogue = Epilogue("vector", "scalar", bias=True, residual=True, activation=jax.nn.relu)
    kernel = build(one, Config(columns=32, warpgroups=2), epilogue)
    wanted = np.maximum(expected(one, a, b) * rows[:, None] * 0.5 + bias, 0) + residual
    assert error_of(kernel(a, b, rows, np.full(1, 0.5, np.float32), bias, residual), wanted) < 4e-3


def test_vmap():
    """Matrices of a batch begin anywhere, too."""
    one = problem(1, 67, 29)
    a, b = operands(one, (3,))
    with config.scoped(sanitize=True):
        result = jax.vmap(build(one, Config(columns=32), Epilogue()))(
            jnp.asarray(a), jnp.asarray(b)
        )
    assert error_of(result, expected(one, a, b)) < 1e-6


def test_columns_see_nothing_of_their_neighbours():
    """What else is in the vectors that are loaded is not added, even if it is not finite."""
    one = problem(1, 67, 29)
    a, b = operands(one)
    b[:, 3], b[28, 66], b[5, 0] = -np.inf, np.nan, np.inf
    result = np.asarray(build(one, Config(columns=32), Epilogue())(a, b))
    finite = np.ones((1, 67), bool)
    finite[:, [0, 3, 66]] = False
    assert (np.isfinite(result) == finite).all()
    wanted = expected(one, a, np.where(np.isfinite(b), b, 0))
    np.testing.assert_allclose(result[finite], wanted[finite], rtol=1e-4, atol=1e-4)


def test_choice():
    """Small and large matrices have configurations with as many steps as there are."""
    assert few_rows_config(Sizes(5, 100, 100, 2, 4)) is None
    assert few_rows_config(Sizes(1, 100, 100, 2, 2, False, True)) is None
    assert few_rows_config(Sizes(3, 1, 100, 2, 2)) is None
    for n, k in ((64, 64), (101, 9001), (16001, 77)):
        chosen, time = few_rows_config(Sizes(1, n, k, 2, 2))
        assert chosen in set(candidates(Sizes(1, n, k, 2, 2))) and 1000 < time < 20000
        assert build(problem(1, n, k), chosen, Epilogue()) is not None
