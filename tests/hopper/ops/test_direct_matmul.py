"""Products whose operands are loaded word by word: rows that begin anywhere, ends of arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallasite_hopper.ops.dense.direct import DirectConfig, build
from pallasite_std.api import Epilogue, MatmulProblem

pytestmark = pytest.mark.runs_kernels

BFLOAT16, FLOAT8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
INT8 = np.dtype(np.int8)


def problem(m, n, k, dtype=BFLOAT16, out_dtype=None, *, ta=False, tb=False):
    integers = dtype.kind == "i"
    return MatmulProblem(
        m=m,
        n=n,
        k=k,
        dtype_a=dtype,
        dtype_b=dtype,
        out_dtype=np.dtype(out_dtype or (np.int32 if integers else np.float32)),
        accumulator=np.dtype(np.int32 if integers else np.float32),
        transpose_a=ta,
        transpose_b=tb,
    )


def random_operands(one, batch=()):
    generator = np.random.default_rng(one.m + one.n)
    shapes = [(one.k, one.m) if one.transpose_a else (one.m, one.k)]
    shapes += [(one.n, one.k) if one.transpose_b else (one.k, one.n)]
    if one.dtype_a == INT8:
        return [generator.integers(-128, 128, (*batch, *s)).astype(INT8) for s in shapes]
    return [generator.standard_normal((*batch, *s)).astype(one.dtype_a) for s in shapes]


def expected(one, a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    a = a.swapaxes(-1, -2) if one.transpose_a else a
    b = b.swapaxes(-1, -2) if one.transpose_b else b
    return a @ b


def error_of(result, wanted):
    result = np.asarray(result).astype(np.float64)
    assert result.shape == wanted.shape and np.isfinite(result).all()
    return np.linalg.norm(result - wanted) / np.linalg.norm(wanted)


Config = functools.partial(DirectConfig, columns=8, warpgroups=1)
SWAP = functools.partial(Config, swap=True)


@pytest.mark.parametrize(
    ("one", "config"),
    [
        (problem(3, 70, 131), SWAP(warpgroups=2, split_k=2)),  # Steps that are not there.
        (problem(70, 9, 131), Config(columns=16, warpgroups=3)),  # Two words of elements each.
        (problem(70, 9, 131, ta=True), Config(columns=16)),
        (problem(70, 9, 131, tb=True), Config(warpgroups=2)),
        (problem(9, 70, 67, ta=True, tb=True), SWAP(columns=16)),
        (problem(9, 70, 130, np.dtype(np.float16), tb=True), SWAP(columns=16, warpgroups=2)),
        (problem(9, 72, 136), SWAP(columns=24, warpgroups=2)),  # Vectors of four words.
        (problem(1, 65, 9), SWAP()),
        (problem(70, 9, 131), Config(columns=16, ahead=3, stages=4, at_once=True)),
        (
            problem(9, 70, 152, np.dtype(np.float16)),
            SWAP(columns=16, ahead=2, stages=4, at_once=True),
        ),
        (problem(20, 66, 902), SWAP(columns=24, stages=3)),  # More steps than there is room for.
        (problem(70, 9, 701, ta=True), Config(columns=16, stages=3, warpgroups=2)),
        (problem(34, 20, 516, tb=True), Config(columns=24, stages=2)),
        (problem(5, 66, 135, FLOAT8, tb=True), SWAP(warpgroups=2)),
        (problem(65, 5, 133, FLOAT8, tb=True), Config()),
        (problem(5, 66, 37, np.dtype(np.float32), tb=True), SWAP()),
        (problem(5, 66, 35, INT8, tb=True), SWAP()),
        (problem(5, 66, 135, INT8, tb=True), SWAP(at_once=True)),
    ],
    ids=str,
)
def test_rows_that_begin_anywhere(one, config):
    """Each order of operands, with rows that begin behind words, and ends of arrays inside them."""
    a, b = random_operands(one)
    limit = 0 if one.dtype_a == INT8 else 1e-3 if one.size == 4 else 1e-6
    assert error_of(build(one, config, Epilogue())(a, b), expected(one, a, b)) <= limit


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("swap", [False, True])
def test_epilogue(swap, at_once):
    """Vectors and a residual that are not multiples of a tile."""
    m, n = (5, 70) if swap else (70, 5)
    one = problem(m, n, 67, out_dtype=BFLOAT16)
    a, b = random_operands(one)
    generator = np.random.default_rng(3)
    rows, bias = (generator.standard_normal(e).astype(np.float32) for e in (m, n))
    residual = generator.standard_normal((m, n)).astype(BFLOAT16)
    epilogue = Epilogue("vector", "scalar", bias=True, residual=True, activation=jax.nn.relu)
    kernel = build(one, Config(swap=swap, warpgroups=2 - at_once, at_once=at_once), epilogue)
    wanted = np.maximum(expected(one, a, b) * rows[:, None] * 0.5 + bias, 0) + residual
    assert error_of(kernel(a, b, rows, np.full(1, 0.5, np.float32), bias, residual), wanted) < 4e-3


@pytest.mark.parametrize("one", [problem(1, 67, 9), problem(5, 66, 135, FLOAT8, tb=True)], ids=str)
def test_vmap(one):
    """Matrices of a batch that begin anywhere, too."""
    a, b = random_operands(one, (3,))
    kernel = jax.vmap(build(one, SWAP(), Epilogue()))
    assert error_of(kernel(jnp.asarray(a), jnp.asarray(b)), expected(one, a, b)) < 1e-6


@pytest.mark.parametrize("tb", [False, True])
def test_rows_see_nothing_of_their_neighbours(tb):
    """What follows the last elements of a row is not multiplied, even by zero."""
    one = problem(66, 5, 67, tb=tb)
    a, b = random_operands(one)
    a[7], a[13, 0] = np.nan, np.inf
    b[(3, slice(None)) if tb else (slice(None), 3)] = -np.inf
    result = np.asarray(build(one, Config(), Epilogue())(a, b))
    finite = np.ones((66, 5), bool)
    finite[7], finite[13], finite[:, 3] = False, False, False
    assert (np.isfinite(result) == finite).all()
    a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))
    wanted = expected(one, a, b)
    np.testing.assert_allclose(result[finite], wanted[finite], rtol=1e-4, atol=1e-4)
